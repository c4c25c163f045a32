"""The operations that a policy rank and an engine share in exact mode: a table for each device.

The result of a row depends on that row alone: not on how many other rows there are, which they are,
or where in the batch it is. ``norm``, ``add`` and ``silu_times`` are differentiable; the others have
no gradient (``megatron.layers.exact_modules`` has those).

Shape suffixes: M = rows, K = input features, N = output features, V = vocabulary, T = tokens of a
pack, Q = query heads, G = key-value heads, D = head dimension, S = sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

Product = Callable[[Tensor, "Tensor | None"], Tensor]
"""(M, K) rows and a bias (N,) or None -> (M, N) rows times a weight, plus the bias."""


class Operations(Protocol):
    """See the module. ``stream``: type in which layers pass on the residual stream; None: the
    model's type."""

    stream: torch.dtype | None

    def product(self, weight_NK: Tensor) -> Product:
        """The product with this weight as it is now. It may hold a copy in another layout, which
        does not follow later changes of the weight."""

    def add(self, residual: Tensor, branch: Tensor) -> Tensor:
        """The residual stream plus what a branch of a layer computed."""

    def norm(self, x_MK: Tensor, weight_K: Tensor, eps: float, *, of_sum: bool) -> Tensor:
        """RMS norm in the weight's type. ``of_sum``: ``x_MK`` is a result of ``add``."""

    def silu_times(self, gate_up_MN: Tensor) -> Tensor:
        """(M, N / 2) SiLU of the first half of each row, times its second half."""

    def rotate(
        self, positions_T: Tensor, query_TQD: Tensor, key_TGD: Tensor, table: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys, turned by the angles of their positions. ``table``: ``rotary_table``."""

    def attention(
        self, query_TQD: Tensor, key_TGD: Tensor, value_TGD: Tensor, starts: Tensor, scale: float
    ) -> Tensor:
        """Causal attention inside each sequence. ``starts``: (S + 1,) int32, where the sequences
        begin and end."""

    def logits(self, hidden_MK: Tensor, head: Product) -> Tensor:
        """(M, V) fp32 logits; ``head``: what ``head_product`` returned."""

    def head_product(self, weight_VK: Tensor) -> Product:
        """The product of ``logits`` with this weight as it is now."""

    def logprobs(self, logits_MV: Tensor, temperature: float) -> Tensor:
        """(M, V) fp32 log-probs from the logits of the true vocabulary."""


def plain_norm(x: Tensor, weight_K: Tensor, eps: float) -> Tensor:
    """RMS norm of the last dimension in torch, rounded to the weight's type before and after the
    product with the weight."""
    x = x.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return x.to(weight_K.dtype) * weight_K


def plain_silu_times(gate_up: Tensor) -> Tensor:
    """``Operations.silu_times`` in torch."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def page_layout(starts: Tensor, tokens: int, page: int) -> tuple[int, Tensor, Tensor]:
    """Pages for the keys and values of a pack, one sequence after the other, known without reading
    from the device.

    Returns:
        The number of pages, not fewer than are needed; (S, P) int32 the pages of each sequence,
        filled up with any; (T,) int64 the place of each token among all places of all pages.
    """
    lengths_S = starts.diff()
    pages = tokens // page + len(lengths_S)
    pages_S = (lengths_S + page - 1) // page
    first_S = pages_S.cumsum(0) - pages_S
    of_one = torch.arange(tokens // page + 1, device=starts.device)
    table_SP = (first_S[:, None] + of_one).clamp(max=pages - 1).int()
    offsets_S = first_S * page - starts[:-1]
    offsets_T = offsets_S.repeat_interleave(lengths_S.long(), output_size=tokens)
    return pages, table_SP, offsets_T + torch.arange(tokens, device=starts.device)


def rotary_table(frequencies_D: Tensor, positions: int, dtype: torch.dtype) -> Tensor:
    """(positions, 2 x frequencies): the cosines of each position's angles, then their sines (vllm
    0.32.0 rotary_embedding/base.py:94)."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float), frequencies_D.float().cpu())
    return torch.cat([angles.cos(), angles.sin()], -1).to(dtype)


class PlainBackward(torch.autograd.Function):
    """``exact(*tensors)``, with the gradient of ``plain(*tensors)``, which the backward pass
    computes. Both return one tensor."""

    @staticmethod
    def forward(
        ctx: Any, exact: Callable[..., Tensor], plain: Callable[..., Tensor], *tensors: Tensor
    ) -> Tensor:
        ctx.plain = plain
        ctx.save_for_backward(*tensors)
        return exact(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            tensors = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
            grads = torch.autograd.grad(ctx.plain(*tensors), tensors, grad)
        return None, None, *grads
