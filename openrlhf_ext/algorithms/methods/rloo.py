"""`rloo`: A. Ahmadian et al., "Back to Basics", arXiv 2402.14740."""

from __future__ import annotations

from torch import Tensor

from openrlhf_ext.algorithms import Inputs, register_algorithm
from openrlhf_ext.algorithms.returns import ReturnAlgorithm, ReturnOptions


class RlooOptions(ReturnOptions):
    """Those of upstream's estimators."""


@register_algorithm("rloo", RlooOptions)
class Rloo(ReturnAlgorithm):
    """RLOO (Ahmadian et al., arXiv 2402.14740): the baseline of a completion is the mean reward of
    the others of its group.

        A_i = r_i - 1/(G - 1) sum_{j != i} r_j
        J = mean over all tokens of f(w_it, A_it)
    """

    def baselined(self, rewards_B: Tensor, inputs: Inputs) -> Tensor:
        groups = inputs.groups
        others_B = groups.sum(rewards_B)[groups.index_B] - rewards_B
        return rewards_B - others_B / (groups.sizes_B - 1).clamp(min=1)
