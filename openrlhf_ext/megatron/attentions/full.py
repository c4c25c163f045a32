"""Attention to all earlier tokens, grouped-query, with a rotary embedding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from openrlhf_ext.megatron.attentions import Attention, Kept

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec

    from openrlhf_ext.megatron.layout import ParallelLayout

_QKV = ("queries", "keys", "keys")


@dataclass(frozen=True)
class FullAttention(Attention):
    """A bias of the projections and norms of query and key are built if, and only if, a family
    names them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool
    qk_norm: bool
    attention_scale: float | None

    layer_type = "full_attention"
    entries = {"num_attention_heads": 2**12}
    parameters = {
        "self_attention.linear_proj.weight": ("row", ("hidden",), "queries"),
        "self_attention.linear_qkv.weight": ("qkv", _QKV, "hidden"),
        "self_attention.linear_qkv.bias": ("qkv", _QKV, None),
        "self_attention.linear_qkv.layer_norm_weight": ("replicated", ("hidden",), None),
        "self_attention.q_layernorm.weight": ("replicated", ("head",), None),
        "self_attention.k_layernorm.weight": ("replicated", ("head",), None),
    }
    names = {
        "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight",),
        "self_attention.linear_qkv.weight": tuple(f"self_attn.{x}_proj.weight" for x in "qkv"),
        "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    }

    @staticmethod
    def read(config: Mapping[str, Any]) -> dict[str, Any]:
        heads = config["num_attention_heads"]
        return {
            "num_heads": heads,
            "num_kv_heads": config.get("num_key_value_heads") or heads,
            "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        }

    @staticmethod
    def problems(config: Mapping[str, Any]) -> Iterator[str]:
        heads, groups = config["num_attention_heads"], config.get("num_key_value_heads")
        if groups and heads % groups:
            yield (
                f"num_attention_heads must be a multiple of num_key_value_heads, got {heads} and "
                f"{groups}"
            )
        if not config.get("head_dim") and config["hidden_size"] % heads:
            yield (
                "hidden_size must be a multiple of num_attention_heads, got "
                f"{config['hidden_size']} and {heads}"
            )

    @property
    def sizes(self) -> dict[str, int]:
        return {
            "head": self.head_dim,
            "queries": self.num_heads * self.head_dim,
            "keys": self.num_kv_heads * self.head_dim,
        }

    @property
    def divided(self) -> dict[str, int]:
        return {"attention heads": self.num_heads}

    @property
    def shared(self) -> dict[str, int]:
        return {"key-value heads (query groups)": self.num_kv_heads}

    @property
    def token_weights(self) -> int:
        return 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)

    @property
    def pair_width(self) -> int:
        return self.num_heads * self.head_dim

    def kept(self, tokens: int, layout: ParallelLayout, entry: int, linear_input: int) -> Kept:
        tp = layout.tensor_parallel_size
        query = tokens * self.num_heads * self.head_dim // tp
        heads = tokens * self.num_heads // tp
        key = tokens * self._key_width(tp)
        rope = tokens * 4 * entry * self.head_dim  # cosines and sines, for queries and for keys
        norms = (entry * (query + key) + 8 * heads) if self.qk_norm else 0
        # With recomputation, attention keeps its arguments, whose values are a view of the
        # projection's whole result; and the projection after it keeps the result of attention
        # (measured: docs/scaling.md). They share it, unless the projection has a copy.
        copied = 0 if linear_input == entry else linear_input * query
        operands = entry * (2 * query + 3 * key) + (0 if copied else entry * query)
        core = entry * (query + 2 * key) + entry * query + 4 * heads
        return Kept(norms + rope + copied, core, operands)

    def token_bytes(self, tensor_parallel_size: int, entry: int) -> int:
        return 2 * self._key_width(tensor_parallel_size) * entry

    def _key_width(self, tensor_parallel_size: int) -> int:
        """Entries of a token's keys on a rank."""
        return max(1, self.num_kv_heads // tensor_parallel_size) * self.head_dim

    def megatron_arguments(self) -> dict[str, Any]:
        return {
            "num_attention_heads": self.num_heads,
            "num_query_groups": self.num_kv_heads,
            "kv_channels": self.head_dim,
            "add_qkv_bias": self.qkv_bias,
            "qk_layernorm": self.qk_norm,
            "softmax_scale": self.attention_scale,
        }

    def spec(self, norm: type, norm_linear: type, row_linear: type, core: type) -> ModuleSpec:
        from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
        from megatron.core.transformer.enums import AttnMaskType
        from megatron.core.transformer.identity_op import IdentityOp
        from megatron.core.transformer.spec_utils import ModuleSpec

        qk_norm = norm if self.qk_norm else IdentityOp
        return ModuleSpec(
            module=SelfAttention,
            params={"attn_mask_type": AttnMaskType.causal},
            submodules=SelfAttentionSubmodules(
                linear_qkv=norm_linear,
                core_attention=core,
                linear_proj=row_linear,
                q_layernorm=qk_norm,
                k_layernorm=qk_norm,
            ),
        )


@dataclass(frozen=True)
class GatedAttention(FullAttention):
    """What each head attends to is multiplied by the sigmoid of its gate, an output of the
    projection beside its query."""

    parameters = {
        **FullAttention.parameters,
        "self_attention.linear_qkv.weight": ("gated_qkv", ("gated", "keys", "keys"), "hidden"),
    }

    @property
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, "gated": 2 * self.num_heads * self.head_dim}

    @property
    def token_weights(self) -> int:
        return super().token_weights + self.hidden_size * self.num_heads * self.head_dim

    def kept(self, tokens: int, layout: ParallelLayout, entry: int, linear_input: int) -> Kept:
        """The gate's sigmoid in fp32, and the product with it, which the projection after it keeps
        beside the result of attention. Where attention is recomputed, the projection's whole result
        has the gates too."""
        usual = super().kept(tokens, layout, entry, linear_input)
        gates = tokens * self.num_heads * self.head_dim // layout.tensor_parallel_size
        return Kept(
            usual.around + (4 + entry) * gates,
            usual.core,
            usual.operands + entry * gates,
        )

    def megatron_arguments(self) -> dict[str, Any]:
        return {**super().megatron_arguments(), "attention_output_gate": True}
