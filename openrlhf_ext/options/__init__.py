"""Options: how a section of the configuration and the options of a method are declared, described
and read.

One declaration is all that an option needs; `--help`, YAML, command line, error report and
documentation follow:

    class Vllm(Section):
        kv_cache_mib: int = added(64, "KV cache per engine when it runs on CPU, MiB", ge=1)

The annotation is the type, keyword arguments are bounds. Rules between the fields of a class go
into its `violations`, what it takes for an option to have an effect into its `needs`. Imports
pydantic and nothing heavier.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypedDict,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

import annotated_types
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, PydanticUndefined

from openrlhf_ext.inputs import did_you_mean, nearest, shortened
from openrlhf_ext.redaction import redact

# "output": made absolute. "input": made absolute when it is a local path, left alone when it is a
# URL or a hub name.
PathKind = Literal["input", "output"]
T = TypeVar("T")
Arity = Literal["flag", "one", "pair", "many", "open"]


# ---- what is wrong


@dataclass(frozen=True)
class Violation:
    """One broken rule: the message has rule, values and remedy; it is not reported if one of the
    options is invalid."""

    options: tuple[str, ...]
    message: str


class ConfigError(ValueError):
    """A configuration that cannot run: a line for each violation, without passwords of addresses. A
    text is a violation that is filed under no option."""

    def __init__(self, violations: Sequence[Violation | str]) -> None:
        self.violations = tuple(
            Violation((), entry) if isinstance(entry, str) else entry for entry in violations
        )
        count = len(self.violations)
        head = f"{count} problem{'s' if count != 1 else ''} in the configuration:"
        lines = [f"- {shortened(violation.message)}" for violation in self.violations]
        super().__init__(redact("\n".join([head, *lines])))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Violation, ...]]]:
        return type(self), (self.violations,)


def no_effect(name: str, value: Any, reason: str, remedy: str = "leave it out") -> str:
    """The warning about a setting that does nothing beside the others."""
    return f"{name} has no effect: got {shortened(value_text(value))}, and {reason}; {remedy}"


# ---- declaring


class Section(BaseModel):
    """A group of options. Unknown names are refused and values cannot be changed after
    construction."""

    needs: ClassVar[dict[str, tuple[str, ...]]] = {}
    """Options of this section (all: '*') that have no effect unless a condition holds, see
    :func:`idle_options`."""
    model_config = ConfigDict(
        frozen=True, extra="forbid", coerce_numbers_to_str=True, protected_namespaces=()
    )

    def violations(self) -> Iterator[Violation]:
        """Broken rules between the options of this section, on values of the right types."""
        yield from ()

    def cautions(self) -> Iterator[str]:
        """Warnings: options that do nothing beside the others of this section, and values that
        deserve a look."""
        yield from ()


@dataclass(frozen=True)
class NotSupported:
    """Why an option of OpenRLHF must stay at its default, or at one of the ``inert`` values, which
    ask for nothing.

    ``yet``: it may come; False for options that have no meaning with a Megatron policy.
    """

    why: str
    instead: str
    yet: bool
    inert: tuple[Any, ...] = ()

    def message(self, name: str, value: str, origin: str) -> str:
        status = (
            "not supported with the Megatron policy yet"
            if self.yet
            else "not an option of the Megatron policy"
        )
        return f"{name} is {status}: {self.why}; got {value} ({origin}); {self.instead}"


class Reason(TypedDict):
    """Of several refused options."""

    why: str
    instead: str


@dataclass(frozen=True)
class Words:
    """Describes a type whose bounds a validator checks; goes into ``Annotated``."""

    text: str


@dataclass(frozen=True)
class OptionInfo:
    """What is known of an option beyond its type, default and help text.

    Attributes:
        added: OpenRLHF does not know it.
        recommended: published value of an option without a default, which a run gets unless it sets
        another.
        refuses_null: null is an error, where it would otherwise take a method's default.
        also: another name of it on the command line.
        repeats: its values on the command line add up when it is given several times.
    """

    unsupported: NotSupported | None = None
    path: PathKind | None = None
    secret: bool = False
    default_text: str | None = None
    added: bool = False
    recommended: Any = None
    refuses_null: bool = False
    also: str | None = None
    repeats: bool = False


def option(
    default: Any,
    help_text: str,
    *,
    path: PathKind | None = None,
    secret: bool = False,
    default_text: str | None = None,
    recommended: Any = None,
    refuses_null: bool = False,
    also: str | None = None,
    repeats: bool = False,
    **constraints: Any,
) -> Any:
    """Declares an option: of OpenRLHF in a section, of its own in a method.

    Args:
        default: the default value; a function that makes it (then give ``default_text``); ``...``
        for none.
        help_text: meaning and unit.
        path: how relative paths in the value are resolved; None for anything that is no path.
        default_text: how the default is shown where its value says too little.
        constraints: pydantic bounds (``ge``, ``gt``, ``le``, ``lt``, ``min_length``,
        ``max_length``).
    """
    info = OptionInfo(
        None, path, secret, default_text, False, recommended, refuses_null, also, repeats
    )
    return _field(default, help_text, info, constraints)


def added(
    default: Any,
    help_text: str,
    *,
    path: PathKind | None = None,
    default_text: str | None = None,
    **constraints: Any,
) -> Any:
    """Declares an option of a section that OpenRLHF does not know; arguments as for
    :func:`option`."""
    return _field(
        default,
        help_text,
        OptionInfo(path=path, default_text=default_text, added=True),
        constraints,
    )


def not_yet(
    default: Any, help_text: str, *, why: str, instead: str, inert: tuple[Any, ...] = ()
) -> Any:
    """Declares an option of OpenRLHF that is known but not built: every value that asks for
    something is refused."""
    return _field(
        default,
        help_text,
        OptionInfo(unsupported=NotSupported(why, instead, yet=True, inert=inert)),
        {},
    )


def no_meaning(default: Any, help_text: str, *, why: str, instead: str) -> Any:
    """Declares an option of OpenRLHF that has no effect with a Megatron policy, and says which
    option has."""
    return _field(
        default, help_text, OptionInfo(unsupported=NotSupported(why, instead, yet=False)), {}
    )


def _field(default: Any, help_text: str, info: OptionInfo, constraints: dict[str, Any]) -> Any:
    how = {"default_factory": default} if callable(default) else {"default": default}
    extra: Any = {"option": info}  # pydantic's slot for what it does not know itself
    return Field(**how, description=help_text, json_schema_extra=extra, **constraints)


def info_of(field: FieldInfo) -> OptionInfo:
    extra: Any = field.json_schema_extra
    return extra["option"] if isinstance(extra, dict) else OptionInfo()


def _no_flag(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("true is not a number")
    return value


def _bounded(value: int) -> int:
    if abs(value) > LARGEST_INT:
        raise PydanticCustomError("too_large", "")
    return value


LARGEST_INT = 2**31 - 1
"""Of any option; those that something is allocated for have tighter bounds: 1 TiB, more than any
cluster has."""
Float = Annotated[float, BeforeValidator(_no_flag), Field(allow_inf_nan=False)]
Int = Annotated[int, BeforeValidator(_no_flag), AfterValidator(_bounded)]
Pair = tuple[Float, Float]


def required(value: T | None, name: str) -> T:
    """The value of an option without which a run is refused before it comes here."""
    if value is None:
        raise ValueError(f"{name} is not set")
    return value


# ---- options that do nothing


def idle_options(config: BaseModel) -> Iterator[str]:
    """The warning about every option that has another value than its default, and no effect beside
    the others.

    Of the conditions in a key of ``Section.needs``, divided by ' | ', one has to hold. ``a.b``
    holds if that option is on (or set, and not 0), ``!a.b`` if it is not, ``a.b=value`` and
    ``a.b!=value`` by its value.
    """
    yield from _idle(config, config, "", ())


def _idle(
    config: BaseModel, section: BaseModel, prefix: str, inherited: tuple[str, ...]
) -> Iterator[str]:
    needs = section.needs if isinstance(section, Section) else {}
    inherited = (*inherited, *(condition for condition, leaves in needs.items() if "*" in leaves))
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _idle(config, value, f"{prefix}{name}.", inherited)
        elif value != field.default and field.default_factory is None:
            own = (condition for condition, leaves in needs.items() if name in leaves)
            for condition in (*inherited, *own):
                if reason := _unmet(config, condition):
                    plain = not set(condition) & set("!=|")
                    remedy = f"set {condition}, or leave it out" if plain else "leave it out"
                    yield no_effect(f"{prefix}{name}", value, reason, remedy)
                    break


def _unmet(config: BaseModel, condition: str) -> str:
    """Why the condition does not hold; empty if it does."""
    reasons = []
    for one in condition.split(" | "):
        name, not_equal, unwanted = one.partition("!=") if "!=" in one[1:] else (one, "", "")
        name, equal, wanted = name.partition("=")
        got = value_of(config, name.removeprefix("!"))
        on = got is not None and got is not False and got != "" and got != 0
        if not_equal:
            reason = f"{name} is {unwanted}" if value_text(got) == unwanted else ""
        elif equal:
            reason = (
                "" if value_text(got) == wanted else f"{name} is {value_text(got)}, not {wanted}"
            )
        elif name.startswith("!"):
            reason = f"{name[1:]} is {'on' if got is True else 'set'}" if on else ""
        else:
            state = "off" if got is False else "0" if got == 0 and got != "" else "not set"
            reason = "" if on else f"{name} is {state}"
        if not reason:
            return ""
        reasons.append(reason)
    return " and ".join(reasons)


# ---- describing

_BOUNDS = {
    annotated_types.Ge: ">=",
    annotated_types.Gt: ">",
    annotated_types.Le: "<=",
    annotated_types.Lt: "<",
}
_SIMPLE = {int: "integer", float: "number", str: "text", bool: "true or false", Any: "any value"}


@dataclass(frozen=True)
class Option:
    """One option as users see it.

    Attributes:
        name: dotted name; for a method the key.
        expects: its type, choices and bounds in words.
        default: None where it is made at run time or there is none.
        arity: words it takes: ``flag`` none or one, ``pair`` two, ``many`` one or more, ``open``
            any value under any sub-name.
        nullable: whether ``null`` is a value.
    """

    name: str
    expects: str
    default: Any
    shown_default: str
    help: str
    arity: Arity
    nullable: bool
    choices: tuple[Any, ...]
    info: OptionInfo
    required: bool

    @property
    def section(self) -> str:
        """Group the option belongs to; empty for a top-level option."""
        return self.name.split(".")[0] if "." in self.name else ""

    @property
    def unsupported(self) -> NotSupported | None:
        return self.info.unsupported

    def is_inert(self, value: Any) -> bool:
        """Whether this value of an unsupported option asks for nothing."""
        return value == self.default or (
            self.unsupported is not None and value in self.unsupported.inert
        )


def leaf_fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every option below ``model`` as (dotted name, field), in order of declaration."""
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from leaf_fields(annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def describe(model: type[BaseModel]) -> dict[str, Option]:
    """Every option of a section, or of the options of a method, by name."""
    return {name: describe_field(name, field) for name, field in leaf_fields(model)}


def nested_model(field: FieldInfo) -> type[BaseModel] | None:
    """The model of an option that is a map with options of its own; None for any other."""
    annotation = _without_none(field.annotation)[0]
    return (
        annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
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


def describe_field(name: str, field: FieldInfo) -> Option:
    info = info_of(field)
    annotation, nullable = _without_none(field.annotation)
    default = None if field.default is PydanticUndefined else field.default
    return Option(
        name=name,
        expects=_in_words(annotation, field.metadata) + (" or null" if nullable else ""),
        default=default,
        shown_default=value_text(default) if info.default_text is None else info.default_text,
        help=field.description or "",
        arity=_arity(annotation),
        nullable=nullable,
        choices=_choices(annotation),
        info=info,
        required=field.is_required(),
    )


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


def _choices(annotation: Any) -> tuple[Any, ...]:
    annotation = _strip(annotation)
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _in_words(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    if get_origin(annotation) is Annotated:
        inner, *extra = get_args(annotation)
        return _in_words(inner, [*extra, *metadata])
    if described := [item.text for item in metadata if isinstance(item, Words)]:
        return described[0]
    if choices := _choices(annotation):
        return "one of " + ", ".join(map(str, choices))
    if get_origin(annotation) is tuple:
        elements = get_args(annotation)
        one = _in_words(elements[0]).replace("number", "numbers").replace("text", "texts")
        return f"list of {one}" if Ellipsis in elements else f"{len(elements)} {one}"
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(_in_words(arm) for arm in get_args(annotation))
    if get_origin(annotation) is dict:
        return "map of options"
    if issubclass(annotation, BaseModel):
        return f"map of {', '.join(annotation.model_fields)}"
    return f"{_SIMPLE[annotation]} {_bounds_in_words(metadata)}".rstrip()


def _bounds_in_words(metadata: Sequence[Any]) -> str:
    # a nested Field carries its constraints inside
    constraints = (
        constraint for item in metadata for constraint in getattr(item, "metadata", None) or [item]
    )
    bounded = ((_BOUNDS[type(one)], one) for one in constraints if type(one) in _BOUNDS)
    return " and ".join(
        f"{symbol} {getattr(one, type(one).__name__.lower()):.15g}" for symbol, one in bounded
    )


# ---- reading

S = TypeVar("S", bound=BaseModel)


def value_of(config: BaseModel, name: str) -> Any:
    return reduce(getattr, name.split("."), config)


def is_set(config: BaseModel, name: str) -> bool:
    """Whether the option was given a value, be it its default one."""
    *sections, leaf = name.split(".")
    return leaf in reduce(getattr, sections, config).model_fields_set


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """``{"a.b": 1, "a.c": 2}`` -> ``{"a": {"b": 1, "c": 2}}``; no name may be a prefix of another
    one."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, leaf = name.split(".")
        node = reduce(lambda parent, key: parent.setdefault(key, {}), parents, tree)
        node[leaf] = value
    return tree


@dataclass(frozen=True)
class Fault:
    """A value that an option does not take.

    Attributes:
        name: dotted name below the model that was to be made.
        problem: what is wrong, to follow the name; all of it where there is no such option
        (``unknown``).
        hint: what may have been meant.
    """

    name: str
    problem: str
    value: Any
    hint: str = ""
    unknown: bool = False


def read(model: type[S], values: Mapping[str, Any]) -> S | list[Fault]:
    """The model with these (nested) values, or every fault in them; rules between options are not
    looked at."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        faults = [_fault(model, detail) for detail in error.errors()]
    return list({fault.name: fault for fault in reversed(faults)}.values())[::-1]


def _fault(model: type[BaseModel], detail: Any) -> Fault:
    """``detail`` is one of pydantic's errors; its location goes on into tuples and unions."""
    names: list[str] = []
    field = None
    for part in map(str, detail["loc"]):
        names.append(part)
        field = model.model_fields.get(part)
        inner = None if field is None else nested_model(field)
        if inner is None:
            break
        model = inner
    name, value = ".".join(names), detail["input"]
    if field is None:
        near = nearest(names[-1], model.model_fields)
        problem = f"unknown option {names[-1]!r}" + (f"; did you mean {near!r}?" if near else ".")
        return Fault(
            name, f"{problem} Options: {', '.join(sorted(model.model_fields))}", value, unknown=True
        )
    described = describe_field(name, field)
    if detail["type"] == "missing":
        return Fault(name, f" is required ({described.help})", None)
    too_large = (
        f"the largest integer is {LARGEST_INT}"
        if detail["type"] in ("too_large", "int_parsing_size")
        else ""
    )
    hint = did_you_mean(str(value), map(str, described.choices), too_large)
    return Fault(name, f": expected {described.expects}, got {value_text(value)}", value, hint)
