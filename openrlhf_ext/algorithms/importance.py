"""Importance correction for the mismatch between the training engine and the sampler.

Tokens are sampled by one engine (log-prob `rollout`) and trained by another (log-prob `old`, same weights, other
numerics). Each token's surrogate is multiplied by a constant made of `w = exp(old - rollout)`; the semantics are those
of OpenRLHF 0.11.2's `PolicyLoss`. Advantages, KL terms and denominators are not touched.

Shape suffixes: B = completions, T = positions, b = rows of one block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openrlhf_ext.algorithms.blocks import row_blocks
from openrlhf_ext.algorithms.option_parsing import Options, option, parse_options

PROBABILITY_MARGIN = 1e-6


@dataclass(frozen=True, kw_only=True)
class Correction(Options):
    """Parsed `correction=` mapping.

    A statistic is computed per unit (a token, or a completion's mean over tokens). `mask` drops the units outside
    [low, high] and weighs the others by w; `clip` replaces w by w clamped to [low, high].
    """

    level: str = option("choice", "token", "unit of the statistic", choices=("off", "token", "seq"))
    mode: str = option("choice", "mask", "drop units outside the band, or clamp their weight", choices=("mask", "clip"))
    gating: str = option(
        "choice",
        "ratio",
        "statistic: w, or the sampled token's binary KL or total variation",
        choices=("ratio", "binary_kl", "tv"),
    )
    threshold: tuple[float, float] = option(
        "pair",
        (0.5, 5.0),
        "band [low, high]; one number is the upper end",
        check=lambda t: 0 <= t[0] <= t[1],
        rule="[low, high] with 0 <= low <= high",
    )

    def violations(self) -> Iterator[str]:
        if self.mode == "clip" and (self.level == "seq" or self.gating != "ratio"):
            yield (
                "correction mode 'clip' requires level 'token' and gating 'ratio' (only the per-token ratio is a "
                f"weight that can be clamped), got level {self.level!r}, gating {self.gating!r}"
            )
        if self.gating != "ratio" and self.level != "off" and self.threshold[0] > 0:
            yield (
                f"correction gating {self.gating!r} has an upper bound only: give one number as threshold, "
                f"got {list(self.threshold)}"
            )


def parse_correction(values: Mapping[str, Any] | None) -> Correction | None:
    """The `correction=` mapping (keys level, mode, gating, threshold); None when absent or `level: off`."""
    if values is None:
        return None
    values = dict(values)
    threshold = values.get("threshold")
    if isinstance(threshold, int | float):
        values["threshold"] = (0.0, threshold)
    elif isinstance(threshold, list | tuple) and len(threshold) == 1:
        values["threshold"] = (0.0, threshold[0])
    correction = parse_options(Correction, values, owner="correction")
    return None if correction.level == "off" else correction


def masked_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """(B, 1) mean over each row's completion tokens."""
    total_B1 = torch.where(mask_BT, values_BT, 0.0).sum(dim=1, keepdim=True)
    return total_B1 / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)


def gate_statistic(correction: Correction, old_BT: Tensor, rollout_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The gated statistic, (B, T) or at sequence level (B, 1): geometric mean of w, or mean divergence."""
    sequence = correction.level == "seq"
    if correction.gating == "ratio":
        log_ratio_BT = old_BT - rollout_BT
        return (masked_mean(log_ratio_BT, mask_BT) if sequence else log_ratio_BT).exp()
    p_BT = rollout_BT.exp().clamp(PROBABILITY_MARGIN, 1 - PROBABILITY_MARGIN)
    q_BT = old_BT.exp().clamp(PROBABILITY_MARGIN, 1 - PROBABILITY_MARGIN)
    if correction.gating == "tv":
        statistic_BT = (p_BT - q_BT).abs()
    else:
        statistic_BT = p_BT * (p_BT / q_BT).log() + (1 - p_BT) * ((1 - p_BT) / (1 - q_BT)).log()
    return masked_mean(statistic_BT, mask_BT) if sequence else statistic_BT


def correction_weights(
    correction: Correction, old_BT: Tensor, rollout_BT: Tensor, mask_BT: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Factor of each token's surrogate, and by how much it had to correct.

    Returns:
        weights (B, T), 1 in padding; (B,) int64 tokens that were filtered or clamped; (B,) float64 sum of
        `rollout - old` over each completion's tokens.
    """
    weights_BT = torch.empty_like(old_BT, dtype=torch.promote_types(old_BT.dtype, rollout_BT.dtype))
    filtered_B = torch.zeros(len(mask_BT), dtype=torch.int64, device=mask_BT.device)
    gap_B = torch.zeros(len(mask_BT), dtype=torch.float64, device=mask_BT.device)
    for rows in row_blocks(*mask_BT.shape):
        mask_bT = mask_BT[rows]
        old_bT, rollout_bT = (torch.where(mask_bT, logprobs_BT[rows], 0.0) for logprobs_BT in (old_BT, rollout_BT))
        weights_bT, outside_bT = _block_weights(correction, old_bT, rollout_bT, mask_bT)
        weights_BT[rows] = torch.where(mask_bT, weights_bT, 1.0)
        filtered_B[rows] = (outside_bT & mask_bT).sum(dim=1)
        gap_B[rows] = (rollout_bT - old_bT).sum(dim=1, dtype=torch.float64)
    return weights_BT, filtered_B, gap_B


def _block_weights(
    correction: Correction, old_bT: Tensor, rollout_bT: Tensor, mask_bT: Tensor
) -> tuple[Tensor, Tensor]:
    """(b, T) factors and (b, T) or (b, 1) which units are outside the band."""
    low, high = correction.threshold
    statistic = gate_statistic(correction, old_bT, rollout_bT, mask_bT)
    outside = (statistic < low) | (statistic > high)
    if correction.mode == "clip":
        return statistic.clamp(low, high), outside
    return torch.where(outside, 0.0, (old_bT - rollout_bT).exp()), outside
