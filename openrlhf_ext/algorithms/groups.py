"""Groups of completions: membership, success, and groups without a signal.

Every operation is a segment operation over `index_B`, so groups may have any size and their rows
any order. Statistics are float64: sums of 1e8 tokens lose digits in float32.

Shape suffixes: B = completions, Q = groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openrlhf_ext.algorithms.batch import Named, RolloutBatch, check_group_sizes, check_lengths
from openrlhf_ext.algorithms.segments import Segments


@dataclass(frozen=True)
class Groups(Named):
    """The grouping of a batch.

    Attributes:
        ids_Q: (Q,) integer group ids, ascending.
        index_B: (B,) int64 position of each row's group in `ids_Q`.
        sizes_Q: (Q,) int64 completions per group.
        lengths_B: (B,) int64 tokens per completion.
    """

    ids_Q: Tensor
    index_B: Tensor
    sizes_Q: Tensor
    lengths_B: Tensor

    @classmethod
    def of(cls, batch: RolloutBatch) -> Groups:
        """Group a batch. Raises ValueError for an empty completion, wrong lengths or an incomplete
        group."""
        ids_Q, index_B, sizes_Q = batch.group_ids.unique(return_inverse=True, return_counts=True)
        check_group_sizes(ids_Q, sizes_Q, batch.group_size)
        check_lengths(batch.lengths, len(batch.tokens))
        return cls(ids_Q, index_B, sizes_Q, batch.segments.lengths_B)

    def __len__(self) -> int:
        return len(self.ids_Q)

    @property
    def sizes_B(self) -> Tensor:
        """(B,) int64 size of each row's group."""
        return self.sizes_Q[self.index_B]

    def sum(self, values_B: Tensor) -> Tensor:
        """(Q,) sums in float64."""
        return segment_sum(values_B, self.index_B, len(self))

    def count(self, flags_B: Tensor) -> Tensor:
        """(Q,) int64 number of True rows per group."""
        return torch.zeros_like(self.sizes_Q).index_add_(
            0, self.index_B, flags_B.to(self.sizes_Q.dtype)
        )

    def any(self, flags_B: Tensor) -> Tensor:
        """(Q,) bool: at least one row of the group is True."""
        return self.count(flags_B) > 0

    def minimum(self, values_B: Tensor) -> Tensor:
        """(Q,) smallest value per group."""
        return segment_reduce(values_B, self.index_B, len(self), "amin")

    def maximum(self, values_B: Tensor) -> Tensor:
        """(Q,) largest value per group."""
        return segment_reduce(values_B, self.index_B, len(self), "amax")

    def natural_order(self) -> Tensor:
        """(B,) rows sorted by group, rows of a group in batch order."""
        return torch.argsort(self.index_B, stable=True)


def group_index(ids_B: Tensor) -> Tensor:
    """(B,) int64 position of each row's group in the ascending order of ids, without a device
    sync."""
    order_B = ids_B.argsort()
    index_B, sorted_B = torch.zeros_like(order_B), ids_B[order_B]
    index_B[order_B[1:]] = (sorted_B[1:] != sorted_B[:-1]).cumsum(0)
    return index_B


def segment_sum(values_B: Tensor, index_B: Tensor, segments: int) -> Tensor:
    """Float64 sums of the rows of each segment."""
    total = torch.zeros(segments, *values_B.shape[1:], dtype=torch.float64, device=values_B.device)
    return total.index_add_(0, index_B, values_B.to(torch.float64))


def segment_reduce(values_B: Tensor, index_B: Tensor, segments: int, reduce: str) -> Tensor:
    """(segments,) reduction; every segment has a row."""
    out = torch.zeros(segments, dtype=values_B.dtype, device=values_B.device)
    return out.scatter_reduce_(0, index_B, values_B, reduce, include_self=False)


@dataclass(frozen=True)
class Moments:
    """Mean and sum of squared deviations of one or more pools, float64, with their sizes."""

    count: Tensor
    mean: Tensor
    m2: Tensor

    @classmethod
    def of_values(cls, values: Tensor) -> Moments:
        """The moments of pools that hold one value each."""
        return cls(torch.ones_like(values), values, torch.zeros_like(values))

    def std(self, ddof: int) -> Tensor:
        """sqrt(m2 / (count - ddof)), 0 where that count is not positive."""
        degrees = self.count - ddof
        return torch.where(degrees > 0, self.m2 / degrees.clamp(min=1), 0.0).sqrt()


def pool_moments(rows: Moments, index_B: Tensor, pools: int) -> Moments:
    """Merge per-row moments into pools (exact: squares within rows plus squares between rows).

    Empty pools get 0.
    """
    count = segment_sum(rows.count, index_B, pools)
    # Deviations from a member of the pool are exactly 0 if all means are equal, so the std of a
    # constant pool is exactly 0.
    present = rows.count > 0
    pivot = torch.zeros(pools, dtype=torch.float64, device=index_B.device)
    pivot = pivot.scatter_reduce_(
        0, index_B[present], rows.mean[present], "amin", include_self=False
    )
    shift = segment_sum(rows.count * (rows.mean - pivot[index_B]), index_B, pools) / count.clamp(
        min=1
    )
    mean = pivot + shift
    between = rows.count * (rows.mean - pivot[index_B] - shift[index_B]) ** 2
    return Moments(count, mean, segment_sum(rows.m2 + between, index_B, pools))


@dataclass(frozen=True)
class Partition(Named):
    """Success classes and degenerate groups of a batch.

    Attributes:
        success_B: (B,) bool, successful completions, without those masked as truncated.
        failure_B: (B,) bool, failed completions, without those masked as truncated.
        degenerate_Q: (Q,) bool, groups without a signal.
        kept_B: (B,) bool, the row's group was not dropped.
        zeroed_B: (B,) bool, the row's group stays with zero advantages.
        active_B: (B,) bool, the row carries loss.
    """

    success_B: Tensor
    failure_B: Tensor
    degenerate_Q: Tensor
    kept_B: Tensor
    zeroed_B: Tensor
    active_B: Tensor

    @property
    def live_B(self) -> Tensor:
        """(B,) bool, the row's group carries a signal: neither dropped nor zeroed."""
        return self.kept_B & ~self.zeroed_B


def partition(
    batch: RolloutBatch,
    groups: Groups,
    *,
    success_threshold: float,
    mask_truncated: bool,
    degenerate: str,
    degenerate_by: str,
) -> Partition:
    """Classify completions and groups. The degenerate test uses all completions, including
    truncated ones."""
    correct_B = batch.rewards > success_threshold
    usable_B = usable_rows(batch, mask_truncated)
    if degenerate_by == "class":
        correct_Q = groups.count(correct_B)
        degenerate_Q = (correct_Q == 0) | (correct_Q == groups.sizes_Q)
    else:
        degenerate_Q = groups.maximum(batch.rewards) == groups.minimum(batch.rewards)
    hit_B = degenerate_Q[groups.index_B]
    kept_B = ~hit_B if degenerate == "drop" else torch.ones_like(hit_B)
    return Partition(
        success_B=correct_B & usable_B,
        failure_B=~correct_B & usable_B,
        degenerate_Q=degenerate_Q,
        kept_B=kept_B,
        zeroed_B=hit_B if degenerate == "zero" else torch.zeros_like(hit_B),
        active_B=kept_B & usable_B,
    )


def usable_rows(batch: RolloutBatch, mask_truncated: bool) -> Tensor:
    """(B,) False for completions masked as truncated.

    Raises ValueError if `mask_truncated` is set and the batch has no `truncated`.
    """
    if not mask_truncated:
        return torch.ones(len(batch.rewards), dtype=torch.bool, device=batch.rewards.device)
    if batch.truncated is None:
        raise ValueError(
            "mask_truncated = true needs RolloutBatch.truncated; set it from the sampler's "
            "finish reason"
        )
    return ~batch.truncated


@dataclass(frozen=True)
class Inputs(Named):
    """A validated rollout batch with its groups and partition; floats are promoted, rewards are
    float64.

    Attributes:
        batch: the completions with their rewards and the models' per-token outputs.
        groups: which completions answer the same prompt; has `sum`, `count`, `any`, `minimum`,
            `maximum` over groups.
        part: which completions succeeded, which groups carry a signal.
    """

    batch: RolloutBatch
    groups: Groups
    part: Partition

    @property
    def segments(self) -> Segments:
        """Which tokens belong to which completion; has `spread` (B,) -> (N,), `sums` (N,) -> (B,),
        `take`, `span`."""
        return self.batch.segments
