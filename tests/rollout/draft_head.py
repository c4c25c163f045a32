"""An EAGLE-3 head of random weights for the models of `tiny`."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig

LAYERS = [0, 1, 2]
"""Whose inputs it reads; the last is the output of two layers."""


def save_head(path: Path, model: PreTrainedConfig, seed: int = 0) -> None:
    """Without an embedding: vLLM then shares the model's."""
    torch.manual_seed(seed)
    hidden, width = model.hidden_size, model.hidden_size // model.num_attention_heads
    keys = model.num_key_value_heads * width

    def weight(*shape: int) -> Tensor:
        return 0.1 * torch.randn(shape)

    attention = {"q": (hidden, 2 * hidden), "k": (keys, 2 * hidden), "v": (keys, 2 * hidden)}
    mlp = {name: (model.intermediate_size, hidden) for name in ("gate", "up")}
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    tensors = {
        **{f"midlayer.self_attn.{n}_proj.weight": weight(*s) for n, s in attention.items()},
        "midlayer.self_attn.o_proj.weight": weight(hidden, hidden),
        **{f"midlayer.mlp.{name}_proj.weight": weight(*shape) for name, shape in mlp.items()},
        "midlayer.mlp.down_proj.weight": weight(hidden, model.intermediate_size),
        **{f"midlayer.{name}.weight": torch.ones(hidden) for name in norms},
        "norm.weight": torch.ones(hidden),
        "fc.weight": weight(hidden, len(LAYERS) * hidden),
        "lm_head.weight": weight(model.vocab_size, hidden),
    }
    path.mkdir(parents=True)
    save_file(tensors, path / "model.safetensors")
    names = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps",
        "max_position_embeddings", "vocab_size",
    )  # fmt: skip
    own = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "draft_vocab_size": model.vocab_size,
        "eagle_aux_hidden_state_layer_ids": LAYERS,
        "torch_dtype": "float32",
    }
    told = {name: getattr(model, name) for name in names} | own
    (path / "config.json").write_text(json.dumps(told))
