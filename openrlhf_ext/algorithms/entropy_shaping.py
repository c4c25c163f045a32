"""Entropy-shaped rewards: `gtpo_entropy` per token and `grpo_s` per completion (specification 3.5, 3.6).

H. Tan and J. Pan, "GTPO and GRPO-S: Token and Sequence-Level Reward Shaping with Policy Entropy", arXiv 2508.04349:
T1 is the first text, T6 the version v6.

A correct completion earns more where the policy was uncertain, a wrong one loses more where it was sure. The unit of
comparison is the *entropy share* rho: an entropy (or its inverse, on failures) over the mean of its comparison set.

Everything is computed in float64 over blocks of rows that fit the cache; only results in the batch's dtype are kept.
Shape suffixes: B = completions, T = positions, S = comparison segments, b = rows of one block.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from openrlhf_ext.algorithms.base import (
    Inputs,
    SequenceAlgorithm,
    TokenAlgorithm,
    divide_by_std,
    require_positive_std,
)
from openrlhf_ext.algorithms.batch import ShapedBatch
from openrlhf_ext.algorithms.blocks import group_blocks, row_blocks
from openrlhf_ext.algorithms.groups import Groups, Moments, pool_moments, segment_sum
from openrlhf_ext.algorithms.length_penalty import length_penalty
from openrlhf_ext.algorithms.options import EntropyOptions, GrpoSOptions, GtpoEntropyOptions
from openrlhf_ext.algorithms.registry import register_algorithm

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True)
class ShareTable:
    """rho = x * scale[segment]: one scale per comparison set.

    Attributes:
        scale: (S, T) for columns, (S, 1) for rows and matrices, float64.
        segment_n: comparison set of each completion of the run.
    """

    scale: Tensor
    segment_n: Tensor


@dataclass(frozen=True)
class RewardRule:
    """Shaped reward of a token, affine in its value: `offset + weight value` (specification 3.5 step 3).

    The value is the share rho; with `clip` = (alpha1, alpha2, low, high), it is `clip(alpha1 + alpha2 rho, low, high)`
    on successes. The (B,) float64 offset holds the base and the length penalty.
    """

    offset_B: Tensor
    weight_B: Tensor
    success_B: Tensor
    clip: tuple[float, float, float, float] | None

    def values(self, rho_bT: Tensor, rows: slice | Tensor) -> Tensor:
        """(b, T) what the reward is affine in; `rho_bT` itself without a clip."""
        if self.clip is None:
            return rho_bT
        alpha1, alpha2, low, high = self.clip
        return torch.where(self.success_B[rows, None], (alpha1 + alpha2 * rho_bT).clamp_(low, high), rho_bT)

    def rewards(self, rho_bT: Tensor, rows: slice | Tensor) -> Tensor:
        """(b, T) shaped rewards."""
        return self.offset_B[rows, None] + self.weight_B[rows, None] * self.values(rho_bT, rows)


class TokenShaping:
    """One call of `gtpo_entropy`: fills shares and advantages run by run.

    Attributes:
        shares_BT: entropy shares, 0 outside the compared completions.
        advantages_BT: standardised shaped rewards.
        pool_mean_B, pool_std_B: what each completion's shaped rewards were standardised with, float64.
    """

    def __init__(
        self, inputs: Inputs, options: GtpoEntropyOptions, rule: RewardRule, success_B: Tensor, failure_B: Tensor
    ) -> None:
        self.options = options
        self.prepared = PreparedEntropy.of(options)
        self.rule = rule
        self.success_B, self.failure_B = success_B, failure_B
        self.inverted_B = failure_B if options.two_tables else torch.zeros_like(failure_B)
        self.member_B = success_B | self.inverted_B
        self.live_B = (success_B | failure_B) & ~inputs.part.zeroed_B
        self.lengths_B = inputs.groups.lengths_B
        self.mask_BT = inputs.batch.mask
        self.entropies_BT = inputs.batch.entropies
        self.group_ids_B = inputs.batch.group_ids
        self.shares_BT = torch.empty_like(inputs.batch.entropies, dtype=inputs.batch.float_dtype)
        self.advantages_BT = torch.empty_like(self.shares_BT)
        self.pool_mean_B = torch.zeros_like(rule.offset_B)
        self.pool_std_B = torch.zeros_like(rule.offset_B)

    def shape(self, run: Run) -> None:
        """Shares, pools and advantages of the completions of a run."""
        # A single block is computed once and kept; several are recomputed per stage, to keep memory small.
        kept_bT = self._quantity(run.blocks[0][1]) if len(run.blocks) == 1 else None
        table = self._table(run, kept_bT)
        if kept_bT is not None:
            kept_bT.mul_(table.scale[table.segment_n])
        moments = self._moments(run, table, kept_bT)
        mean_n, std_n = class_pools(
            moments,
            run.group_n,
            run.groups,
            self.success_B[run.rows],
            self.failure_B[run.rows],
            self.options,
            self.options.ddof_tok,
        )
        self.pool_mean_B[run.rows], self.pool_std_B[run.rows] = mean_n, std_n
        self._standardise(run, table, kept_bT)

    def _quantity(self, rows: slice | Tensor) -> Tensor:
        """(b, T) x: H' on successes, q on failures, 0 outside the compared tokens."""
        h_bT = self.prepared.prepare(self.entropies_BT[rows])
        inverted_b = self.inverted_B[rows]
        if bool(inverted_b.any()):
            h_bT = torch.where(inverted_b[:, None], self.prepared.inverse(h_bT), h_bT)
        return torch.where(self._tokens(rows, self.member_B), h_bT, 0.0)

    def _tokens(self, rows: slice | Tensor, flags_B: Tensor) -> Tensor:
        return self.mask_BT[rows] & flags_B[rows, None]

    def _shares(self, rows: slice | Tensor, local: slice, table: ShareTable, kept_bT: Tensor | None) -> Tensor:
        if kept_bT is not None:
            return kept_bT
        return self._quantity(rows).mul_(table.scale[table.segment_n[local]])

    # ---- shares ----

    def _table(self, run: Run, kept_bT: Tensor | None) -> ShareTable:
        segment_n, segments = self._segments(run)
        geometric = self.options.normaliser == "geomean"
        columns = self.mask_BT.shape[1] if self.options.entropy_axis == "column" else 1
        total = torch.zeros(segments, columns, dtype=torch.float64, device=self.mask_BT.device)
        for local, rows in run.blocks:
            x_bT = self._quantity(rows) if kept_bT is None else kept_bT
            if geometric:
                x_bT = torch.where(self._tokens(rows, self.member_B), x_bT, 1.0).log_()
            total.index_add_(0, segment_n[local], x_bT if columns > 1 else x_bT.sum(dim=1, keepdim=True))
        self._require_finite(run, total)
        count = self._counts(run, segment_n, segments, columns)
        if geometric:
            return ShareTable(torch.exp(-total / count.clamp(min=1.0)), segment_n)
        denominator = total + self.prepared.denominator_eps
        return ShareTable(torch.where(denominator > 0, count / denominator, 0.0), segment_n)

    def _segments(self, run: Run) -> tuple[Tensor, int]:
        """Comparison set of each completion; successes and failures never share one."""
        if self.options.entropy_axis == "row":
            return torch.arange(len(run.rows), device=run.rows.device), len(run.rows)
        inverted_n = self.inverted_B[run.rows].long()
        if self.options.entropy_scope == "batch":
            return inverted_n, 2
        return 2 * run.group_n + inverted_n, 2 * run.groups

    def _counts(self, run: Run, segment_n: Tensor, segments: int, columns: int) -> Tensor:
        """|X|: members alive at each position (columns), or the members' tokens."""
        member_n, lengths_n = self.member_B[run.rows], self.lengths_B[run.rows]
        if columns == 1:
            return segment_sum(torch.where(member_n, lengths_n, 0), segment_n, segments)[:, None]
        # A completion of length T is alive at positions 0..T-1: count the ends, then sum from the right.
        ends = torch.zeros(segments * columns, dtype=torch.float64, device=segment_n.device)
        ends.index_add_(0, segment_n * columns + lengths_n - 1, member_n.to(torch.float64))
        return ends.view(segments, columns).flip(1).cumsum(1).flip(1)

    def _require_finite(self, run: Run, total: Tensor) -> None:
        if bool(torch.isfinite(total).all()):
            return
        for local, rows in run.blocks:
            x_bT = self._quantity(rows)
            legal_bT = torch.isfinite(x_bT) & (x_bT > 0)
            bad = (~legal_bT & self._tokens(rows, self.member_B)).nonzero()
            if len(bad):
                row, position = int(run.rows[local][bad[0, 0]]), int(bad[0, 1])
                raise ValueError(
                    f"entropy {float(self.entropies_BT[row, position])} at row {row}, position {position} has no "
                    f"inverse or logarithm with eps_mode {self.options.eps_mode!r}, entropy_eps = "
                    f"{self.options.entropy_eps}; use eps_mode 'shift' with entropy_eps > 0"
                )

    # ---- advantages ----

    def _moments(self, run: Run, table: ShareTable, kept_bT: Tensor | None) -> Moments:
        """Moments of each completion's shaped rewards; stores the shares on the way."""
        lengths_n = self.lengths_B[run.rows].to(torch.float64)
        mean_n, m2_n = torch.zeros_like(lengths_n), torch.zeros_like(lengths_n)
        for local, rows in run.blocks:
            rho_bT = self._shares(rows, local, table, kept_bT)
            self.shares_BT[rows] = rho_bT.to(self.shares_BT.dtype)
            value_bT = self.rule.values(rho_bT, rows)
            mask_bT = self.mask_BT[rows]
            if value_bT is not rho_bT:
                value_bT = torch.where(mask_bT, value_bT, 0.0)
            mean_n[local] = value_bT.sum(dim=1) / lengths_n[local]
            centred_bT = torch.where(mask_bT, value_bT - mean_n[local, None], 0.0)
            m2_n[local] = torch.linalg.vector_norm(centred_bT, dim=1) ** 2
        weight_n = self.rule.weight_B[run.rows]
        return Moments(lengths_n, self.rule.offset_B[run.rows] + weight_n * mean_n, weight_n**2 * m2_n)

    def _standardise(self, run: Run, table: ShareTable, kept_bT: Tensor | None) -> None:
        inverse_std_B = torch.where(self.live_B, 1.0 / (self.pool_std_B + self.options.adv_eps), 0.0)
        slope_B = self.rule.weight_B * inverse_std_B
        shift_B = (self.rule.offset_B - self.pool_mean_B) * inverse_std_B
        for local, rows in run.blocks:
            value_bT = self.rule.values(self._shares(rows, local, table, kept_bT), rows)
            a_bT = value_bT.mul_(slope_B[rows, None]).add_(shift_B[rows, None])
            if self.options.sign_guard:
                a_bT = torch.where(self.success_B[rows, None], a_bT.clamp(min=0.0), a_bT.clamp(max=0.0))
            tokens_bT = self._tokens(rows, self.live_B)
            self.advantages_BT[rows] = torch.where(tokens_bT, a_bT, 0.0).to(self.advantages_BT.dtype)


def base_rewards(inputs: Inputs, base_reward: str, success_B: Tensor) -> Tensor:
    """r_i of the shaped rewards: 1 on successes and 0 elsewhere, or the reward itself (specification 2.1)."""
    return inputs.batch.rewards if base_reward == "raw" else success_B.to(torch.float64)


def select_by_class(success_B: Tensor, failure_B: Tensor, on_success: Any, on_failure: Any) -> Tensor:
    """(B,) float64 with one value on successes, another on failures, 0 elsewhere."""
    zero_B = torch.zeros(len(success_B), dtype=torch.float64, device=success_B.device)
    return torch.where(success_B, on_success, torch.where(failure_B, on_failure, zero_B))


def class_pools(
    rows: Moments,
    group_B: Tensor,
    groups: int,
    success_B: Tensor,
    failure_B: Tensor,
    options: EntropyOptions,
    ddof: int,
) -> tuple[Tensor, Tensor]:
    """Mean and std that standardise each completion's shaped rewards (specification 3.5 step 4, 3.6 step 3).

    The table of R+ serves successes, and failures too where the version has one table; R- serves failures.

    Args:
        rows: moments of each completion's own shaped rewards.
        group_B: group number of each completion, below `groups`.
    Returns:
        (B,) mean and std, float64.
    """
    batch_wide = options.norm_scope == "batch"
    index_B = torch.zeros_like(group_B) if batch_wide else group_B
    pools = 1 if batch_wide else groups

    def pool(own_B: Tensor, other_B: Tensor, *, other_is_zero: bool) -> tuple[Tensor, Tensor]:
        member_B = own_B if options.adv_pool == "own" else own_B | other_B
        valued_B = own_B if other_is_zero else own_B | other_B
        count_B = torch.where(member_B, rows.count, 0.0)
        mean_B, m2_B = torch.where(valued_B, rows.mean, 0.0), torch.where(valued_B, rows.m2, 0.0)
        merged = pool_moments(Moments(count_B, mean_B, torch.where(member_B, m2_B, 0.0)), index_B, pools)
        return merged.mean[index_B], merged.std(ddof)[index_B]

    mean_B, std_B = pool(success_B, failure_B, other_is_zero=options.two_tables)
    if options.two_tables:
        negative_mean_B, negative_std_B = pool(failure_B, success_B, other_is_zero=True)
        mean_B = torch.where(failure_B, negative_mean_B, mean_B)
        std_B = torch.where(failure_B, negative_std_B, std_B)
    return mean_B, std_B


@register_algorithm("gtpo_entropy", GtpoEntropyOptions)
class GtpoEntropy(TokenAlgorithm):
    """Group Token Policy Optimization (Tan et al.), versions v1, v1u, v2 (T1) and v6 (T6).

    R+ = alpha1 r + alpha2 rho+ on successes, R- = -alpha1 - alpha2 rho- on failures (v6, T6 eq. 3-7); each table is
    standardised over its token pool and gives the token advantages.
    """

    needs: ClassVar[tuple[str, ...]] = ("entropies",)

    def __init__(self, options: GtpoEntropyOptions, **parts: Any) -> None:
        super().__init__(options, **parts)
        if options.version == "v2" and not options.sign_guard:
            logger.warning(
                "gtpo_entropy v2 gives some tokens of wrong completions a positive advantage (specification T-8); "
                "version v6 or sign_guard = true cures it"
            )

    def advantages(self, inputs: Inputs) -> dict[str, Any]:
        success_B = inputs.part.success_B & inputs.part.kept_B
        failure_B = inputs.part.failure_B & inputs.part.kept_B
        rule = self.reward_rule(inputs, success_B, failure_B)
        shaping = TokenShaping(inputs, self.options, rule, success_B, failure_B)
        for run in make_runs(inputs.groups, inputs.batch.mask.shape[1], self._batch_wide()):
            shaping.shape(run)
        if self.options.adv_eps == 0.0:
            require_positive_std(shaping.pool_std_B, shaping.live_B, inputs.batch.group_ids)
        exposed = {
            "shares": shaping.shares_BT,
            "success": success_B,
            "failure": failure_B,
            "reward_offset": rule.offset_B,
            "reward_weight": rule.weight_B,
            "pool_mean": shaping.pool_mean_B,
            "pool_std": shaping.pool_std_B,
        }
        return {"advantages": shaping.advantages_BT, "exposed": exposed}

    def _batch_wide(self) -> bool:
        """Some statistic spans the groups."""
        compares_groups = self.options.entropy_scope == "batch" and self.options.entropy_axis != "row"
        return compares_groups or self.options.norm_scope == "batch"

    def reward_rule(self, inputs: Inputs, success_B: Tensor, failure_B: Tensor) -> RewardRule:
        """The version's formula as one affine rule per completion."""
        options = self.options
        base_positive, weight_positive = self._positive_formula(inputs, success_B)
        base_negative, weight_negative = 0.0, 0.0
        if options.version == "v6":
            base_negative, weight_negative = -options.alpha1, -options.alpha2
        elif options.version == "v2":
            weight_negative = -1.0
        penalty_B = length_penalty(inputs.groups, inputs.part, options)
        return RewardRule(
            offset_B=select_by_class(success_B, failure_B, base_positive + penalty_B, base_negative + penalty_B),
            weight_B=select_by_class(success_B, failure_B, weight_positive, weight_negative),
            success_B=success_B,
            clip=self._clip(),
        )

    def _positive_formula(self, inputs: Inputs, success_B: Tensor) -> tuple[Tensor | float, float]:
        """Base of R+ on successes, and the weight of what is added to it."""
        options = self.options
        if options.clipped_positive:
            return 0.0, 1.0
        reward_B = base_rewards(inputs, options.base_reward, success_B)
        if options.version == "v6":
            return options.alpha1 * reward_B, options.alpha2
        return reward_B, options.alpha

    def _clip(self) -> tuple[float, float, float, float] | None:
        """alpha1, alpha2 and the interval [1, alpha1 + alpha1/kappa] of T1 eq. 11, where it applies."""
        options = self.options
        if not options.clipped_positive:
            return None
        return options.alpha1, options.alpha2, 1.0, options.alpha1 + options.alpha1 / options.kappa

    def derived(self) -> dict[str, Callable[[ShapedBatch], Tensor]]:
        return {
            "Rpos": self._positive_rewards,
            "Rneg": self._negative_rewards,
            "rho_pos": lambda shaped: _where_rows(shaped.success, shaped.shares),
            "rho_neg": lambda shaped: _where_rows(shaped.failure, shaped.shares),
        }

    def _shaped_rewards(self, shaped: ShapedBatch) -> Tensor:
        rule = RewardRule(shaped.reward_offset, shaped.reward_weight, shaped.success, self._clip())
        rewards_BT = rule.rewards(shaped.shares.to(torch.float64), slice(None)).to(shaped.shares.dtype)
        return torch.where(shaped.mask & (shaped.success | shaped.failure)[:, None], rewards_BT, 0.0)

    def _positive_rewards(self, shaped: ShapedBatch) -> Tensor:
        rewards_BT = self._shaped_rewards(shaped)
        return _where_rows(shaped.success, rewards_BT) if self.options.two_tables else rewards_BT

    def _negative_rewards(self, shaped: ShapedBatch) -> Tensor:
        rewards_BT = self._shaped_rewards(shaped)
        return _where_rows(shaped.failure, rewards_BT) if self.options.two_tables else torch.zeros_like(rewards_BT)


def _where_rows(rows_B: Tensor, values_BT: Tensor) -> Tensor:
    return torch.where(rows_B[:, None], values_BT, 0.0)


# --------------------------------------------------------------------------------------------------------------------
# GRPO-S
# --------------------------------------------------------------------------------------------------------------------


def sequence_entropies(prepared: PreparedEntropy, entropies_BT: Tensor, mask_BT: Tensor, kind: str) -> Tensor:
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
    x_B: Tensor, member_B: Tensor, index_B: Tensor, segments: int, normaliser: str, eps: float
) -> Tensor:
    """Share of each member among the members of its segment, 0 elsewhere (specification 3.6 step 2)."""
    count_B = segment_sum(member_B, index_B, segments)[index_B]
    if normaliser == "geomean":
        log_B = torch.where(member_B, x_B, 1.0).log()
        centre_B = (segment_sum(log_B, index_B, segments)[index_B] / count_B.clamp(min=1.0)).exp()
        return torch.where(member_B, x_B / centre_B, 0.0)
    total_B = segment_sum(torch.where(member_B, x_B, 0.0), index_B, segments)[index_B] + eps
    return torch.where(member_B & (total_B > 0), x_B / total_B * count_B, 0.0)


@register_algorithm("grpo_s", GrpoSOptions)
class GrpoS(SequenceAlgorithm):
    """GRPO-S, sequence-level entropy shaping (Tan et al.), versions v1, v2 (T1) and v6 (T6).

    r+ = beta1 r + beta2 share(mean entropy) on successes, r- = -beta1 - beta2 share(1/mean entropy) on failures (v6,
    T6 eq. 9); standardised over the sequences.
    """

    needs: ClassVar[tuple[str, ...]] = ("entropies",)

    @property
    def ratio_kind(self) -> str:
        return self.options.w_hat

    def advantages(self, inputs: Inputs) -> dict[str, Any]:
        part, options = inputs.part, self.options
        success_B, failure_B = part.success_B & part.kept_B, part.failure_B & part.kept_B
        prepared = PreparedEntropy.of(options)
        h_hat_B = sequence_entropies(prepared, inputs.batch.entropies, inputs.batch.mask, options.h_hat)
        share_B = self._shares(inputs, prepared, h_hat_B, success_B, failure_B)
        reward_B = self._shaped_rewards(inputs, share_B, success_B, failure_B)
        ones_B = torch.ones_like(reward_B)
        moments = Moments(ones_B, reward_B, torch.zeros_like(reward_B))
        groups = inputs.groups
        mean_B, std_B = class_pools(
            moments, groups.index_B, len(groups), success_B, failure_B, options, options.ddof_seq
        )
        live_B = (success_B | failure_B) & ~part.zeroed_B
        if options.version == "v1" and options.adv_pool == "own":
            live_B = live_B & self._pool_has_success(inputs, success_B)
        centred_B = torch.where(live_B, reward_B - mean_B, 0.0)
        advantages_B = divide_by_std(centred_B, std_B, options.adv_eps, live_B, inputs.batch.group_ids)
        positive_B = success_B if options.two_tables else success_B | failure_B
        return {
            "seq_advantages": advantages_B,
            "exposed": {
                "H_hat": h_hat_B,
                "share": share_B,
                "Rpos": torch.where(positive_B, reward_B, 0.0),
                "Rneg": torch.where(failure_B & ~positive_B, reward_B, 0.0),
                "pool_mean": mean_B,
                "pool_std": std_B,
            },
        }

    def _shares(
        self, inputs: Inputs, prepared: PreparedEntropy, h_hat_B: Tensor, success_B: Tensor, failure_B: Tensor
    ) -> Tensor:
        """(B,) share of H_hat among successes, of 1/H_hat among failures, 0 elsewhere."""
        options, eps = self.options, prepared.denominator_eps
        compared_B = failure_B if options.two_tables else torch.zeros_like(failure_B)
        x_B = torch.where(compared_B, 1.0 / (h_hat_B + eps), h_hat_B)
        member_B = success_B | compared_B
        illegal_B = ~torch.isfinite(x_B) | ((x_B <= 0) & (options.normaliser == "geomean"))
        if bool((illegal_B & member_B).any()):
            row = int((illegal_B & member_B).nonzero()[0])
            raise ValueError(
                f"mean entropy {float(h_hat_B[row])} of row {row} has no inverse or logarithm with eps_mode "
                f"{options.eps_mode!r}, entropy_eps = {options.entropy_eps}; use eps_mode 'shift', entropy_eps > 0"
            )
        segment_B = compared_B.long()
        if options.entropy_scope == "group":
            segment_B = 2 * inputs.groups.index_B + segment_B
        segments = 2 * max(1, len(inputs.groups))
        return sequence_shares(x_B, member_B, segment_B, segments, options.normaliser, eps)

    def _shaped_rewards(self, inputs: Inputs, share_B: Tensor, success_B: Tensor, failure_B: Tensor) -> Tensor:
        options = self.options
        reward_B = base_rewards(inputs, options.base_reward, success_B)
        if options.version == "v6":
            positive_B = options.beta1 * reward_B + options.beta2 * share_B
            negative_B = -options.beta1 - options.beta2 * share_B
        else:
            positive_B = reward_B + options.beta * share_B
            negative_B = -share_B if options.version == "v2" else torch.zeros_like(share_B)
        penalty_B = length_penalty(inputs.groups, inputs.part, options)
        return select_by_class(success_B, failure_B, positive_B + penalty_B, negative_B + penalty_B)

    def _pool_has_success(self, inputs: Inputs, success_B: Tensor) -> Tensor:
        """(B,) the pool that standardises the completion has a success in it."""
        if self.options.norm_scope == "batch":
            return success_B.any().expand_as(success_B)
        return inputs.groups.any(success_B)[inputs.groups.index_B]
