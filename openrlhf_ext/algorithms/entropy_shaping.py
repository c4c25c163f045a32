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
from openrlhf_ext.algorithms.blocks import row_blocks
from openrlhf_ext.algorithms.groups import Groups, Moments, pool_moments, segment_sum
from openrlhf_ext.algorithms.length_penalty import length_penalty
from openrlhf_ext.algorithms.options import EntropyOptions, GrpoSOptions, GtpoEntropyOptions
from openrlhf_ext.algorithms.registry import register_algorithm

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedEntropy:
    """Entropies as the shares see them (specification 3.5 step 1): clamped, shifted, inverted on failures."""

    entropies_BT: Tensor
    mask_BT: Tensor
    clamp: tuple[float, float] | None
    shift: float
    denominator_eps: float
    inverse_floor: float

    @classmethod
    def of(cls, inputs: Inputs, options: EntropyOptions) -> PreparedEntropy:
        """With the eps mode resolved: either `shift` or `denominator_eps` is entropy_eps, the other 0."""
        shifted = options.eps_mode == "shift"
        return cls(
            entropies_BT=inputs.batch.entropies,
            mask_BT=inputs.batch.mask,
            clamp=options.entropy_clamp,
            shift=options.entropy_eps if shifted else 0.0,
            denominator_eps=0.0 if shifted else options.entropy_eps,
            inverse_floor=getattr(options, "inverse_floor", 0.0),
        )

    def block(self, rows: slice) -> Tensor:
        """(b, T) float64 H'."""
        h_bT = self.entropies_BT[rows].to(torch.float64)
        if self.clamp is not None:
            h_bT = h_bT.clamp(*self.clamp)
        return h_bT + self.shift if self.shift else h_bT

    def inverse(self, h_bT: Tensor) -> Tensor:
        """q = 1/(max(H', inverse_floor) + eps)."""
        if self.inverse_floor:
            h_bT = h_bT.clamp(min=self.inverse_floor)
        return (h_bT + self.denominator_eps if self.denominator_eps else h_bT).reciprocal()


@dataclass(frozen=True)
class ShareTable:
    """rho = x * scale[segment_B]: one scale per comparison set.

    Attributes:
        scale: (S, T) for columns, (S, 1) for rows and matrices, float64.
        segment_B: comparison set of each completion.
    """

    scale: Tensor
    segment_B: Tensor


class EntropyShares:
    """Entropy shares of members: successes compared by H', failures by 1/H' (specification 3.5 step 2)."""

    def __init__(self, inputs: Inputs, options: GtpoEntropyOptions, success_B: Tensor, failure_B: Tensor) -> None:
        self.prepared = PreparedEntropy.of(inputs, options)
        self.options = options
        self.failure_B = failure_B
        self.member_B = success_B | failure_B
        self.lengths_B = inputs.groups.lengths_B
        self.group_ids_B = inputs.batch.group_ids
        self.table = self._build_table(inputs.groups)

    def block(self, rows: slice) -> Tensor:
        """(b, T) float64 shares, 0 outside the members' tokens."""
        scale_bT = self.table.scale[self.table.segment_B[rows]]
        return self._quantity(rows).mul_(scale_bT)

    def _quantity(self, rows: slice) -> Tensor:
        """(b, T) x: H' on successes, q on failures, 0 outside."""
        h_bT = self.prepared.block(rows)
        failure_b = self.failure_B[rows]
        if bool(failure_b.any()):
            h_bT = torch.where(failure_b[:, None], self.prepared.inverse(h_bT), h_bT)
        return torch.where(self._member_tokens(rows), h_bT, 0.0)

    def _member_tokens(self, rows: slice) -> Tensor:
        return self.prepared.mask_BT[rows] & self.member_B[rows, None]

    def _build_table(self, groups: Groups) -> ShareTable:
        segment_B, segments = self._segments(groups)
        geometric = self.options.normaliser == "geomean"
        column = self.options.entropy_axis == "column"
        positions = self.prepared.mask_BT.shape[1]
        total = torch.zeros(
            segments, positions if column else 1, dtype=torch.float64, device=self.prepared.mask_BT.device
        )
        for rows in row_blocks(len(self.member_B), positions):
            x_bT = self._quantity(rows)
            if geometric:
                x_bT = torch.where(self._member_tokens(rows), x_bT, 1.0).log()
            x_bT = x_bT if column else x_bT.sum(dim=1, keepdim=True)
            total.index_add_(0, segment_B[rows], x_bT)
        self._require_finite(total)
        count = self._counts(segment_B, segments, positions if column else 1)
        if geometric:
            return ShareTable(torch.exp(-total / count.clamp(min=1.0)), segment_B)
        denominator = total + self.prepared.denominator_eps
        return ShareTable(torch.where(denominator > 0, count / denominator, 0.0), segment_B)

    def _segments(self, groups: Groups) -> tuple[Tensor, int]:
        """Comparison set of each completion; successes and failures never share one."""
        if self.options.entropy_axis == "row":
            return torch.arange(len(self.member_B), device=self.member_B.device), len(self.member_B)
        failure_B = self.failure_B.long()
        if self.options.entropy_scope == "batch":
            return failure_B, 2
        return 2 * groups.index_B + failure_B, 2 * len(groups)

    def _counts(self, segment_B: Tensor, segments: int, columns: int) -> Tensor:
        """|X|: members alive at each position (columns), or their tokens."""
        lengths_B = torch.where(self.member_B, self.lengths_B, 0)
        if self.options.entropy_axis != "column":
            return segment_sum(lengths_B, segment_B, segments)[:, None]
        # A completion of length T is alive at positions 0..T-1: count ends, then sum from the right.
        ends = torch.zeros(segments * columns, dtype=torch.float64, device=segment_B.device)
        index_B = segment_B * columns + (self.lengths_B - 1)
        ends.index_add_(0, index_B, self.member_B.to(torch.float64))
        return ends.view(segments, columns).flip(1).cumsum(1).flip(1)

    def _require_finite(self, total: Tensor) -> None:
        if bool(torch.isfinite(total).all()):
            return
        for rows in row_blocks(len(self.member_B), self.prepared.mask_BT.shape[1]):
            x_bT = self._quantity(rows)
            bad_bT = ~(torch.isfinite(x_bT) & (x_bT > 0)) & self._member_tokens(rows)
            if bool(bad_bT.any()):
                row, position = bad_bT.nonzero()[0].tolist()
                row += rows.start
                entropy = float(self.prepared.entropies_BT[row, position])
                raise ValueError(
                    f"entropy {entropy} at row {row}, position {position} has no inverse or logarithm after "
                    f"eps_mode {self.options.eps_mode!r} with entropy_eps = {self.options.entropy_eps}; use "
                    "eps_mode 'shift' with entropy_eps > 0"
                )


@dataclass(frozen=True)
class RewardRule:
    """Shaped reward of a token: `clip(base + weight rho) + penalty`, per completion (specification 3.5 step 3).

    `clip` is [low, high] on successes, None for none. All (B,) float64.
    """

    base_B: Tensor
    weight_B: Tensor
    penalty_B: Tensor
    success_B: Tensor
    clip: tuple[float, float] | None

    def apply(self, rho_bT: Tensor, rows: slice) -> Tensor:
        """(b, T) shaped rewards."""
        reward_bT = self.base_B[rows, None] + self.weight_B[rows, None] * rho_bT
        if self.clip is not None:
            reward_bT = torch.where(self.success_B[rows, None], reward_bT.clamp(*self.clip), reward_bT)
        return reward_bT + self.penalty_B[rows, None]


def base_rewards(inputs: Inputs, base_reward: str, success_B: Tensor) -> Tensor:
    """r_i of the shaped rewards: 1 on successes and 0 elsewhere, or the reward itself (specification 2.1)."""
    return inputs.batch.rewards if base_reward == "raw" else success_B.to(torch.float64)


def select_by_class(success_B: Tensor, failure_B: Tensor, on_success: Any, on_failure: Any) -> Tensor:
    """(B,) float64 with one value on successes, another on failures, 0 elsewhere."""
    zero_B = torch.zeros(len(success_B), dtype=torch.float64, device=success_B.device)
    return torch.where(success_B, on_success, torch.where(failure_B, on_failure, zero_B))


def class_pools(
    inputs: Inputs, rows: Moments, success_B: Tensor, failure_B: Tensor, options: EntropyOptions, ddof: int
) -> tuple[Tensor, Tensor]:
    """Mean and std that standardise each completion's shaped rewards (specification 3.5 step 4, 3.6 step 3).

    The table of R+ serves successes, and failures too where the version has one table; R- serves failures.

    Args:
        rows: moments of each completion's own shaped rewards.
    Returns:
        (B,) mean and std, float64.
    """
    batch_wide = options.norm_scope == "batch"
    index_B = torch.zeros_like(inputs.groups.index_B) if batch_wide else inputs.groups.index_B
    pools = 1 if batch_wide else len(inputs.groups)

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
    """GTPO, Group Token Policy Optimization (Tan et al.), versions v1, v1u, v2 (T1) and v6 (T6).

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
        no_one_B = torch.zeros_like(failure_B)
        compared_B = failure_B if self.options.two_tables else no_one_B
        shares = EntropyShares(inputs, self.options, success_B, compared_B)
        rule = self.reward_rule(inputs, success_B, failure_B)
        shares_BT, moments = self._shares_and_moments(inputs, shares, rule)
        mean_B, std_B = class_pools(inputs, moments, success_B, failure_B, self.options, self.options.ddof_tok)
        live_B = (success_B | failure_B) & ~inputs.part.zeroed_B
        if self.options.adv_eps == 0.0:
            require_positive_std(std_B, live_B, inputs.batch.group_ids)
        advantages_BT = self._standardise(inputs, shares, rule, mean_B, std_B, live_B)
        exposed = {
            "shares": shares_BT,
            "success": success_B,
            "failure": failure_B,
            "reward_base": rule.base_B,
            "reward_weight": rule.weight_B,
            "length_penalty": rule.penalty_B,
            "pool_mean": mean_B,
            "pool_std": std_B,
        }
        return {"advantages": advantages_BT, "exposed": exposed}

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
            base_B=select_by_class(success_B, failure_B, base_positive, base_negative),
            weight_B=select_by_class(success_B, failure_B, weight_positive, weight_negative),
            penalty_B=torch.where(success_B | failure_B, penalty_B, 0.0),
            success_B=success_B,
            clip=self._clip(),
        )

    def _positive_formula(self, inputs: Inputs, success_B: Tensor) -> tuple[Tensor | float, float]:
        """Base and entropy weight of R+ on successes."""
        options = self.options
        if options.clipped_positive:
            return options.alpha1, options.alpha2
        reward_B = base_rewards(inputs, options.base_reward, success_B)
        if options.version == "v6":
            return options.alpha1 * reward_B, options.alpha2
        return reward_B, options.alpha

    def _clip(self) -> tuple[float, float] | None:
        """[1, alpha1 + alpha1/kappa] of T1 eq. 11, where it applies."""
        options = self.options
        return (1.0, options.alpha1 + options.alpha1 / options.kappa) if options.clipped_positive else None

    def _shares_and_moments(self, inputs: Inputs, shares: EntropyShares, rule: RewardRule) -> tuple[Tensor, Moments]:
        """Shares of all tokens, and mean and squares of each completion's shaped rewards."""
        mask_BT = inputs.batch.mask
        lengths_B = inputs.groups.lengths_B.to(torch.float64)
        shares_BT = torch.empty(mask_BT.shape, dtype=inputs.batch.float_dtype, device=mask_BT.device)
        mean_B, m2_B = torch.zeros_like(lengths_B), torch.zeros_like(lengths_B)
        for rows in row_blocks(*mask_BT.shape):
            rho_bT = shares.block(rows)
            shares_BT[rows] = rho_bT
            reward_bT = torch.where(mask_BT[rows], rule.apply(rho_bT, rows), 0.0)
            mean_B[rows] = reward_bT.sum(dim=1) / lengths_B[rows]
            centred_bT = torch.where(mask_BT[rows], reward_bT - mean_B[rows, None], 0.0)
            m2_B[rows] = (centred_bT * centred_bT).sum(dim=1)
        return shares_BT, Moments(lengths_B, mean_B, m2_B)

    def _standardise(
        self, inputs: Inputs, shares: EntropyShares, rule: RewardRule, mean_B: Tensor, std_B: Tensor, live_B: Tensor
    ) -> Tensor:
        mask_BT, options = inputs.batch.mask, self.options
        advantages_BT = torch.empty(mask_BT.shape, dtype=inputs.batch.float_dtype, device=mask_BT.device)
        inverse_std_B = torch.where(live_B, 1.0 / (std_B + options.adv_eps), 0.0)
        for rows in row_blocks(*mask_BT.shape):
            reward_bT = rule.apply(shares.block(rows), rows)
            a_bT = (reward_bT - mean_B[rows, None]) * inverse_std_B[rows, None]
            if options.sign_guard:
                a_bT = torch.where(rule.success_B[rows, None], a_bT.clamp(min=0.0), a_bT.clamp(max=0.0))
            advantages_BT[rows] = torch.where(mask_BT[rows] & live_B[rows, None], a_bT, 0.0)
        return advantages_BT

    def derived(self) -> dict[str, Callable[[ShapedBatch], Tensor]]:
        return {
            "Rpos": self._positive_rewards,
            "Rneg": self._negative_rewards,
            "rho_pos": lambda shaped: _where_rows(shaped.success, shaped.shares),
            "rho_neg": lambda shaped: _where_rows(shaped.failure, shaped.shares),
        }

    def _shaped_rewards(self, shaped: ShapedBatch) -> Tensor:
        rule = RewardRule(
            shaped.reward_base, shaped.reward_weight, shaped.length_penalty, shaped.success, self._clip()
        )
        rewards_BT = rule.apply(shaped.shares.to(torch.float64), slice(None)).to(shaped.shares.dtype)
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


def mean_entropies(prepared: PreparedEntropy, lengths_B: Tensor, kind: str) -> Tensor:
    """(B,) float64 mean of each completion's H', arithmetic or geometric (0 if some H' is not positive)."""
    mask_BT = prepared.mask_BT
    mean_B = torch.zeros(len(lengths_B), dtype=torch.float64, device=mask_BT.device)
    for rows in row_blocks(*mask_BT.shape):
        h_bT = prepared.block(rows)
        if kind == "geometric":
            # The log of 0 is -inf and its exponential 0, as specified; a negative entropy counts as 0 too.
            h_bT = h_bT.clamp(min=0.0).log()
        mean_B[rows] = torch.where(mask_BT[rows], h_bT, 0.0).sum(dim=1) / lengths_B[rows]
    return mean_B.exp() if kind == "geometric" else mean_B


def sequence_shares(x_B: Tensor, member_B: Tensor, index_B: Tensor, segments: int, normaliser: str, eps: float) -> Tensor:
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
        prepared = PreparedEntropy.of(inputs, options)
        h_hat_B = mean_entropies(prepared, inputs.groups.lengths_B, options.h_hat)
        share_B = self._shares(inputs, prepared, h_hat_B, success_B, failure_B)
        reward_B = self._shaped_rewards(inputs, share_B, success_B, failure_B)
        ones_B = torch.ones_like(reward_B)
        moments = Moments(ones_B, reward_B, torch.zeros_like(reward_B))
        mean_B, std_B = class_pools(inputs, moments, success_B, failure_B, options, options.ddof_seq)
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
