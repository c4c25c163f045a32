"""`dr_grpo`: Z. Liu et al., "Understanding R1-Zero-Like Training", arXiv 2503.20783."""

from __future__ import annotations

from typing import Any, ClassVar

from openrlhf_ext.algorithms import Inputs, TokenAlgorithm, option, register_algorithm
from openrlhf_ext.algorithms.group_advantage import group_relative
from openrlhf_ext.algorithms.option_blocks import Aggregation, Degenerate, TokenGroupOptions, agg, degenerate


class DrGrpoOptions(TokenGroupOptions):
    degenerate: Degenerate = degenerate("literal")
    normalize_std: bool = option(False, "divide by the group's standard deviation")
    agg: Aggregation = agg("seq-mean-token-sum-norm")


@register_algorithm("dr_grpo", DrGrpoOptions)
class DrGrpo(TokenAlgorithm):
    """Dr. GRPO (Liu et al., arXiv 2503.20783): GRPO without the std, token sums over a constant
    length.

        A_i = r_i - mean r
        J = 1/G sum_i 1/l_norm sum_t f(w_it, A_i)
    """

    kl_places: ClassVar[tuple[str, ...]] = ("loss", "reward")

    def advantages(self, inputs: Inputs) -> dict[str, Any]:
        return group_relative(self, inputs)
