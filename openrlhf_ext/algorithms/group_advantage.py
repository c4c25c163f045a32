"""The group-relative advantage that most methods start from.

    A_i = (r_i - mean r)/(std r + adv_eps)                  over the completions of one prompt

Shape suffixes: B = completions, N = tokens of all completions, Q = groups.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from openrlhf_ext.algorithms.base import Algorithm
from openrlhf_ext.algorithms.groups import Groups, Inputs, Moments, pool_moments
from openrlhf_ext.algorithms.kl import reward_kl
from openrlhf_ext.algorithms.length_penalty import length_penalty


class GroupRelative(Algorithm):
    """A method whose advantage is the group-relative one; a KL penalty is in the loss or in the
    reward."""

    kl_places: ClassVar[tuple[str, ...]] = ("loss", "reward")

    def advantages(self, inputs: Inputs) -> dict[str, Any]:
        """The fields `rewards` and `seq_advantages` (B,) float64 and `advantages` (N,) of a
        LossBatch.

        r_i is the raw reward plus the length penalty, minus a KL placed in the reward. A is 0 in
        groups that were dropped or zeroed, and the same on all tokens of a completion.
        """
        batch = inputs.batch
        rewards_B = batch.rewards + length_penalty(inputs, self.options)
        if self.kl is not None and self.kl.place == "reward":
            rewards_B = rewards_B - batch.segments.sums(reward_kl(self.kl, batch))
        a_B = group_advantages(rewards_B, inputs.groups, self.options, inputs.part.live_B)
        a_N = batch.segments.spread(a_B.to(batch.float_dtype))
        return {"rewards": rewards_B, "seq_advantages": a_B, "advantages": a_N}


def group_advantages(rewards_B: Tensor, groups: Groups, options: Any, live_B: Tensor) -> Tensor:
    """(B,) float64 A_i, 0 where not `live_B`. Every completion counts in mean and std.

    Args:
        rewards_B: (B,) float64.
        options: reads `normalize_std`, `ddof_seq`, `adv_eps`, and `baseline` where there is one.
    """
    moments = pool_moments(Moments.of_values(rewards_B), groups.index_B, len(groups))
    center_Q = moments.mean
    if getattr(options, "baseline", "seq") == "token":
        lengths_B = groups.lengths_B.to(torch.float64)
        # Relative to the mean, so that equal rewards give exactly the mean.
        shift_Q = groups.sum(lengths_B * (rewards_B - center_Q[groups.index_B])) / groups.sum(
            lengths_B
        )
        center_Q = center_Q + shift_Q
    centered_B = rewards_B - center_Q[groups.index_B]
    if options.normalize_std:
        std_B = moments.std(options.ddof_seq)[groups.index_B]
        centered_B = divide_by_std(
            centered_B, std_B, options.adv_eps, live_B, groups.ids_Q[groups.index_B]
        )
    return torch.where(live_B, centered_B, 0.0)


def divide_by_std(
    centered_B: Tensor, std_B: Tensor, adv_eps: float, live_B: Tensor, group_ids_B: Tensor
) -> Tensor:
    """`centered / (std + adv_eps)`; ValueError naming the group where that would be 0/0."""
    if adv_eps == 0.0:
        require_positive_std(std_B, live_B, group_ids_B)
    return centered_B / torch.where(live_B, std_B + adv_eps, 1.0)


def require_positive_std(std_B: Tensor, live_B: Tensor, group_ids_B: Tensor) -> None:
    """`adv_eps: 0` is legal only when no standard deviation that divides is 0."""
    flat = (live_B & (std_B == 0)).nonzero().flatten()
    if len(flat):
        group = int(group_ids_B[flat[0]])
        raise ValueError(
            f"adv_eps = 0 needs positive standard deviations, that of group {group} is 0; set "
            "adv_eps > 0"
        )
