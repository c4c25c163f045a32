"""Length penalties R(i), one number per completion, added to a reward.

Lengths are in tokens. Shape suffixes: B = completions, Q = groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openrlhf_ext.algorithms.groups import Groups, Inputs, Partition
from openrlhf_ext.algorithms.option_blocks import LengthPenalty, PenaltyOptions

TOLERANCE = 1e-12


def dapo_overlong(lengths_B: Tensor, l_max: int, l_cache: int, factor: float = 1.0) -> Tensor:
    """DAPO eq. 13: 0 up to `l_max - l_cache`, linear down to `-factor` at `l_max`, `-factor`
    above."""
    lengths_B = lengths_B.to(torch.float64)
    soft_B = factor * ((l_max - l_cache) - lengths_B) / l_cache
    penalty_B = torch.where(lengths_B <= l_max, soft_B, -factor)
    return torch.where(lengths_B <= l_max - l_cache, 0.0, penalty_B)


def tan_v1(lengths_B: Tensor, short: int, long: int, denominator: str = "L2") -> Tensor:
    """T1 sec. 4.5.1 with L = long - short: 0 up to L, (L - T)/denominator up to `long`, -1 above.

    The printed denominator L2 jumps at L2; `L1` is the continuous form.
    """
    lengths_B = lengths_B.to(torch.float64)
    soft_B = ((long - short) - lengths_B) / (long if denominator == "L2" else short)
    penalty_B = torch.where(lengths_B <= long, soft_B, -1.0)
    return torch.where(lengths_B <= long - short, 0.0, penalty_B)


def _ramp(lengths_B: Tensor, knee_B: Tensor) -> Tensor:
    """0 below the knee, -(T - L)/(2L) up to 2L, -1/2 from there."""
    soft_B = -(lengths_B - knee_B) / (2 * knee_B)
    return torch.where(lengths_B < knee_B, 0.0, torch.where(lengths_B < 2 * knee_B, soft_B, -0.5))


def _knee(lengths_B: Tensor, member_B: Tensor, groups: Groups) -> Tensor:
    """(B,) max(mid-range, mean) of the members' lengths, per group; 1 where a group has no
    member."""
    high_Q = groups.maximum(torch.where(member_B, lengths_B, -torch.inf))
    low_Q = groups.minimum(torch.where(member_B, lengths_B, torch.inf))
    count_Q = groups.count(member_B)
    mean_Q = groups.sum(torch.where(member_B, lengths_B, 0.0)) / count_Q.clamp(min=1)
    knee_Q = torch.maximum((low_Q + high_Q) / 2, mean_Q)
    return torch.where(count_Q > 0, knee_Q, 1.0)[groups.index_B]


def grop(groups: Groups, part: Partition, options: PenaltyOptions) -> Tensor:
    """Group Relative Overlong Punishment (T6 app. D), with separate rules for easy, hard and medium
    prompts."""
    lengths_B = groups.lengths_B.to(torch.float64)
    n_B = groups.count(part.success_B)[groups.index_B]
    m_B = groups.count(part.failure_B)[groups.index_B]
    fraction_B = n_B.double() / groups.sizes_B
    easy_B = (n_B > 0) & (fraction_B >= options.grop_gamma1 - TOLERANCE)
    hard_B = ~easy_B & (fraction_B <= 1 - options.grop_gamma1 + TOLERANCE)
    medium_B = ~easy_B & ~hard_B

    everyone_B = torch.ones_like(easy_B)
    penalty_B = torch.where(
        easy_B & part.success_B, _ramp(lengths_B, _knee(lengths_B, part.success_B, groups)), 0.0
    )
    hit_B = part.success_B & (n_B > m_B)
    if options.grop_medium_else == "incorrect":
        hit_B = hit_B | (part.failure_B & (n_B <= m_B))
    penalty_B = torch.where(
        medium_B & hit_B, _ramp(lengths_B, _knee(lengths_B, everyone_B, groups)), penalty_B
    )
    hard = options.grop_hard_dapo
    if hard is not None:
        penalty_B = torch.where(
            hard_B, dapo_overlong(groups.lengths_B, hard.l_max, hard.l_cache), penalty_B
        )
    return penalty_B


def length_penalty(inputs: Inputs, options: PenaltyOptions) -> Tensor:
    """(B,) float64 R(i) of the configured penalties, zeros without one.

    Raises ValueError if `stop_properly` is set and the batch has no `truncated`.
    """
    rewards_B, truncated_B = inputs.batch.rewards, inputs.batch.truncated
    penalty_B = _of_length(inputs.groups, inputs.part, options)
    if options.stop_properly is None:
        return penalty_B
    if truncated_B is None:
        raise ValueError(
            "stop_properly needs RolloutBatch.truncated; set it from the sampler's finish reason"
        )
    stopped_B = _stopped(rewards_B + penalty_B, options.stop_properly)
    return torch.where(truncated_B, stopped_B - rewards_B, penalty_B)


def _stopped(rewards_B: Tensor, coef: float) -> Tensor:
    """Rewards of truncated completions (OpenRLHF 0.11.2,
    `trainer/ppo_utils/length_penalty.py:68`)."""
    return torch.full_like(rewards_B, coef) if coef < 0 else rewards_B * coef


def _of_length(groups: Groups, part: Partition, options: PenaltyOptions) -> Tensor:
    penalty = options.length_penalty
    if penalty is None or penalty.kind == "none":
        return torch.zeros(len(groups.index_B), dtype=torch.float64, device=groups.index_B.device)
    values_B = _formula(penalty, groups, part, options)
    if penalty.on == "correct":
        return torch.where(part.success_B, values_B, 0.0)
    if penalty.on == "incorrect":
        return torch.where(part.failure_B, values_B, 0.0)
    return values_B


def _formula(
    penalty: LengthPenalty, groups: Groups, part: Partition, options: PenaltyOptions
) -> Tensor:
    if penalty.kind == "dapo":
        return dapo_overlong(groups.lengths_B, *penalty.span, penalty.factor)
    if penalty.kind == "tan_v1":
        return tan_v1(groups.lengths_B, *penalty.span, penalty.denominator)
    return grop(groups, part, options)
