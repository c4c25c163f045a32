"""The table of all options of a run, derived from the sections: finding one, and what command-line words mean."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from openrlhf_ext.config.run_config import RunConfig
from openrlhf_ext.options import Option, describe

# what other programs call an option, by the last part of its name
_OTHER_NAMES = {"learning_rate": "lr", "pretrain": "model_name_or_path", "model": "model_name_or_path"}


class UsageError(ValueError):
    """Words on the command line that cannot belong to the option they follow."""


def from_words(option: Option, words: Sequence[str]) -> Any:
    """The raw value given by the words after ``--name``.

    Raises:
        UsageError: the number of words does not fit.
    """
    if option.arity == "flag" and not words:
        return True
    if option.nullable and list(words) == ["null"]:
        return None
    expected = {"pair": 2, "many": max(1, len(words))}.get(option.arity, 1)
    if len(words) != expected:
        raise UsageError(
            f"--{option.name} takes {expected} value{'s' if expected > 1 else ''} ({option.expects}), "
            f"got {len(words)}: {' '.join(words) or 'none'}"
        )
    return list(words) if option.arity in ("pair", "many") else words[0]


@lru_cache(maxsize=1)
def option_table() -> dict[str, Option]:
    """Every option by name, in the order of the schema."""
    return describe(RunConfig)


def find_option(name: str) -> Option | None:
    """The option of this name, or the open map a longer name falls into."""
    table = option_table()
    if name in table:
        return table[name]
    parent = ".".join(name.split(".")[:2])
    option = table.get(parent)
    return option if option is not None and option.arity == "open" and name != parent else None


def is_section(name: str) -> bool:
    """Whether options lie below this name."""
    option = option_table().get(name)
    return (option is not None and option.arity == "open") or any(
        other.startswith(f"{name}.") for other in option_table()
    )


def nearest_option(name: str) -> str | None:
    """The supported option that looks most like an unknown name, or None when none does."""
    supported = [other for other, option in option_table().items() if option.unsupported is None]
    plain = [other for other in supported if option_table()[other].arity != "open"]
    section, leaf = name.split(".")[0], name.split(".")[-1]
    by_leaf = [other for other in plain if other.split(".")[-1] == _OTHER_NAMES.get(leaf, leaf)]
    meant = [other for other in by_leaf if other.startswith(f"{section}.")]
    by_leaf = meant or [other for other in by_leaf if not other.startswith("critic.")] or by_leaf
    if len(by_leaf) == 1:
        return by_leaf[0]
    head, key = ".".join(name.split(".")[:2]), name.split(".")[2:]
    opened = [other for other in supported if other not in plain]
    if key and (maps := difflib.get_close_matches(head, opened, n=1, cutoff=0.8)):
        return ".".join([maps[0], *key])
    spelled = {_spelling(other): other for other in plain}
    found = difflib.get_close_matches(_spelling(name), spelled, n=1, cutoff=0.6)
    return spelled[found[0]] if found else None


def _spelling(name: str) -> str:
    """OpenRLHF wrote ``--train_batch_size`` before 0.11; dots, dashes and underscores are one letter here."""
    return name.replace(".", "_").replace("-", "_").lower()
