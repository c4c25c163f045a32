"""Importance correction for the mismatch between the training engine and the rollout engine.

The rollout engine samples the tokens (log-prob `rollout`), and the training engine computes their
log-probs again (log-prob `old`, same weights, different numerics). A constant made of `w = exp(old
- rollout)` multiplies each token's surrogate. The semantics match OpenRLHF 0.11.2's `PolicyLoss`.
Advantages, KL terms and denominators do not change.

Shape suffixes: B = completions, N = tokens of all completions, b and n = those of one block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator
from torch import Tensor

from openrlhf_ext.algorithms.option_blocks import Bounds, Options, parse
from openrlhf_ext.algorithms.segments import Block, Segments
from openrlhf_ext.options import Violation, option

PROBABILITY_MARGIN = 1e-6


def _with_low(threshold: Any) -> Any:
    """(low, high); a single number is the upper end, with low = 0."""
    if isinstance(threshold, int | float):
        return (0.0, threshold)
    return (
        (0.0, *threshold)
        if isinstance(threshold, list | tuple) and len(threshold) == 1
        else threshold
    )


class Correction(Options):
    """Parsed `correction=` mapping.

    The unit of the statistic is a token, or a completion (mean over its tokens). `mask` drops the
    units outside [low, high] and weights the others by w. `clip` replaces w by w clamped to [low,
    high].
    """

    level: Literal["off", "token", "seq"] = option("token", "unit of the statistic")
    mode: Literal["mask", "clip"] = option(
        "mask", "drop units outside the band, or clamp their weight"
    )
    gating: Literal["ratio", "binary_kl", "tv"] = option(
        "ratio", "statistic: w, or the sampled token's binary KL or total variation"
    )
    threshold: Annotated[Bounds, BeforeValidator(_with_low)] = option(
        (0.5, 5.0), "band LOW HIGH of the statistic; one number is the upper end"
    )

    def violations(self) -> Iterator[Violation]:
        if self.mode == "clip" and (self.level == "seq" or self.gating != "ratio"):
            yield Violation(
                ("mode", "level", "gating"),
                "mode clip requires level token and gating ratio (only the per-token ratio is a "
                f"weight that can be clamped), got {self.level} and {self.gating}; use mode mask",
            )
        if self.gating != "ratio" and self.level != "off" and self.threshold[0] > 0:
            yield Violation(
                ("gating", "threshold"),
                f"gating {self.gating} takes an upper bound only: got {list(self.threshold)}; "
                "give one threshold",
            )


def parse_correction(values: Mapping[str, Any] | None) -> Correction | None:
    """Parse the `correction=` mapping (keys level, mode, gating, threshold).

    Returns None if it is absent or has `level: off`.
    """
    if values is None:
        return None
    correction = parse(Correction, values, owner="correction")
    return None if correction.level == "off" else correction


def gate_statistic(
    correction: Correction, old_n: Tensor, rollout_n: Tensor, block: Block | None
) -> Tensor:
    """The gated statistic, (n,), or (b,) at sequence level: geometric mean of w, or mean
    divergence."""
    if correction.gating == "ratio":
        log_ratio_n = old_n - rollout_n
        return (log_ratio_n if block is None else _mean(log_ratio_n, block)).exp()
    p_n = rollout_n.exp().clamp(PROBABILITY_MARGIN, 1 - PROBABILITY_MARGIN)
    q_n = old_n.exp().clamp(PROBABILITY_MARGIN, 1 - PROBABILITY_MARGIN)
    if correction.gating == "tv":
        statistic_n = (p_n - q_n).abs()
    else:
        statistic_n = p_n * (p_n / q_n).log() + (1 - p_n) * ((1 - p_n) / (1 - q_n)).log()
    return statistic_n if block is None else _mean(statistic_n, block)


def _mean(values_n: Tensor, block: Block) -> Tensor:
    """(b,) mean over each completion's tokens."""
    return (block.sums(values_n) / block.lengths_b).to(values_n.dtype)


def correction_weights(
    correction: Correction, old_N: Tensor, rollout_N: Tensor, segments: Segments
) -> tuple[Tensor, Tensor, Tensor]:
    """The factor of each token's surrogate, and statistics of the correction.

    Returns:
        weights (N,); (B,) int64 tokens that were filtered or clamped; (B,) float64 sum of `rollout
        - old` over each completion's tokens.
    """
    weights_N = torch.empty_like(old_N, dtype=torch.promote_types(old_N.dtype, rollout_N.dtype))
    filtered_B = torch.zeros_like(segments.lengths_B)
    gap_B = torch.zeros_like(segments.lengths_B, dtype=torch.float64)
    for block in segments.blocks():
        old_n, rollout_n = old_N[block.tokens], rollout_N[block.tokens]
        of_completions = block if correction.level == "seq" else None
        weights_N[block.tokens], outside_n = factors(correction, old_n, rollout_n, of_completions)
        filtered_B[block.rows] = block.sums(outside_n).long()
        gap_B[block.rows] = block.sums(rollout_n - old_n)
    return weights_N, filtered_B, gap_B


def factors(
    correction: Correction, old_n: Tensor, rollout_n: Tensor, block: Block | None = None
) -> tuple[Tensor, Tensor]:
    """(n,) factors, and a mask of the tokens outside the band.

    ``block``: the rows of these tokens, at sequence level only.
    """
    low, high = correction.threshold
    statistic = gate_statistic(correction, old_n, rollout_n, block)
    outside = (statistic < low) | (statistic > high)
    if correction.mode == "clip":
        return statistic.clamp(low, high), outside
    outside_n = outside if block is None else block.spread(outside)
    return (old_n - rollout_n).exp_().masked_fill_(outside_n, 0.0), outside_n
