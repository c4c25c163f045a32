"""`SequenceAlgorithm`: the loss of methods with one ratio and one advantage per completion (specification 2.10).

    J = 1/Q sum over prompts of 1/G sum_i f(s_i, A_i)                       f: the clipped surrogate
    s_i = exp(1/T_i sum_t log w_it)  (geometric)    or    1/T_i sum_t w_it  (arithmetic)

An importance correction multiplies a completion's term by the mean of its tokens' factors.

Shape suffixes: B = completions, N = tokens of all completions.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from openrlhf_ext.algorithms import losses
from openrlhf_ext.algorithms.base import Algorithm, Inputs
from openrlhf_ext.algorithms.losses import masked_log_ratio
from openrlhf_ext.algorithms.shaped import Loss, ShapedBatch


class SequenceAlgorithm(Algorithm):
    """One ratio and one advantage per completion.

    Class attributes:
        ratio_kind: "geometric" or "arithmetic" mean of the token ratios.
    """

    ratio_kind: ClassVar[str] = "geometric"

    def rollout_level(self, inputs: Inputs) -> ShapedBatch:
        fields = self.advantages(inputs)
        token_N = inputs.segments.spread(fields["seq_advantages"].to(inputs.batch.float_dtype))
        return self.shaped(inputs, advantages=token_N, **fields)

    def loss_level(self, shaped: ShapedBatch) -> ShapedBatch:
        denominators = {
            "tokens": torch.where(shaped.active, shaped.lengths, 0).sum().to(torch.float64),
            "sequences": shaped.active.sum().to(torch.float64),
        }
        return dataclasses.replace(
            shaped,
            # Truncated-masked completions have a ratio to look at, but weight 0.
            loss_mask=shaped.segments.spread(shaped.kept),
            weights=losses.sequence_weights(shaped),
            denominators=denominators,
            complete=True,
        )

    def loss(self, new_logprobs: Tensor, shaped: ShapedBatch) -> Loss:
        options = self.options
        log_ratio_N = masked_log_ratio(new_logprobs, shaped)
        log_ratio_B = self.sequence_log_ratio(log_ratio_N, shaped)
        objective_B, clipped_B = losses.clipped_surrogate(
            log_ratio_B,
            shaped.seq_advantages.to(log_ratio_B.dtype),
            options.clip_low,
            options.clip_high,
            options.dual_clip,
            factor=self._factor(shaped).to(log_ratio_B.dtype),
        )
        value = -objective_B.sum()
        clipped_B = clipped_B & shaped.active
        active_N = shaped.segments.spread(shaped.active)
        metrics = losses.ratio_metrics(torch.where(active_N, log_ratio_N.detach(), 0.0), None, shaped)
        sequences = shaped.denominators["sequences"].clamp(min=1.0)
        metrics["clip_fraction"] = clipped_B.sum(dtype=torch.float64) / sequences
        details = {"clipped": clipped_B, "ratios": log_ratio_B.detach().exp()}
        loss = Loss(value, {"policy_loss": value.detach(), **metrics}, details)
        return losses.checked(loss, (objective_B,), new_logprobs, log_ratio_N, shaped)

    def sequence_log_ratio(self, log_ratio_N: Tensor, shaped: ShapedBatch) -> Tensor:
        """(B,) log s_i, 0 in dropped groups."""
        segments = shaped.segments
        if self.ratio_kind == "geometric" or len(shaped) == 0:
            return (segments.sums(log_ratio_N) / shaped.lengths).to(log_ratio_N.dtype)
        # Relative to the largest token ratio, so that nothing overflows.
        largest_B = segments.maxima(log_ratio_N.detach())
        mean_B = segments.sums((log_ratio_N - segments.spread(largest_B)).exp()) / shaped.lengths
        return largest_B + mean_B.to(log_ratio_N.dtype).log()

    def _factor(self, shaped: ShapedBatch) -> Tensor:
        """(B,) 1/(Q G), times the importance correction."""
        if shaped.correction is None:
            return shaped.weights
        return shaped.weights * (shaped.segments.sums(shaped.correction) / shaped.lengths)
