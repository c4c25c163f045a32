"""Causal attention over packed sequences that are cut over the context-parallel ranks, for machines without
TransformerEngine, and the collectives that context parallelism needs.

Every rank holds two chunks of every sequence ("zig-zag", see ``packing``). It gathers the keys and values of all ranks,
one collective per layer, and attends from its own chunks; the backward pass scatters the summed gradients back.

Shape suffixes: L = tokens of the pack on this rank, N = query heads, K = key-value heads, D = head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right


class _GatherRanks(torch.autograd.Function):
    """(ranks, ...) of every rank's tensor; backward: the sum of all ranks' gradients of this rank's tensor."""

    @staticmethod
    def forward(ctx, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        tensor = tensor.contiguous()
        gathered = tensor.new_empty(group.size() * tensor.shape[0], *tensor.shape[1:])
        dist.all_gather_into_tensor(gathered, tensor, group=group)
        return gathered.unflatten(0, (group.size(), -1))

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        mine = torch.empty_like(grad[0])
        dist.reduce_scatter_tensor(mine, grad.flatten(0, 1).contiguous(), group=ctx.group)
        return mine, None


class _SumRanks(torch.autograd.Function):
    """Sum over the ranks; backward: the gradient as it is.

    For values that every rank then uses in the same computation: the gradient of that one computation, not of as many
    copies of it as there are ranks.
    """

    @staticmethod
    def forward(ctx, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def sum_ranks(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of all ranks' tensors, on every rank; a gradient passes back as it is."""
    return _SumRanks.apply(tensor, group) if group.size() > 1 else tensor


def causal_attention(query_LND: Tensor, key_LKD: Tensor, value_LKD: Tensor, scale: float) -> Tensor:
    """Causal attention of one sequence; with fewer queries than keys, the queries are its last ones."""
    q, k, v = (t.transpose(0, 1)[None] for t in (query_LND, key_LKD, value_LKD))
    grouped = q.shape[1] != k.shape[1]
    if q.shape[2] == k.shape[2]:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    else:
        mask = causal_lower_right(q.shape[2], k.shape[2])
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)
    return out[0].transpose(0, 1)


def context_parallel_attention(
    query_LND: Tensor, key_LKD: Tensor, value_LKD: Tensor, slots: Sequence[int], scale: float, group: dist.ProcessGroup
) -> Tensor:
    """(L, N, D) causal attention of this rank's tokens over whole sequences.

    Args:
        slots: length of each sequence's slot in the whole pack, a multiple of twice the group's size.
    """
    size, rank = group.size(), group.rank()
    gathered = _GatherRanks.apply(torch.cat([key_LKD, value_LKD], -1), group)  # (ranks, L, K, 2 D)
    outputs, start = [], 0
    for slot in slots:
        chunk = slot // (2 * size)
        key, value = _in_order(gathered[:, start : start + 2 * chunk]).chunk(2, -1)
        for half, number in enumerate((rank, 2 * size - 1 - rank)):
            first, end = start + half * chunk, (number + 1) * chunk
            outputs.append(causal_attention(query_LND[first : first + chunk], key[:end], value[:end], scale))
        start += 2 * chunk
    return torch.cat(outputs)


def _in_order(pieces: Tensor) -> Tensor:
    """One sequence in its own order from what the ranks hold of it, (ranks, 2 chunks, ...)."""
    front, back = pieces.chunk(2, 1)
    return torch.cat([front.flatten(0, 1), back.flip(0).flatten(0, 1)])
