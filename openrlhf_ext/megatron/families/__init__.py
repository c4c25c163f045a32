"""The model families that the policy takes: one file each, found by being in this folder. A family from outside is an
entry point of an installed package: every process on every node then finds it (docs/models.md)."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points

from openrlhf_ext.inputs import InputError
from openrlhf_ext.megatron.model.family import Family

__all__ = ["family_of"]

GROUP = "openrlhf_ext.families"


@cache
def family_of(model_type: str) -> Family:
    """The family of checkpoints whose ``config.json`` says ``model_type``. Raises InputError: there is none."""
    own = [module.name for module in pkgutil.iter_modules(__path__)]
    if model_type in own:
        return import_module(f"{__name__}.{model_type}").FAMILY
    installed = entry_points(group=GROUP)
    for entry in installed.select(name=model_type):
        return entry.load()
    known = ", ".join(sorted({*own, *installed.names}))
    raise InputError(f"model_type must be one of {known}, got {model_type!r}")
