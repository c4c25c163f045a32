"""GRPO, DAPO, Dr. GRPO, GSPO and the entropy baselines over them (specification 3.1 - 3.4, 3.8, 3.9).

Formulas are per prompt, of G completions with T_i tokens and (penalised) rewards r_i; the mean over prompts is left
out. `f(w, A) = min(w A, clip(w, 1 - clip_low, 1 + clip_high) A)`, `w_it = exp(new_it - old_it)`. Equation numbers are
those of the paper named, as far as its text could be consulted.

Shape suffixes: B = completions, T = positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from openrlhf_ext.algorithms.base import (
    Inputs,
    SequenceAlgorithm,
    TokenAlgorithm,
    broadcast,
    group_advantages,
    penalised_rewards,
    tokens_of,
)
from openrlhf_ext.algorithms.batch import ShapedBatch
from openrlhf_ext.algorithms.blocks import row_blocks, row_counts
from openrlhf_ext.algorithms.option_blocks import (
    AggregationOptions,
    ClipOptions,
    GroupOptions,
    KLOptions,
    ScopeOptions,
    agg,
    clip_high,
    clip_low,
    degenerate,
)
from openrlhf_ext.algorithms.option_parsing import option, positive
from openrlhf_ext.algorithms.quantiles import upper_threshold
from openrlhf_ext.algorithms.registry import register_algorithm


class GroupRelative(TokenAlgorithm):
    """Base: the group-relative sequence advantage A_i (specification 2.5) on every token of a completion."""

    kl_places: ClassVar[tuple[str, ...]] = ("loss", "reward")

    def advantages(self, inputs: Inputs) -> dict[str, Any]:
        rewards_B = penalised_rewards(self, inputs)
        seq_B = group_advantages(inputs, rewards_B, self.options)
        token_BT = broadcast(seq_B, inputs.batch.mask, inputs.batch.float_dtype)
        return {"advantages": token_BT, "seq_advantages": seq_B, "rewards": rewards_B}


@dataclass(frozen=True, kw_only=True)
class GrpoOptions(GroupOptions, ClipOptions, KLOptions, AggregationOptions):
    degenerate: str = degenerate("literal")
    agg: str = agg("seq-mean-token-mean")


@register_algorithm("grpo", GrpoOptions)
class Grpo(GroupRelative):
    """GRPO (Shao et al., DeepSeekMath, arXiv 2402.03300): a completion's reward relative to its group is the advantage
    of all its tokens; mean over tokens, then over completions.

        A_i = (r_i - mean r)/(std r + adv_eps)                          sec. 4.1.2
        J = 1/G sum_i 1/T_i sum_t (f(w_it, A_i) - kl_coef k3_it)        eq. 3, k3 as in eq. 4
    """


@dataclass(frozen=True, kw_only=True)
class DapoOptions(GroupOptions, ClipOptions, KLOptions, AggregationOptions):
    degenerate: str = degenerate("drop")
    clip_high: float | None = clip_high(0.28)


@register_algorithm("dapo", DapoOptions)
class Dapo(GroupRelative):
    """DAPO (Yu et al., arXiv 2503.14476): GRPO's advantage, a mean over all tokens, a higher upper
    clip, and no groups without a signal.

        A_i = (r_i - mean r)/(std r + adv_eps)                          eq. 9
        J = 1/(sum_i T_i) sum_i sum_t f(w_it, A_i)                      eq. 8, token mean: eq. 12
        clip_high > clip_low (eq. 10); groups with 0 or G successes are dropped (eq. 11)
    """


@dataclass(frozen=True, kw_only=True)
class DrGrpoOptions(GroupOptions, ClipOptions, KLOptions, AggregationOptions):
    degenerate: str = degenerate("literal")
    normalize_std: bool = option("bool", False, "divide by the group's standard deviation")
    agg: str = agg("seq-mean-token-sum-norm")


@register_algorithm("dr_grpo", DrGrpoOptions)
class DrGrpo(GroupRelative):
    """Dr. GRPO (Liu et al., arXiv 2503.20783): GRPO without the std, token sums over a constant
    length.

        A_i = r_i - mean r
        J = 1/G sum_i 1/l_norm sum_t f(w_it, A_i)
    """


@dataclass(frozen=True, kw_only=True)
class GspoOptions(GroupOptions, ClipOptions):
    degenerate: str = degenerate("literal")
    clip_low: float | None = clip_low(3e-4)
    clip_high: float | None = clip_high(4e-4)


@register_algorithm("gspo", GspoOptions)
class Gspo(SequenceAlgorithm):
    """GSPO (Zheng et al., arXiv 2507.18071): one ratio per completion, the geometric mean of its token ratios, clipped
    as a whole.

        A_i = (r_i - mean r)/(std r + adv_eps)                          eq. 6
        s_i = exp(1/T_i sum_t (new_it - old_it))                        eq. 7
        J = 1/G sum_i f(s_i, A_i)                                       eq. 5
    """

    kl_places: ClassVar[tuple[str, ...]] = ("reward",)

    def advantages(self, inputs: Inputs) -> dict[str, Any]:
        rewards_B = penalised_rewards(self, inputs)
        return {"seq_advantages": group_advantages(inputs, rewards_B, self.options), "rewards": rewards_B}


@dataclass(frozen=True, kw_only=True)
class EntropyAdvantageOptions(GroupOptions, ClipOptions, KLOptions, AggregationOptions):
    ent_alpha: float = option("float", 0.4, "entropy weight (published: 0.4 with GRPO, 0.1 with PPO)")
    ent_kappa: float = option("float", 2.0, "the bonus is at most |A| / kappa", check=positive, rule="positive")
    degenerate: str = degenerate("zero")
    clip_high: float | None = clip_high(0.28)


@register_algorithm("entropy_advantage", EntropyAdvantageOptions)
class EntropyAdvantage(GroupRelative):
    """Entropy-shaped advantage (Cheng et al., arXiv 2506.14758): uncertain tokens get a bonus that never turns the sign
    of the advantage. The formula is from a secondary description.

        A_it = A_i + min(ent_alpha H_it, |A_i|/ent_kappa)               H without gradient
        J = 1/(sum_i T_i) sum_i sum_t f(w_it, A_it)
    """

    needs: ClassVar[tuple[str, ...]] = ("entropies",)

    def advantages(self, inputs: Inputs) -> dict[str, Any]:
        fields = super().advantages(inputs)
        live_B = inputs.part.kept_B & ~inputs.part.zeroed_B
        limit_B1 = (fields["seq_advantages"].abs() / self.options.ent_kappa).to(inputs.batch.float_dtype)[:, None]
        advantages_BT = fields["advantages"]
        for rows in row_blocks(*advantages_BT.shape):
            bonus_bT = torch.minimum(self.options.ent_alpha * inputs.batch.entropies[rows], limit_B1[rows])
            advantages_BT[rows] += torch.where(inputs.batch.mask[rows] & live_B[rows, None], bonus_bT, 0.0)
        return fields


@dataclass(frozen=True, kw_only=True)
class HighEntropyTokensOptions(GroupOptions, ClipOptions, KLOptions, ScopeOptions):
    top_rho: float = option("float", 0.2, "share of tokens kept", check=lambda r: 0 < r <= 1, rule="in (0, 1]")
    mask_denominator: str = option(
        "choice", "selected", "denominators count the selected tokens, or all", choices=("selected", "all")
    )
    degenerate: str = degenerate("drop")
    clip_high: float | None = clip_high(0.28)


@register_algorithm("high_entropy_tokens", HighEntropyTokensOptions)
class HighEntropyTokens(GroupRelative):
    """DAPO on the share `top_rho` of tokens with the highest entropy (Wang et al., arXiv 2506.01939).

    tau = (1 - top_rho) quantile of H over all tokens of the mini-batch
    J = mean of f(w_it, A_i) over the tokens with H_it >= tau       eq. 6 of the final text
    """

    needs: ClassVar[tuple[str, ...]] = ("entropies",)

    def advantages(self, inputs: Inputs) -> dict[str, Any]:
        return {**super().advantages(inputs), "exposed": {"entropies": inputs.batch.entropies}}

    def loss_level(self, shaped: ShapedBatch) -> ShapedBatch:
        pool_BT = tokens_of(shaped.mask, shaped.kept)
        tau, cut = upper_threshold(shaped.exposed["entropies"], pool_BT, self.options.top_rho)
        return super().loss_level(dataclasses.replace(shaped, pools={"tau": tau, "cut": cut}))

    def loss_mask(self, shaped: ShapedBatch) -> Tensor:
        return self._selected(shaped) & shaped.active[:, None]

    def loss_tokens(self, shaped: ShapedBatch, loss_mask_BT: Tensor) -> Tensor:
        return row_counts(loss_mask_BT)

    def counted_tokens(self, shaped: ShapedBatch, loss_mask_BT: Tensor) -> Tensor:
        if self.options.mask_denominator == "all":
            return torch.where(shaped.active, shaped.lengths, 0)
        return self.loss_tokens(shaped, loss_mask_BT)

    def derived(self) -> dict[str, Callable[[ShapedBatch], Tensor]]:
        return {"token_mask": self._selected}

    def _selected(self, shaped: ShapedBatch) -> Tensor:
        """(B, T) tokens of the mini-batch with an entropy of at least tau, dropped groups included."""
        return (shaped.exposed["entropies"] >= shaped.pools["cut"]) & shaped.mask
