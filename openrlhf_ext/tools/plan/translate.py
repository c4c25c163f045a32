"""A configuration of verl or TRL in our options, by the tables ``verl.yaml`` and ``trl.yaml``
beside this file.

    options   theirs: [ours, their default]; ours null: read by the rules only
    rules     ours: a Python expression of their values, ``v(name)``; None: nothing is set, ...:
              null is set
    notes     theirs: [an expression, what is said where it is true]
    lines     theirs, * for any text: what becomes of it; nothing: names of which there is nothing
              to say

A value that is given and has no option and no rule has a line: nothing is dropped in silence.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from openrlhf_ext.config.load import ConfigLoader, words_by_option
from openrlhf_ext.inputs import InputError, nearest, read_text, reading, type_name
from openrlhf_ext.options import nest

PROJECTS = ("verl", "trl")
_SHOWN_LETTERS = 200
_NOT_HERE = "not here"
_WORD = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
_REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
# of hydra's maps, which need no space behind the colon
_KEY = re.compile(r"((?<!\$)[{,]\s*[\w.]+):(?=\S)")
_OWN = ("ppo_trainer", "ppo_megatron_trainer")
"""Files of verl, whose defaults are those of the table."""
_IN_SCRIPTS = (
    "in a shell script write `openrlhf-ext plan --from verl` in the place of `python3 -m "
    "verl.trainer.main_ppo` (or `--from trl` in the place of what starts TRL's script), and run "
    "it with bash, which alone knows what it says"
)
_HYDRA = (
    "takes hydra to be read; what `python3 -m verl.trainer.main_ppo ... --cfg job --resolve` "
    "prints is a file that can be read"
)


def translate(words: Sequence[str], gpus: int | None = None) -> str:
    """YAML for ``train --config``, with a comment for each option that means something else here,
    or nothing.

    Args:
        words: the project, one of ``PROJECTS``, and its options as a shell hands them to its
        trainer: hydra's
            NAME=VALUE or TRL's --NAME VALUE, behind a YAML file of the project if there is one.
        gpus: what TRL's configuration leaves to its launcher (1).
    Raises:
        InputError: the project is not named or another one, something cannot be read or takes hydra
            to be read, or a value is not of the kind that the project has.
    """
    if not words or words[0] not in PROJECTS:
        commands = (f"openrlhf-ext plan --from {shlex.join([one, *words])}" for one in PROJECTS)
        raise InputError(
            f"plan --from takes the name of the project first: {' or '.join(commands)}; "
            f"{_IN_SCRIPTS}"
        )
    project, *theirs = words
    if project == "verl" and gpus is not None:
        raise InputError(
            "--gpus is for TRL, whose launcher knows: verl has trainer.n_gpus_per_node and "
            "trainer.nnodes"
        )
    table, command = _table(project), f"plan --from {shlex.join(words)}"
    release = table["release"]
    with reading(command[:_SHOWN_LETTERS], f"as options of {release}"):
        given = _of_verl(theirs) if project == "verl" else _of_trl(theirs)
        said = {name: _said(table, name) for name in given if name not in table["options"]}
        unknown = [name for name, text in said.items() if text is None]
        if not given or 2 * len(unknown) > len(given):
            raise InputError(
                f"{command[:_SHOWN_LETTERS]} takes a YAML file or options of {release}, which "
                f"knows {len(given) - len(unknown)} of the {len(given)} names here and not: "
                f"{', '.join(unknown[:5])}"
            )
        for name, text in said.items():
            if text is None or text.startswith(_NOT_HERE):
                said[name] = (text or f"{release} has no such option") + _hint(
                    name, table["options"]
                )
        ours, notes = _by_table(table, given if gpus is None else given | {"gpus": gpus})
        lines = sorted([*notes, *(f"{name} {given[name]}: {text}" for name, text in said.items())])
        comments = (f"of {release}, by openrlhf-ext {command}", *lines)
        text = "".join(f"# {' '.join(line.split())}\n" for line in comments) + yaml.safe_dump(
            nest(ours)
        )
        text.encode()  # no half of a character, which no terminal shows
    return text


@cache
def _table(project: str) -> dict[str, Any]:
    return yaml.safe_load(files(__package__).joinpath(f"{project}.yaml").read_text())


def _said(table: Mapping[str, Any], name: str) -> str | None:
    """What becomes of an option of theirs that is none here; None: they have none of this name."""
    found = (text for pattern, text in table["lines"].items() if fnmatchcase(name, pattern))
    return next(found, _NOT_HERE if name.partition(".")[0] in table["nothing"] else None)


def _hint(name: str, options: Mapping[str, Any]) -> str:
    """An option of the same section whose last word is nearly the same."""
    section = name[: name.rfind(".") + 1]
    known = [other.removeprefix(section) for other in options if other.startswith(section)]
    near = nearest(name.removeprefix(section), known, 0.8)
    return f"; there is {section}{near}" if near else ""


def _by_table(
    table: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Our options, and notes. Raises ValueError: values are not of the kind of their defaults."""
    values: dict[str, Any] = {}
    ours: dict[str, Any] = {}
    wrong = []
    for name, (own, default) in table["options"].items():
        value = values[name] = given.get(name, default)
        may_be_null = value is None and own is None
        if (
            isinstance(default, (int, float))
            and not isinstance(value, (int, float))
            and not may_be_null
        ):
            kind = "true or false" if isinstance(default, bool) else "a number"
            wrong.append(f"{name} must be {kind}, as its default {default}: got {value!r:.80}")
        if own is not None:
            ours[own] = value
    if wrong:
        raise ValueError("; ".join(wrong))

    names = {"v": values.__getitem__, "ours": ours}
    for name, rule in table["rules"].items():
        ours[name.format(estimator=ours.get("algo.advantage.estimator"))] = eval(rule, names)
    notes = [
        f"{name}: {text}" for name, (rule, text) in table["notes"].items() if eval(rule, names)
    ]
    return {
        name: None if value is ... else value for name, value in ours.items() if value is not None
    }, notes


# ---- what is given


def _of_verl(words: Sequence[str]) -> dict[str, Any]:
    """Of YAML files, then of hydra's words, which change what files say."""
    paths: list[str] = []
    changes: dict[str, Any] = {}
    left = iter(words)
    chosen = {"--config-path": "config", "--config-name": _OWN[0]}
    for word in left:
        name, equals, value = word.partition("=")
        if name in chosen:
            chosen[name] = value if equals else next(left, "")
        elif (found := _WORD.fullmatch(word)) is not None:
            text = _KEY.sub(r"\1: ", value) if value.startswith(("{", "[")) else value
            changes |= _flat({found[1]: _value(text, found[1])})
        else:
            paths.append(word)
    folder, file = map(Path, chosen.values())
    if folder != Path("config") or file.stem not in _OWN:  # verl's own stands for its defaults
        paths.append(str(folder / (file if file.suffix else f"{file}.yaml")))
    given = _of_files(paths, "verl takes a YAML file and NAME=VALUE") | changes
    options = _table("verl")["options"]
    return {
        name: _put_in(name, given) if name in options else value for name, value in given.items()
    }


def _of_trl(words: Sequence[str]) -> dict[str, Any]:
    """Of a YAML file, then of the words, as TRL's parser reads them."""
    paths: list[str] = []
    changes: dict[str, Any] = {}
    ahead = [] if not words or words[0].startswith("--") else ["--config"]
    for word, texts in words_by_option([*ahead, *words], []):
        name = word.removeprefix("--").replace("-", "_")
        if name == "config":
            paths += texts
        elif texts:
            values = [_value(text, name) for text in texts]
            changes |= _flat({name: values[0] if len(values) == 1 else values})
        else:
            changes[name.removeprefix("no_")] = not name.startswith("no_")
    return _of_files(paths, "trl takes a YAML file and --NAME VALUE") | changes


def _value(text: str, name: str) -> Any:
    with reading(f"{name}={text}", "as a value"):
        return yaml.load(text, Loader=ConfigLoader) if text else ""


def _of_files(paths: Sequence[str], takes: str) -> dict[str, Any]:
    """Raises InputError: one is no YAML file, cannot be read, holds no map, or is composed of files
    other than verl's own."""
    given: dict[str, Any] = {}
    for path in paths:
        if not path.endswith((".yaml", ".yml")):
            raise InputError(f"plan --from {takes}: got {path!r}; {_IN_SCRIPTS}")
        with reading(path, "as YAML"):
            tree = yaml.load(read_text(path), Loader=ConfigLoader)
            if not isinstance(tree, dict):
                raise InputError(f"{path} must hold a map of options, got a {type_name(tree)}")
            first, *rest = tree.pop("defaults", None) or ["_self_"]
            if first not in (*_OWN, "_self_") or rest not in ([], ["_self_"]):
                raise InputError(f"{path}: its defaults list {[first, *rest]} {_HYDRA}")
            given |= _flat(tree)
    return given


def _flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{key}.")
        elif key != "_target_":
            yield f"{above}{key}", value


def _put_in(name: str, given: Mapping[str, Any], above: Sequence[str] = ()) -> Any:
    """An option's value, with those of others that it refers to. Raises ValueError: it refers to
    something else."""
    value = given[name]

    def other(found: re.Match[str]) -> Any:
        return (
            _put_in(found[1], given, (*above, name))
            if found[1] in given.keys() - {*above, name}
            else found[0]
        )

    if isinstance(value, str):
        whole = _REFERENCE.fullmatch(value)
        value = other(whole) if whole else _REFERENCE.sub(lambda found: str(other(found)), value)
    if "${" in str(value):
        raise ValueError(
            f"{name}={given[name]} is no reference to another option that is given, and {_HYDRA}"
        )
    return value
