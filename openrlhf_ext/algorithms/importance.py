"""Importance correction for the mismatch between the training engine and the sampler.

Tokens are sampled by one engine (log-prob `rollout`) and trained by another (log-prob `old`, same weights, other
numerics). Each token's surrogate is multiplied by a constant made of `w = exp(old - rollout)`; the semantics are those
of OpenRLHF 0.11.2's `PolicyLoss`. Advantages, KL terms and denominators are not touched.

Shape suffixes: B = completions, N = tokens of all completions, b and n = those of one block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openrlhf_ext.algorithms.option_parsing import Options, option, parse_options
from openrlhf_ext.algorithms.segments import Block, Segments

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


def gate_statistic(correction: Correction, old_n: Tensor, rollout_n: Tensor, block: Block) -> Tensor:
    """The gated statistic, (n,) or at sequence level (b,): geometric mean of w, or mean divergence."""
    if correction.gating == "ratio":
        log_ratio_n = old_n - rollout_n
        return (_mean(log_ratio_n, block) if correction.level == "seq" else log_ratio_n).exp()
    p_n = rollout_n.exp().clamp(PROBABILITY_MARGIN, 1 - PROBABILITY_MARGIN)
    q_n = old_n.exp().clamp(PROBABILITY_MARGIN, 1 - PROBABILITY_MARGIN)
    if correction.gating == "tv":
        statistic_n = (p_n - q_n).abs()
    else:
        statistic_n = p_n * (p_n / q_n).log() + (1 - p_n) * ((1 - p_n) / (1 - q_n)).log()
    return _mean(statistic_n, block) if correction.level == "seq" else statistic_n


def _mean(values_n: Tensor, block: Block) -> Tensor:
    """(b,) mean over each completion's tokens."""
    return (block.sums(values_n) / block.lengths_b).to(values_n.dtype)


def correction_weights(
    correction: Correction, old_N: Tensor, rollout_N: Tensor, segments: Segments
) -> tuple[Tensor, Tensor, Tensor]:
    """Factor of each token's surrogate, and by how much it had to correct.

    Returns:
        weights (N,); (B,) int64 tokens that were filtered or clamped; (B,) float64 sum of `rollout - old` over each
        completion's tokens.
    """
    weights_N = torch.empty_like(old_N, dtype=torch.promote_types(old_N.dtype, rollout_N.dtype))
    filtered_B = torch.zeros_like(segments.lengths_B)
    gap_B = torch.zeros_like(segments.lengths_B, dtype=torch.float64)
    for block in segments.blocks():
        old_n, rollout_n = old_N[block.tokens], rollout_N[block.tokens]
        weights_N[block.tokens], outside_n = _block_weights(correction, old_n, rollout_n, block)
        filtered_B[block.rows] = block.sums(outside_n).long()
        gap_B[block.rows] = block.sums(rollout_n - old_n)
    return weights_N, filtered_B, gap_B


def _block_weights(correction: Correction, old_n: Tensor, rollout_n: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """(n,) factors, and which tokens are outside the band."""
    low, high = correction.threshold
    statistic = gate_statistic(correction, old_n, rollout_n, block)
    outside = (statistic < low) | (statistic > high)
    if correction.mode == "clip":
        return statistic.clamp(low, high), outside
    outside_n = block.spread(outside) if correction.level == "seq" else outside
    return (old_n - rollout_n).exp_().masked_fill_(outside_n, 0.0), outside_n
