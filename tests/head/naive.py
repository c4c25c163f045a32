"""Log-probability and entropy from the logits of all tokens at once: what the head is compared
with.

Plain differentiable torch, in about 4 fp32 tensors of (tokens, vocabulary shard).
Shape suffixes: T = tokens, V = rows of this rank's vocabulary shard, H = hidden size.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from openrlhf_ext.head.linear import HeadOutput, check_call
from openrlhf_ext.head.statistics import VocabularyShard


def naive_logprob_entropy(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    target_T: Tensor,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    entropy_grad: bool = False,
) -> HeadOutput:
    """The same as ``linear_logprob_entropy``, which documents the arguments, with all logits in
    memory."""
    shard = VocabularyShard.of(weight_VH, vocab_size, process_group)
    check_call(
        hidden_TH, weight_VH, target_T, temperature, None, 1, shard, checks=not hidden_TH.is_cuda
    )
    hidden_TH = _SameOnEveryRank.apply(hidden_TH, shard)
    logits_TV = (hidden_TH @ weight_VH[: shard.true_rows].t()).to(
        torch.promote_types(hidden_TH.dtype, torch.float32)
    )
    scale = temperature.to(logits_TV)[..., None] if isinstance(temperature, Tensor) else temperature
    shifted_TV = logits_TV / scale
    shifted_TV = shifted_TV - _maximum(shifted_TV.detach(), shard)[:, None]
    exponential_TV = shifted_TV.exp()
    sum_T = _SumOverRanks.apply(exponential_TV.sum(-1), shard)
    local_T = shard.local(target_T)
    here_T = (local_T >= 0) & (local_T < shard.true_rows)
    # a rank of padding alone has no column to point at
    padded_TV = torch.nn.functional.pad(shifted_TV, (0, 1))
    chosen_T = padded_TV.gather(1, local_T.masked_fill(~here_T, shard.true_rows)[:, None])[:, 0]
    logprob_T = _SumOverRanks.apply(chosen_T, shard) - sum_T.log()
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy_T = (
            sum_T.log() - _SumOverRanks.apply((exponential_TV * shifted_TV).sum(-1), shard) / sum_T
        )
    return HeadOutput(logprob_T.clamp_max(0.0), entropy_T.clamp(0.0, math.log(shard.vocab_size)))


def _maximum(logits_TV: Tensor, shard: VocabularyShard) -> Tensor:
    lowest_T = logits_TV.new_full(logits_TV.shape[:1], torch.finfo(logits_TV.dtype).min)
    own_T = logits_TV.amax(-1) if logits_TV.shape[1] else lowest_T
    return shard.all_reduce(own_T, dist.ReduceOp.MAX)


class _SumOverRanks(torch.autograd.Function):
    """Sum of the shards' values; every rank goes on with the same computation, so the gradient is
    that of each."""

    @staticmethod
    def forward(ctx, values_T: Tensor, shard: VocabularyShard) -> Tensor:
        return shard.all_reduce(values_T.clone())

    @staticmethod
    def backward(ctx, grad_T: Tensor) -> tuple[Tensor, None]:
        return grad_T, None


class _SameOnEveryRank(torch.autograd.Function):
    """Identity; the gradient of what every rank uses is the sum of the shards' gradients."""

    @staticmethod
    def forward(ctx, hidden_TH: Tensor, shard: VocabularyShard) -> Tensor:
        ctx.shard = shard
        return hidden_TH.view_as(hidden_TH)

    @staticmethod
    def backward(ctx, grad_TH: Tensor) -> tuple[Tensor, None]:
        return ctx.shard.all_reduce(grad_TH.contiguous().clone()), None
