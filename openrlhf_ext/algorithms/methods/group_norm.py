"""`group_norm`: OpenRLHF's form of GRPO's advantage (Z. Shao et al., arXiv 2402.03300), with its
token mean."""

from __future__ import annotations

from torch import Tensor

from openrlhf_ext.algorithms import Inputs, option, register_algorithm
from openrlhf_ext.algorithms.groups import Moments, pool_moments
from openrlhf_ext.algorithms.returns import ReturnAlgorithm, ReturnOptions
from openrlhf_ext.options import Float


class GroupNormOptions(ReturnOptions):
    adv_eps: Float = option(1e-9, "added to the group's standard deviation", gt=0)


@register_algorithm("group_norm", GroupNormOptions)
class GroupNorm(ReturnAlgorithm):
    """OpenRLHF's group normalization: GRPO's advantage (arXiv 2402.03300, sec. 4.1.2), a mean over
    all tokens; groups without a signal stay in the denominator.

        A_i = (r_i - mean r)/(std r + adv_eps)                          sample std
        J = mean over all tokens of f(w_it, A_it)
    """

    def baselined(self, rewards_B: Tensor, inputs: Inputs) -> Tensor:
        groups = inputs.groups
        moments = pool_moments(Moments.of_values(rewards_B), groups.index_B, len(groups))
        scale_Q = moments.std(1) + self.options.adv_eps
        return (rewards_B - moments.mean[groups.index_B]) / scale_Q[groups.index_B]
