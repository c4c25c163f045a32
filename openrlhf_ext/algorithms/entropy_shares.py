"""Entropy shares of tokens: an entropy (on failures its inverse) over the mean of its comparison set.

Specification 3.5, steps 1 and 2. Everything is computed in float64 over blocks of rows that fit the cache; only results
in the batch's dtype are kept.
Shape suffixes: B = completions, T = positions, S = comparison sets, n = completions of a run, b = rows of one block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from openrlhf_ext.algorithms.base import Inputs
from openrlhf_ext.algorithms.blocks import group_blocks
from openrlhf_ext.algorithms.class_pools import Classes
from openrlhf_ext.algorithms.groups import Groups, segment_sum
from openrlhf_ext.algorithms.option_blocks import EntropyOptions


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
