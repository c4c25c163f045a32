"""A command's options: the configuration that they make, their table, and what command-line words
mean."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, ClassVar

from pydantic import PrivateAttr

from openrlhf_ext.options import Option, Section, describe

# what other programs call an option, by the last part of its name
_OTHER_NAMES = {
    "learning_rate": "lr",
    "pretrain": "model_name_or_path",
    "model": "model_name_or_path",
}


class UsageError(ValueError):
    """Words on the command line that cannot belong to the option they follow."""


def from_words(option: Option, words: Sequence[str]) -> Any:
    """The raw value given by the words after ``--name``; raises UsageError unless their number
    fits."""
    if option.arity == "flag" and not words:
        return True
    if option.nullable and list(words) == ["null"]:
        return None
    expected = {"pair": 2, "many": max(1, len(words))}.get(option.arity, 1)
    if len(words) != expected:
        raise UsageError(
            f"--{option.name} takes {expected} value{'s' if expected > 1 else ''} "
            f"({option.expects}), got {len(words)}: {' '.join(words) or 'none'}"
        )
    return list(words) if option.arity in ("pair", "many") else words[0]


class Configuration(Section):
    """All options of a command: frozen, and its paths are their names."""

    usage: ClassVar[str] = ""
    """What ``--help`` begins with."""
    abbreviates: ClassVar[bool] = False
    """Whether the command line takes the beginning of a name that no other name has."""
    _warnings: tuple[str, ...] = PrivateAttr(default=())
    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Settings that are allowed but deserve a look; meant to be logged once at the start."""
        return self._warnings

    @property
    def sources(self) -> dict[str, str]:
        """Where each option that was set got its value: ``{"train.seed": "run.yaml:12"}``."""
        return dict(self._sources)

    def resolved(self) -> Iterable[tuple[str, Any]]:
        """Defaults that follow from typed settings, so that what is shown loads back to the same
        run."""
        return ()


class OptionTable(dict[str, Option]):
    """The options of a configuration ``model`` by their dotted names, in order of declaration."""

    def __init__(self, model: type[Configuration]) -> None:
        super().__init__(describe(model))
        self.model = model
        self._also = {
            option.info.also: name for name, option in self.items() if option.info.also is not None
        }

    def called(self, name: str) -> str:
        """The option's own name of one that the command line gives: another of its names, or a
        beginning."""
        if self.model.abbreviates and name not in self and name not in self._also:
            begun = {
                self._also.get(other, other)
                for other in (*self, *self._also)
                if other.startswith(name)
            }
            name = begun.pop() if len(begun) == 1 else name
        return self._also.get(name, name)

    def find(self, name: str) -> Option | None:
        """The option of this name, or the open map a longer name falls into."""
        if name in self:
            return self[name]
        parent = ".".join(name.split(".")[:2])
        option = self.get(parent)
        return option if option is not None and option.arity == "open" and name != parent else None

    def is_section(self, name: str) -> bool:
        option = self.get(name)
        return (option is not None and option.arity == "open") or any(
            other.startswith(f"{name}.") for other in self
        )

    def nearest(self, name: str) -> str | None:
        """The supported option that looks most like an unknown name, or None when none does."""
        supported = [other for other, option in self.items() if option.unsupported is None]
        plain = [other for other in supported if self[other].arity != "open"]
        section, leaf = name.split(".")[0], name.split(".")[-1]
        by_leaf = [other for other in plain if other.split(".")[-1] == _OTHER_NAMES.get(leaf, leaf)]
        meant = [other for other in by_leaf if other.startswith(f"{section}.")]
        by_leaf = (
            meant or [other for other in by_leaf if not other.startswith("critic.")] or by_leaf
        )
        if len(by_leaf) == 1:
            return by_leaf[0]
        head, key = ".".join(name.split(".")[:2]), name.split(".")[2:]
        opened = [other for other in supported if other not in plain]
        if key and (maps := difflib.get_close_matches(head, opened, n=1, cutoff=0.8)):
            return ".".join([maps[0], *key])
        spelled = {_spelling(other): other for other in plain}
        found = difflib.get_close_matches(_spelling(name), spelled, n=1, cutoff=0.6)
        return spelled[found[0]] if found else None


@lru_cache(maxsize=4)
def table_of(model: type[Configuration]) -> OptionTable:
    return OptionTable(model)


def _spelling(name: str) -> str:
    """OpenRLHF wrote ``--train_batch_size`` before 0.11; dots, dashes and underscores are one
    letter here."""
    return name.replace(".", "_").replace("-", "_").lower()
