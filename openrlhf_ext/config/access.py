"""Reading a tree of frozen models by dotted option names."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo


def leaf_fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every option below ``model`` as (dotted name, field), in order of declaration."""
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from leaf_fields(annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def value_of(config: BaseModel, name: str) -> Any:
    """The value of the option with this dotted name."""
    return reduce(getattr, name.split("."), config)


def is_set(config: BaseModel, name: str) -> bool:
    """Whether the option was given a value, be it its default one."""
    *entities, leaf = name.split(".")
    return leaf in reduce(getattr, entities, config).model_fields_set


def nest(flat: dict[str, Any]) -> dict[str, Any]:
    """``{"a.b": 1, "a.c": 2}`` -> ``{"a": {"b": 1, "c": 2}}``; no name may be a prefix of another one."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, leaf = name.split(".")
        node = reduce(lambda parent, key: parent.setdefault(key, {}), parents, tree)
        node[leaf] = value
    return tree
