"""From files and command-line words to a checked, frozen configuration."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openrlhf_ext.config.files import is_url, resolve_path
from openrlhf_ext.config.rules import Findings, check_config, check_settings
from openrlhf_ext.config.run_config import RunConfig
from openrlhf_ext.config.show import format_help
from openrlhf_ext.config.sources import Setting, flattened, read_command_line, read_yaml, unknown_option
from openrlhf_ext.config.table import find_option, option_table
from openrlhf_ext.options import ConfigError, Fault, Option, Violation, is_set, nest, read, value_of, value_text
from openrlhf_ext.options.sections.algo import UPSTREAM_ESTIMATORS

Rules = Callable[[RunConfig], Findings]


def load_config(
    argv: Sequence[str],
    *,
    more_rules: Rules | None = None,
    files: bool = True,
    defaults: Mapping[str, Any] | None = None,
    chosen: Iterable[str] = (),
) -> RunConfig:
    """Builds the configuration of a run from command-line words.

    Precedence: defaults, then ``--config`` files in order, then the other words (the last one wins). Relative paths are
    resolved against the current directory. Nothing heavier than pydantic, PyYAML, safetensors and tokenizers is
    imported, unless there is a data file of a form that pandas or pyarrow reads.

    Args:
        argv: words after the program's name: ``--config FILE.yaml`` (repeatable), ``--section.name value ...``,
            ``--help [section]`` (prints and exits with status 0).
        more_rules: what else is checked, for the same report; called with a configuration whose types are right, which
            may break other rules.
        files: whether data, reward and outputs are needed and looked at; a plan needs none of them.
        defaults: values of options that neither a file nor a word gives.
        chosen: options that the caller gives other values, so that no rule about them is asked.

    Returns:
        The configuration, with ``warnings`` for settings that are allowed but deserve a look.

    Raises:
        ConfigError: lists every violation: unknown names, wrong types, unsupported options, broken rules, absent files.
        SystemExit: after ``--help``.
    """
    line = read_command_line(argv)
    if line.help_filter is not None:
        own_files = [str(setting.value) for setting in line.settings if setting.name == "algo.module_path"]
        sys.stdout.write(format_help(line.help_filter, resolve_path(own_files[-1], "input") if own_files else None))
        raise SystemExit(0)
    settings = [found for name, value in (defaults or {}).items() for found in flattened(name, value, "default")]
    violations = list(line.violations)
    readable = True
    for path in line.config_files:
        found, broken = read_yaml(path)
        settings += found
        violations += broken
        readable &= all(violation.options for violation in broken)
    rules = [check_config if files else check_settings, *([more_rules] if more_rules is not None else [])]
    return _build([*settings, *line.settings], violations, rules if readable else [], chosen)


def build_config(values: Mapping[str, Any], *, origin: str = "code", files: bool = True) -> RunConfig:
    """The same from dotted names, for programs and tests: ``build_config({"train.seed": 1, "algo.dapo": {...}})``.

    Raises:
        ConfigError: as :func:`load_config`.
    """
    settings = [setting for name, value in values.items() for setting in flattened(name, value, origin)]
    return _build(settings, [], [check_config if files else check_settings])


@dataclass
class _Draft:
    """Settings that survived so far, and what was wrong with the others."""

    violations: list[Violation]
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def reject(self, violation: Violation, name: str | None = None) -> None:
        self.violations.append(violation)
        if name is not None:
            self.values.pop(name, None)

    @property
    def tainted(self) -> set[str]:
        """Options that are already complained about; no rule is checked on the defaults that stand in for them."""
        return {option for violation in self.violations for option in violation.options}


def _build(
    settings: Sequence[Setting], violations: list[Violation], rules: Sequence[Rules], chosen: Iterable[str] = ()
) -> RunConfig:
    """There are no ``rules`` when a file could not be read: they would be about defaults that nobody meant."""
    draft = _Draft(violations)
    _collect(draft, settings)
    _resolve_paths(draft)
    _derive(draft.values)
    config = _typed(draft)
    if resolved := {name: value for name, value in _resolved_defaults(config) if not is_set(config, name)}:
        draft.values |= resolved
        config = _typed(draft)
    draft.violations += _unsupported(config, draft.origins)
    config._sources = draft.origins
    findings = [check(config) for check in rules]
    tainted = draft.tainted | set(chosen)
    draft.violations += [v for found in findings for v in found.violations if tainted.isdisjoint(v.options)]
    if draft.violations:
        raise ConfigError(draft.violations)
    config._warnings = tuple(warning for found in findings for warning in found.warnings)
    return config


def _collect(draft: _Draft, settings: Iterable[Setting]) -> None:
    """Known settings into ``draft``. The last value wins, also over values above and below its name in open maps."""
    for setting in settings:
        option = find_option(setting.name)
        if option is None or (option.arity == "open" and option.name == setting.name):
            draft.reject(unknown_option(setting))
            continue
        for name in [other for other in draft.values if _overlap(other, setting.name)]:
            del draft.values[name], draft.origins[name]
        draft.values[setting.name] = setting.value
        draft.origins[setting.name] = setting.origin


def _overlap(one: str, other: str) -> bool:
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def _resolve_paths(draft: _Draft) -> None:
    """Makes local paths absolute; refuses those that mean nothing."""
    for name, value in list(draft.values.items()):
        kind = option_table()[name].info.path if name in option_table() else None
        if kind is None or not isinstance(value, str):
            continue
        if (fault := _path_fault(value.split(",") if kind == "input" else [value])) is not None:
            got = f"got {value_text(value)!r:.200} ({draft.origins[name]})"
            draft.reject(Violation((name,), f"{name} must not be or hold {fault}: {got}; leave it out"), name)
        else:
            draft.values[name] = resolve_path(value, kind)


def _path_fault(parts: Iterable[str]) -> str | None:
    """What is wrong with one of several paths: it is empty (the current directory?), or no name of a file at all."""
    for part in parts:
        if not part.strip():
            return "an empty path"
        try:
            os.stat(os.path.expanduser(part.strip()))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:  # too long, a NUL, links that go round
            if not is_url(part):
                return f"a path that cannot be looked up ({getattr(error, 'strerror', None) or error})"
    return None


def _derive(values: dict[str, Any]) -> None:
    """Defaults that follow from other settings."""
    output_dir = values.get("ckpt.output_dir") or resolve_path(RunConfig().ckpt.output_dir, "output")
    values.setdefault("ckpt.output_dir", output_dir)
    values.setdefault("ckpt.path", resolve_path(RunConfig().ckpt.path, "output"))
    for name, leaf in (("logger.metrics_path", "metrics.jsonl"), ("logger.figure_path", "training.png")):
        if values.get(name) is None:
            values[name] = os.fspath(Path(str(output_dir)) / leaf)


def _resolved_defaults(config: RunConfig) -> Iterable[tuple[str, Any]]:
    """Defaults that follow from typed settings, so that the configuration that is shown loads back to the same run."""
    if config.actor.gradient_checkpointing_enable:
        yield "megatron.recompute", "full"
    if config.correction_level != "off":
        yield "algo.advantage.is_correction_level", config.correction_level
        yield "algo.advantage.is_correction_mode", config.correction_mode
        yield "algo.advantage.is_correction_threshold", config.correction_threshold


def _typed(draft: _Draft) -> RunConfig:
    """The model of the settings that have the right types; the others are reported and left at their defaults."""
    found = read(RunConfig, nest(draft.values))
    if isinstance(found, RunConfig):
        return found
    for fault in found:
        draft.reject(_type_violation(fault, draft.origins.get(fault.name, "default")), fault.name)
    return RunConfig.model_validate(nest(draft.values))


def _type_violation(fault: Fault, origin: str) -> Violation:
    option, value = option_table()[fault.name], fault.value
    message = f"{fault.name}: expected {option.expects}, got {value_text(value)} ({origin})"
    if hint := _value_hint(option, value) or fault.hint:
        message += f"; {hint}"
    return Violation((fault.name,), message)


def _value_hint(option: Option, value: Any) -> str:
    if option.name == "algo.advantage.estimator" and str(value) in UPSTREAM_ESTIMATORS:
        return UPSTREAM_ESTIMATORS[str(value)]
    if option.arity == "pair" and isinstance(value, str) and len(value.split()) == 2:
        return f"write it as a list: [{', '.join(value.split())}]"
    return ""


def _unsupported(config: RunConfig, origins: Mapping[str, str]) -> Iterable[Violation]:
    for name, option in option_table().items():
        if option.unsupported is not None and not option.is_inert(value := value_of(config, name)):
            yield Violation((name,), option.unsupported.message(name, value_text(value), origins.get(name, "default")))
