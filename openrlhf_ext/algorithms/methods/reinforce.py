"""`reinforce`: J. Hu et al., "REINFORCE++", arXiv 2501.03262, as OpenRLHF computes it."""

from __future__ import annotations

from openrlhf_ext.algorithms import register_algorithm
from openrlhf_ext.algorithms.returns import (
    DiscountOptions,
    ReturnAlgorithm,
    ReturnOptions,
    WhitenOptions,
)


class ReinforceOptions(ReturnOptions, WhitenOptions, DiscountOptions):
    """Those of `gae` without a critic's."""


@register_algorithm("reinforce", ReinforceOptions)
class Reinforce(ReturnAlgorithm):
    """REINFORCE++ (Hu et al., arXiv 2501.03262): discounted returns, whitened over all tokens of
    the rollout batch; one completion per prompt is enough.

        R_it = sum_{s >= t} gamma^(s - t) r_is      r_is: reward at the end, KL per token
        A_it = (R_it - mean R)/sqrt(max(var R, adv_eps))
        J = mean over all tokens of f(w_it, A_it)
    """
