"""GRPO, DAPO, Dr. GRPO and GSPO: every token of a completion has the completion's advantage.

Formulas are per prompt, of G completions with T_i tokens and (penalized) rewards r_i; the mean over prompts is left
out. `f(w, A) = min(w A, clip(w, 1 - clip_low, 1 + clip_high) A)`, `w_it = exp(new_it - old_it)`. Equation numbers are
those of the paper named.

Shape suffixes: B = completions, N = tokens of all completions.
"""

from __future__ import annotations

from typing import Any, ClassVar

from openrlhf_ext.algorithms.group_advantage import group_relative
from openrlhf_ext.algorithms.groups import Inputs
from openrlhf_ext.algorithms.losses import SequenceAlgorithm, TokenAlgorithm
from openrlhf_ext.algorithms.option_blocks import (
    Aggregation,
    AggregationOptions,
    ClipOptions,
    Degenerate,
    GroupOptions,
    KLOptions,
    agg,
    clip_high,
    clip_low,
    degenerate,
)
from openrlhf_ext.algorithms.registry import register_algorithm
from openrlhf_ext.options import Float, option


class GroupRelative(TokenAlgorithm):
    """Base: the group-relative sequence advantage A_i on every token of a completion."""

    kl_places: ClassVar[tuple[str, ...]] = ("loss", "reward")

    def advantages(self, inputs: Inputs) -> dict[str, Any]:
        fields = group_relative(self, inputs)
        token_N = inputs.segments.spread(fields["seq_advantages"].to(inputs.batch.float_dtype))
        return {"advantages": token_N, **fields}


class GrpoOptions(GroupOptions, ClipOptions, KLOptions, AggregationOptions):
    degenerate: Degenerate = degenerate("literal")
    agg: Aggregation = agg("seq-mean-token-mean")


@register_algorithm("grpo", GrpoOptions)
class Grpo(GroupRelative):
    """GRPO (Shao et al., DeepSeekMath, arXiv 2402.03300): a completion's reward relative to its group is the advantage
    of all its tokens; mean over tokens, then over completions.

        A_i = (r_i - mean r)/(std r + adv_eps)                          sec. 4.1.2
        J = 1/G sum_i 1/T_i sum_t (f(w_it, A_i) - kl_coef k3_it)        eq. 3, k3 as in eq. 4
    """


class DapoOptions(GroupOptions, ClipOptions, KLOptions, AggregationOptions):
    degenerate: Degenerate = degenerate("drop")
    clip_high: Float | None = clip_high(0.28)


@register_algorithm("dapo", DapoOptions)
class Dapo(GroupRelative):
    """DAPO (Yu et al., arXiv 2503.14476): GRPO's advantage, a mean over all tokens, a higher upper
    clip, and no groups without a signal.

        A_i = (r_i - mean r)/(std r + adv_eps)                          eq. 9
        J = 1/(sum_i T_i) sum_i sum_t f(w_it, A_i)                      eq. 8, token mean: eq. 12
        clip_high > clip_low (eq. 10); groups with 0 or G successes are dropped (eq. 11)
    """


class DrGrpoOptions(GroupOptions, ClipOptions, KLOptions, AggregationOptions):
    degenerate: Degenerate = degenerate("literal")
    normalize_std: bool = option(False, "divide by the group's standard deviation")
    agg: Aggregation = agg("seq-mean-token-sum-norm")


@register_algorithm("dr_grpo", DrGrpoOptions)
class DrGrpo(GroupRelative):
    """Dr. GRPO (Liu et al., arXiv 2503.20783): GRPO without the std, token sums over a constant
    length.

        A_i = r_i - mean r
        J = 1/G sum_i 1/l_norm sum_t f(w_it, A_i)
    """


class GspoOptions(GroupOptions, ClipOptions):
    degenerate: Degenerate = degenerate("literal")
    clip_low: Float | None = clip_low(3e-4)
    clip_high: Float | None = clip_high(4e-4)


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
        return group_relative(self, inputs)
