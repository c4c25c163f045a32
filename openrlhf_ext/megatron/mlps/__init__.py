"""The kinds of MLP that a decoder layer may have: one file each, found by being in this folder. A family names its."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from openrlhf_ext.megatron.mlps.dense import DenseMLP

__all__ = ["mlp_kind"]


@cache
def mlp_kind(name: str) -> type[DenseMLP]:
    return import_module(f"{__name__}.{name}").MLP
