"""What is known of a distribution from parts of its logits, and how the parts are put together.

A part of a token's logits ``u`` (a slice of the vocabulary, or a rank's shard) is described by four
numbers:

    m = max u  s = sum exp(u - m)  w = sum exp(u - m) (u - m)    t = u[target], 0 if not in the part

Parts combine without a loss of precision, because every exponential is at most 1: with
``M = max m``, ``d = m - M``:
``s' = sum e^d s``, ``w' = sum e^d (w + d s)``, ``t' = sum t``. Then

    logprob = (t' - M) - ln s'        entropy = ln s' - w' / s'

Shape suffixes: P = parts, N = tokens, V = rows of this rank's shard, B = tokens of a block; 4 = (m,
s, w, t).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's rows of the output embedding, ``[first, first + true_rows)`` of the true
    vocabulary; the rest of the shard is padding. ``group``: the tensor-parallel group; None where
    one rank holds the whole vocabulary."""

    group: dist.ProcessGroup | None
    first: int
    true_rows: int
    vocab_size: int

    @classmethod
    def of(
        cls, weight_VH: Tensor, vocab_size: int | None, group: dist.ProcessGroup | None
    ) -> VocabularyShard:
        """The shard of this rank: rank r of the group holds rows ``[r V, (r + 1) V)`` of the padded
        vocabulary. Raises
        ValueError: ``vocab_size`` does not fit the shards."""
        size = group.size() if group is not None else 1
        rank = group.rank() if group is not None else 0
        rows = weight_VH.shape[0]
        total = rows * size if vocab_size is None else vocab_size
        if not 0 < total <= rows * size:
            raise ValueError(
                f"vocab_size must be in [1, shard rows * group size]: got {total}, {rows} * {size}"
            )
        true_rows = min(max(total - rank * rows, 0), rows)
        return cls(group if size > 1 else None, rank * rows, true_rows, total)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        if self.group is not None and tensor.numel():
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor

    def gathered(self, own_BV: Tensor) -> Tensor:
        """Columns of the true vocabulary, from every rank's columns, padding included."""
        if self.group is None:
            return own_BV[:, : self.vocab_size]
        parts = [torch.empty_like(own_BV) for _ in range(self.group.size())]
        dist.all_gather(parts, own_BV.contiguous(), group=self.group)
        return torch.cat(parts, 1)[:, : self.vocab_size]

    def start_sum(self, tensor: Tensor) -> dist.Work | None:
        if self.group is None:
            return None
        return dist.all_reduce(tensor, group=self.group, async_op=True)

    def local(self, target_N: Tensor) -> Tensor:
        """Row of each target in this shard; outside of ``[0, true_rows)`` where another rank holds
        it."""
        return target_N - self.first


class TokenStatistics(NamedTuple):
    """Of each token's whole distribution, the same on every rank; all of shape (N,), fp32 (fp64 for
    fp64 input)."""

    logprob_N: Tensor
    entropy_N: Tensor
    maximum_N: Tensor
    log_sum_N: Tensor

    def select(self, index: slice | Tensor) -> TokenStatistics:
        return TokenStatistics(*(value[index] for value in self))


class TokenGradient(NamedTuple):
    """What the gradient of a tile's logits takes from each of its tokens; all of shape (B,)."""

    maximum_B: Tensor
    log_sum_B: Tensor
    coefficient_B: Tensor  # d loss / d log-probability
    column_B: Tensor  # of the target in the tile; outside of ``[0, S)`` where it lies elsewhere
    # factor of the logits (1 / temperature); None: they are scaled already
    scale_B: Tensor | None = None
    entropy_coefficient_B: Tensor | None = None  # d loss / d entropy; None: the entropy is constant
    entropy_B: Tensor | None = None


def empty_part(tokens: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(4, N) of a part without any logit: the neutral element of ``merge``."""
    part_4N = torch.zeros(4, tokens, dtype=dtype, device=device)
    part_4N[0] = torch.finfo(dtype).min / 2  # -inf would give inf - inf
    return part_4N


def merge(parts_P4N: Tensor) -> Tensor:
    """(4, N) of the union of the parts."""
    maximum_PN, sum_PN, weighted_PN, target_PN = parts_P4N.unbind(1)
    maximum_N = maximum_PN.amax(0)
    sums = _rescaled(maximum_PN, sum_PN, weighted_PN, maximum_N)
    return torch.stack([maximum_N, *(value.sum(0) for value in sums), target_PN.sum(0)])


def combine(part_4N: Tensor, shard: VocabularyShard) -> TokenStatistics:
    """Statistics of the whole distributions from every rank's part: one MAX and one packed SUM
    all-reduce."""
    maximum_N = shard.all_reduce(part_4N[0].clone(), dist.ReduceOp.MAX)
    packed_3N = torch.stack([*_rescaled(part_4N[0], part_4N[1], part_4N[2], maximum_N), part_4N[3]])
    sum_N, weighted_N, target_N = shard.all_reduce(packed_3N)
    log_sum_N = sum_N.log()
    logprob_N = (target_N - maximum_N - log_sum_N).clamp_max_(0.0)
    entropy_N = (log_sum_N - weighted_N / sum_N).clamp_(0.0, math.log(shard.vocab_size))
    return TokenStatistics(logprob_N, entropy_N, maximum_N, log_sum_N)


def _rescaled(
    maximum: Tensor, total: Tensor, weighted: Tensor, reference: Tensor
) -> tuple[Tensor, Tensor]:
    shift = maximum - reference
    factor = shift.exp()
    return factor * total, factor * (weighted + shift * total)
