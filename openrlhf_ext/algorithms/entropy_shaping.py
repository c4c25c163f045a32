"""Shared parts of `gtpo_entropy` and `grpo_s`: classes, entropy shares of tokens, pools that
standardize rewards.

A share is a token's entropy (on failures its inverse) over the mean of its comparison set (T1 eq. 2
and 13, T1 being arXiv 2508.04349v1). Everything is computed in float64 over blocks of rows that fit
the cache; only results in the batch's dtype are kept.

Shape suffixes: B = completions, N = tokens of all completions, S = comparison sets, R = completions
of a cohort, b and n = completions and tokens of one block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openrlhf_ext.algorithms.groups import (
    Groups,
    Inputs,
    Moments,
    Partition,
    pool_moments,
    segment_sum,
)
from openrlhf_ext.algorithms.option_blocks import EntropyOptions
from openrlhf_ext.algorithms.segments import Block, Segments, group_blocks


@dataclass(frozen=True)
class Classes:
    """Classes of completions, (B,) bool each; completions of dropped groups are in no class.

    Attributes:
        success_B: P, with shares of their entropy.
        failure_B: N.
        inverted_B: failures with shares of their inverse entropy: N in two-table versions, else
            none.
        live_B: completions that may get an advantage other than 0.
    """

    success_B: Tensor
    failure_B: Tensor
    inverted_B: Tensor
    live_B: Tensor

    @classmethod
    def of(cls, part: Partition, two_tables: bool) -> Classes:
        success_B, failure_B = part.success_B & part.kept_B, part.failure_B & part.kept_B
        inverted_B = failure_B if two_tables else torch.zeros_like(failure_B)
        return cls(success_B, failure_B, inverted_B, (success_B | failure_B) & ~part.zeroed_B)

    @property
    def member_B(self) -> Tensor:
        """Completions with shares."""
        return self.success_B | self.inverted_B

    def rows(self, rows_n: Tensor) -> Classes:
        """The classes of some rows."""
        return Classes(*(getattr(self, f.name)[rows_n] for f in dataclasses.fields(self)))

    def select(self, on_success: Any, on_failure: Any) -> Tensor:
        """(B,) float64 with one value on successes, another on failures, 0 elsewhere."""
        zero_B = torch.zeros(len(self.success_B), dtype=torch.float64, device=self.success_B.device)
        return torch.where(
            self.success_B, on_success, torch.where(self.failure_B, on_failure, zero_B)
        )


@dataclass(frozen=True)
class PreparedEntropy:
    """How entropies enter the shares: clamped, shifted, inverted on failures.

    The eps mode sets either `shift` or `denominator_eps` to entropy_eps, and the other to 0.
    """

    clamp: tuple[float, float] | None
    shift: float
    denominator_eps: float
    inverse_floor: float

    @classmethod
    def of(cls, options: EntropyOptions) -> PreparedEntropy:
        shifted = options.eps_mode == "shift"
        return cls(
            clamp=options.entropy_clamp,
            shift=options.entropy_eps if shifted else 0.0,
            denominator_eps=0.0 if shifted else options.entropy_eps,
            inverse_floor=getattr(options, "inverse_floor", 0.0),
        )

    def prepare(self, entropies: Tensor) -> Tensor:
        """H' in float64, a new tensor."""
        h = entropies.to(torch.float64, copy=True)
        if self.clamp is not None:
            h.clamp_(*self.clamp)
        return h.add_(self.shift)

    def inverse(self, h: Tensor) -> Tensor:
        """q = 1/(max(H', inverse_floor) + eps), a new tensor."""
        floored = h.clamp(min=self.inverse_floor) if self.inverse_floor else h
        return (
            (floored + self.denominator_eps).reciprocal_()
            if self.denominator_eps
            else floored.reciprocal()
        )


def no_share_error(quantity: str, options: EntropyOptions) -> ValueError:
    """The error for an entropy that cannot enter a share."""
    return ValueError(
        f"{quantity} has no inverse or logarithm with eps_mode {options.eps_mode!r}, entropy_eps = "
        f"{options.entropy_eps}; use eps_mode 'shift' with entropy_eps > 0"
    )


@dataclass(frozen=True)
class Cohort:
    """Completions that are shaped together, ordered by group, cut into blocks.

    A group-scoped method has one cohort per block of whole groups. A batch-wide statistic needs one
    cohort over all blocks, so each stage computes its quantities once for all of them.

    Attributes:
        rows: (R,) rows of the batch.
        group_R: dense group number in the cohort.
        blocks: pairs of a slice of the cohort and the block of the same rows.
    """

    rows: Tensor
    group_R: Tensor
    blocks: list[tuple[slice, Block]]

    @property
    def groups(self) -> int:
        return int(self.group_R[-1]) + 1


def make_cohorts(groups: Groups, segments: Segments, batch_wide: bool) -> list[Cohort]:
    """All completions as one cohort, or as one cohort per block of whole groups."""
    order_B = groups.natural_order()
    blocks = group_blocks(segments, order_B, groups.sizes_Q)
    if batch_wide and blocks:
        return [Cohort(order_B, groups.index_B[order_B], blocks)]
    cohorts = []
    for cut, block in blocks:
        group_R = groups.index_B[order_B[cut]]
        cohorts.append(
            Cohort(order_B[cut], group_R - group_R[0], [(slice(0, len(group_R)), block)])
        )
    return cohorts


class TokenShares:
    """rho of the completions of a cohort: x times |X| over the sum of its comparison set X (T1 eq.
    2, 13).

        for local, block, rho_n in shares: ...

    `local` is a slice of the cohort, `block` the block of its rows, `rho_n` their shares. x is H'
    on successes, 1/H' on failures with shares, and 0 elsewhere. A share is `x scale[X]`, with one
    scale per comparison set. A single block is computed once and yielded in every pass, so the
    caller must not change it. Several blocks are recomputed in every pass to save memory.
    """

    def __init__(
        self, inputs: Inputs, options: EntropyOptions, axis: str, classes: Classes, cohort: Cohort
    ) -> None:
        self.cohort = cohort
        self._options, self._axis = options, axis
        self._prepared = PreparedEntropy.of(options)
        self._entropies_N, self._segments = inputs.batch["entropies"], inputs.segments
        self._lengths_R = inputs.groups.lengths_B[cohort.rows]
        self._inverted_B, self._member_B = classes.inverted_B, classes.member_B
        self._columns = int(self._lengths_R.max()) if axis == "column" else 1
        self._only_n = self._x(cohort.blocks[0][1]) if len(cohort.blocks) == 1 else None
        self._set_R, sets = self._comparison_sets()
        self._only_set_n: Tensor | None = None
        if self._only_n is not None:
            self._only_set_n = self._set_n(*cohort.blocks[0])
        self._scale_S = self._scales(sets)
        if self._only_n is not None:
            self._only_n.mul_(self._scale_of(*cohort.blocks[0]))

    def __iter__(self) -> Iterator[tuple[slice, Block, Tensor]]:
        for local, block in self.cohort.blocks:
            if self._only_n is not None:
                yield local, block, self._only_n
            else:
                yield local, block, self._x(block).mul_(self._scale_of(local, block))

    def _x(self, block: Block) -> Tensor:
        """(n,) H' on successes, q on failures with shares, 0 on other completions."""
        h_n = self._prepared.prepare(self._entropies_N[block.tokens])
        inverted_b, member_b = self._inverted_B[block.rows], self._member_B[block.rows]
        if bool(inverted_b.any()):
            h_n = torch.where(block.spread(inverted_b), self._prepared.inverse(h_n), h_n)
        return h_n if bool(member_b.all()) else h_n.masked_fill_(block.spread(~member_b), 0.0)

    def _comparison_sets(self) -> tuple[Tensor, int]:
        """The comparison set of each completion, and the number of sets.

        Successes and failures never share a set. With axis "column" there is one set per position.
        """
        cohort, inverted_R = self.cohort, self._inverted_B[self.cohort.rows].long()
        if self._axis == "row":
            return torch.arange(len(cohort.rows), device=cohort.rows.device), len(cohort.rows)
        if self._options.entropy_scope == "batch":
            return inverted_R * self._columns, 2
        return (2 * cohort.group_R + inverted_R) * self._columns, 2 * cohort.groups

    def _set_n(self, local: slice, block: Block) -> Tensor:
        """(n,) comparison set of each token."""
        if self._only_set_n is not None:
            return self._only_set_n
        return (
            block.positions(self._set_R[local])
            if self._columns > 1
            else block.spread(self._set_R[local])
        )

    def _scale_of(self, local: slice, block: Block) -> Tensor:
        return self._scale_S.take(self._set_n(local, block))

    def _scales(self, sets: int) -> Tensor:
        """(S,) scale of each comparison set: |X| / sum X, or 1 / geometric mean of X."""
        geometric = self._options.normaliser == "geomean"
        total = torch.zeros(
            sets * self._columns, dtype=torch.float64, device=self._entropies_N.device
        )
        for local, block in self.cohort.blocks:
            x_n = self._x(block) if self._only_n is None else self._only_n
            if geometric:
                x_n = x_n.masked_fill(block.spread(~self._member_B[block.rows]), 1.0).log_()
            if self._columns > 1:
                total.index_add_(0, self._set_n(local, block), x_n)
            else:
                total.index_add_(0, self._set_R[local], block.sums(x_n))
        self._require_finite(total)
        count = self._set_sizes(sets)
        if geometric:
            return torch.exp(-total / count.clamp(min=1.0))
        denominator = total + self._prepared.denominator_eps
        return torch.where(denominator > 0, count / denominator, 0.0)

    def _set_sizes(self, sets: int) -> Tensor:
        """(S,) |X|: members alive at each position (d_t and h_t of columns), or the members'
        tokens."""
        member_R = self._member_B[self.cohort.rows]
        if self._columns == 1:
            return segment_sum(torch.where(member_R, self._lengths_R, 0), self._set_R, sets)
        # A completion of length T is alive at positions 0..T-1: count the ends, then sum from the
        # right.
        ends = segment_sum(member_R, self._set_R + self._lengths_R - 1, sets * self._columns)
        return ends.view(sets, self._columns).flip(1).cumsum(1).flip(1).flatten()

    def _require_finite(self, total: Tensor) -> None:
        if bool(torch.isfinite(total).all()):
            return
        for _, block in self.cohort.blocks:
            x_n = self._x(block)
            legal_n = torch.isfinite(x_n) & (x_n > 0)
            bad = (~legal_n & block.spread(self._member_B[block.rows])).nonzero()
            if len(bad):
                token = block.token(int(bad[0]))
                row, position = self._segments.place(token)
                value = float(self._entropies_N[token])
                raise no_share_error(
                    f"entropy {value} at row {row}, position {position}", self._options
                )


def base_rewards(inputs: Inputs, base_reward: str, success_B: Tensor) -> Tensor:
    """r_i of the shaped rewards: 1 on successes and 0 elsewhere, or the reward itself."""
    return inputs.batch.rewards if base_reward == "raw" else success_B.to(torch.float64)


def class_pools(
    rewards: Moments,
    group_B: Tensor,
    groups: int,
    classes: Classes,
    options: EntropyOptions,
    ddof: int,
    two_tables: bool,
) -> tuple[Tensor, Tensor]:
    """Mean and std that standardize each completion's shaped rewards (T1 eq. 3, 14-15; GRPO-S: eq.
    8).

    The pool of R+ serves successes, and also failures if the version has one table. The pool of R-
    serves failures.

    Args:
        rewards: moments of each completion's own shaped rewards.
        group_B: group number of each completion, below `groups`.
        classes: of the same completions.
        two_tables: failures have their own shaped rewards, R-.
    Returns:
        (B,) mean and std, float64.
    """
    success_B, failure_B = classes.success_B, classes.failure_B
    batch_wide = options.norm_scope == "batch"
    index_B = torch.zeros_like(group_B) if batch_wide else group_B
    pools = 1 if batch_wide else groups

    def pool(own_B: Tensor, other_B: Tensor, *, other_is_zero: bool) -> tuple[Tensor, Tensor]:
        member_B = own_B if options.adv_pool == "own" else own_B | other_B
        valued_B = own_B if other_is_zero else own_B | other_B
        count_B = torch.where(member_B, rewards.count, 0.0)
        mean_B, m2_B = (
            torch.where(valued_B, rewards.mean, 0.0),
            torch.where(valued_B, rewards.m2, 0.0),
        )
        merged = pool_moments(
            Moments(count_B, mean_B, torch.where(member_B, m2_B, 0.0)), index_B, pools
        )
        return merged.mean[index_B], merged.std(ddof)[index_B]

    mean_B, std_B = pool(success_B, failure_B, other_is_zero=two_tables)
    if two_tables:
        negative_mean_B, negative_std_B = pool(failure_B, success_B, other_is_zero=True)
        mean_B = torch.where(failure_B, negative_mean_B, mean_B)
        std_B = torch.where(failure_B, negative_std_B, std_B)
    return mean_B, std_B
