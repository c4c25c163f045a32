"""``gtpo_entropy`` whose pools count completions, as those of ``dapo`` do, and not their tokens.

Without entropy (``alpha2`` 0) it is ``dapo``: what the published pools of tokens change is all that
differs.

Shape suffix: R = completions of a cohort.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from openrlhf_ext.algorithms import Inputs, register_algorithm
from openrlhf_ext.algorithms.entropy_shaping import Classes, TokenShares
from openrlhf_ext.algorithms.groups import Moments
from openrlhf_ext.algorithms.methods.gtpo_entropy import (
    GtpoEntropy,
    GtpoEntropyOptions,
    TokenReward,
)


class CompletionReward(TokenReward):
    """Shaped rewards whose pools take one number from each completion, its mean."""

    def moments(self, shares: TokenShares, lengths_B: Tensor) -> Moments:
        """(R,) each completion's mean of R."""
        return Moments.of_values(super().moments(shares, lengths_B).mean)


@register_algorithm("completion_pools", GtpoEntropyOptions)
class CompletionPools(GtpoEntropy):
    """Give it ``ddof_tok`` 1: ``dapo`` divides by the sample's standard deviation."""

    def reward(self, inputs: Inputs, classes: Classes, penalty_B: Tensor) -> Any:
        given = super().reward(inputs, classes, penalty_B)
        return CompletionReward(given.options, given.offset_B, given.weight_B, given.success_B)
