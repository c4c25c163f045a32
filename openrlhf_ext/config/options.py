"""The table of options, derived from the schema: names, types in words, and how command-line words become values."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from openrlhf_ext.config.access import leaf_fields
from openrlhf_ext.config.entities.base import NotSupported, OptionInfo, Words, info_of
from openrlhf_ext.config.schema import RunConfig
from openrlhf_ext.config.upstream import is_ours

Arity = Literal["flag", "one", "pair", "many", "open"]
_BOUNDS = {annotated_types.Ge: ">=", annotated_types.Gt: ">", annotated_types.Le: "<=", annotated_types.Lt: "<"}
_SIMPLE = {int: "integer", float: "number", str: "text", bool: "true or false", Any: "any value"}


# what other programs call an option, by the last part of its name
_OTHER_NAMES = {"learning_rate": "lr", "pretrain": "model_name_or_path", "model": "model_name_or_path"}


class UsageError(ValueError):
    """Words on the command line that cannot belong to the option they follow."""


@dataclass(frozen=True)
class Option:
    """One option as users see it.

    Attributes:
        name: dotted name, on the command line with ``--`` before it.
        expects: its type, choices and bounds in words.
        default: its default as text.
        help: meaning and unit.
        arity: words it takes: ``flag`` none or one, ``pair`` two, ``many`` one or more, ``open`` any value under any
            sub-name.
        nullable: whether ``null`` is a value.
        choices: allowed values of an option with choices.
        info: support, path and secrecy.
        default_value: the default; None where it is made at run time.
    """

    name: str
    expects: str
    default: str
    help: str
    arity: Arity
    nullable: bool
    choices: tuple[str, ...]
    info: OptionInfo
    default_value: Any

    @property
    def entity(self) -> str:
        """Group the option belongs to; empty for a top-level option."""
        return self.name.split(".")[0] if "." in self.name else ""

    @property
    def unsupported(self) -> NotSupported | None:
        return self.info.unsupported

    @property
    def is_extension(self) -> bool:
        """Whether OpenRLHF does not know this option."""
        return is_ours(self.name)

    def is_inert(self, value: Any) -> bool:
        """Whether this value of an unsupported option asks for nothing."""
        return value == self.default_value or (self.unsupported is not None and value in self.unsupported.inert)

    def from_words(self, words: Sequence[str]) -> Any:
        """The raw value given by the words after ``--name``.

        Raises:
            UsageError: the number of words does not fit.
        """
        if self.arity == "flag" and not words:
            return True
        if self.nullable and list(words) == ["null"]:
            return None
        expected = {"pair": 2, "many": max(1, len(words))}.get(self.arity, 1)
        if len(words) != expected:
            raise UsageError(
                f"--{self.name} takes {expected} value{'s' if expected > 1 else ''} ({self.expects}), "
                f"got {len(words)}: {' '.join(words) or 'none'}"
            )
        return list(words) if self.arity in ("pair", "many") else words[0]


@lru_cache(maxsize=1)
def option_table() -> dict[str, Option]:
    """Every option by name, in the order of the schema."""
    return {name: _option(name, field) for name, field in leaf_fields(RunConfig)}


def option_names() -> list[str]:
    """Sorted names; an open map of options ends in ``.*``."""
    return sorted(name + (".*" if option.arity == "open" else "") for name, option in option_table().items())


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
    entity, leaf = name.split(".")[0], name.split(".")[-1]
    by_leaf = [other for other in plain if other.split(".")[-1] == _OTHER_NAMES.get(leaf, leaf)]
    meant = [other for other in by_leaf if other.startswith(f"{entity}.")]
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


def _option(name: str, field: FieldInfo) -> Option:
    info = info_of(field)
    annotation, nullable = _without_none(field.annotation)
    default = None if field.default is PydanticUndefined else field.default
    return Option(
        name=name,
        expects=_in_words(annotation, field.metadata) + (" or null" if nullable else ""),
        default=value_text(default) if info.default_text is None else info.default_text,
        help=field.description or "",
        arity=_arity(annotation),
        nullable=nullable,
        choices=_choices(annotation),
        info=info,
        default_value=default,
    )


def value_text(value: Any) -> str:
    """A value as it is written on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return " ".join(value_text(element) for element in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _without_none(annotation: Any) -> tuple[Any, bool]:
    """(``T``, whether None was allowed) of ``T | None``."""
    if get_origin(annotation) not in (Union, UnionType):
        return annotation, False
    rest = tuple(arm for arm in get_args(annotation) if arm is not NoneType)
    return (rest[0] if len(rest) == 1 else Union[rest]), len(rest) < len(get_args(annotation))  # noqa: UP007


def _strip(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _arity(annotation: Any) -> Arity:
    annotation = _strip(annotation)
    if annotation is bool:
        return "flag"
    if get_origin(annotation) is dict:
        return "open"
    if get_origin(annotation) is tuple:
        return "many" if Ellipsis in get_args(annotation) else "pair"
    return "many" if get_origin(annotation) in (Union, UnionType) else "one"


def _choices(annotation: Any) -> tuple[str, ...]:
    annotation = _strip(annotation)
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _in_words(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    if get_origin(annotation) is Annotated:
        inner, *extra = get_args(annotation)
        return _in_words(inner, [*extra, *metadata])
    if described := [item.text for item in metadata if isinstance(item, Words)]:
        return described[0]
    if choices := _choices(annotation):
        return "one of " + ", ".join(choices)
    if get_origin(annotation) is tuple:
        return _tuple_in_words(get_args(annotation))
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(_in_words(arm) for arm in get_args(annotation))
    if get_origin(annotation) is dict:
        return "map of options"
    return " ".join([_SIMPLE[annotation], *_bounds_in_words(metadata)])


def _tuple_in_words(elements: tuple[Any, ...]) -> str:
    one = _in_words(elements[0]).replace("number", "numbers").replace("text", "texts")
    return f"list of {one}" if Ellipsis in elements else f"{len(elements)} {one}"


def _bounds_in_words(metadata: Sequence[Any]) -> Iterator[str]:
    bounds = []
    for item in metadata:
        for constraint in getattr(item, "metadata", None) or [item]:  # a nested Field carries its constraints inside
            symbol = _BOUNDS.get(type(constraint))
            if symbol is not None:
                bounds.append(f"{symbol} {getattr(constraint, type(constraint).__name__.lower()):.15g}")
    if bounds:
        yield " and ".join(bounds)
