"""Numbers that describe a rollout batch: entropy by class, where the advantage mass lies,
degenerate groups.

Shape suffixes: B = completions, N = tokens of all completions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openrlhf_ext.algorithms.groups import Inputs
from openrlhf_ext.algorithms.segments import Segments

SAMPLE = 1 << 16
"""Completion tokens the quantile metrics look at: all of a small batch, evenly spaced ones of a
large batch."""

QUANTILES = 5
GOLDEN_RATIO = (5**0.5 - 1) / 2


def rollout_metrics(inputs: Inputs, rewards_B: Tensor, advantages_N: Tensor) -> dict[str, Tensor]:
    """0-d float64 metrics every algorithm reports; a number that does not exist is left out, as is
    all of an empty batch.
    """
    if len(rewards_B) == 0:
        return {}
    part, groups = inputs.part, inputs.groups
    metrics = {
        "groups": torch.tensor(float(len(groups)), dtype=torch.float64, device=rewards_B.device),
        "degenerate_groups": part.degenerate_Q.to(torch.float64).mean(),
        "kept_completions": part.kept_B.to(torch.float64).mean(),
        "active_completions": part.active_B.to(torch.float64).mean(),
        "success_rate": part.success_B.to(torch.float64).mean(),
        "penalised_reward": rewards_B.mean(),
        **_shares_of_the_right(inputs),
    }
    if inputs.batch.entropies is not None:
        metrics.update(_entropy_by_class(inputs))
        metrics.update(_mass_by_entropy_quantile(inputs, advantages_N))
    return metrics


def mean_entropies(entropies_N: Tensor, segments: Segments) -> Tensor:
    """(B,) float64 `<H>_i`, the mean entropy of each completion in nats.

    `<H>_ini` (option `h_ini`) is the mean of these numbers over the completions of the first 100
    training prompts, sampled at training temperature before the first step.
    """
    return segments.sums(entropies_N) / segments.lengths_B.clamp(min=1)


def _shares_of_the_right(inputs: Inputs) -> dict[str, Tensor]:
    """What is right, means over groups with right and wrong completions: p of their completions, q
    of their tokens.

    A right completion gets the advantage sqrt((1 - p)/p) where a pool counts completions, as in
    dapo, and sqrt((1 - q)/q) where it counts tokens, as in gtpo_entropy (T1 eq. 3 without entropy).
    """
    groups, right_B = inputs.groups, inputs.part.success_B
    mixed_Q = groups.any(right_B) & groups.any(inputs.part.failure_B)
    if not bool(mixed_Q.any()):
        return {}
    right_Q = groups.sum(torch.where(right_B, groups.lengths_B, 0))
    return {
        "right_completions": (groups.count(right_B) / groups.sizes_Q)[mixed_Q].mean(
            dtype=torch.float64
        ),
        "right_tokens": (right_Q / groups.sum(groups.lengths_B))[mixed_Q].mean(),
    }


def _entropy_by_class(inputs: Inputs) -> dict[str, Tensor]:
    """Mean token entropy of successful and failed completions, over their tokens; of classes that
    exist."""
    total_B = inputs.segments.sums(inputs.batch["entropies"])
    lengths_B = inputs.groups.lengths_B.to(torch.float64)
    metrics = {}
    for name, flags_B in (("correct", inputs.part.success_B), ("wrong", inputs.part.failure_B)):
        if bool(flags_B.any()):
            metrics[f"entropy_{name}"] = total_B[flags_B].sum() / lengths_B[flags_B].sum()
    return metrics


def _mass_by_entropy_quantile(inputs: Inputs, advantages_N: Tensor) -> dict[str, Tensor]:
    """Share of sum |A| on the tokens of each fifth of the entropy distribution, lowest first; none
    if all A are 0."""
    sample = _sampled_tokens(inputs.segments.tokens, advantages_N.device)
    entropy = inputs.batch["entropies"][sample]
    mass = advantages_N[sample].abs().to(torch.float64)
    order = entropy.argsort(stable=True)
    fifth = (torch.arange(len(order), device=order.device) * QUANTILES) // len(order)
    by_fifth = torch.zeros(QUANTILES, dtype=torch.float64, device=order.device).index_add_(
        0, fifth, mass[order]
    )
    if not bool(by_fifth.any()):
        return {}
    shares = by_fifth / by_fifth.sum()
    return {f"advantage_mass_q{i + 1}": shares[i] for i in range(QUANTILES)}


def _sampled_tokens(tokens: int, device: torch.device) -> Tensor:
    """Flat index of all completion tokens, or of SAMPLE tokens spread evenly over them."""
    rank = torch.arange(min(tokens, SAMPLE), device=device)
    if tokens <= SAMPLE:
        return rank
    # Multiples of the golden ratio: as even as a stride, but in step with no row length or
    # position.
    return (rank.double() * GOLDEN_RATIO % 1.0 * tokens).long()
