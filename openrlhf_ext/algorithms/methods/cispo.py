"""`cispo`: MiniMax, "MiniMax-M1", arXiv 2506.13585."""

from __future__ import annotations

import torch
from torch import Tensor

from openrlhf_ext.algorithms import LossBatch, TokenAlgorithm, register_algorithm
from openrlhf_ext.algorithms.losses import GroupRelative
from openrlhf_ext.algorithms.option_blocks import (
    AggregationOptions,
    ClipIntervalOptions,
    Degenerate,
    GroupOptions,
    KLOptions,
    clip_high,
    clip_low,
    degenerate,
)
from openrlhf_ext.options import Float


class CispoOptions(GroupOptions, ClipIntervalOptions, KLOptions, AggregationOptions):
    degenerate: Degenerate = degenerate("literal")
    clip_low: Float | None = clip_low(1.0)
    clip_high: Float | None = clip_high(4.0)


@register_algorithm("cispo", CispoOptions)
class Cispo(GroupRelative, TokenAlgorithm):
    """CISPO (MiniMax-M1, arXiv 2506.13585): the ratio is clipped as a constant weight, so that
    every token keeps its gradient. The paper has no lower bound (`clip_low` 1) and gives no number
    for the upper one.

        A_i = (r_i - mean r)/(std r + adv_eps)                          eq. 2
        v_it = constant clip(w_it, 1 - clip_low, 1 + clip_high)         eq. 5
        J = 1/(sum_i T_i) sum_i sum_t v_it A_i new_it                   eq. 4
    """

    tokenwise = True

    def surrogate(self, log_ratio_N: Tensor, shaped: LossBatch) -> tuple[Tensor, Tensor]:
        low, high = self.options.clip_low, self.options.clip_high
        ratio_N = log_ratio_N.detach().exp()
        weight_N = ratio_N if low is None else ratio_N.clamp(1 - low, 1 + high)
        clipped_N = (weight_N != ratio_N) & (shaped.advantages != 0) & shaped.loss_mask
        factor_N = self.factor(shaped)
        scale_N = (
            weight_N * shaped.advantages
            if factor_N is None
            else weight_N * shaped.advantages * factor_N
        )
        return torch.where(
            shaped.loss_mask, scale_N * (log_ratio_N + shaped["old_logprobs"]), 0.0
        ), clipped_N
