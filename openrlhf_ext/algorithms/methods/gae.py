"""`gae`: PPO with a critic.

J. Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation",
arXiv 1506.02438, and "Proximal Policy Optimization Algorithms", arXiv 1707.06347.
"""

from __future__ import annotations

from torch import Tensor

from openrlhf_ext.algorithms import Inputs, option, register_algorithm
from openrlhf_ext.algorithms.returns import (
    DiscountOptions,
    ReturnAlgorithm,
    ReturnOptions,
    WhitenOptions,
    gae,
    token_rewards,
)
from openrlhf_ext.options import Float


class GaeOptions(ReturnOptions, WhitenOptions, DiscountOptions):
    lambd: Float = option(1.0, "GAE lambda", ge=0, le=1)


@register_algorithm("gae", GaeOptions)
class Gae(ReturnAlgorithm):
    """PPO with a critic: needs `RolloutBatch.values`; exposes `returns` and `values` for the
    critic's loss.

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t = sum_l (gamma lambd)^l delta_{t+l}                         GAE, eq. 16; then whitened
        J = mean over all tokens of f(w_t, A_t)                         PPO, eq. 7

    V is 0 after the last token.
    """

    needs = ("values",)

    def returns(
        self, scores_B: Tensor, kl_N: Tensor | None, inputs: Inputs
    ) -> tuple[Tensor, dict[str, Tensor]]:
        values_N, options = inputs.batch["values"], self.options
        rewards_N = token_rewards(scores_B, kl_N, inputs.segments)
        advantages_N, returns_N = gae(
            rewards_N, values_N, inputs.segments, gamma=options.gamma, lambd=options.lambd
        )
        return advantages_N, {"returns": returns_N, "values": values_N}
