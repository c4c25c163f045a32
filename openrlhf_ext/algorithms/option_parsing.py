"""Options as frozen dataclasses: one field per key with default, choices, rule and help text.

`option` declares a key, `parse_options` turns a mapping (from YAML or the command line) into the dataclass and reports
*all* violations in one ValueError, `option_infos` is what a command line prints. The blocks that algorithms share are
in `option_blocks`, an algorithm's own keys beside the algorithm.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger(__name__)

REQUIRED = object()


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of all options: cross-field rules come from `violations`, which each block extends."""

    @classmethod
    def preset_overrides(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults that the given values replace, if the options know presets."""
        return {}

    def violations(self) -> Iterator[str]:
        yield from ()

    def missing(self, names: Iterable[str], version: str) -> Iterator[str]:
        """A violation for each of these options that is null although `version` needs it."""
        metadata = {f.name: f.metadata for f in dataclasses.fields(self)}
        for name in names:
            if getattr(self, name) is None:
                published = metadata[name]["recommended"]
                hint = f"must be {metadata[name]['rule']}" if published is None else f"published for v6: {published}"
                yield f"{name} is required with version {version} ({hint})"


@dataclass(frozen=True)
class OptionInfo:
    """One option as a command line shows it.

    Attributes:
        name: key, spelled as in `get_algorithm(name, key=value)`.
        kind: "float", "int", "bool", "choice", "pair", "ints" or "mapping".
        default: value used when the key is absent; None where null is the default.
        required: True when there is no default and a missing key is always an error.
        choices: legal values of a "choice".
        nullable: null is a value with a meaning of its own (not "take the default").
        recommended: published value of a key without a default; what a command line should supply.
        help: one sentence.
    """

    name: str
    kind: str
    default: Any
    required: bool
    choices: tuple[Any, ...]
    nullable: bool
    recommended: Any
    help: str


def option(
    kind: str,
    default: Any,
    help: str,
    *,
    choices: tuple[Any, ...] = (),
    nullable: bool = False,
    refuses_null: bool = False,
    recommended: Any = None,
    check: Callable[[Any], bool] | None = None,
    rule: str = "",
) -> Any:
    """A dataclass field that carries what `describe_options` and `parse_options` need to know about a key.

    Args:
        kind, default, help, choices, nullable, recommended: as in `OptionInfo`; REQUIRED as default for none.
        refuses_null: null is an error; otherwise a null without a meaning of its own takes the default.
        check: what a converted value must satisfy; `rule` says it in words ("NAME must be RULE").
    """
    metadata = {
        "kind": kind,
        "help": help,
        "choices": choices,
        "nullable": nullable or default is None,
        "refuses_null": refuses_null,
        "required": default is REQUIRED,
        "recommended": recommended,
        "check": check,
        "rule": rule,
    }
    return field(default=None if default is REQUIRED else default, metadata=metadata)


def positive(value: float) -> bool:
    return value > 0


def not_negative(value: float) -> bool:
    return value >= 0


def in_closed_unit_interval(value: float) -> bool:
    return 0 <= value <= 1


def in_unit_interval(value: float) -> bool:
    return 0 < value < 1


def nearest(name: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the known name closest to `name`, or an empty string."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else ""


def _as_float(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _as_int(value: Any) -> int:
    number = _as_float(value)
    if number != int(number):
        raise ValueError
    return int(number)


def _as_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ValueError


def _as_pair(value: Any) -> tuple[float, float]:
    low, high = value
    return _as_float(low), _as_float(high)


def _as_ints(value: Any) -> tuple[int, ...]:
    return tuple(_as_int(item) for item in value)


def _as_mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError
    return dict(value)


_READERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "float": (_as_float, "a finite number"),
    "int": (_as_int, "an integer"),
    "bool": (_as_bool, "true or false"),
    "pair": (_as_pair, "two numbers [low, high]"),
    "ints": (_as_ints, "a list of integers"),
    "mapping": (_as_mapping, "a mapping"),
}


def read_value(name: str, value: Any, metadata: Mapping[str, Any]) -> Any:
    """`value` converted to the kind of an option; ValueError names the option, the rule and the value."""
    if metadata["kind"] == "choice":
        # A command line hands over text, also for numbers; True is no 1.
        legal = {str(choice): choice for choice in metadata["choices"]}
        if str(value) not in legal:
            known = ", ".join(repr(choice) for choice in metadata["choices"])
            raise ValueError(f"{name} must be one of {known}, got {value!r}{nearest(str(value), legal)}")
        return legal[str(value)]
    reader, wanted = _READERS[metadata["kind"]]
    try:
        converted = reader(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be {wanted}, got {value!r}") from None
    if metadata["check"] is not None and not metadata["check"](converted):
        raise ValueError(f"{name} must be {metadata['rule']}, got {value!r}")
    return converted


def parse_options(
    cls: type[Options],
    values: Mapping[str, Any],
    *,
    owner: str,
    foreign: Iterable[str] = (),
    overrides: Mapping[str, Any] | None = None,
) -> Any:
    """Build the options dataclass `cls` from a mapping.

    Args:
        cls: options dataclass of the algorithm.
        values: key -> value; a null value takes the default unless null has a meaning for this key.
        owner: algorithm name, for messages.
        foreign: keys that other algorithms read; they are ignored here with a warning.
        overrides: defaults that replace those of `cls` (presets); explicit keys win.
    Raises:
        ValueError: every violation found, one line each.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}
    foreign = set(foreign)
    errors: list[str] = []
    parsed: dict[str, Any] = dict(overrides or {})
    for name, value in values.items():
        if name not in fields:
            errors.extend(_unknown_key(name, owner, fields, foreign))
            continue
        try:
            parsed.update(_read_option(name, value, fields[name].metadata))
        except ValueError as error:
            errors.append(str(error))
    for name, f in fields.items():
        if f.metadata["required"] and parsed.get(name) is None:
            errors.append(f"{name} is required ({f.metadata['help']})")
    if not errors:
        options = cls(**parsed)
        errors.extend(options.violations())
        if not errors:
            return options
    raise ValueError(f"{owner}: " + f"\n{owner}: ".join(errors))


def _read_option(name: str, value: Any, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The option's converted value under its name; nothing for a null that takes the default."""
    if value is not None:
        return {name: read_value(name, value, metadata)}
    if metadata["refuses_null"]:
        raise ValueError(f"{name} must be one of {metadata['choices']}, null is not accepted")
    return {name: None} if metadata["nullable"] else {}


def _unknown_key(name: str, owner: str, fields: Mapping[str, Any], foreign: set[str]) -> Iterator[str]:
    if name in foreign:
        logger.warning("%s does not read the option %r; it is ignored", owner, name)
        return
    hint = nearest(name, [*fields, *foreign])
    yield f"unknown option {name!r}{hint}. Options: {', '.join(sorted(fields))}"


def option_infos(cls: type) -> list[OptionInfo]:
    """The options of a dataclass built from `option(...)` fields, sorted by name."""
    return [
        OptionInfo(
            name=f.name,
            kind=f.metadata["kind"],
            default=f.default,
            required=f.metadata["required"],
            choices=f.metadata["choices"],
            nullable=f.metadata["nullable"],
            recommended=f.metadata["recommended"],
            help=f.metadata["help"],
        )
        for f in sorted(dataclasses.fields(cls), key=lambda f: f.name)
    ]
