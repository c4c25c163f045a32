"""From files and command-line words to a checked, frozen configuration that records the origin of
each value."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import yaml
from yaml.composer import ComposerError

from openrlhf_ext.config.files import is_url, resolve_path
from openrlhf_ext.config.rules import Findings, check_config, check_settings
from openrlhf_ext.config.run_config import RunConfig, option_table
from openrlhf_ext.config.show import format_help
from openrlhf_ext.config.upstream import (
    EARLIER_DEFAULTS,
    STANDS_FOR,
    is_earlier,
    of_earlier,
    origin_of,
    read_earlier,
)
from openrlhf_ext.inputs import InputError, read_text, shipped, shown
from openrlhf_ext.megatron.layout import PIPELINE_ENDS
from openrlhf_ext.options import (
    ConfigError,
    Fault,
    Option,
    Violation,
    is_set,
    nest,
    no_effect,
    read,
    value_of,
    value_text,
)
from openrlhf_ext.options.sections.algo import OTHER_ESTIMATORS
from openrlhf_ext.options.table import Configuration, OptionTable, UsageError, from_words, table_of

COMMAND_LINE = "command line"
# Number of unknown options to report: a file of another program has thousands, and finding similar
# names takes time.
_SHOWN_UNKNOWN = 20
C = TypeVar("C", bound=Configuration)


@dataclass(frozen=True)
class Setting:
    """One option's value; ``origin`` is ``file:line`` or ``command line``."""

    name: str
    value: Any
    origin: str


@dataclass
class CommandLine:
    """The parsed command line; ``help_filter``: the section (or part of a name) to show, "" = all,
    None = no help."""

    config_files: list[str] = field(default_factory=list)
    settings: list[Setting] = field(default_factory=list)
    help_filter: str | None = None
    violations: list[Violation] = field(default_factory=list)


_FLOAT = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
_SCALARS = (  # tag, form, first characters
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", r"[-+]?[0-9]{1,40}", [*"-+0123456789"]),
    ("float", _FLOAT, [*"-+.0123456789"]),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
)
_TAG = "tag:yaml.org,2002:"
# Half of a UTF-16 pair is not a character.
_FORMS = {f"{_TAG}str": re.compile(r"[^\ud800-\udfff]*")}
_FORMS |= {f"{_TAG}{tag}": re.compile(form) for tag, form, _ in _SCALARS}
# "<<" is not a scalar of this schema; the loader of studies reads it.
_FORMS[f"{_TAG}merge"] = re.compile("<<")
_FILE_BYTES = 1 << 20
# The longest configuration of this repository has 5 levels and some 200 values.
_LEVELS, _NODES = 20, 20_000


class ConfigLoader(yaml.SafeLoader):
    """YAML with the scalars of YAML 1.2's core schema, of bounded size.

    PyYAML follows YAML 1.1, in which ``off``, ``on`` and ``no`` are booleans and ``1e-6`` is text.
    ``is_correction_level: off`` or ``lr: 1e-6`` would then have the wrong type. An alias counts
    with the size of its target.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._level = self._nodes = 0
        self._size_of: dict[int, int] = {}  # size of a complete node, with all nodes below it

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Composes a node. Raises ComposerError for too many nodes, too deep nesting, a
        self-reference, or a node outside the core schema."""
        event = self.peek_event()
        mark = event.start_mark
        before = self._nodes
        self._level += 1
        self._nodes += 1
        if self._level > _LEVELS:
            raise ComposerError(None, None, f"nested deeper than {_LEVELS} levels", mark)
        if (
            isinstance(event, yaml.AliasEvent)
            and id(self.anchors.get(event.anchor)) not in self._size_of
        ):
            said = f"the alias *{event.anchor} has no complete anchor before it"
            raise ComposerError(None, None, said, mark)

        node = super().compose_node(parent, index)
        self._nodes += self._size_of.get(id(node), 0)  # the size of an alias's target
        self._size_of.setdefault(id(node), self._nodes - before)
        if self._nodes > _NODES:
            raise ComposerError(None, None, f"more than {_NODES} values, aliases included", mark)
        is_name = isinstance(parent, yaml.MappingNode) and index is None
        if is_name and not isinstance(node, yaml.ScalarNode):
            raise ComposerError(None, None, "a name must be text", mark)
        if (fault := _node_fault(node)) is not None:
            raise ComposerError(None, None, fault, mark)
        self._level -= 1
        return node


def _node_fault(node: yaml.Node | None) -> str | None:
    """Returns why a node is not part of the core schema, or None. An explicit tag (``!!int abc``)
    need not match its value."""
    if isinstance(node, yaml.ScalarNode):
        form = _FORMS.get(node.tag)
        if form is not None and form.fullmatch(node.value) is not None:
            return None
        return f"{shown(node.value)} is not a valid {node.tag.removeprefix(_TAG)}"
    kind = "map" if isinstance(node, yaml.MappingNode) else "seq"
    if node is None or node.tag == _TAG + kind:
        return None
    return f"the tag {node.tag.removeprefix(_TAG)} is not supported"


ConfigLoader.yaml_implicit_resolvers = {}
for _name, _form, _first in _SCALARS:
    ConfigLoader.add_implicit_resolver(_TAG + _name, re.compile(f"^(?:{_form})$"), _first)


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node))


ConfigLoader.add_constructor(f"{_TAG}int", _integer)


def read_yaml(path: str, table: OptionTable) -> tuple[list[Setting], list[Violation]]:
    """Returns the settings of a YAML file, in its order, and the faults of the file itself
    (missing, not YAML, a duplicate key).

    Nested and dotted keys may be mixed. A path such as ``configs/recipes/smoke_cpu.yaml`` that does
    not exist in the working folder refers to a file that the package ships.
    """
    given = os.path.expanduser(path)
    if not os.path.exists(given) and given.startswith("configs/") and shipped(given).exists():
        given = str(shipped(given))
    try:
        loader = ConfigLoader(read_text(given, _FILE_BYTES))
        root = loader.get_single_node()
    except InputError as error:
        return [], [Violation((), f"--config must name a readable file: {error}")]
    except yaml.YAMLError as error:
        return [], [Violation((), f"--config {_yaml_fault(path, error)}")]
    if root is None:
        return [], []
    if not isinstance(root, yaml.MappingNode):
        kind = "a list" if isinstance(root, yaml.SequenceNode) else repr(root.value)
        said = f"--config {path} must hold a mapping of options (name: value), got {kind}"
        return [], [Violation((), said)]
    reader = _YamlReader(path, loader, table)
    return list(reader.settings(root, "")), reader.violations


def read_files(paths: Sequence[str], table: OptionTable) -> tuple[list[Setting], list[Violation]]:
    settings, violations = [], []
    for path in paths:
        found, broken = read_yaml(path, table)
        settings.extend(found)
        violations.extend(broken)
    return settings, violations


def _yaml_fault(path: str, error: yaml.YAMLError) -> str:
    """Returns ``file:line is not valid YAML: problem`` with the usual cause."""
    if not isinstance(error, yaml.MarkedYAMLError) or (mark := error.problem_mark) is None:
        return f"{path} is not valid YAML: {' '.join(str(error).split())}"
    return (
        f"{path}:{mark.line + 1} is not valid YAML: {error.problem} (column {mark.column + 1}); "
        "indent with spaces, and all options of one group equally"
    )


class _YamlReader:
    """Walks the nodes of one file and keeps the line of every value."""

    def __init__(self, path: str, loader: ConfigLoader, table: OptionTable) -> None:
        self.path = path
        self.loader = loader
        self.table = table
        self.violations: list[Violation] = []
        self._lines: dict[str, int] = {}

    def settings(self, node: yaml.Node, name: str) -> Iterator[Setting]:
        option = self.table.get(name)
        is_leaf = option is not None and option.arity != "open"
        is_null = isinstance(node, yaml.ScalarNode) and node.tag == f"{_TAG}null"
        if isinstance(node, yaml.MappingNode) and not is_leaf:
            for key, value in node.value:
                inner = f"{name}.{key.value}" if name else str(key.value)
                yield from self.settings(value, inner)
        # A null section has all its lines commented out.
        elif not (is_null and self.table.is_section(name)):
            yield self._setting(node, name)

    def _setting(self, node: yaml.Node, name: str) -> Setting:
        line = node.start_mark.line + 1
        if name in self._lines:
            said = (
                f"{name} is set twice in {self.path}: lines {self._lines[name]} and {line}; keep "
                "one"
            )
            self.violations.append(Violation((name,), said))
        self._lines[name] = line
        return Setting(name, self.loader.construct_object(node, deep=True), f"{self.path}:{line}")


def read_command_line(argv: Sequence[str], table: OptionTable) -> CommandLine:
    line = CommandLine()
    for word, values in words_by_option(argv, line.violations):
        if word in ("--help", "-h"):
            line.help_filter = " ".join(values)
        elif word == "--config":
            _add_config_file(line, values, table)
        else:
            _add_setting(line, table.called(word.removeprefix("--")), values, table)
    return line


def words_by_option(
    argv: Sequence[str], violations: list[Violation]
) -> Iterator[tuple[str, list[str]]]:
    """Yields ``--name`` with the words that follow it; ``--name=value`` counts as two words."""
    groups: list[tuple[str, list[str]]] = []
    for word in argv:
        if word.startswith("--") or word == "-h":
            name, separator, value = word.partition("=")
            groups.append((name, [value] if separator else []))
        elif groups:
            groups[-1][1].append(word)
        else:
            said = f"options start with --: got {word!r} at the start of the command line"
            violations.append(Violation((), said))
    yield from groups


def _add_config_file(line: CommandLine, values: list[str], table: OptionTable) -> None:
    named = [word for word in values if table.find(word) is not None and not os.path.exists(word)]
    if named:  # the words that follow it are its values
        said = f"options start with --: got {named[0]!r} after --config; did you mean --{named[0]}?"
        line.violations.append(Violation((), said))
        values = values[: values.index(named[0])]
    if values:
        line.config_files.extend(values)
    elif not named:
        line.violations.append(Violation((), "--config takes the path of a YAML file, got none"))


def _add_setting(line: CommandLine, name: str, words: list[str], table: OptionTable) -> None:
    option = table.find(name)
    switch = table.find(table.called(name.removeprefix("no-")))
    if option is None and switch is not None and switch.arity == "flag" and not words:  # --no-NAME
        option = switch
        name = switch.name
        words = ["false"]
    if option is None and not _is_earlier(name, table):
        # Reported later, together with the unknown names of the files.
        line.settings.append(Setting(name, words, COMMAND_LINE))
        return
    try:
        if option is None:
            value = read_earlier(name, words)
        else:
            value = _free_value(words) if option.arity == "open" else from_words(option, words)
    except UsageError as error:
        line.violations.append(Violation((name,), f"{error} ({COMMAND_LINE})"))
        return
    except yaml.YAMLError as error:
        message = f"--{name}: {' '.join(words)} is not valid YAML ({' '.join(str(error).split())})"
        line.violations.append(Violation((name,), message))
        return
    if option is not None and option.info.repeats:
        given = (setting.value for setting in line.settings if setting.name == name)
        value = [*chain.from_iterable(given), *value]
    line.settings.extend(flattened(name, value, COMMAND_LINE))


def _is_earlier(name: str, table: OptionTable) -> bool:
    """Whether ``name`` is an option of an earlier release; only ``train_ppo_ray`` supports
    those."""
    return table.model is RunConfig and table.find(name) is None and is_earlier(name)


def _free_value(words: list[str]) -> Any:
    """Parses a value whose type only the estimator knows: YAML, ``true`` for a bare flag, a list
    for several words."""
    values = [yaml.load(word, Loader=ConfigLoader) for word in words]  # noqa: S506 (a SafeLoader)
    if not values:
        return True
    return values[0] if len(values) == 1 else values


def flattened(name: str, value: Any, origin: str) -> Iterator[Setting]:
    """Yields the settings inside a map of options, or the value itself if it is not a map."""
    if not isinstance(value, dict):
        yield Setting(name, value, origin)
        return
    for key, inner in value.items():
        yield from flattened(f"{name}.{key}", inner, origin)


def _flattened_all(values: Mapping[str, Any], origin: str) -> Iterator[Setting]:
    for name, value in values.items():
        yield from flattened(name, value, origin)


def unknown_option(setting: Setting, table: OptionTable) -> Violation:
    if table.is_section(setting.name):
        message = (
            f"{setting.name} is a group of options: give one of {setting.name}.* ({setting.origin})"
        )
        return Violation((setting.name,), message)
    nearest = table.nearest(setting.name)
    hint = f"did you mean {nearest}?" if nearest else "--help lists all options"
    of_runs = None if table.model is RunConfig else option_table().find(setting.name)
    if of_runs is not None and of_runs.unsupported is None:
        hint = "train_ppo_ray has this option, but this command does not"
        if nearest:
            hint += f"; the closest one here is {nearest}"
    options = (setting.name,) if nearest is None else (setting.name, nearest)
    return Violation(options, f"unknown option {setting.name} ({setting.origin}); {hint}")


# ---- the configuration

Rules = Callable[[C], Findings]
Choice = Callable[[C], Mapping[str, Any]]
"""Chooses the options that a configuration leaves open, before the rules are checked."""
CHOSEN = "chosen: megatron.layout auto"
"""The source of a chosen option (``RunConfig.sources``)."""
_SIZES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "expert_parallel_size",
    "expert_tensor_parallel_size",
    *PIPELINE_ENDS,
)


def load(
    model: type[C],
    argv: Sequence[str],
    rules: Sequence[Rules[C]],
    *,
    choice: Choice[C] | None = None,
    defaults: Mapping[str, Any] | None = None,
    chosen: Iterable[str] = (),
) -> C:
    """Builds the configuration of a command from its words.

    Precedence: defaults, then ``--config`` files in order, then the other words (the last one
    wins). Relative paths are resolved against the current directory. Imports nothing heavier than
    pydantic, PyYAML, safetensors and tokenizers, unless a data file has a format that pandas or
    pyarrow reads.

    Args:
        model: the options of the command.
        argv: words after the program's name: ``--config FILE.yaml`` (repeatable),
            ``--section.name value ...``, ``--help [section]`` (prints and exits with status 0).
        rules: checks whose findings form one report; called with a configuration whose types are
            correct but which may break other rules.
        choice: resolves ``megatron.layout auto``; without it the sizes stay unchanged.
        chosen: options that the caller will change, so rules about them are ignored.

    Raises:
        ConfigError: lists every violation: unknown names, wrong types, unsupported options, broken
            rules, missing files.
    """
    table = table_of(model)
    line = read_command_line(argv, table)
    if line.help_filter is not None:
        own_files = [
            str(setting.value) for setting in line.settings if setting.name == "algo.module_path"
        ]
        own_file = resolve_path(own_files[-1], "input") if own_files else None
        sys.stdout.write(format_help(line.help_filter, own_file, model))
        raise SystemExit(0)

    of_files, broken = read_files(line.config_files, table)
    if any(not violation.options for violation in broken):
        # After an unreadable file, rules would report defaults that the user did not choose.
        rules, choice = (), None
    draft = Draft(table, [*line.violations, *broken])
    settings = [*_flattened_all(defaults or {}, "default"), *of_files, *line.settings]
    return _build(model, draft, settings, rules, choice, chosen)


def load_config(
    argv: Sequence[str],
    *,
    more_rules: Rules[RunConfig] | None = None,
    files: bool = True,
    **how: Any,
) -> RunConfig:
    """Builds the configuration of a run and checks all of its rules and ``more_rules``.

    Without ``files``, data, reward and outputs are neither required nor checked. ``how``: see
    :func:`load`.
    """
    rule = check_config if files else check_settings
    more = () if more_rules is None else (more_rules,)
    return load(RunConfig, argv, [rule, *more], **how)


def build_config(
    values: Mapping[str, Any], *, origin: str = "code", files: bool = True
) -> RunConfig:
    """Builds the configuration from dotted names, for programs and tests:
    ``build_config({"train.seed": 1, "algo.dapo": {...}})``."""
    draft = Draft(option_table(), [])
    rule = check_config if files else check_settings
    return _build(RunConfig, draft, list(_flattened_all(values, origin)), [rule])


@dataclass
class Draft:
    """A configuration under construction from its settings."""

    table: OptionTable
    violations: list[Violation]
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    """Warnings about settings whose meaning differs from OpenRLHF's, or that have none."""

    def reject(self, violation: Violation, name: str | None = None) -> None:
        self.violations.append(violation)
        if name is not None:
            self.values.pop(name, None)

    @property
    def tainted(self) -> set[str]:
        """Options that already have a violation; no rule is checked on the defaults that replace
        them."""
        return set(chain.from_iterable(violation.options for violation in self.violations))


def _build(
    model: type[C],
    draft: Draft,
    settings: Sequence[Setting],
    rules: Sequence[Rules[C]],
    choice: Choice[C] | None = None,
    chosen: Iterable[str] = (),
) -> C:
    collect(draft, _todays(draft, settings))
    resolve_paths(draft)
    stand_in(draft)
    _share_gpus(draft)
    _derive_paths(draft)
    config = typed(draft, model)
    if resolved := {name: value for name, value in config.resolved() if not is_set(config, name)}:
        draft.values |= resolved
        config = typed(draft, model)
    if choice is not None and value_of(config, "megatron.layout") == "auto":
        config._sources = draft.origins
        as_chosen(draft, choice(config))
        config = typed(draft, model)
    note_unsupported(draft, config)
    if getattr(config, "strict", False):
        draft.violations += [Violation((), line) for line in draft.lines]
    config._sources = draft.origins

    warnings = list(draft.lines)
    tainted = draft.tainted | set(chosen)
    # A rejected estimator is replaced by the default one, whose critic the user did not request.
    prefix = ("critic.",) if "algo.advantage.estimator" in tainted else ()
    for check in rules:
        findings = check(config)
        warnings += findings.warnings
        for violation in findings.violations:
            is_tainted = not tainted.isdisjoint(violation.options)
            if not is_tainted and not any(name.startswith(prefix) for name in violation.options):
                draft.violations.append(violation)
    if draft.violations:
        raise ConfigError(draft.violations)
    config._warnings = tuple(warnings)
    return config


def _todays(draft: Draft, settings: Sequence[Setting]) -> Sequence[Setting]:
    """Translates settings with names of an earlier OpenRLHF; a script of 0.8 or 0.9 keeps its
    defaults."""
    earlier = {
        setting.name: setting for setting in settings if _is_earlier(setting.name, draft.table)
    }
    if not earlier:
        return settings
    values, faults = of_earlier({name: setting.value for name, setting in earlier.items()})
    origin = next(reversed(earlier.values())).origin
    draft.violations += [Violation((), f"{fault} ({origin})") for fault in faults]
    said = ", ".join(f"{name} {value_text(value)}" for name, value in values.items())
    draft.lines.append(
        f"names of an earlier OpenRLHF: {', '.join(earlier)}; they are read as {said or 'nothing'}"
    )

    last = max(index for index, setting in enumerate(settings) if setting.name in earlier)
    before = [setting for setting in settings[:last] if setting.name not in earlier]
    after = [setting for setting in settings[last:] if setting.name not in earlier]
    of_old = [
        Setting(name, value, f"{origin}, under its earlier name") for name, value in values.items()
    ]
    defaults = []
    if any("." not in name for name in earlier):
        given = {setting.name for setting in (*before, *of_old, *after)}
        missing = {name: value for name, value in EARLIER_DEFAULTS.items() if name not in given}
        defaults = [
            Setting(name, value, "default of OpenRLHF 0.9") for name, value in missing.items()
        ]
        said = ", ".join(f"{name} {value}" for name, value in missing.items())
        draft.lines.append(f"defaults of OpenRLHF 0.9, whose names are used: {said}")
    return [*defaults, *before, *of_old, *after]


def collect(draft: Draft, settings: Iterable[Setting]) -> None:
    """Puts known settings into ``draft``. The last value wins, also over values above and below its
    name in open maps."""
    unknown: list[Setting] = []
    for setting in settings:
        option = draft.table.find(setting.name)
        if option is None or (option.arity == "open" and option.name == setting.name):
            unknown.append(setting)
            continue
        for name in [other for other in draft.values if _overlap(other, setting.name)]:
            del draft.values[name], draft.origins[name]
        draft.values[setting.name] = setting.value
        draft.origins[setting.name] = setting.origin
    for setting in unknown[:_SHOWN_UNKNOWN]:
        draft.reject(unknown_option(setting, draft.table))
    if more := unknown[_SHOWN_UNKNOWN:]:
        said = (
            f"and {len(more)} more unknown options, the last one {more[-1].name} "
            f"({more[-1].origin}): is this the right file?"
        )
        draft.reject(Violation(tuple(setting.name for setting in more), said))


def _overlap(one: str, other: str) -> bool:
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def stand_in(draft: Draft) -> None:
    """Reads sizes and types that OpenRLHF gives DeepSpeed as Megatron's, unless Megatron's are
    given."""
    if any(f"megatron.{size}" in draft.values for size in _SIZES):
        draft.values.setdefault("megatron.layout", "given")
    for name, ours in STANDS_FOR.items():
        value = draft.values.pop(name, None)
        if value is None:
            continue
        if ours in draft.values:
            if str(value) != str(draft.values[ours]):
                why = f"{ours} is given as {value_text(draft.values[ours])}"
                draft.lines.append(no_effect(name, value, why))
            continue
        draft.values[ours] = value
        draft.origins[ours] = origin_of(draft.origins[name], name)
        if str(value) != str(draft.table[name].default):
            draft.lines.append(f"{name} {value_text(value)} is read as {ours} {value_text(value)}")


def _share_gpus(draft: Draft) -> None:
    """Applies ``train.colocate_all``, whose effect depends on whether engines sample while the
    policy trains."""
    shares = _says(draft, "train.colocate_all")
    streams = (
        _says(draft, "train.async_enable")
        or str(draft.values.get("train.max_staleness") or 0) != "0"
    )
    if shares and not streams:
        if draft.values.get("vllm.sync_backend") == "nccl":
            draft.values["vllm.sync_backend"] = "auto"
            draft.lines.append(
                "vllm.sync_backend nccl with train.colocate_all is read as auto: CUDA IPC, as "
                "in OpenRLHF"
            )
        return
    if shares:
        draft.lines.append(
            "train.colocate_all with rollouts during training: the engines get their own GPUs, and "
            "the other models share the policy's, as in OpenRLHF"
        )
    for name in ("ds.enable_sleep", "vllm.enable_sleep"):
        if _says(draft, name):
            del draft.values[name]
            draft.lines.append(
                no_effect(name, True, "engines and policy share no GPU (train.colocate_all)")
            )


def _says(draft: Draft, flag: str) -> bool:
    return str(draft.values.get(flag)).lower() == "true"


def as_chosen(draft: Draft, made: Mapping[str, Any]) -> None:
    """Applies the options that ``megatron.layout auto`` chose."""
    for name in made:
        if name in draft.origins:
            instead = f"{value_text(draft.values[name])} ({draft.origins[name]})"
            draft.origins[name] = f"{CHOSEN}, instead of {instead}"
        elif len(made) > 1:
            draft.origins[name] = CHOSEN
    draft.values |= made


def resolve_paths(draft: Draft) -> None:
    """Makes local paths absolute; rejects invalid paths."""
    for name, value in list(draft.values.items()):
        kind = draft.table[name].info.path if name in draft.table else None
        if kind is None or not isinstance(value, str):
            continue
        fault = _path_fault(value.split(",") if kind == "input" else [value])
        if fault is None:
            draft.values[name] = resolve_path(value, kind)
            continue
        got = f"got {value_text(value)!r:.200} ({draft.origins[name]})"
        said = f"{name} must not be or contain {fault}: {got}; leave it out"
        draft.reject(Violation((name,), said), name)


def _path_fault(parts: Iterable[str]) -> str | None:
    """Returns the fault of the first invalid path: it is empty (which would mean the current
    directory), or not a file name."""
    for part in parts:
        if not part.strip():
            return "an empty path"
        try:
            os.stat(os.path.expanduser(part.strip()))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:  # too long, a NUL, cyclic links
            if not is_url(part):
                return (
                    f"a path that cannot be looked up ({getattr(error, 'strerror', None) or error})"
                )
    return None


def _derive_paths(draft: Draft) -> None:
    """Sets paths that follow from other paths or from the current directory."""
    values, table = draft.values, draft.table
    for name in {"ckpt.output_dir", "ckpt.path"} & table.keys():
        values.setdefault(name, resolve_path(table[name].default, "output"))
    for name, leaf in (
        ("logger.metrics_path", "metrics.jsonl"),
        ("logger.figure_path", "training.png"),
    ):
        if name in table and values.get(name) is None:
            values[name] = os.fspath(Path(str(values["ckpt.output_dir"])) / leaf)


def typed(draft: Draft, model: type[C]) -> C:
    """Builds the model from the settings with correct types; reports the others and leaves them at
    their defaults."""
    found = read(model, nest(draft.values))
    if not isinstance(found, list):
        return found
    for fault in found:
        origin = draft.origins.get(fault.name, "default")
        draft.reject(_type_violation(fault, draft.table[fault.name], origin), fault.name)
    return model.model_validate(nest(draft.values))


def _type_violation(fault: Fault, option: Option, origin: str) -> Violation:
    value = fault.value
    message = f"{fault.name}: expected {option.expects}, got {value_text(value)} ({origin})"
    if hint := _value_hint(option, value) or fault.hint:
        message += f"; {hint}"
    return Violation((fault.name,), message)


def _value_hint(option: Option, value: Any) -> str:
    if option.name == "algo.advantage.estimator" and str(value) in OTHER_ESTIMATORS:
        return OTHER_ESTIMATORS[str(value)]
    if option.arity == "pair" and isinstance(value, str) and len(value.split()) == 2:
        return f"write it as a list: [{', '.join(value.split())}]"
    return ""


def note_unsupported(draft: Draft, config: Configuration) -> None:
    """Reports options that are not implemented (a violation each) and options without meaning here
    (a warning each)."""
    for name, option in draft.table.items():
        unsupported = option.unsupported
        if unsupported is None or option.is_inert(value := value_of(config, name)):
            continue
        said = unsupported.message(name, value_text(value), draft.origins.get(name, "default"))
        if unsupported.yet:
            draft.violations.append(Violation((name,), said))
        else:
            draft.lines.append(said)
