"""`SequenceAlgorithm`: the loss of methods with one ratio and one advantage per completion (specification 2.10).

    J = 1/Q sum over prompts of 1/G sum_i f(s_i, A_i)                       f: the clipped surrogate
    s_i = exp(1/T_i sum_t log w_it)  (geometric)    or    1/T_i sum_t w_it  (arithmetic)

An importance correction multiplies a completion's term by the mean of its tokens' factors.

Shape suffixes: B = completions, T = positions.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from openrlhf_ext.algorithms import losses
from openrlhf_ext.algorithms.base import Algorithm, Inputs, broadcast, tokens_of
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
        token_BT = broadcast(fields["seq_advantages"], inputs.batch.mask, inputs.batch.float_dtype)
        return self.shaped(inputs, advantages=token_BT, **fields)

    def loss_level(self, shaped: ShapedBatch) -> ShapedBatch:
        denominators = {
            "tokens": torch.where(shaped.active, shaped.lengths, 0).sum().to(torch.float64),
            "sequences": shaped.active.sum().to(torch.float64),
        }
        return dataclasses.replace(
            shaped,
            # Truncated-masked completions have a ratio to look at, but weight 0.
            loss_mask=tokens_of(shaped.mask, shaped.kept),
            weights=losses.sequence_weights(shaped),
            denominators=denominators,
            complete=True,
        )

    def loss(self, new_logprobs: Tensor, shaped: ShapedBatch) -> Loss:
        options = self.options
        log_ratio_BT = masked_log_ratio(new_logprobs, shaped)
        log_ratio_B = self.sequence_log_ratio(log_ratio_BT, shaped)
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
        metrics = losses.ratio_metrics(torch.where(shaped.active[:, None], log_ratio_BT.detach(), 0.0), None, shaped)
        sequences = shaped.denominators["sequences"].clamp(min=1.0)
        metrics["clip_fraction"] = clipped_B.sum(dtype=torch.float64) / sequences
        details = {"clipped": clipped_B, "ratios": log_ratio_B.detach().exp()}
        loss = Loss(value, {"policy_loss": value.detach(), **metrics}, details)
        return losses.checked(loss, (objective_B,), new_logprobs, log_ratio_BT, shaped)

    def sequence_log_ratio(self, log_ratio_BT: Tensor, shaped: ShapedBatch) -> Tensor:
        """(B,) log s_i, 0 in dropped groups."""
        lengths_B = shaped.lengths.to(log_ratio_BT.dtype)
        if self.ratio_kind == "geometric" or len(shaped) == 0:
            return log_ratio_BT.sum(dim=1) / lengths_B
        # Relative to the largest token ratio, so that nothing overflows.
        largest_B = torch.where(shaped.loss_mask, log_ratio_BT.detach(), -torch.inf).amax(dim=1)
        largest_B = torch.where(shaped.kept, largest_B, 0.0)
        below_BT = torch.where(shaped.loss_mask, log_ratio_BT - largest_B[:, None], -torch.inf)
        mean_B = below_BT.exp().sum(dim=1) / lengths_B
        return largest_B + torch.where(shaped.kept, mean_B, 1.0).log()

    def _factor(self, shaped: ShapedBatch) -> Tensor:
        """(B,) 1/(Q G), times the importance correction."""
        if shaped.correction is None:
            return shaped.weights
        total_B = torch.where(shaped.mask, shaped.correction, 0.0).sum(dim=1)
        return shaped.weights * (total_B / shaped.lengths.to(total_B.dtype))
