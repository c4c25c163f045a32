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

# mixtures of experts that users ask for -> what a family of theirs would need
_MIXTURES = {
    "mixtral": "its experts' names (block_sparse_moe.experts.*.w1, w2, w3), and a test of its numbers",
    "olmoe": "a norm of whole queries and keys, not of each head's",
    "glm4_moe": "a sigmoid router with a bias of each expert, dense first layers and partial rotary embedding",
    "deepseek_v3": "multi-head latent attention, and a sigmoid router with groups and a bias of each expert",
    "kimi_k2": "multi-head latent attention, and a sigmoid router with groups and a bias of each expert",
    "gpt_oss": "attention sinks, sliding windows, biases, clamped SwiGLU and MXFP4 files",
    "qwen3_next": "gated delta net, which megatron-core 0.16.1 does not compute over packed sequences",
    "qwen3_5_moe": "gated delta net, which megatron-core 0.16.1 does not compute over packed sequences",
}


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
    needs = f": it would need {_MIXTURES[model_type]}" if model_type in _MIXTURES else ""
    raise InputError(f"model_type must be one of {known}, got {model_type!r}{needs}")
