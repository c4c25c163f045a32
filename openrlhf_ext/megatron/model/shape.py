"""What the policy needs to know of a Hugging Face checkpoint, read from its ``config.json`` alone."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

SUPPORTED_MODEL_TYPES = ("qwen2", "qwen3", "llama")
# the one scaled variant that megatron-core's RotaryEmbedding implements (rope_utils, Llama 3)
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class UnsupportedModelError(ValueError):
    """The checkpoint uses something the Megatron policy does not build."""


@dataclass(frozen=True)
class ModelShape:
    """Dimensions and switches of a dense decoder of the Qwen2/2.5, Qwen3 or Llama family."""

    model_type: Literal["qwen2", "qwen3", "llama"]
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling_factor: float | None  # Llama 3 scaling; None = plain rotary embedding
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    value_head: str | None = None  # a critic: HF name of the value head that replaces the vocabulary projection

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
        UnsupportedModelError: model type, rotary scaling, activation or bias that is not built.
    """
    config = json.loads((Path(model_path) / "config.json").read_text())
    problems = list(_problems(config))
    if problems:
        raise UnsupportedModelError(f"{model_path}: " + "; ".join(problems))
    heads = config["num_attention_heads"]
    rope = _rope(config)
    return ModelShape(
        model_type=config["model_type"],
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        max_positions=config.get("max_position_embeddings", 32768),
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        rope_scaling_factor=float(rope["factor"]) if _rope_type(rope) == "llama3" else None,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=config["model_type"] == "qwen2",
        qk_norm=config["model_type"] == "qwen3",
    )


def read_value_shape(model_path: str | Path, value_head: str) -> ModelShape:
    """The checkpoint's decoder with a value head, as a critic builds it; embeddings have nothing to be tied to.

    Args:
        value_head: HF name of the value head; an entry ``value_head_prefix`` of ``config.json`` wins.
    """
    config = json.loads((Path(model_path) / "config.json").read_text())
    prefix = config.get("value_head_prefix", value_head)
    return replace(read_model_shape(model_path), tied_embeddings=False, value_head=prefix)


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings: ``rope_parameters`` (transformers 5) or ``rope_scaling`` (transformers 4)."""
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _rope_type(rope: dict[str, Any]) -> str:
    return rope.get("rope_type") or rope.get("type") or "default"


def _problems(config: dict[str, Any]):
    if config.get("model_type") not in SUPPORTED_MODEL_TYPES:
        yield f"model_type must be one of {SUPPORTED_MODEL_TYPES}, got {config.get('model_type')!r}"
    rope = _rope(config)
    if _rope_type(rope) not in ("default", "llama3"):
        yield f"rope_type must be 'default' or 'llama3', got {_rope_type(rope)!r}"
    if _rope_type(rope) == "llama3":
        wrong = {k: rope.get(k) for k, v in _LLAMA3_ROPE.items() if rope.get(k) is not None and float(rope[k]) != v}
        if wrong:
            yield f"llama3 rotary scaling is built for {_LLAMA3_ROPE}, got {wrong}"
    if config.get("hidden_act", "silu") != "silu":
        yield f"hidden_act must be 'silu', got {config['hidden_act']!r}"
    if config.get("quantization_config"):
        yield "quantization_config is not supported: only fp32, bf16 and fp16 weights are loaded"
    if config.get("use_sliding_window"):
        yield "use_sliding_window is not supported: set it to false in config.json"
    if config.get("model_type") == "llama" and (config.get("attention_bias") or config.get("mlp_bias")):
        yield "llama with attention_bias or mlp_bias is not supported"
    if config.get("model_type") == "qwen3" and config.get("attention_bias"):
        yield "qwen3 with attention_bias is not supported"
