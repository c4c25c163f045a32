"""A configuration of verl or TRL in our options, by the tables ``verl.yaml`` and ``trl.yaml`` beside this file.

    options   theirs: [ours, their default]; ours null: read by the rules only
    rules     ours: a Python expression of their values, ``v(name)``; null: nothing is set
    notes     theirs: [an expression, what is said where it is true]
    lines     theirs, * for any text: what becomes of it; nothing: names of which there is nothing to say

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

from openrlhf_ext.config.load import ConfigLoader
from openrlhf_ext.inputs import InputError, nearest, read_text, reading, type_name
from openrlhf_ext.options import nest

PROJECTS = ("verl", "trl")
_SHORT = {"A.": "actor_rollout_ref.actor.", "R.": "actor_rollout_ref.rollout."}
_WORD = re.compile(r"(?P<mark>\+\+?|~|)(?P<name>[A-Za-z_][\w.]*)(?:=(?P<value>.*))?", re.DOTALL)
_REFERENCE = re.compile(r"\$\{(?P<select>oc\.select:)?(?P<up>\.*)(?P<name>[A-Za-z_][\w.]*)(?:,(?P<default>[^{}]*))?\}")
_KEY = re.compile(r"((?<!\$)[{,]\s*[\w.]+):(?=\S)")  # of hydra's maps, which need no space behind the colon
_FOLDER, _FILE = ("--config-path", "-cp", "--config-dir", "-cd"), ("--config-name", "-cn")
_OWN = ("ppo_trainer", "ppo_megatron_trainer")
"""Files of verl, whose defaults are those of the table."""
_PRINTED = "what `python3 -m verl.trainer.main_ppo ... --cfg job --resolve` prints is a whole file that can be read"


def translate(words: Sequence[str], gpus: int | None = None) -> str:
    """YAML for ``train --config``, with a comment for each option that means something else here, or nothing.

    Args:
        words: the project, one of ``PROJECTS``, and its options as a shell hands them to its trainer: hydra's
            NAME=VALUE or TRL's --NAME VALUE, behind a YAML file of the project if there is one.
        gpus: what TRL's configuration leaves to its launcher (1).
    Raises:
        InputError: the project is not named or another one, something cannot be read or takes hydra to be read, or a
            value is not of the kind that the project has.
    """
    if script := next((word for word in words[:2] if re.fullmatch(r"[^=]+\.sh", word)), None):
        raise InputError(
            f"plan --from reads no shell script, since bash alone knows what {script} runs: in the script write "
            "`openrlhf-ext plan --from verl` in the place of `python3 -m verl.trainer.main_ppo` (`openrlhf-ext plan "
            "--from trl` in the place of what starts TRL's script), and run it with bash"
        )
    if not words or words[0] not in PROJECTS:
        commands = (f"openrlhf-ext plan --from {shlex.join([one, *words])}" for one in PROJECTS)
        raise InputError(f"plan --from takes the name of the project first: {' or '.join(commands)}")
    project, *theirs = words
    if project == "verl" and gpus is not None:
        raise InputError("--gpus is for TRL, whose launcher knows: verl has trainer.n_gpus_per_node and trainer.nnodes")
    table = _table(project)
    given = _of_verl(theirs) if project == "verl" else _of_trl(theirs)
    _check_names(project, given)
    if gpus is not None:
        given["gpus"] = gpus
    with reading(f"what is given behind --from {project}", f"as options of {table['release']}"):
        ours, lines = _by_table(table, given)
        comments = (f"of {table['release']}, by openrlhf-ext plan --from {shlex.join(words)}", *sorted(lines))
        notes = "".join(f"# {' '.join(line.split())}\n" for line in comments)
        text = notes + yaml.safe_dump(nest(ours), sort_keys=True)
        text.encode()  # no half of a character, which no terminal shows
    return text


@cache
def _table(project: str) -> dict[str, Any]:
    return yaml.safe_load(files(__package__).joinpath(f"{project}.yaml").read_text())


def _check_names(project: str, given: Mapping[str, Any]) -> None:
    """Raises InputError: there are none, or the project does not know most of them."""
    if not given:
        raise InputError(f"plan --from {project} takes a YAML file or options of a run: got none")
    unknown = {one: [name for name in given if _said(_table(one), name) is None] for one in PROJECTS}
    if 2 * len(foreign := unknown[project]) <= len(given):
        return
    knows = next((f"; --from {one} knows more" for one in PROJECTS if len(unknown[one]) < len(foreign)), "")
    raise InputError(
        f"plan --from {project}: {_table(project)['release']} knows {len(given) - len(foreign)} of the {len(given)} "
        f"names, and not {', '.join(foreign[:5])}: this is a configuration of something else{knows}"
    )


def _said(table: Mapping[str, Any], name: str) -> str | None:
    """What becomes of an option of theirs; None: they have none of this name."""
    if name in table["options"]:
        return ""
    name = name.removeprefix("~")
    found = (said for pattern, said in table["lines"].items() if fnmatchcase(name, pattern))
    return next(found, "not here" if name.partition(".")[0] in table["nothing"] else None)


def _by_table(table: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    options, ours = table["options"], {}
    kinds = [(name, given[name], *options[name]) for name in given if name in options]
    if wrong := [
        f"{name} must be {'true or false' if isinstance(default, bool) else 'a number'}, as its default {default}: got "
        f"{value!r:.80}"
        for name, value, own, default in kinds
        if isinstance(default, (int, float)) and not isinstance(value, (int, float))
        and (value is not None or own is not None)
    ]:  # fmt: skip
        raise ValueError("; ".join(wrong))

    def v(name: str) -> Any:
        name = _SHORT.get(name[:2], name[:2]) + name[2:]
        return given.get(name, options[name][1])

    for theirs, (name, _) in options.items():
        if name is not None:
            ours[name] = v(theirs)
    names = {"v": v, "ours": ours}
    for name, rule in table["rules"].items():
        ours[name.format(estimator=ours.get("algo.advantage.estimator"))] = eval(rule, names)
    lines = [f"{name}: {text}" for name, (rule, text) in table["notes"].items() if eval(rule, names)]
    for name in given.keys() - options.keys():
        if (text := _said(table, name)) is None:
            near = nearest(name, [one for one in options if one.rpartition(".")[0] == name.rpartition(".")[0]], 0.85)
            text = f"{table['release']} has no such option" + (f"; there is {near}" if near else "")
        lines.append(f"{name} {given[name]}: {text}")
    return {name: value for name, value in ours.items() if value is not None}, lines


# ---- what is given -----------------------------------------------------------------------------------------------


def _of_verl(words: Sequence[str]) -> dict[str, Any]:
    """Of YAML files, then of hydra's words, which change what files say; references to other options are put in."""
    chosen, paths, changes, left = {}, [], [], iter(words)
    for word in left:
        name, equals, value = word.partition("=")
        if name in (*_FOLDER, *_FILE):
            chosen[name in _FILE] = value if equals else next(left, "")
        elif (found := _WORD.fullmatch(word)) and (found["value"] is not None or found["mark"] == "~"):
            changes.append(found)
        elif word.endswith((".yaml", ".yml")) and not equals:
            paths.append(word)
        else:
            raise InputError(
                "plan --from verl takes NAME=VALUE, +NAME=VALUE or ~NAME, behind a YAML file if there is one: got "
                f"{word!r}"
            )
    folder, name = Path(chosen.get(False, "config")), chosen.get(True, _OWN[0])
    if folder != Path("config"):
        paths.append(str(folder / (name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")))
    elif Path(name).stem not in _OWN:
        raise InputError(f"--config-name {name} is no file of verl's own: give its folder too, --config-path FOLDER")
    given = {name: value for path in paths for name, value in _flat(_of_file(path))}
    options = _table("verl")["options"]
    for change in changes:
        name = change["name"]
        if change["mark"] == "~":
            inner = [one for one in (*options, *given) if f"{one}.".startswith(f"{name}.")]
            if known := [one for one in inner if one in options]:
                raise InputError(f"~{name}: verl needs {known[0]}, so it cannot be left out; give it a value")
            given = {one: value for one, value in given.items() if one not in inner} | {f"~{name}": ""}
        else:
            text = change["value"]
            text = _KEY.sub(r"\1: ", text) if text.startswith(("{", "[")) else text
            given |= _flat({name: _value(text, name)})
    return {name: _put_in(name, given, options) if name in options else value for name, value in given.items()}


def _of_trl(words: Sequence[str]) -> dict[str, Any]:
    """Of a YAML file, then of the words, as TRL's parser reads them."""
    ahead: list[str] = []
    groups: list[tuple[str, list[str]]] = [("config", ahead)]
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            groups.append((name.replace("-", "_"), [value] if equals else []))
        else:
            groups[-1][1].append(word)
    paths = [path for name, values in groups for path in values if name == "config"]
    if wrong := [path for path in paths if not path.endswith((".yaml", ".yml"))]:
        raise InputError(f"plan --from trl takes --NAME VALUE, behind a YAML file if there is one: got {wrong[0]!r}")
    given = {name: value for path in paths for name, value in _flat(_of_file(path))}
    for name, texts in groups:
        values = [_value(text, name) for text in texts]
        if name.startswith("no_") and not texts and name.removeprefix("no_") in _table("trl")["options"]:
            given[name.removeprefix("no_")] = False
        elif name != "config":
            given |= _flat({name: values[0] if len(values) == 1 else values or True})
    return given


def _value(text: str, name: str) -> Any:
    with reading(f"{name}={text}", "as a value"):
        return yaml.load(text, Loader=ConfigLoader) if text else ""


def _of_file(path: str) -> dict[str, Any]:
    """Raises InputError: it cannot be read, holds no map, or is composed of files other than verl's own."""
    with reading(path, "as YAML"):
        tree = yaml.load(read_text(path), Loader=ConfigLoader)
    if not isinstance(tree, dict):
        raise InputError(f"{path} must hold a map of options, got a {type_name(tree)}")
    pulled = tree.pop("defaults", None) or []
    if pulled not in ([], ["_self_"], *([one, *rest] for one in _OWN for rest in ([], ["_self_"]))):
        raise InputError(f"{path}: its defaults list {pulled} takes hydra to be read; {_PRINTED}")
    return tree


def _flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{key}.")
        elif key != "_target_":
            yield f"{above}{key}", value


def _put_in(name: str, given: Mapping[str, Any], options: Mapping[str, Any], above: Sequence[str] = ()) -> Any:
    """The value of an option with the values that it refers to. Raises InputError: they refer to each other, or to
    something that nothing says."""

    def referred(found: re.Match[str]) -> Any:
        parents = name.split(".")[: -len(found["up"])] if found["up"] else []
        target = ".".join([*parents, found["name"]])
        if target in above:
            raise InputError(f"{name} and {target} refer to each other: give one of them a value")
        if target in given:
            return _put_in(target, given, options, (*above, target))
        default = options.get(target, (None, None))[1]
        if default is None and found["select"]:
            return _value((found["default"] or "null").strip(), name)
        if default is None:
            raise InputError(f"{name} is {found[0]}, and nothing says what that is: give {name}=VALUE behind the file")
        return default

    def whole(value: Any) -> Any:
        if isinstance(value, list):
            return [whole(one) for one in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        if (found := _REFERENCE.fullmatch(value)) is not None:
            return referred(found)
        text = _REFERENCE.sub(lambda found: str(referred(found)), value)
        if "${" in text:
            raise InputError(
                f"{name} is {value}, which takes hydra to be read: give {name}=VALUE behind the file; {_PRINTED}"
            )
        return text

    return whole(given[name])
