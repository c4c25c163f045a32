"""``gtpo_conflict`` with half of its masks: shared tokens of right completions count double, others
as ever."""

from __future__ import annotations

from typing import Any

import torch

from openrlhf_ext.algorithms import Inputs, register_algorithm
from openrlhf_ext.algorithms.methods.gtpo_conflict import GtpoConflict, GtpoConflictOptions


@register_algorithm("positive_weights", GtpoConflictOptions)
class PositiveWeights(GtpoConflict):
    """lambda of a negative completion is 1 everywhere."""

    def advantages(self, inputs: Inputs) -> dict[str, Any]:
        fields = super().advantages(inputs)
        negative_N = inputs.segments.spread(fields["exposed"]["A"] < 0)
        fields["token_weights"] = torch.where(negative_N, 1.0, fields["token_weights"])
        return fields
