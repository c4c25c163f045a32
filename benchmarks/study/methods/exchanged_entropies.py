"""``gtpo_entropy`` with a placebo: its entropies stand at the places of other tokens of the
rollout.

What it does better than ``dapo`` all the same is not due to where the entropy is.

Shape suffix: N = tokens of all completions.
"""

from __future__ import annotations

import dataclasses

import torch

from openrlhf_ext.algorithms import Inputs, RolloutBatch, register_algorithm
from openrlhf_ext.algorithms.methods.gtpo_entropy import GtpoEntropy, GtpoEntropyOptions


@register_algorithm("exchanged_entropies", GtpoEntropyOptions)
class ExchangedEntropies(GtpoEntropy):
    """The same entropies in a random order, which the rollout's tokens decide: a resumed run draws
    the same one."""

    def inputs(self, batch: RolloutBatch) -> Inputs:
        places_N = torch.arange(1, len(batch.tokens) + 1, device=batch.tokens.device)
        generator = torch.Generator().manual_seed(int((batch.tokens.long() * places_N).sum()))
        order_N = torch.randperm(len(batch.tokens), generator=generator).to(batch.tokens.device)
        return super().inputs(dataclasses.replace(batch, entropies=batch["entropies"][order_N]))
