"""`dr_grpo`: Z. Liu et al., "Understanding R1-Zero-Like Training", arXiv 2503.20783."""

from __future__ import annotations

from torch import Tensor

from openrlhf_ext.algorithms import Inputs, register_algorithm
from openrlhf_ext.algorithms.returns import ReturnAlgorithm, ReturnOptions, group_means


class DrGrpoOptions(ReturnOptions):
    """Those of upstream's estimators; `agg seq-mean-token-sum-norm` is the paper's loss."""


@register_algorithm("dr_grpo", DrGrpoOptions)
class DrGrpo(ReturnAlgorithm):
    """Dr. GRPO (Liu et al., arXiv 2503.20783): GRPO without the std. As OpenRLHF has it the loss is
    a mean over all tokens; the paper divides token sums by a constant length (`agg
    seq-mean-token-sum-norm`).

        A_i = r_i - mean r
        J = mean over all tokens of f(w_it, A_it)
        J = 1/G sum_i 1/l_norm sum_t f(w_it, A_it)                      the paper's
    """

    def baselined(self, rewards_B: Tensor, inputs: Inputs) -> Tensor:
        return rewards_B - group_means(rewards_B, inputs.groups)
