"""PPO with a critic: generalised advantage estimation, value loss, and the `gae` algorithm.

J. Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation", arXiv 1506.02438, and
"Proximal Policy Optimization Algorithms", arXiv 1707.06347.

Shape suffixes: B = completions, T = positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from openrlhf_ext.algorithms.base import Inputs
from openrlhf_ext.algorithms.batch import RolloutBatch
from openrlhf_ext.algorithms.blocks import row_blocks, row_counts, row_sums
from openrlhf_ext.algorithms.groups import Groups, Partition
from openrlhf_ext.algorithms.kl import reward_kl
from openrlhf_ext.algorithms.length_penalty import length_penalty
from openrlhf_ext.algorithms.option_blocks import AggregationOptions, ClipOptions, KLOptions, PenaltyOptions
from openrlhf_ext.algorithms.option_parsing import in_closed_unit_interval, option, positive
from openrlhf_ext.algorithms.registry import register_algorithm
from openrlhf_ext.algorithms.token_level import TokenAlgorithm

_ROWS = 1024  # go through the positions together: enough for each step to be worth its call, few enough for the memory
_ROUNDING = 1e-12  # relative variance of equal numbers that went through fp32 sums


def token_rewards(rewards_B: Tensor, mask_BT: Tensor) -> Tensor:
    """(B, T) terminal reward on each completion's last token, 0 elsewhere."""
    last_B1 = (mask_BT.sum(dim=1, keepdim=True) - 1).clamp(min=0)
    rewards_BT = torch.zeros(mask_BT.shape, dtype=rewards_B.dtype, device=mask_BT.device)
    return rewards_BT.scatter_(1, last_B1, rewards_B[:, None])


def gae(rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, *, gamma: float, lambd: float) -> tuple[Tensor, Tensor]:
    """Advantages `sum_l (gamma lambda)^l delta_{t+l}` and returns `A + V`, both (B, T) and 0 in padding.

    `delta_t = r_t + gamma V_{t+1} - V_t`, with V = 0 after the last token. No gradient flows.
    """
    advantages_BT, returns_BT = torch.zeros_like(values_BT.detach()), torch.zeros_like(values_BT.detach())
    for first in range(0, len(values_BT), _ROWS):
        rows = slice(first, first + _ROWS)
        values_TR = torch.where(mask_BT[rows], values_BT[rows].detach(), 0.0).t().contiguous()
        rewards_TR = torch.where(mask_BT[rows], rewards_BT[rows].detach(), 0.0).t().contiguous()
        advantages_BT[rows] = _backwards(rewards_TR, values_TR, gamma=gamma, lambd=lambd).t()
        returns_BT[rows] = values_TR.t()
        returns_BT[rows] += advantages_BT[rows]
    return advantages_BT, returns_BT


def _backwards(rewards_TR: Tensor, values_TR: Tensor, *, gamma: float, lambd: float) -> Tensor:
    """(T, R) advantages, in the memory of the rewards."""
    advantages_TR = rewards_TR
    following_R = next_value_R = torch.zeros_like(values_TR[0]) if len(values_TR) else None
    for t in range(len(values_TR) - 1, -1, -1):
        delta_R = rewards_TR[t] + gamma * next_value_R - values_TR[t]
        following_R = delta_R + gamma * lambd * following_R
        advantages_TR[t] = following_R
        next_value_R = values_TR[t]
    return advantages_TR


def value_loss(
    values_BT: Tensor, old_values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor, *, clip: float | None, tokens: Tensor
) -> Tensor:
    """`1/2` mean of the (clipped) squared error over `tokens` tokens of the whole mini-batch: shares add up.

    With `clip`, the larger of the errors of V and of V clipped to `old +- clip`, as in PPO.
    """
    error_BT = (values_BT - returns_BT) ** 2
    if clip is not None:
        near_BT = old_values_BT + (values_BT - old_values_BT).clamp(-clip, clip)
        error_BT = torch.maximum(error_BT, (near_BT - returns_BT) ** 2)
    return 0.5 * torch.where(mask_BT, error_BT, 0.0).sum() / tokens.to(error_BT.dtype)


@torch.no_grad()
def value_clip_fraction(
    values_BT: Tensor, old_values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor, *, clip: float, tokens: Tensor
) -> Tensor:
    """Share of the `tokens` tokens whose value gets no gradient, because the clipped value has the larger error."""
    near_BT = old_values_BT + (values_BT - old_values_BT).clamp(-clip, clip)
    cut_BT = mask_BT & ((near_BT - returns_BT) ** 2 > (values_BT - returns_BT) ** 2)
    return cut_BT.sum() / tokens.to(values_BT.dtype)


def explained_variance(values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor) -> Tensor | None:
    """`1 - Var(returns - values) / Var(returns)` over the completion tokens, float64; None if the returns are equal
    up to rounding.

    1: the critic knows the returns; 0: it is as good as their mean; negative: worse.
    """
    returns_N, error_N = returns_BT[mask_BT].double(), (returns_BT - values_BT)[mask_BT].double()
    variance = returns_N.var(correction=0)
    if variance <= _ROUNDING * (returns_N * returns_N).mean():
        return None
    return 1.0 - error_N.var(correction=0) / variance


@dataclass(frozen=True, kw_only=True)
class GaeOptions(ClipOptions, KLOptions, AggregationOptions, PenaltyOptions):
    gamma: float = option("float", 1.0, "discount per token", check=in_closed_unit_interval, rule="in [0, 1]")
    lambd: float = option("float", 1.0, "GAE lambda", check=in_closed_unit_interval, rule="in [0, 1]")
    whiten: bool = option("bool", True, "standardise the advantages over all tokens of the rollout batch")
    normalize_std: bool = option("bool", True, "divide by the std when whitening; false only subtracts the mean")
    adv_eps: float = option("float", 1e-8, "added to the standard deviation", check=positive, rule="positive")


@register_algorithm("gae", GaeOptions)
class Gae(TokenAlgorithm):
    """PPO with a critic: needs `RolloutBatch.values`; exposes `returns` and `values` for the critic's loss.

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t = sum_l (gamma lambd)^l delta_{t+l}                         GAE, eq. 16
        J = mean over all tokens of f(w_t, A_t)                         PPO, eq. 7

    V is 0 after the last token.
    """

    needs: ClassVar[tuple[str, ...]] = ("values",)
    kl_places: ClassVar[tuple[str, ...]] = ("loss", "reward")

    def partition(self, batch: RolloutBatch, groups: Groups) -> Partition:
        """Completions need no partner here; classes serve the metrics only."""
        success_B = batch.rewards > 0.5
        everyone_B = torch.ones_like(success_B)
        return Partition(
            success_B=success_B,
            failure_B=~success_B,
            degenerate_Q=torch.zeros_like(groups.sizes_Q, dtype=torch.bool),
            kept_B=everyone_B,
            zeroed_B=~everyone_B,
            active_B=everyone_B,
        )

    def advantages(self, inputs: Inputs) -> dict[str, Any]:
        batch, options = inputs.batch, self.options
        rewards_B = batch.rewards + length_penalty(inputs.groups, inputs.part, options)
        rewards_BT = token_rewards(rewards_B.to(batch.float_dtype), batch.mask)
        if self.kl is not None and self.kl.place == "reward":
            kl_BT = reward_kl(self.kl, batch.old_logprobs, batch.ref_logprobs, batch.mask)
            rewards_BT -= kl_BT
            rewards_B = rewards_B - kl_BT.sum(dim=1, dtype=torch.float64)
            del kl_BT
        advantages_BT, returns_BT = gae(rewards_BT, batch.values, batch.mask, gamma=options.gamma, lambd=options.lambd)
        del rewards_BT
        if options.whiten:
            self._whiten(advantages_BT, batch.mask)
        exposed = {"returns": returns_BT, "values": batch.values}
        return {"advantages": advantages_BT, "rewards": rewards_B, "exposed": exposed}

    def _whiten(self, advantages_BT: Tensor, mask_BT: Tensor) -> None:
        """Centres them over all tokens and, with `normalize_std`, divides by their population std, in place.

        The statistics are in float64. Padding, which is 0, stays 0.
        """
        blocks = list(row_blocks(*advantages_BT.shape))
        tokens = row_counts(mask_BT).sum().clamp(min=1).to(torch.float64)
        mean = row_sums(advantages_BT, mask_BT).sum() / tokens
        squares = torch.zeros_like(mean)
        for rows in blocks:
            advantages_BT[rows] -= mask_BT[rows] * mean.to(advantages_BT.dtype)
            squares += (advantages_BT[rows] ** 2).sum(dtype=torch.float64)
        if self.options.normalize_std:
            scale = ((squares / tokens).sqrt() + self.options.adv_eps).to(advantages_BT.dtype)
            for rows in blocks:
                advantages_BT[rows] /= scale
