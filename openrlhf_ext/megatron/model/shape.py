"""What the policy needs to know of a Hugging Face checkpoint, read from its ``config.json`` alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from openrlhf_ext.megatron.families import family_of
from openrlhf_ext.megatron.model.family import Family, ModelError, rope_settings, rope_type

__all__ = ["ModelShape", "ModelError", "read_model_shape", "read_value_shape"]


@dataclass(frozen=True)
class ModelShape:
    """Dimensions and switches of a dense decoder of one of the ``families``."""

    model_type: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int | None  # None: config.json does not say
    rms_norm_eps: float
    rope_theta: float
    rope_scaling_factor: float | None  # Llama 3 scaling; None = plain rotary embedding
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    value_head: str | None = None  # a critic: HF name of the value head that replaces the vocabulary projection

    @property
    def family(self) -> Family:
        """Names of the tensors in the checkpoint."""
        return family_of(self.model_type)

    @property
    def attention_length(self) -> float:
        """Tokens of a sequence at which causal attention costs as many operations as the layer's matrix products.

        Per token and layer: 2 operations for each weight; 2 * 2 * (length / 2) * heads * head_dim for scores and
        weighted values, half of the sequence being visible on average.
        """
        width = self.num_heads * self.head_dim
        weights = self.hidden_size * (2 * width + 2 * self.num_kv_heads * self.head_dim + 3 * self.ffn_hidden_size)
        return weights / width

    def padded_vocab_size(self, tensor_parallel_size: int) -> int:
        """Vocabulary rounded up to a multiple of the tensor-parallel size."""
        return -(-self.vocab_size // tensor_parallel_size) * tensor_parallel_size


def read_model_shape(model_path: str | Path) -> ModelShape:
    """Reads ``model_path/config.json`` (transformers 4 and 5 forms).

    Raises:
        ModelError: there is no such file, a dimension is missing, or the model type, rotary scaling, activation or bias
            is none of those that are built.
    """
    return _shape(_config(model_path), model_path)


def read_value_shape(model_path: str | Path, value_head: str) -> ModelShape:
    """The checkpoint's decoder with a value head, as a critic builds it; embeddings have nothing to be tied to.

    Args:
        value_head: HF name of the value head; an entry ``value_head_prefix`` of ``config.json`` wins.
    """
    config = _config(model_path)
    prefix = config.get("value_head_prefix", value_head)
    return replace(_shape(config, model_path), tied_embeddings=False, value_head=prefix)


def _config(model_path: str | Path) -> dict[str, Any]:
    path = Path(model_path) / "config.json"
    if not path.parent.is_dir():
        raise ModelError(f"{model_path} does not exist (a hub name has the form org/name)")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} must hold a mapping, got {type(config).__name__}")
    return config


_DIMENSIONS = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_MAY_BE_ABSENT = ("num_key_value_heads", "head_dim", "max_position_embeddings")


def _dimension_problems(config: dict[str, Any]) -> Iterator[str]:
    for key in (*_DIMENSIONS, *_MAY_BE_ABSENT):
        value = config.get(key)
        if (value or key in _DIMENSIONS) and (not isinstance(value, int) or value < 1):
            yield f"{key} must be a positive integer, got {value!r}"


def _shape(own_config: dict[str, Any], model_path: str | Path) -> ModelShape:
    path = Path(model_path) / "config.json"
    try:
        family = family_of(own_config.get("model_type", ""))
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    config = family.usual(own_config)
    if problems := [*_dimension_problems(config), *family.problems(config)]:
        raise ModelError(f"{path}: " + "; ".join(problems))
    heads, rope = config["num_attention_heads"], rope_settings(config)
    return ModelShape(
        model_type=family.model_type,
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        max_positions=config.get("max_position_embeddings") or None,
        rms_norm_eps=config["rms_norm_eps"],
        rope_theta=float(rope.get("rope_theta") or config["rope_theta"]),
        rope_scaling_factor=float(rope["factor"]) if rope_type(rope) == "llama3" else None,
        tied_embeddings=bool(config["tie_word_embeddings"]),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
    )
