"""Megatron's modules with the engine's forward pass and their own backward pass.

Shape suffixes: L = tokens of the pack on this rank, D = head dimension; of attention
N = query heads, K = key-value heads; of linear layers K = input features, N = output features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from openrlhf_ext.exact.operations import PlainBackward, Product
from openrlhf_ext.exact.table import device_operations
from openrlhf_ext.megatron.layers.products import OwnProductLinear
from openrlhf_ext.megatron.model.spec import (
    CausalAttention,
    NormColumnParallelLinear,
    PackedSequences,
    RMSNorm,
)


class ExactLinear(OwnProductLinear):
    """The product of a weight is made by the first pass of a schedule, for all of its passes."""

    exact_product: Product | None = None  # see ``exact.ExactLayers.begin_schedule``

    def products(self, input_L1K: Tensor, weight_NK: Tensor) -> ExactLinear:
        return self

    def output(self, x_LK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        if self.exact_product is None:
            self.exact_product = device_operations().product(weight_NK)
        return self.exact_product(x_LK, bias_N)

    def input_gradient(self, dy_LN: Tensor, weight_NK: Tensor) -> Tensor:
        return dy_LN @ weight_NK

    def weight_gradient(self, dy_LN: Tensor, x_LK: Tensor) -> Tensor:
        return dy_LN.t() @ x_LK


class ExactNormColumnParallelLinear(ExactLinear, NormColumnParallelLinear):
    """``of_sum``: its input is a residual sum, not the embedding."""

    def __init__(self, *args: Any, of_sum: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.of_sum = of_sum

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        normed = device_operations().norm(x, self.layer_norm_weight, self.eps, of_sum=self.of_sum)
        return super(NormColumnParallelLinear, self).forward(normed, *args, **kwargs)


class ExactRowParallelLinear(ExactLinear, RowParallelLinear):
    """The sum over two ranks is the engine's: a + b has one order."""


class ExactNorm(RMSNorm):
    """Of the heads of queries or keys."""

    def forward(self, x: Tensor) -> Tensor:
        return device_operations().norm(x, self.weight, self.eps, of_sum=False)


def use_exact_norm(norm: torch.nn.Module) -> None:
    """Makes the final norm, which no layer's spec holds, the engine's."""

    def forward(x: Tensor) -> Tensor:
        return device_operations().norm(x, norm.weight, norm.eps, of_sum=True)  # type: ignore[arg-type]

    norm.forward = forward  # type: ignore[method-assign]


class ExactActivation(torch.nn.Module):
    """In the place of Megatron's SwiGLU."""

    def __init__(self, *, config: Any) -> None:
        super().__init__()

    def forward(self, gate_up_L1N: Tensor) -> Tensor:
        return device_operations().silu_times(gate_up_L1N)


class ExactSelfAttention(SelfAttention):
    """Leaves the rotary embedding to its core."""

    def forward(self, *args: Any, rotary_pos_emb: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, rotary_pos_emb=None, **kwargs)


class ExactAttention(CausalAttention):
    """Rotates queries and keys and attends, by the engine's kernels; the backward pass recomputes
    the plain path. ``table``: of the rotary embedding."""

    table: Tensor

    def __init__(self, config: Any, *, softmax_scale: float | None = None, **kwargs: Any) -> None:
        super().__init__(config, softmax_scale=softmax_scale, **kwargs)
        self.scale = softmax_scale or config.kv_channels**-0.5  # vLLM's expression

    def forward(
        self,
        query_LND: Tensor,
        key_LKD: Tensor,
        value_LKD: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSequences | None = None,
        **_: Any,
    ) -> Tensor:
        if packed_seq_params is None:
            raise ValueError("ExactAttention takes packed sequences")
        pack, whole, operations = packed_seq_params, packed_seq_params.whole, device_operations()
        plain_attention = super().forward

        def exact(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            query, key = operations.rotate(pack.positions_L, query, key, self.table)
            if whole is not None:
                query, key, value = (whole.gather(x) for x in (query, key, value))
            out = operations.attention(query, key, value, pack.boundaries, self.scale)
            return out if whole is None else whole.take(out)

        def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            query, key = (_rotated(x, pack.positions_L, self.table) for x in (query, key))
            return plain_attention(query, key, value, packed_seq_params=pack)

        return PlainBackward.apply(exact, plain, query_LND, key_LKD, value_LKD)


def _rotated(x_LHD: Tensor, positions_L: Tensor, table: Tensor) -> Tensor:
    cos, sin = table[positions_L].float()[:, None].chunk(2, -1)
    one, two = x_LHD.float().chunk(2, -1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1).to(x_LHD.dtype)


def _exact_add(training: bool, fused: bool) -> Callable[..., Tensor]:
    def add(output_with_bias: tuple[Tensor, None], residual: Tensor, _dropout: float) -> Tensor:
        return device_operations().add(residual, output_with_bias[0])

    return add


def exact_layer(layer: ModuleSpec, paths: Sequence[str], *, is_first: bool) -> None:
    """Changes the spec of a dense layer of ours in place. ``paths``: of its linear layers;
    ``is_first``: of the model's first layer, which norms embeddings."""
    parts = layer.submodules
    attention, mlp = parts.self_attention, parts.mlp.keywords["submodules"]
    expected = {"self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1"}
    if {*paths} != expected | {"mlp.linear_fc2"}:
        raise ValueError(f"exact mode knows no layer with the linear layers {sorted(paths)}")
    attention.module = ExactSelfAttention
    inside = attention.submodules
    inside.linear_qkv = _norm_linear(of_sum=not is_first)
    inside.linear_proj, inside.core_attention = ExactRowParallelLinear, ExactAttention
    for name in ("q_layernorm", "k_layernorm"):
        if getattr(inside, name) is not IdentityOp:
            setattr(inside, name, ExactNorm)
    mlp.linear_fc1, mlp.linear_fc2 = _norm_linear(of_sum=True), ExactRowParallelLinear
    mlp.activation_func = ExactActivation
    parts.self_attn_bda = parts.mlp_bda = _exact_add


def _norm_linear(of_sum: bool) -> ModuleSpec:
    return ModuleSpec(module=ExactNormColumnParallelLinear, params={"of_sum": of_sum})


def set_table(decoder: torch.nn.Module, table: Tensor) -> None:
    """Gives every attention the rotary table. Not as a buffer, which Megatron would convert."""
    for module in decoder.modules():
        if isinstance(module, ExactAttention):
            module.table = table
