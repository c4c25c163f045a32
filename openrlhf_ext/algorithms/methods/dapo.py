"""`dapo`: Q. Yu et al., "DAPO", arXiv 2503.14476."""

from __future__ import annotations

from openrlhf_ext.algorithms import TokenAlgorithm, register_algorithm
from openrlhf_ext.algorithms.losses import GroupRelative
from openrlhf_ext.algorithms.option_blocks import (
    Aggregation,
    Degenerate,
    TokenGroupOptions,
    agg,
    clip_high,
    clip_low,
    degenerate,
)
from openrlhf_ext.options import Float


class DapoOptions(TokenGroupOptions):
    degenerate: Degenerate = degenerate("drop")
    clip_low: Float | None = clip_low(0.2)
    clip_high: Float | None = clip_high(0.28)
    agg: Aggregation = agg("token-mean")


@register_algorithm("dapo", DapoOptions)
class Dapo(GroupRelative, TokenAlgorithm):
    """DAPO (Yu et al., arXiv 2503.14476): GRPO's advantage, a mean over all tokens, a higher upper
    clip, and no groups without a signal.

        A_i = (r_i - mean r)/(std r + adv_eps)                          eq. 9
        J = 1/(sum_i T_i) sum_i sum_t f(w_it, A_i)                      eq. 8, token mean: eq. 12
        clip_high > clip_low (eq. 10); groups with 0 or G successes are dropped (eq. 11)
    """
