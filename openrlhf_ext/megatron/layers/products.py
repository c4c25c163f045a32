"""Megatron's linear layers with other products: what FP8's emulation and exact mode share.

Shape suffixes: L = tokens of the pack on this rank (of a column-parallel layer's input under
sequence parallelism a piece of them), K = input features, N = output features.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    _gather_along_first_dim,
    _reduce,
    _reduce_scatter_along_first_dim,
)
from torch import Tensor


class PassProducts(Protocol):
    """The three products of a linear layer in one pass of a micro-batch."""

    def output(self, x_LK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        """(L, N)."""

    def input_gradient(self, dy_LN: Tensor, weight_NK: Tensor) -> Tensor:
        """(L, K). Comes before ``weight_gradient``."""

    def weight_gradient(self, dy_LN: Tensor, x_LK: Tensor) -> Tensor:
        """(N, K)."""


class OwnProductLinear:
    """A mixin before one of Megatron's linear layers."""

    def products(self, input_L1K: Tensor, weight_NK: Tensor) -> PassProducts:
        """Those of this pass."""
        raise NotImplementedError

    def _forward_impl(
        self,
        input: Tensor,  # noqa: A002  # Megatron calls it by name
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        allreduce_dgrad: bool = False,
        sequence_parallel: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        **_: Any,
    ) -> Tensor:
        """(L, 1, N) product of an input (L, 1, K), a piece of L under sequence parallelism, with
        the weight."""
        group = tp_group or parallel_state.get_tensor_model_parallel_group()
        products = self.products(input, weight)
        return _Linear.apply(
            input, weight, bias, products, allreduce_dgrad, sequence_parallel, group
        )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input_L1K: Tensor,
        weight_NK: Tensor,
        bias_N: Tensor | None,
        products: PassProducts,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.save_for_backward(input_L1K, weight_NK)
        ctx.products, ctx.group, ctx.has_bias = products, group, bias_N is not None
        ctx.allreduce_dgrad, ctx.sequence_parallel = allreduce_dgrad, sequence_parallel
        whole = _gather_along_first_dim(input_L1K, group) if sequence_parallel else input_L1K
        output_LN = products.output(whole.flatten(0, 1), weight_NK, bias_N)
        return output_LN.view(*whole.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad_L1N: Tensor) -> tuple[Tensor | None, ...]:
        input_L1K, weight_NK = ctx.saved_tensors
        dy_LN = grad_L1N.flatten(0, 1)
        grad_input = ctx.products.input_gradient(dy_LN, weight_NK)
        grad_input = grad_input.view(*grad_L1N.shape[:-1], -1)
        if ctx.sequence_parallel:
            grad_input = _reduce_scatter_along_first_dim(grad_input, ctx.group)
        elif ctx.allreduce_dgrad:
            grad_input = _reduce(grad_input, ctx.group)
        grad_weight = grad_bias = None
        if ctx.needs_input_grad[1]:
            whole = input_L1K
            if ctx.sequence_parallel:
                whole = _gather_along_first_dim(input_L1K, ctx.group)
            grad_weight = ctx.products.weight_gradient(dy_LN, whole.flatten(0, 1))
            grad_weight = grad_weight.to(weight_NK.dtype)
        if ctx.has_bias:
            grad_bias = dy_LN.sum(0)
        return grad_input, grad_weight, grad_bias, None, None, None, None
