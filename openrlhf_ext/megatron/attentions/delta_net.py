"""Gated delta net: linear attention by the gated delta rule (``openrlhf_ext.delta_rule``), behind a short
causal convolution, with a gated norm."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from openrlhf_ext.megatron.attentions import Attention, Kept

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec

    from openrlhf_ext.megatron.layout import ParallelLayout

_FIELDS = {
    "delta_key_heads": "linear_num_key_heads",
    "delta_value_heads": "linear_num_value_heads",
    "delta_key_dim": "linear_key_head_dim",
    "delta_value_dim": "linear_value_head_dim",
    "delta_conv_width": "linear_conv_kernel_dim",
}
_FP32 = 4
_KERNEL_TRIANGLE = 64
"""Entries that flash-linear-attention keeps for each token and head beside the rule's inputs."""


@dataclass(frozen=True)
class DeltaNet(Attention):
    delta_key_heads: int
    delta_value_heads: int
    delta_key_dim: int
    delta_value_dim: int
    delta_conv_width: int

    layer_type = "linear_attention"
    entries = {
        "linear_num_key_heads": 2**12,
        "linear_num_value_heads": 2**12,
        "linear_key_head_dim": 2**12,
        "linear_value_head_dim": 2**12,
        "linear_conv_kernel_dim": 2**6,
    }
    parameters = {
        "self_attention.conv_weight": (
            "parts",
            ("delta_keys", "delta_keys", "delta_values"),
            ("one", "delta_width"),
        ),
        "self_attention.decay_log": ("parts", ("delta_heads",), None),
        "self_attention.decay_bias": ("parts", ("delta_heads",), None),
        "self_attention.norm_weight": ("replicated", ("delta_value",), None),
        "self_attention.linear_in.weight": (
            "parts",
            (
                "delta_keys",
                "delta_keys",
                "delta_values",
                "delta_values",
                "delta_heads",
                "delta_heads",
            ),
            "hidden",
            (0, 0, 0, 1, 2, 3),
        ),
        "self_attention.linear_in.layer_norm_weight": ("replicated", ("hidden",), None),
        "self_attention.linear_out.weight": ("row", ("hidden",), "delta_values"),
    }
    names = {
        "self_attention.linear_in.layer_norm_weight": ("input_layernorm.weight",),
        "self_attention.linear_in.weight": tuple(
            f"linear_attn.in_proj_{name}.weight" for name in ("qkv", "z", "b", "a")
        ),
        "self_attention.conv_weight": ("linear_attn.conv1d.weight",),
        "self_attention.decay_log": ("linear_attn.A_log",),
        "self_attention.decay_bias": ("linear_attn.dt_bias",),
        "self_attention.norm_weight": ("linear_attn.norm.weight",),
        "self_attention.linear_out.weight": ("linear_attn.out_proj.weight",),
    }
    without_adapters = ("linear_in.weight",)
    no_context_parallel = "the state of a gated delta net runs through the whole sequence"
    no_fp8 = "gated delta nets, whose projections have single rows for each head"
    gpu_module = ("fla", "flash-linear-attention==0.6.0")

    @staticmethod
    def read(config: Mapping[str, Any]) -> dict[str, Any]:
        return {field: config[entry] for field, entry in _FIELDS.items()}

    @staticmethod
    def problems(config: Mapping[str, Any]) -> Iterator[str]:
        keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
        if values % keys:
            yield (
                "linear_num_value_heads must be a multiple of linear_num_key_heads, got "
                f"{values} and {keys}"
            )
        if (gate := config.get("output_gate_type", "silu")) not in ("silu", "swish"):
            yield f"output_gate_type must be 'silu' or 'swish', got {gate!r}"

    @property
    def sizes(self) -> dict[str, int]:
        return {
            "delta_keys": self.delta_key_heads * self.delta_key_dim,
            "delta_values": self.delta_value_heads * self.delta_value_dim,
            "delta_heads": self.delta_value_heads,
            "delta_value": self.delta_value_dim,
            "delta_width": self.delta_conv_width,
        }

    @property
    def divided(self) -> dict[str, int]:
        return {"key heads of linear attention": self.delta_key_heads}

    @property
    def channels(self) -> int:
        """Queries, keys, and values, which the convolution reads."""
        return self.sizes["delta_values"] + 2 * self.sizes["delta_keys"]

    @property
    def token_weights(self) -> int:
        values = self.sizes["delta_values"]
        return self.hidden_size * (self.channels + 2 * values + 2 * self.delta_value_heads)

    @property
    def token_operations(self) -> int:
        """Of the rule, a state's reading, correction, and second reading; and of the
        convolution."""
        state = self.delta_value_heads * self.delta_key_dim * self.delta_value_dim
        return 6 * state + 2 * self.delta_conv_width * self.channels

    def kept(self, tokens: int, layout: ParallelLayout, entry: int, linear_input: int) -> Kept:
        """By reading of the layer and of flash-linear-attention 0.6.0; not measured on a GPU."""
        tp = layout.tensor_parallel_size
        channels = self.channels // tp
        values, heads = self.sizes["delta_values"] // tp, self.delta_value_heads // tp
        # all that comes out of the projection, and what the rule reads of it
        read = entry * (2 * channels + values + 2 * heads)
        # outputs of the rule and gates, which are made fp32, and SiLU of these
        normed = (2 * _FP32 if entry == _FP32 else 3 * _FP32) * values
        # normalized, scaled, and times the gate, which the projection after it keeps
        normed += 3 * entry * values
        # decay before and after softplus, its log, beta, and the outputs' root mean square
        small = heads * (5 * _FP32 + _KERNEL_TRIANGLE * entry)
        return Kept(tokens * (read + normed + small), 0, 0)

    def request_bytes(self, tensor_parallel_size: int, entry: int) -> int:
        """The state in fp32, and the tokens that the convolution has yet to see again."""
        state = self.delta_value_heads * self.delta_key_dim * self.delta_value_dim * _FP32
        seen = (self.delta_conv_width - 1) * self.channels * entry
        return (state + seen) // tensor_parallel_size

    def megatron_arguments(self) -> dict[str, Any]:
        return {}

    def spec(self, norm: type, norm_linear: type, row_linear: type, core: type) -> ModuleSpec:
        from megatron.core.transformer.spec_utils import ModuleSpec

        from openrlhf_ext.megatron.model.delta_layer import DeltaLayer, DeltaSubmodules

        return ModuleSpec(
            module=DeltaLayer,
            params={
                "key_heads": self.delta_key_heads,
                "value_heads": self.delta_value_heads,
                "key_dim": self.delta_key_dim,
                "value_dim": self.delta_value_dim,
                "conv_width": self.delta_conv_width,
            },
            submodules=DeltaSubmodules(linear_in=norm_linear, linear_out=row_linear),
        )

    def transformer_engine_layer(self, layer: ModuleSpec) -> ModuleSpec:
        full = layer.submodules.self_attention.submodules
        attention = self.spec(object, full.linear_qkv, full.linear_proj, object)
        submodules = dataclasses.replace(layer.submodules, self_attention=attention)
        return dataclasses.replace(layer, submodules=submodules)
