"""`grpo`: Z. Shao et al., "DeepSeekMath", arXiv 2402.03300."""

from __future__ import annotations

from openrlhf_ext.algorithms import TokenAlgorithm, register_algorithm
from openrlhf_ext.algorithms.losses import GroupRelative
from openrlhf_ext.algorithms.option_blocks import (
    Aggregation,
    Degenerate,
    TokenGroupOptions,
    agg,
    degenerate,
)


class GrpoOptions(TokenGroupOptions):
    degenerate: Degenerate = degenerate("literal")
    agg: Aggregation = agg("seq-mean-token-mean")


@register_algorithm("grpo", GrpoOptions)
class Grpo(GroupRelative, TokenAlgorithm):
    """GRPO (Shao et al., DeepSeekMath, arXiv 2402.03300): a completion's reward relative to its
    group is the advantage of all its tokens; mean over tokens, then over completions.

        A_i = (r_i - mean r)/(std r + adv_eps)                          sec. 4.1.2
        J = 1/G sum_i 1/T_i sum_t (f(w_it, A_i) - kl_coef k3_it)        eq. 3, k3 as in eq. 4
    """
