"""A configuration of verl or TRL in our options, by the tables ``verl.yaml`` and ``trl.yaml`` beside this file.

    options   theirs: [ours, their default]; ours null: read by the rules only
    rules     ours: a Python expression of their values, ``v(name)``; null: nothing is set
    notes     theirs: [an expression, what is said where it is true]
    lines     theirs, * for any text: what becomes of it; nothing: names of which there is nothing to say

A value that is given and has no option and no rule has a line: nothing is dropped in silence.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import yaml

from openrlhf_ext.config.load import ConfigLoader
from openrlhf_ext.inputs import InputError, nearest, read_text, reading
from openrlhf_ext.options import nest

PROJECTS = ("verl", "trl")
_WORD = re.compile(r"[+~-]*(?P<name>[A-Za-z_][\w.]*)=(?P<value>.*)", re.DOTALL)
_SUM, _DEFAULT = re.compile(r"\$\(\((.*?)\)\)(?!\))"), re.compile(r"\$\{(\w+):-([^{}]*)\}")
_SHORT = {"A.": "actor_rollout_ref.actor.", "R.": "actor_rollout_ref.rollout."}


def translate(words: Sequence[str], gpus: int | None = None) -> str:
    """YAML for ``train --config``, with a comment for each option that means something else here, or nothing.

    Args:
        words: a YAML file, a shell script, or the name of a project; then words NAME=VALUE.
        gpus: what TRL's configuration leaves to its launcher (1).
    Raises:
        InputError: it cannot be read, or a value is not of the kind that the project has.
    """
    given = dict(_given(words))
    project = words[0] if words[0] in PROJECTS else "verl" if any("." in name for name in given) else "trl"
    table = _table(project)
    with reading(words[0], f"as options of {table['release']}"):
        ours, lines = _by_table(table, given, gpus or 1)
        head = f"# of {table['release']}, by openrlhf-ext plan --from {shlex.join(words)}\n"
        notes = "".join(f"# {' '.join(line.split())}\n" for line in sorted(lines))
        text = head + notes + yaml.safe_dump(nest(ours), sort_keys=True)
        text.encode()  # no half of a character, which no terminal shows
    return text


@cache
def _table(project: str) -> dict[str, Any]:
    return yaml.safe_load(files(__package__).joinpath(f"{project}.yaml").read_text())


def _by_table(table: Mapping[str, Any], given: Mapping[str, Any], gpus: int) -> tuple[dict[str, Any], list[str]]:
    options, ours = table["options"], {}
    kinds = [(name, options[name][1]) for name in given if name in options]
    if wrong := [
        f"{name} must be a number, as its default {default}: got {given[name]!r:.80}"
        for name, default in kinds
        if isinstance(default, (int, float)) and not isinstance(given[name], (int, float, type(None)))
    ]:
        raise ValueError("; ".join(wrong))

    def v(name: str) -> Any:
        name = _SHORT.get(name[:2], name[:2]) + name[2:]
        return given.get(name, options[name][1])

    for theirs, (name, _) in options.items():
        if name is not None:
            ours[name] = v(theirs)
    names = {"v": v, "ours": ours, "gpus": gpus}
    for name, rule in table["rules"].items():
        ours[name.format(estimator=ours.get("algo.advantage.estimator"))] = eval(rule, names)
    lines = [f"{name}: {text}" for name, (rule, text) in table["notes"].items() if eval(rule, names)]
    for name in given.keys() - options.keys():
        text = "not here" if name in table["nothing"] else f"{table['release']} has no such option"
        text = next((said for pattern, said in table["lines"].items() if fnmatchcase(name, pattern)), text)
        near = nearest(name, [one for one in options if one.rpartition(".")[0] == name.rpartition(".")[0]], 0.85)
        lines.append(f"{name} {given[name]}: {text}" + (f"; there is {near}" if near else ""))
    return {name: value for name, value in ours.items() if value is not None}, lines


def _given(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    source, *more = words
    if source not in PROJECTS and Path(source).suffix == ".sh":
        more = [*_words_of_script(source), *more]
    elif source not in PROJECTS:
        with reading(source, "as YAML"):
            yield from _flat(yaml.load(read_text(source), Loader=ConfigLoader))
    for word in more:
        if (found := _WORD.fullmatch(word)) is None:
            raise InputError(f"plan --from takes NAME=VALUE behind {source}: got {word}")
        with reading(f"{source}: {found['name']}", "as NAME=VALUE"):
            yield found["name"], yaml.load(found["value"], Loader=ConfigLoader)


def _flat(tree: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{key}.")
        elif key != "_target_" and not str(value).startswith("${"):  # a reference to another option
            yield f"{above}{key}", value


def _words_of_script(path: str) -> Iterator[str]:
    """Words NAME.NAME=VALUE of a shell script, with its own variables, defaults and sums put in."""
    variables = dict(os.environ)
    text = _SUM.sub(lambda found: found[0].replace(" ", ""), read_text(path))
    with reading(path, "as a shell script"):
        words = shlex.split(text, comments=True)
    for word in words:
        if (found := _WORD.fullmatch(word.removeprefix("("))) is None:
            continue
        value = Template(found["value"]).safe_substitute(variables)
        value = _DEFAULT.sub(lambda each: variables.get(each[1]) or each[2], value)
        value = _SUM.sub(lambda each: _sum(each[1], variables), value)
        variables[found["name"]] = value
        if "." in found["name"]:
            if "$" in value:
                raise InputError(f"{path}: nothing says what {value} is; put {found['name']}=VALUE into the script")
            yield f"{found['name']}={value}"


def _sum(text: str, variables: Mapping[str, str]) -> str:
    numbers = re.sub(r"[A-Za-z_]\w*", lambda each: variables.get(each[0], each[0]), text)
    return str(int(eval(numbers))) if re.fullmatch(r"[\d()+*/-]+", numbers) else f"$(({text}))"
