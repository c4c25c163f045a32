"""Upstream's estimators: token rewards, returns, whitening, and one of two policy losses.

What OpenRLHF 0.11.2 computes (`trainer/ppo_utils/experience_maker.py:238`, `models/loss.py:123`),
number by number:

    r_i = penalized reward of the completion, minus the method's baseline, in `reward_clip`
    r_it = [t = T_i] r_i - kl_coef KL_it            a KL in the reward, within +-10
    A_it = sum_{s >= t} gamma^(s - t) r_is          then whitened, where the method does
    J = mean over all tokens of f(w_it, A_it)       `policy_loss_type ppo`, log w within +-20
    J = 1/B sum_i 1/T_i sum_t f(s_i, A_it)          `gspo`, s_i = exp(1/T_i sum_t log w_it)

A KL in the loss is a mean over all tokens, whatever `agg` is.

Shape suffixes: B = completions, N = tokens of all completions, Q = groups, R = completions that are
scanned together, T = positions of the longest of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from openrlhf_ext.algorithms.base import LossBatch, TokenLoss
from openrlhf_ext.algorithms.batch import RolloutBatch
from openrlhf_ext.algorithms.groups import Groups, Inputs, Partition
from openrlhf_ext.algorithms.kl import reward_kl
from openrlhf_ext.algorithms.length_penalty import length_penalty
from openrlhf_ext.algorithms.losses import TokenAlgorithm, clipped_surrogate
from openrlhf_ext.algorithms.option_blocks import (
    AggregationOptions,
    ClipOptions,
    KLOptions,
    Options,
    PenaltyOptions,
)
from openrlhf_ext.algorithms.segments import BLOCK_TOKENS, Segments, float64_sum
from openrlhf_ext.options import Float, Pair, Violation, no_effect, option

# go through the positions together: enough for each step to be worth its call, few enough for the
# memory
_ROWS = 1024
_MOST_LOG_RATIO = 20.0


class ReturnOptions(ClipOptions, KLOptions, AggregationOptions, PenaltyOptions):
    """What all of upstream's estimators read."""

    policy_loss_type: Literal["ppo", "gspo"] = option(
        "ppo",
        "one ratio per token, or per completion the geometric mean of its tokens' (mean over "
        "completions)",
    )
    reward_clip: Pair | None = option(
        (-10, 10), "LOW HIGH that a reward is clipped to after the baseline; null: no clipping"
    )

    def violations(self) -> Iterator[Violation]:
        yield from super().violations()
        if self.reward_clip is not None and self.reward_clip[0] > self.reward_clip[1]:
            low, high = self.reward_clip
            yield Violation(
                ("reward_clip",),
                f"reward_clip must be LOW HIGH with LOW <= HIGH, got {low:g} {high:g}",
            )

    def cautions(self) -> Iterator[str]:
        yield from super().cautions()
        for name in ("agg", "agg_scope", "l_norm") if self.policy_loss_type == "gspo" else ():
            if getattr(self, name) != type(self).model_fields[name].default:
                yield no_effect(
                    name, getattr(self, name), "policy_loss_type gspo is a mean over completions"
                )


class WhitenOptions(Options):
    """Whitening of the advantages."""

    whiten: bool = option(True, "standardize the advantages over all tokens of the rollout batch")
    normalize_std: bool = option(
        True, "divide by the std when whitening; false only subtracts the mean"
    )
    adv_eps: Float = option(1e-8, "least variance that divides when whitening", gt=0)


class DiscountOptions(Options):
    """The discount."""

    gamma: Float = option(1.0, "discount per token", ge=0, le=1)


class ReturnAlgorithm(TokenAlgorithm):
    """A reward on the last token, its returns as advantages; a method gives `baselined`."""

    kl_places = ("loss", "reward")
    loss_inputs = ("sampled_logprobs",)
    tokenwise = True
    kl_is_token_mean = True
    most_kl = 10.0

    def baselined(self, rewards_B: Tensor, inputs: Inputs) -> Tensor:
        """(B,) float64 rewards relative to the method's baseline."""
        return rewards_B

    def partition(self, batch: RolloutBatch, groups: Groups) -> Partition:
        return whole_batch(batch, groups)

    def advantages(self, inputs: Inputs) -> dict[str, Any]:
        batch, options = inputs.batch, self.options
        rewards_B = batch.rewards + length_penalty(inputs, options)
        scores_B = self.baselined(rewards_B, inputs)
        if options.reward_clip is not None:
            scores_B = scores_B.clamp(*options.reward_clip)
        kl_N = None
        if self.kl is not None and self.kl.place == "reward":
            kl_N = reward_kl(self.kl, batch, most=self.most_kl)
            rewards_B = rewards_B - batch.segments.sums(kl_N)
        advantages_N, exposed = self.returns(scores_B.to(batch.float_dtype), kl_N, inputs)
        del kl_N
        if getattr(options, "whiten", False):
            _whiten(advantages_N, normalize_std=options.normalize_std, least=options.adv_eps)
        if self._is_gspo and self.correction is not None:
            exposed["sampled_logprobs"] = batch["rollout_logprobs"]
        return {"advantages": advantages_N, "rewards": rewards_B, "exposed": exposed}

    def returns(
        self, scores_B: Tensor, kl_N: Tensor | None, inputs: Inputs
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(N,) discounted sums of the rewards from each token on, and what else the loss or a
        critic reads."""
        gamma = getattr(self.options, "gamma", 1.0)
        if kl_N is None and gamma == 1:  # the same on all tokens, without a scan
            return inputs.segments.spread(scores_B).clone(), {}
        rewards_N = token_rewards(scores_B, kl_N, inputs.segments)
        return gae(rewards_N, torch.zeros_like(rewards_N), inputs.segments, gamma=gamma, lambd=1.0)[
            0
        ], {}

    # ---- the loss ----

    @property
    def _is_gspo(self) -> bool:
        return bool(self.options.policy_loss_type == "gspo")

    @property
    def agg(self) -> str:
        return "seq-mean-token-mean" if self._is_gspo else super().agg

    def token_loss(self, shaped: LossBatch) -> TokenLoss | None:
        return None if self._is_gspo else super().token_loss(shaped)

    def surrogate(self, log_ratio_N: Tensor, shaped: LossBatch) -> tuple[Tensor, Tensor]:
        if not self._is_gspo:
            return super().surrogate(log_ratio_N.clamp(-_MOST_LOG_RATIO, _MOST_LOG_RATIO), shaped)
        segments, options = shaped.segments, self.options
        # upstream corrects a completion's ratio to new / sampled
        if "sampled_logprobs" in shaped.of_tokens:
            log_ratio_N = log_ratio_N + (shaped["old_logprobs"] - shaped["sampled_logprobs"])
        mean_B = (segments.sums(log_ratio_N) / shaped.lengths).to(log_ratio_N.dtype)
        objective_N, clipped_N = clipped_surrogate(
            segments.spread(mean_B),
            shaped.advantages,
            options.clip_low,
            options.clip_high,
            options.dual_clip,
        )
        return torch.where(shaped.loss_mask, objective_N, 0.0), clipped_N & shaped.loss_mask


def whole_batch(batch: RolloutBatch, groups: Groups) -> Partition:
    """Every completion carries loss; classes serve the metrics only."""
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


def token_rewards(rewards_B: Tensor, kl_N: Tensor | None, segments: Segments) -> Tensor:
    """(N,) terminal reward on each completion's last token, 0 elsewhere, less a KL per token."""
    rewards_N = torch.zeros(segments.tokens, dtype=rewards_B.dtype, device=rewards_B.device)
    rewards_N.index_copy_(0, segments.last(), rewards_B)
    return rewards_N if kl_N is None else rewards_N.sub_(kl_N)


def group_means(rewards_B: Tensor, groups: Groups) -> Tensor:
    """(B,) mean reward of each completion's group."""
    return (groups.sum(rewards_B) / groups.sizes_Q)[groups.index_B]


def gae(
    rewards_N: Tensor, values_N: Tensor, segments: Segments, *, gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    """Advantages `sum_l (gamma lambda)^l delta_{t+l}` and returns `A + V`, both (N,).

    `delta_t = r_t + gamma V_{t+1} - V_t`, with V = 0 after the last token. No gradient flows. (J.
    Schulman et al., arXiv 1506.02438, eq. 16.)
    """
    advantages_N = torch.empty_like(values_N.detach())
    # of about equal length
    for rows_R in segments.lengths_B.argsort().split(_ROWS) if len(segments) else ():
        values_TR, rewards_TR = (
            _from_the_end(x_N.detach(), segments, rows_R) for x_N in (values_N, rewards_N)
        )
        advantages_RT = _backwards(rewards_TR, values_TR, gamma=gamma, lambd=lambd).t().flip(1)
        lengths = segments.lengths_B[rows_R].tolist()
        ends_R = [row_T[-length:] for row_T, length in zip(advantages_RT, lengths, strict=True)]
        segments.put(advantages_N, torch.cat(ends_R), rows_R)
    return advantages_N, advantages_N + values_N.detach()


def _from_the_end(values_N: Tensor, segments: Segments, rows_R: Tensor) -> Tensor:
    """(T, R) entries of some rows, the last ones first, 0 behind the first ones; T is the longest
    row."""
    lengths = segments.lengths_B[rows_R].tolist()
    padded_RT = values_N.new_zeros(len(lengths), max(lengths))
    for row_T, values_n in zip(
        padded_RT, segments.take(values_N, rows_R).split(lengths), strict=True
    ):
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


def _whiten(advantages_N: Tensor, *, normalize_std: bool, least: float) -> None:
    """Centers over all tokens and divides by their population std, in place; statistics in
    float64."""
    tokens = max(1, len(advantages_N))
    advantages_N -= (float64_sum(advantages_N) / tokens).to(advantages_N.dtype)
    if normalize_std:
        squares = sum((block_n.double() ** 2).sum() for block_n in advantages_N.split(BLOCK_TOKENS))
        advantages_N *= (squares / tokens).clamp(min=least).rsqrt().to(advantages_N.dtype)
