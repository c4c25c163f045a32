"""What `gtpo_entropy` and `grpo_s` share: prepared entropies, entropy shares, and the pools that standardise rewards.

The unit of comparison is the *entropy share* rho: an entropy (or its inverse, on failures) over the mean of its
comparison set (specification 3.5, 3.6).

Everything is computed in float64 over blocks of rows that fit the cache; only results in the batch's dtype are kept.
Shape suffixes: B = completions, T = positions, S = comparison sets, n = completions of a run, b = rows of one block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openrlhf_ext.algorithms.base import Inputs
from openrlhf_ext.algorithms.blocks import group_blocks, row_blocks
from openrlhf_ext.algorithms.groups import Groups, Moments, Partition, pool_moments, segment_sum
from openrlhf_ext.algorithms.option_blocks import EntropyOptions


@dataclass(frozen=True)
class Classes:
    """Who is shaped, (B,) bool each; nobody of a dropped group.

    Attributes:
        success_B: P, with shares of their entropy.
        failure_B: N.
        inverted_B: failures with shares of their own, of their inverse entropy: N in two-table versions, else nobody.
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
        """Those of some rows."""
        return Classes(*(getattr(self, f.name)[rows_n] for f in dataclasses.fields(self)))

    def select(self, on_success: Any, on_failure: Any) -> Tensor:
        """(B,) float64 with one value on successes, another on failures, 0 elsewhere."""
        zero_B = torch.zeros(len(self.success_B), dtype=torch.float64, device=self.success_B.device)
        return torch.where(self.success_B, on_success, torch.where(self.failure_B, on_failure, zero_B))


@dataclass(frozen=True)
class PreparedEntropy:
    """How entropies enter the shares (specification 3.5 step 1): clamped, shifted, inverted on failures.

    Of `shift` and `denominator_eps` one is entropy_eps, by the eps mode, and the other 0.
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
        return (floored + self.denominator_eps).reciprocal_() if self.denominator_eps else floored.reciprocal()


def no_share_error(quantity: str, options: EntropyOptions) -> ValueError:
    """The error for an entropy that cannot enter a share."""
    return ValueError(
        f"{quantity} has no inverse or logarithm with eps_mode {options.eps_mode!r}, entropy_eps = "
        f"{options.entropy_eps}; use eps_mode 'shift' with entropy_eps > 0"
    )


# --------------------------------------------------------------------------------------------------------------------
# Shares of tokens
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """Completions that are shaped together, ordered by group, cut into blocks.

    A group-scoped method runs over one block of whole groups after the other; a batch-wide statistic needs one run
    over all blocks, which then computes its quantities once per stage.

    Attributes:
        rows: (n,) rows of the batch.
        group_n: dense group number in the run.
        blocks: pairs of a slice of the run and the same rows in the batch.
    """

    rows: Tensor
    group_n: Tensor
    blocks: list[tuple[slice, slice | Tensor]]

    @property
    def groups(self) -> int:
        return int(self.group_n[-1]) + 1


def make_runs(groups: Groups, positions: int, batch_wide: bool) -> list[Run]:
    """All completions as one run, or as one run per block of whole groups."""
    order_B = groups.natural_order()
    in_order = bool((order_B[1:] > order_B[:-1]).all())
    cuts = group_blocks(groups.sizes_Q, positions)

    def rows_of(cut: slice) -> slice | Tensor:
        return cut if in_order else order_B[cut]

    if batch_wide and cuts:
        return [Run(order_B, groups.index_B[order_B], [(cut, rows_of(cut)) for cut in cuts])]
    runs = []
    for cut in cuts:
        group_n = groups.index_B[order_B[cut]]
        whole = slice(0, cut.stop - cut.start)
        runs.append(Run(order_B[cut], group_n - group_n[0], [(whole, rows_of(cut))]))
    return runs


class TokenShares:
    """rho of the completions of a run: x times |X| over the sum of its comparison set X (specification 3.5 step 2).

        for local, rows, rho_bT in shares: ...      # a slice of the run, the same rows of the batch, their shares

    x is H' on successes, 1/H' on failures with shares, and 0 elsewhere. A share is `x scale[X]`, with one scale per
    comparison set. A single block is computed once and yielded at every pass, so it must not be changed; several
    blocks are recomputed at every pass, to keep memory small.
    """

    def __init__(self, inputs: Inputs, options: EntropyOptions, classes: Classes, run: Run) -> None:
        self.run = run
        self._options = options
        self._prepared = PreparedEntropy.of(options)
        self._entropies_BT, self._mask_BT = inputs.batch.entropies, inputs.batch.mask
        self._lengths_n = inputs.groups.lengths_B[run.rows]
        self._inverted_B, self._member_B = classes.inverted_B, classes.member_B
        self._only_bT = self._x(run.blocks[0][1]) if len(run.blocks) == 1 else None
        self._set_n, sets = self._comparison_sets()
        self._scale_ST = self._scales(sets)
        if self._only_bT is not None:
            self._only_bT.mul_(self._scale_ST[self._set_n])

    def __iter__(self) -> Iterator[tuple[slice, slice | Tensor, Tensor]]:
        for local, rows in self.run.blocks:
            if self._only_bT is not None:
                yield local, rows, self._only_bT
            else:
                yield local, rows, self._x(rows).mul_(self._scale_ST[self._set_n[local]])

    def _x(self, rows: slice | Tensor) -> Tensor:
        """(b, T) H' on successes, q on failures with shares, 0 outside the compared tokens."""
        h_bT = self._prepared.prepare(self._entropies_BT[rows])
        inverted_b = self._inverted_B[rows]
        if bool(inverted_b.any()):
            h_bT = torch.where(inverted_b[:, None], self._prepared.inverse(h_bT), h_bT)
        return torch.where(self._tokens(rows), h_bT, 0.0)

    def _tokens(self, rows: slice | Tensor) -> Tensor:
        """(b, T) the compared tokens."""
        return self._mask_BT[rows] & self._member_B[rows, None]

    def _comparison_sets(self) -> tuple[Tensor, int]:
        """Comparison set of each completion, and their number; successes and failures never share one."""
        run, inverted_n = self.run, self._inverted_B[self.run.rows].long()
        if self._options.entropy_axis == "row":
            return torch.arange(len(run.rows), device=run.rows.device), len(run.rows)
        if self._options.entropy_scope == "batch":
            return inverted_n, 2
        return 2 * run.group_n + inverted_n, 2 * run.groups

    def _scales(self, sets: int) -> Tensor:
        """(S, T) for columns, (S, 1) for rows and matrices: |X| / sum X, or 1 / geometric mean of X."""
        geometric = self._options.normaliser == "geomean"
        columns = self._mask_BT.shape[1] if self._options.entropy_axis == "column" else 1
        total = torch.zeros(sets, columns, dtype=torch.float64, device=self._mask_BT.device)
        for local, rows in self.run.blocks:
            x_bT = self._x(rows) if self._only_bT is None else self._only_bT
            if geometric:
                x_bT = torch.where(self._tokens(rows), x_bT, 1.0).log_()
            total.index_add_(0, self._set_n[local], x_bT if columns > 1 else x_bT.sum(dim=1, keepdim=True))
        self._require_finite(total)
        count = self._set_sizes(sets, columns)
        if geometric:
            return torch.exp(-total / count.clamp(min=1.0))
        denominator = total + self._prepared.denominator_eps
        return torch.where(denominator > 0, count / denominator, 0.0)

    def _set_sizes(self, sets: int, columns: int) -> Tensor:
        """|X|: members alive at each position (d_t and h_t of columns), or the members' tokens."""
        member_n = self._member_B[self.run.rows]
        if columns == 1:
            return segment_sum(torch.where(member_n, self._lengths_n, 0), self._set_n, sets)[:, None]
        # A completion of length T is alive at positions 0..T-1: count the ends, then sum from the right.
        ends = torch.zeros(sets * columns, dtype=torch.float64, device=member_n.device)
        ends.index_add_(0, self._set_n * columns + self._lengths_n - 1, member_n.to(torch.float64))
        return ends.view(sets, columns).flip(1).cumsum(1).flip(1)

    def _require_finite(self, total: Tensor) -> None:
        if bool(torch.isfinite(total).all()):
            return
        for local, rows in self.run.blocks:
            x_bT = self._x(rows)
            legal_bT = torch.isfinite(x_bT) & (x_bT > 0)
            bad = (~legal_bT & self._tokens(rows)).nonzero()
            if len(bad):
                row, position = int(self.run.rows[local][bad[0, 0]]), int(bad[0, 1])
                value = float(self._entropies_BT[row, position])
                raise no_share_error(f"entropy {value} at row {row}, position {position}", self._options)


# --------------------------------------------------------------------------------------------------------------------
# Shares of completions
# --------------------------------------------------------------------------------------------------------------------


def sequence_entropies(entropies_BT: Tensor, mask_BT: Tensor, prepared: PreparedEntropy, kind: str) -> Tensor:
    """(B,) float64 mean of each completion's H', arithmetic or geometric (0 if some H' is not positive)."""
    mean_B = torch.zeros(len(mask_BT), dtype=torch.float64, device=mask_BT.device)
    for rows in row_blocks(*mask_BT.shape):
        h_bT = prepared.prepare(entropies_BT[rows])
        if kind == "geometric":
            # The log of 0 is -inf and its exponential 0, as specified; a negative entropy counts as 0 too.
            h_bT = h_bT.clamp_(min=0.0).log_()
        mean_B[rows] = torch.where(mask_BT[rows], h_bT, 0.0).sum(dim=1) / mask_BT[rows].sum(dim=1)
    return mean_B.exp() if kind == "geometric" else mean_B


def sequence_shares(
    x_B: Tensor, member_B: Tensor, set_B: Tensor, sets: int, normaliser: str, denominator_eps: float
) -> Tensor:
    """Share of each member in its comparison set, 0 elsewhere (specification 3.6 step 2)."""
    count_B = segment_sum(member_B, set_B, sets)[set_B]
    if normaliser == "geomean":
        log_B = torch.where(member_B, x_B, 1.0).log()
        centre_B = (segment_sum(log_B, set_B, sets)[set_B] / count_B.clamp(min=1.0)).exp()
        return torch.where(member_B, x_B / centre_B, 0.0)
    total_B = segment_sum(torch.where(member_B, x_B, 0.0), set_B, sets)[set_B] + denominator_eps
    return torch.where(member_B & (total_B > 0), x_B / total_B * count_B, 0.0)


# --------------------------------------------------------------------------------------------------------------------
# Rewards and pools
# --------------------------------------------------------------------------------------------------------------------


def base_rewards(inputs: Inputs, base_reward: str, success_B: Tensor) -> Tensor:
    """r_i of the shaped rewards: 1 on successes and 0 elsewhere, or the reward itself (specification 2.1)."""
    return inputs.batch.rewards if base_reward == "raw" else success_B.to(torch.float64)


def class_pools(
    rewards: Moments,
    group_B: Tensor,
    groups: int,
    classes: Classes,
    options: EntropyOptions,
    ddof: int,
) -> tuple[Tensor, Tensor]:
    """Mean and std that standardise each completion's shaped rewards (specification 3.5 step 4, 3.6 step 3).

    The pool of R+ serves successes, and failures too where the version has one table; that of R- serves failures.

    Args:
        rewards: moments of each completion's own shaped rewards.
        group_B: group number of each completion, below `groups`.
        classes: of the same completions.
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
        mean_B, m2_B = torch.where(valued_B, rewards.mean, 0.0), torch.where(valued_B, rewards.m2, 0.0)
        merged = pool_moments(Moments(count_B, mean_B, torch.where(member_B, m2_B, 0.0)), index_B, pools)
        return merged.mean[index_B], merged.std(ddof)[index_B]

    mean_B, std_B = pool(success_B, failure_B, other_is_zero=options.two_tables)
    if options.two_tables:
        negative_mean_B, negative_std_B = pool(failure_B, success_B, other_is_zero=True)
        mean_B = torch.where(failure_B, negative_mean_B, mean_B)
        std_B = torch.where(failure_B, negative_std_B, std_B)
    return mean_B, std_B
