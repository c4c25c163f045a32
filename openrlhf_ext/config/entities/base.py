"""The words in which options are declared: entities, options with help text, options that are refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

Float = Annotated[float, Field(allow_inf_nan=False)]
Pair = tuple[Float, Float]

# "output": made absolute. "input": made absolute when it is a local path, left alone when it is a URL or a hub name.
PathKind = Literal["input", "output"]


class Entity(BaseModel):
    """A group of options. Unknown names are refused and values cannot be changed after construction."""

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True, protected_namespaces=())


@dataclass(frozen=True)
class NotSupported:
    """Why a known option of OpenRLHF must stay at a value without effect.

    Attributes:
        why: what is missing, or why the option means nothing here.
        instead: what to do about it.
        yet: whether it may come; False for options that have no meaning with a Megatron policy.
        inert: values besides the default that ask for nothing.
    """

    why: str
    instead: str
    yet: bool
    inert: tuple[Any, ...] = ()

    def message(self, name: str, value: str, origin: str) -> str:
        """What to tell a user who asked for ``value`` at ``origin``."""
        status = "not supported with the Megatron policy yet" if self.yet else "not an option of the Megatron policy"
        return f"{name} is {status}: {self.why}; got {value} ({origin}); {self.instead}"


@dataclass(frozen=True)
class Words:
    """Describes a type whose bounds a validator checks; goes into ``Annotated``."""

    text: str


@dataclass(frozen=True)
class OptionInfo:
    """What the schema knows of an option beyond its type, default and help text."""

    unsupported: NotSupported | None = None
    path: PathKind | None = None
    secret: bool = False
    default_text: str | None = None


def option(
    default: Any,
    help_text: str,
    *,
    path: PathKind | None = None,
    secret: bool = False,
    default_text: str | None = None,
    **constraints: Any,
) -> Any:
    """Declares a supported option.

    Args:
        default: the default value, or a function that makes it (then give ``default_text``).
        help_text: meaning and unit, shown by ``--help`` and in the documentation.
        path: how relative paths in the value are resolved; None for anything that is no path.
        secret: whether the value must not be shown.
        default_text: how the default is shown where its value says too little.
        constraints: pydantic bounds (``ge``, ``gt``, ``le``, ``lt``, ``min_length``, ``max_length``).
    """
    info = OptionInfo(path=path, secret=secret, default_text=default_text)
    return _field(default, help_text, info, constraints)


def not_yet(default: Any, help_text: str, *, why: str, instead: str, inert: tuple[Any, ...] = ()) -> Any:
    """Declares an option of OpenRLHF that is known but not built: every value that asks for something is refused."""
    return _field(default, help_text, OptionInfo(unsupported=NotSupported(why, instead, yet=True, inert=inert)), {})


def no_meaning(default: Any, help_text: str, *, why: str, instead: str) -> Any:
    """Declares an option of OpenRLHF that has no effect with a Megatron policy, and says which option has."""
    return _field(default, help_text, OptionInfo(unsupported=NotSupported(why, instead, yet=False)), {})


def info_of(field: FieldInfo) -> OptionInfo:
    """The :class:`OptionInfo` of a field declared by one of the functions above."""
    extra = field.json_schema_extra
    return extra["option"] if isinstance(extra, dict) else OptionInfo()


def _field(default: Any, help_text: str, info: OptionInfo, constraints: dict[str, Any]) -> Any:
    how = {"default_factory": default} if callable(default) else {"default": default}
    return Field(**how, description=help_text, json_schema_extra={"option": info}, **constraints)
