"""The model families that the policy takes: one file each, found by being in this folder. A family
from outside is an entry point of an installed package: every process on every node then finds it
(docs/models.md)."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

from openrlhf_ext.inputs import InputError
from openrlhf_ext.megatron.model.family import Family

__all__ = ["TEXT_CLASSES", "UnknownModelType", "family_of", "model_types"]

GROUP = "openrlhf_ext.families"
# model types of images and text -> the class of their text model, whose type ends in _text
TEXT_CLASSES = {"qwen3_5": "Qwen3_5ForCausalLM", "qwen3_5_moe": "Qwen3_5MoeForCausalLM"}

_BEHIND = "norms behind attention and MLP, where a layer has no place for them"
_SIDE_BY_SIDE = "attention and MLP side by side, and a LayerNorm before them"
_LAYER_NORM = "a LayerNorm"
_INTERLEAVED = "rotary embedding of neighboring entries, not of the halves of a head"
_UNGATED = "an MLP of squared ReLU without a gate"
_NEXT = "the names and the order of its gated delta nets' projections, by key head"
_QWEN4 = "embeddings of n-grams, a sparse index of attention, and several residual streams"
_LATENT = "multi-head latent attention"
_GROUPS = f"{_LATENT}, and a sigmoid router with groups and a bias of each expert"
_STATE_SPACE = "state-space layers"
_LEARNED = "learned or linear positions instead of a rotary embedding"
_IMAGES = "a decoder within a model of images and text: only text models are built"
_NO_CLASS = "a model class of transformers, whose release 5.15 has none for it"
# model types that users ask for -> what a family of theirs would need (transformers 5.19,
# models/*/modeling_*.py)
_NEEDS = {
    # mixtures of experts
    "mixtral": "its experts' names (block_sparse_moe.experts.*.w1, w2, w3), and a test of its numbers",
    "olmoe": "a norm of whole queries and keys, not of each head's",
    "glm4_moe": "a sigmoid router with a bias of each expert, dense first layers and partial rotary "
    "embedding",
    "granitemoe": "Granite's factors beside experts, and its experts' names (block_sparse_moe)",
    "deepseek_v2": f"{_LATENT}, and dense first layers",
    "deepseek_v3": _GROUPS,
    "kimi_k2": _GROUPS,
    "minimax_m2": "a sigmoid router with a bias of each expert, and a norm of whole queries and keys",
    "gpt_oss": "attention sinks, sliding windows, biases, clamped SwiGLU and MXFP4 files",
    "qwen3_next": _NEXT,
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), _QWEN4),
    # dense models
    "olmo": "a LayerNorm without weights",
    "olmo2": f"{_BEHIND}, and a norm of whole queries and keys, not of each head's",
    "olmo3": f"{_BEHIND}, a norm of whole queries and keys, not of each head's, and attention windows",
    "gemma": "norms scaled by 1 + w, GELU, and embeddings scaled by the root of their width",
    "gemma2": f"{_BEHIND}, norms scaled by 1 + w, GELU, and soft-capped scores and logits",
    "gemma3": _IMAGES,
    "gemma3_text": f"{_BEHIND}, norms scaled by 1 + w, GELU, and two rotary bases",
    "exaone4": f"{_BEHIND}, and no rotary embedding in layers without a window",
    "glm": f"{_INTERLEAVED}, and that of a part of the head",
    "glm4": f"{_BEHIND}, and {_INTERLEAVED}, that of a part of the head",
    "ernie4_5": _INTERLEAVED,
    "helium": _INTERLEAVED,
    "cohere": f"{_SIDE_BY_SIDE}, {_INTERLEAVED}, and a factor of logits",
    "cohere2": f"{_SIDE_BY_SIDE}, {_INTERLEAVED}, a factor of logits, and attention windows",
    "hunyuan_v1_dense": "norms of query and key behind the rotary embedding, not before it",
    "ministral": "a family of its own: Llama's layer with the windows of layer_types, and a test of its "
    "numbers",
    "ministral3": "a factor of queries that grows with their position (llama_4_scaling_beta)",
    "mistral3": _IMAGES,
    "nemotron": f"{_LAYER_NORM} scaled by 1 + w, {_UNGATED}, and rotary embedding of a part of the head",
    "arcee": _UNGATED,
    "apertus": "an MLP of xIELU without a gate",
    "jais2": f"{_LAYER_NORM}, and {_UNGATED}",
    "stablelm": f"{_LAYER_NORM}, and rotary embedding of a part of the head",
    "starcoder2": f"{_LAYER_NORM}, an MLP of GELU without a gate, and biases of all projections",
    "phi": f"{_SIDE_BY_SIDE}, biases of all projections, and rotary embedding of a part of the head",
    "gpt_neox": f"{_SIDE_BY_SIDE}, and biases of all projections",
    "falcon": _SIDE_BY_SIDE,
    "minicpm3": _LATENT,
    "bitnet": "norms within attention and MLP, and ternary weights",
    "lfm2": "short convolutions",
    "nemotron_h": _STATE_SPACE,
    "falcon_h1": _STATE_SPACE,
    "granitemoehybrid": _STATE_SPACE,
    "gpt2": _LEARNED,
    "opt": _LEARNED,
    "bloom": _LEARNED,
    "mpt": _LEARNED,
    "internlm2": _NO_CLASS,
    "baichuan": _NO_CLASS,
    "qwen": _NO_CLASS,
    "chatglm": _NO_CLASS,
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma4", "llama4", "mllama"), _IMAGES),
}


class UnknownModelType(InputError):
    """There is no family of a checkpoint's ``model_type``."""


def model_types() -> list[str]:
    """Of all families: those of this package, and installed ones."""
    own = [module.name for module in pkgutil.iter_modules(__path__)]
    return sorted({*own, *entry_points(group=GROUP).names})


@cache
def family_of(model_type: str, checkpoint: str | Path = "CHECKPOINT") -> Family:
    """The family of checkpoints whose ``config.json`` says ``model_type``. Raises UnknownModelType,
    or InputError with the command that makes a model with a family of this ``checkpoint``."""
    if model_type in {module.name for module in pkgutil.iter_modules(__path__)}:
        return import_module(f"{__name__}.{model_type}").FAMILY
    for entry in entry_points(group=GROUP).select(name=model_type):
        return entry.load()
    refusal = f"model_type must be one of {', '.join(model_types())}, got {model_type!r}"
    if model_type in TEXT_CLASSES:
        raise InputError(
            f"{refusal}, a model of images and text; write its text model, which is built, by "
            f"openrlhf-ext convert --text_only {checkpoint} --to FOLDER, and give FOLDER"
        )
    needs = f": it would need {_NEEDS[model_type]}" if model_type in _NEEDS else ""
    raise UnknownModelType(f"{refusal}{needs}")
