"""`reinforce_baseline`: J. Hu et al., "REINFORCE++", arXiv 2501.03262, with the group's mean as the
baseline."""

from __future__ import annotations

from torch import Tensor

from openrlhf_ext.algorithms import Inputs, register_algorithm
from openrlhf_ext.algorithms.returns import (
    ReturnAlgorithm,
    ReturnOptions,
    WhitenOptions,
    group_means,
)


class ReinforceBaselineOptions(ReturnOptions, WhitenOptions):
    """Those of upstream's estimators, with whitening."""


@register_algorithm("reinforce_baseline", ReinforceBaselineOptions)
class ReinforceBaseline(ReturnAlgorithm):
    """REINFORCE++-baseline (Hu et al., arXiv 2501.03262): the group's mean is subtracted, the std
    of the whole batch divides.

        R_it = r_i - mean r - sum_{s >= t} kl_coef KL_is
        A_it = (R_it - mean R)/sqrt(max(var R, adv_eps))    over all tokens of the rollout batch
        J = mean over all tokens of f(w_it, A_it)
    """

    def baselined(self, rewards_B: Tensor, inputs: Inputs) -> Tensor:
        return rewards_B - group_means(rewards_B, inputs.groups)
