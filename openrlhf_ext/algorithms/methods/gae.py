"""`gae`: PPO with a critic.

J. Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation", arXiv 1506.02438, and
"Proximal Policy Optimization Algorithms", arXiv 1707.06347.

Shape suffixes: B = completions, N = tokens of all completions, R = completions that are scanned together, T = positions
of the longest of them.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from openrlhf_ext.algorithms import Inputs, RolloutBatch, TokenAlgorithm, option, register_algorithm
from openrlhf_ext.algorithms.groups import Groups, Partition
from openrlhf_ext.algorithms.kl import reward_kl
from openrlhf_ext.algorithms.length_penalty import length_penalty
from openrlhf_ext.algorithms.option_blocks import AggregationOptions, ClipOptions, KLOptions, PenaltyOptions
from openrlhf_ext.algorithms.segments import BLOCK_TOKENS, Segments, float64_sum
from openrlhf_ext.options import Float

_ROWS = 1024  # go through the positions together: enough for each step to be worth its call, few enough for the memory


def token_rewards(rewards_B: Tensor, segments: Segments) -> Tensor:
    """(N,) terminal reward on each completion's last token, 0 elsewhere."""
    rewards_N = torch.zeros(segments.tokens, dtype=rewards_B.dtype, device=rewards_B.device)
    return rewards_N.index_copy_(0, segments.last(), rewards_B)


def gae(
    rewards_N: Tensor, values_N: Tensor, segments: Segments, *, gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    """Advantages `sum_l (gamma lambda)^l delta_{t+l}` and returns `A + V`, both (N,).

    `delta_t = r_t + gamma V_{t+1} - V_t`, with V = 0 after the last token. No gradient flows.
    """
    advantages_N = torch.empty_like(values_N.detach())
    for rows_R in segments.lengths_B.argsort().split(_ROWS) if len(segments) else ():  # of about equal length
        values_TR, rewards_TR = (_from_the_end(x_N.detach(), segments, rows_R) for x_N in (values_N, rewards_N))
        advantages_RT = _backwards(rewards_TR, values_TR, gamma=gamma, lambd=lambd).t().flip(1)
        lengths = segments.lengths_B[rows_R].tolist()
        ends_R = [row_T[-length:] for row_T, length in zip(advantages_RT, lengths, strict=True)]
        segments.put(advantages_N, torch.cat(ends_R), rows_R)
    return advantages_N, advantages_N + values_N.detach()


def _from_the_end(values_N: Tensor, segments: Segments, rows_R: Tensor) -> Tensor:
    """(T, R) entries of some rows, the last ones first, 0 behind the first ones; T is the longest row."""
    lengths = segments.lengths_B[rows_R].tolist()
    padded_RT = values_N.new_zeros(len(lengths), max(lengths))
    for row_T, values_n in zip(padded_RT, segments.take(values_N, rows_R).split(lengths), strict=True):
        row_T[-len(values_n) :] = values_n
    return padded_RT.flip(1).t().contiguous()


def _backwards(rewards_TR: Tensor, values_TR: Tensor, *, gamma: float, lambd: float) -> Tensor:
    """(T, R) advantages, in the memory of the rewards; entry 0 is the last token."""
    advantages_TR = rewards_TR
    following_R = next_value_R = torch.zeros_like(values_TR[0])
    for t in range(len(values_TR)):
        delta_R = rewards_TR[t] + gamma * next_value_R - values_TR[t]
        following_R = delta_R + gamma * lambd * following_R
        advantages_TR[t] = following_R
        next_value_R = values_TR[t]
    return advantages_TR


class GaeOptions(ClipOptions, KLOptions, AggregationOptions, PenaltyOptions):
    gamma: Float = option(1.0, "discount per token", ge=0, le=1)
    lambd: Float = option(1.0, "GAE lambda", ge=0, le=1)
    whiten: bool = option(True, "standardize the advantages over all tokens of the rollout batch")
    normalize_std: bool = option(True, "divide by the std when whitening; false only subtracts the mean")
    adv_eps: Float = option(1e-8, "added to the standard deviation", gt=0)


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
        rewards_N = token_rewards(rewards_B.to(batch.float_dtype), batch.segments)
        if self.kl is not None and self.kl.place == "reward":
            kl_N = reward_kl(self.kl, batch)
            rewards_N -= kl_N
            rewards_B = rewards_B - batch.segments.sums(kl_N)
            del kl_N
        advantages_N, returns_N = gae(
            rewards_N, batch["values"], batch.segments, gamma=options.gamma, lambd=options.lambd
        )
        del rewards_N
        if options.whiten:
            self._whiten(advantages_N)
        exposed = {"returns": returns_N, "values": batch.values}
        return {"advantages": advantages_N, "rewards": rewards_B, "exposed": exposed}

    def _whiten(self, advantages_N: Tensor) -> None:
        """Centers them over all tokens and, with `normalize_std`, divides by their population std, in place.

        The statistics are in float64.
        """
        tokens = max(1, len(advantages_N))
        advantages_N -= (float64_sum(advantages_N) / tokens).to(advantages_N.dtype)
        if self.options.normalize_std:
            squares = sum((block_n.double() ** 2).sum() for block_n in advantages_N.split(BLOCK_TOKENS))
            advantages_N /= ((squares / tokens).sqrt() + self.options.adv_eps).to(advantages_N.dtype)
