"""`mixed_policy_dapo`: experimental reconstruction from an abstract, not the published formulas.

H. Tan and Y. Li, "Improving DAPO from a Mixed-Policy Perspective", arXiv 2507.12931, known from its
abstract only.

Shape suffixes: B = completions, N = tokens of all completions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from openrlhf_ext.algorithms import (
    Inputs,
    LossBatch,
    RolloutBatch,
    TokenAlgorithm,
    option,
    register_algorithm,
)
from openrlhf_ext.algorithms.base import MOST_LOGPROB
from openrlhf_ext.algorithms.batch import check_values
from openrlhf_ext.algorithms.losses import GroupRelative, clipped_surrogate
from openrlhf_ext.algorithms.methods.dapo import DapoOptions
from openrlhf_ext.options import Float


class MixedPolicyOptions(DapoOptions):
    zero_batch: bool = option(
        False, "add the loss over groups without a success, guided by the other policy"
    )
    zero_weight: Float = option(1.0, "weight of that loss", ge=0)

    def cautions(self) -> Iterator[str]:
        yield from super().cautions()
        yield (
            "mixed_policy_dapo is an experimental reconstruction from the abstract of arXiv "
            "2507.12931; it does not reproduce the published method"
        )


@register_algorithm("mixed_policy_dapo", MixedPolicyOptions)
class MixedPolicyDapo(GroupRelative, TokenAlgorithm):
    """EXPERIMENTAL RECONSTRUCTION: DAPO with ratios to a guiding policy on its completions (a), and
    optionally a loss over groups without any success, guided by that policy (b).
    """

    loss_inputs = ("zero_group", "guide_logprobs")
    reads_old = True
    tokenwise = True

    def inputs(self, batch: RolloutBatch) -> Inputs:
        guided = batch.from_guide is not None and bool(batch.from_guide.any())
        if (guided or self.options.zero_batch) and batch.guide_logprobs is None:
            raise ValueError(
                "mixed_policy_dapo with from_guide completions or zero_batch needs guide_logprobs"
            )
        inputs = super().inputs(batch)
        if inputs.batch.guide_logprobs is not None:
            check_values(
                "guide_logprobs", inputs.batch.guide_logprobs, inputs.segments, high=MOST_LOGPROB
            )
        return inputs

    def advantages(self, inputs: Inputs) -> dict[str, Any]:
        batch, groups = inputs.batch, inputs.groups
        fields: dict[str, Any] = super().advantages(inputs)
        if batch.from_guide is not None and batch.guide_logprobs is not None:
            guided_N = batch.segments.spread(batch.from_guide)
            fields["old_logprobs"] = torch.where(
                guided_N, batch.guide_logprobs, batch["old_logprobs"]
            )
        if self.options.zero_batch:
            without_success_B = ~groups.any(inputs.part.success_B)[groups.index_B]
            fields["exposed"] = {
                "zero_group": without_success_B,
                "guide_logprobs": batch["guide_logprobs"],
            }
        return fields

    def corrected_rows(self, inputs: Inputs) -> Tensor:
        """Completions of the guide were not sampled by the policy: no importance correction for
        them."""
        everyone_B = super().corrected_rows(inputs)
        return (
            everyone_B if inputs.batch.from_guide is None else everyone_B & ~inputs.batch.from_guide
        )

    def loss_level(self, shaped: LossBatch) -> LossBatch:
        shaped = super().loss_level(shaped)
        if not self.options.zero_batch:
            return shaped
        tokens = torch.where(shaped["zero_group"], shaped.lengths, 0).sum().to(torch.float64)
        return dataclasses.replace(
            shaped, denominators={**shaped.denominators, "zero_tokens": tokens}
        )

    def extra_terms(self, new_N: Tensor, shaped: LossBatch) -> dict[str, Tensor]:
        """Part (b): constant advantage -1 on all tokens of groups without a success, ratio to the
        guide."""
        if not self.options.zero_batch:
            return {}
        tokens_N = shaped.segments.spread(shaped["zero_group"])
        log_ratio_N = torch.where(tokens_N, new_N - shaped["guide_logprobs"], 0.0)
        minus_one = torch.full((), -1.0, dtype=log_ratio_N.dtype, device=log_ratio_N.device)
        objective_N, _ = clipped_surrogate(
            log_ratio_N, minus_one, self.options.clip_low, self.options.clip_high
        )
        factor = self.options.zero_weight / shaped.denominators["zero_tokens"].clamp(min=1.0)
        return {
            "zero_batch_loss": -torch.where(tokens_N, objective_N, 0.0)
            * factor.to(log_ratio_N.dtype)
        }
