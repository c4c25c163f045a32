"""`gtpo_entropy`: rewards per token, shaped by entropy.

H. Tan and J. Pan, "GTPO and GRPO-S: Token and Sequence-Level Reward Shaping with Policy Entropy",
arXiv 2508.04349. T1 is the first version of the paper, T6 version v6.

Shape suffixes: B = completions, N = tokens of all completions, R = completions of a cohort, b and n
= completions and tokens of one block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from openrlhf_ext.algorithms import Inputs, LossBatch, TokenAlgorithm, option, register_algorithm
from openrlhf_ext.algorithms.base import Derived
from openrlhf_ext.algorithms.entropy_shaping import (
    Classes,
    TokenShares,
    base_rewards,
    class_pools,
    make_cohorts,
)
from openrlhf_ext.algorithms.groups import Moments
from openrlhf_ext.algorithms.length_penalty import length_penalty
from openrlhf_ext.algorithms.losses import require_positive_std
from openrlhf_ext.algorithms.option_blocks import (
    Ddof,
    Degenerate,
    EntropyShapingOptions,
    KLOptions,
    ScopeOptions,
    clip_high,
    degenerate,
)
from openrlhf_ext.algorithms.segments import Block
from openrlhf_ext.options import Float, Violation, no_effect


class GtpoEntropyOptions(EntropyShapingOptions, KLOptions, ScopeOptions):
    version: Literal["v1", "v1u", "v2", "v6"] = option("v6", "formula of the shaped reward")
    alpha: Float = option(0.1, "v1, v2: entropy weight", ge=0)
    alpha1: Float | None = option(
        None, "base weight; required for v6, v1u and v2_positive v1u", recommended=1.0, ge=0
    )
    alpha2: Float | None = option(
        None, "entropy weight; required for v6, v1u and v2_positive v1u", recommended=0.1, ge=0
    )
    kappa: Float | None = option(None, "v1u: upper clip alpha1 (1 + 1/kappa); required there", gt=1)
    v2_positive: Literal["v1", "v1u"] = option("v1", "v2: formula for successful completions")
    entropy_axis: Literal["column", "row", "matrix"] = option(
        "column", "entropies compared at equal positions, inside a completion, or all together"
    )
    inverse_floor: Float = option(
        0.0, "lower bound of the entropy before it is inverted, nats", ge=0
    )
    ddof_tok: Ddof = option(0, "std of token pools: 0 population, 1 sample")
    sign_guard: bool = option(
        False, "clamp advantages to >= 0 on successes and <= 0 on failures; in no paper"
    )
    degenerate: Degenerate = degenerate("drop")
    clip_high: Float | None = clip_high(0.28)

    @property
    def clipped_positive(self) -> bool:
        """Successful completions use the clipped reward of T1 eq. 11."""
        return self.version == "v1u" or (self.version == "v2" and self.v2_positive == "v1u")

    @property
    def two_tables(self) -> bool:
        """Failures have their own shaped rewards."""
        return self.version in ("v2", "v6")

    def violations(self) -> Iterator[Violation]:
        yield from super().violations()
        if self.version == "v6" or self.clipped_positive:
            needed = (
                ("alpha1", "alpha2", "kappa") if self.clipped_positive else ("alpha1", "alpha2")
            )
            missing = list(self.missing(needed, self.version))
            yield from missing
            if self.clipped_positive and not missing:
                yield from self._clip_violations()
        if self.version == "v6" and self.alpha1 == self.alpha2 == 0:
            message = (
                "alpha1 = alpha2 = 0 makes all shaped rewards 0; raise one of them (published: "
                "1.0, 0.1)"
            )
            yield Violation(("alpha1", "alpha2"), message)

    def _clip_violations(self) -> Iterator[Violation]:
        upper = self.given("alpha1") * (1 + 1 / self.given("kappa"))
        if upper < 1:
            yield Violation(
                ("alpha1", "kappa"),
                f"the clip interval [1, alpha1 (1 + 1/kappa)] is empty: alpha1 = {self.alpha1}, "
                f"kappa = {self.kappa} give an upper end of {upper:.6g}; raise alpha1 or lower "
                "kappa",
            )

    def cautions(self) -> Iterator[str]:
        yield from super().cautions()
        if self.v2_positive != "v1" and self.version != "v2":
            yield no_effect(
                "v2_positive", self.v2_positive, f"version {self.version} does not read it"
            )
        if self.alpha != type(self).model_fields["alpha"].default and self.version not in (
            "v1",
            "v2",
        ):
            yield no_effect(
                "alpha",
                self.alpha,
                f"version {self.version} does not read it",
                "use alpha1 and alpha2",
            )
        if self.version != "v6" and not self.clipped_positive:
            for name in ("alpha1", "alpha2"):
                if (given := getattr(self, name)) is not None:
                    yield no_effect(
                        name, given, f"version {self.version} does not read it", "use alpha"
                    )
        if self.kappa is not None and not self.clipped_positive:
            yield no_effect("kappa", self.kappa, "only version v1u and v2_positive v1u read it")
        if self.version == "v2" and not self.sign_guard:
            yield (
                "version v2 gives some tokens of wrong completions a positive advantage: their "
                "mean is below 0, and those of high entropy get about 0; version v6 or "
                "sign_guard = true cures it"
            )
        if self.clipped_positive and abs(self.given("alpha1") + self.given("alpha2") - 1) > 1e-9:
            yield f"the paper requires alpha1 + alpha2 = 1 here, got {self.alpha1} + {self.alpha2}"


@dataclass(frozen=True)
class TokenReward:
    """Shaped rewards R = offset + weight x of each completion's tokens: R+ on P, R- on N, 0
    elsewhere.

    x is the share rho, or its clipped form on P. The (B,) float64 offset contains the base reward
    and the length penalty.
    """

    options: GtpoEntropyOptions
    offset_B: Tensor
    weight_B: Tensor
    success_B: Tensor

    def x(self, rho_n: Tensor, block: Block) -> Tensor:
        """(n,) `rho_n` itself, or clip(alpha1 + alpha2 rho, 1, alpha1 + alpha1/kappa) on P (T1 eq.
        11)."""
        if not self.options.clipped_positive:
            return rho_n
        alpha1, alpha2, kappa = (self.options.given(name) for name in ("alpha1", "alpha2", "kappa"))
        clipped_n = (alpha1 + alpha2 * rho_n).clamp_(1.0, alpha1 + alpha1 / kappa)
        return torch.where(block.spread(self.success_B[block.rows]), clipped_n, rho_n)

    def rewards(self, rho_n: Tensor, block: Block) -> Tensor:
        """(n,) R."""
        offset_n, weight_n = (
            block.spread(self.offset_B[block.rows]),
            block.spread(self.weight_B[block.rows]),
        )
        return offset_n + weight_n * self.x(rho_n, block)

    def moments(self, shares: TokenShares, lengths_B: Tensor) -> Moments:
        """(R,) moments of each completion's R, from those of x."""
        lengths_R = lengths_B[shares.cohort.rows].to(torch.float64)
        mean_R, m2_R = torch.zeros_like(lengths_R), torch.zeros_like(lengths_R)
        for local, block, rho_n in shares:
            x_n = self.x(rho_n, block)
            mean_R[local] = block.sums(x_n) / lengths_R[local]
            m2_R[local] = block.sums((x_n - block.spread(mean_R[local])).square_())
        offset_R, weight_R = self.offset_B[shares.cohort.rows], self.weight_B[shares.cohort.rows]
        return Moments(lengths_R, offset_R + weight_R * mean_R, weight_R**2 * m2_R)


@register_algorithm("gtpo_entropy", GtpoEntropyOptions)
class GtpoEntropy(TokenAlgorithm):
    """Group Token Policy Optimization (Tan et al.): tokens of correct completions earn more where
    the policy was uncertain, tokens of wrong ones lose more where it was sure.

    P are the successes of a prompt and N its failures, d_t and h_t of them alive at position t; H'
    = clamp(H) + eps.

        rho+_it = H'_it / (sum of H'_kt over k in P) d_t            share on P, T1 eq. 2
        rho-_it = (1/H'_it) / (sum of 1/H'_kt over k in N) h_t      share on N, T1 eq. 13
        R+_it = alpha1 r_i + alpha2 rho+_it                         reward, 0 on N, T6 eq. 3-7 (v6)
        R-_it = -alpha1 - alpha2 rho-_it                            reward, 0 on P, T6 eq. 3-7 (v6)
        A_it = (R_it - mean R)/(std R + adv_eps)                    advantage, T1 eq. 3, 14-15
        J = mean over all tokens of f(w_it, A_it)                   objective, T1 eq. 4, 16

    R is R+ on P and R- on N; f is the clipped surrogate. The rewards of v1 (T1 eq. 2), v1u (T1 eq.
    11-12) and v2 (T1 eq. 2, 13) are in `reward`.
    """

    needs = ("entropies",)

    def advantages(self, inputs: Inputs) -> dict[str, Any]:
        """Compute share, reward, pools and advantage, one cohort after another."""
        options, batch, groups = self.options, inputs.batch, inputs.groups
        classes = Classes.of(inputs.part, options.two_tables)
        penalty_B = length_penalty(inputs, options)
        reward = self.reward(inputs, classes, penalty_B)
        rho_N = torch.empty_like(batch["entropies"], dtype=batch.float_dtype)
        a_N = torch.empty_like(rho_N)
        mean_B, std_B = torch.zeros_like(reward.offset_B), torch.zeros_like(reward.offset_B)
        for cohort in make_cohorts(groups, batch.segments, self._batch_wide()):
            # rho+ on P, rho- on N
            shares = TokenShares(inputs, options, options.entropy_axis, classes, cohort)
            moments = reward.moments(shares, groups.lengths_B)  # of each completion's R+ or R-
            mean_B[cohort.rows], std_B[cohort.rows] = class_pools(
                moments,
                cohort.group_R,
                cohort.groups,
                classes.rows(cohort.rows),
                options,
                options.ddof_tok,
                options.two_tables,
            )
            for _, block, rho_n in shares:
                rho_N[block.tokens] = rho_n.to(rho_N.dtype)
                a_n = self._standardized(
                    reward, rho_n, block, mean_B[block.rows], std_B[block.rows], classes
                )
                a_N[block.tokens] = a_n.to(a_N.dtype)
        if options.adv_eps == 0.0:
            require_positive_std(std_B, classes.live_B, batch.group_ids)
        exposed = {
            "shares": rho_N,
            "success": classes.success_B,
            "inverted": classes.inverted_B,
            "reward_offset": reward.offset_B,
            "reward_weight": reward.weight_B,
            "pool_mean": mean_B,
            "pool_std": std_B,
        }
        return {"advantages": a_N, "rewards": batch.rewards + penalty_B, "exposed": exposed}

    def reward(self, inputs: Inputs, classes: Classes, penalty_B: Tensor) -> TokenReward:
        """The version's R+ and R-, each as (offset, weight) of the share, with the length penalty
        on every token."""
        options = self.options
        r_B = base_rewards(inputs, options.base_reward, classes.success_B)
        positive: tuple[Any, Any] = (r_B, options.alpha)  # v1: R+ = r + alpha rho+, T1 eq. 2
        negative: tuple[Any, Any] = (0.0, 0.0)
        if options.version == "v2":
            negative = (0.0, -1.0)  # R- = -rho-, T1 eq. 13
        elif options.version == "v6":
            positive, negative = (
                (options.alpha1 * r_B, options.alpha2),
                (-options.alpha1, -options.alpha2),
            )
        if options.clipped_positive:
            positive = (0.0, 1.0)  # R+ = x, the clipped form of T1 eq. 11
        offset_B = classes.select(positive[0] + penalty_B, negative[0] + penalty_B)
        return TokenReward(
            options, offset_B, classes.select(positive[1], negative[1]), classes.success_B
        )

    def _standardized(
        self,
        reward: TokenReward,
        rho_n: Tensor,
        block: Block,
        mean_b: Tensor,
        std_b: Tensor,
        classes: Classes,
    ) -> Tensor:
        """(n,) A = (R - mean R)/(std R + adv_eps) as `slope x + shift`, with R = offset + weight x;
        0 if not live."""
        rows = block.rows
        scale_b = torch.where(classes.live_B[rows], 1.0 / (std_b + self.options.adv_eps), 0.0)
        slope_n = block.spread(reward.weight_B[rows] * scale_b)
        shift_n = block.spread((reward.offset_B[rows] - mean_b) * scale_b)
        a_n = slope_n.mul_(reward.x(rho_n, block)).add_(shift_n)
        if not self.options.sign_guard:
            return a_n
        return torch.where(
            block.spread(classes.success_B[rows]), a_n.clamp(min=0.0), a_n.clamp(max=0.0)
        )

    def _batch_wide(self) -> bool:
        """Whether a statistic spans several groups."""
        compares_groups = (
            self.options.entropy_scope == "batch" and self.options.entropy_axis != "row"
        )
        return compares_groups or self.options.norm_scope == "batch"

    def derived(self) -> Derived:
        return {
            "Rpos": lambda shaped: self._rewards(shaped, ~shaped["inverted"]),
            "Rneg": lambda shaped: self._rewards(shaped, shaped["inverted"]),
            "rho_pos": lambda shaped: _on(shaped, shaped["success"], shaped["shares"]),
            "rho_neg": lambda shaped: _on(shaped, shaped["inverted"], shaped["shares"]),
        }

    def _rewards(self, shaped: LossBatch, rows_B: Tensor) -> Tensor:
        """(N,) shaped rewards of these completions, 0 elsewhere."""
        reward = TokenReward(
            self.options, shaped["reward_offset"], shaped["reward_weight"], shaped["success"]
        )
        whole = shaped.segments.block(slice(None))
        rewards_N = reward.rewards(shaped["shares"].to(torch.float64), whole).to(
            shaped["shares"].dtype
        )
        return _on(shaped, rows_B, rewards_N)


def _on(shaped: LossBatch, rows_B: Tensor, values_N: Tensor) -> Tensor:
    """(N,) the values of these completions, 0 elsewhere."""
    return torch.where(shaped.segments.spread(rows_B), values_N, 0.0)
