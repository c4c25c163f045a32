"""`gmpo`: Y. Zhao et al., "Geometric-Mean Policy Optimization", arXiv 2507.20673."""

from __future__ import annotations

import torch
from torch import Tensor

from openrlhf_ext.algorithms import LossBatch, SequenceAlgorithm, option, register_algorithm
from openrlhf_ext.algorithms.losses import GroupRelative, clipped_surrogate
from openrlhf_ext.algorithms.option_blocks import Degenerate, GroupOptions, degenerate
from openrlhf_ext.options import Float


class GmpoOptions(GroupOptions):
    degenerate: Degenerate = degenerate("literal")
    log_clip: Float = option(
        0.4, "a token's log-ratio that helps its completion is at most this far from 0", gt=0
    )


@register_algorithm("gmpo", GmpoOptions)
class Gmpo(GroupRelative, SequenceAlgorithm):
    """GMPO (Zhao et al., arXiv 2507.20673): the geometric mean of the token ratios, each clipped by
    itself, so that one token cannot carry a completion.

        A_i = (r_i - mean r)/(std r + adv_eps)
        c_it = min(log w_it, log_clip) where A_i > 0, max(log w_it, -log_clip) elsewhere
        J = 1/G sum_i A_i exp(1/T_i sum_t c_it)                eq. 4; the clip range of its sec. 3.2
    """

    kl_places = ("reward",)

    def objective(self, log_ratio_N: Tensor, shaped: LossBatch) -> tuple[Tensor, Tensor, Tensor]:
        segments, most = shaped.segments, self.options.log_clip
        advantages_B = shaped["seq_advantages"]
        positive_N, zero_N = segments.spread(advantages_B > 0), segments.spread(advantages_B == 0)
        clipped_N = torch.where(positive_N, log_ratio_N > most, log_ratio_N < -most) & ~zero_N
        bound_N = torch.full_like(log_ratio_N, -most).masked_fill_(positive_N, most)
        mean_B = self.sequence_log_ratio(torch.where(clipped_N, bound_N, log_ratio_N), shaped)
        factor_B = self.factor(shaped).to(mean_B.dtype)
        objective_B, _ = clipped_surrogate(
            mean_B, advantages_B.to(mean_B.dtype), None, factor=factor_B
        )
        return objective_B, segments.sums(clipped_N.to(torch.float64)) / shaped.lengths, mean_B
