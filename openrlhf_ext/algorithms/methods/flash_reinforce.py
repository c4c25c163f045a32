"""`flash_reinforce`: OpenRLHF 0.11.2's estimator of one completion per prompt."""

from __future__ import annotations

from torch import Tensor

from openrlhf_ext.algorithms import Inputs, register_algorithm
from openrlhf_ext.algorithms.returns import ReturnAlgorithm, ReturnOptions


class FlashReinforceOptions(ReturnOptions):
    """Those of upstream's estimators."""


@register_algorithm("flash_reinforce", FlashReinforceOptions)
class FlashReinforce(ReturnAlgorithm):
    """FlashREINFORCE (OpenRLHF 0.11.2, `trainer/ppo_utils/experience_maker.py:275`): the baseline
    is the mean reward of the whole rollout batch, and nothing is whitened; one completion per
    prompt is enough.

        A_i = r_i - mean r                                              over the rollout batch
        J = mean over all tokens of f(w_it, A_it)
    """

    def baselined(self, rewards_B: Tensor, inputs: Inputs) -> Tensor:
        return rewards_B - rewards_B.mean()
