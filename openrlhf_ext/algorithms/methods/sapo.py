"""`sapo`: C. Gao et al., "Soft Adaptive Policy Optimization", arXiv 2511.20347."""

from __future__ import annotations

import torch
from torch import Tensor

from openrlhf_ext.algorithms import LossBatch, TokenAlgorithm, option, register_algorithm
from openrlhf_ext.algorithms.losses import GroupRelative
from openrlhf_ext.algorithms.option_blocks import (
    Aggregation,
    AggregationOptions,
    Degenerate,
    GroupOptions,
    KLOptions,
    agg,
    degenerate,
)
from openrlhf_ext.options import Float

# w = 1096: the gate's gradient is 0 there in float64, and 0 times an overflow would be NaN
_MOST_LOG_RATIO = 7.0


class SapoOptions(GroupOptions, KLOptions, AggregationOptions):
    degenerate: Degenerate = degenerate("literal")
    agg: Aggregation = agg("seq-mean-token-mean")
    tau_pos: Float = option(1.0, "temperature of the gate where A > 0", gt=0)
    tau_neg: Float = option(
        1.05, "temperature of the gate elsewhere; above tau_pos it decays faster", gt=0
    )


@register_algorithm("sapo", SapoOptions)
class Sapo(GroupRelative, TokenAlgorithm):
    """SAPO (Gao et al., arXiv 2511.20347): a smooth gate on each ratio in place of clipping.

    A_i = (r_i - mean r)/(std r + adv_eps)
    f(w) = 4/tau sigmoid(tau (w - 1)),  tau = tau_pos where A_i > 0, tau_neg elsewhere     eq. 6
    J = 1/G sum_i 1/T_i sum_t f(w_it) A_i                           eq. 5
    """

    tokenwise = True

    def surrogate(self, log_ratio_N: Tensor, shaped: LossBatch) -> tuple[Tensor, Tensor]:
        advantages_N, factor_N = shaped.advantages, self.factor(shaped)
        tau_N = torch.full_like(log_ratio_N, self.options.tau_neg)
        tau_N = tau_N.masked_fill_(advantages_N > 0, self.options.tau_pos)
        gate_N = (
            4 / tau_N * torch.sigmoid(tau_N * (log_ratio_N.clamp(max=_MOST_LOG_RATIO).exp() - 1))
        )
        scale_N = advantages_N if factor_N is None else advantages_N * factor_N
        return torch.where(shaped.loss_mask, gate_N * scale_N, 0.0), torch.zeros_like(
            shaped.loss_mask
        )
