"""Pure pieces of policy losses: the clipped surrogate and the aggregation weights.

Shape suffixes: B = completions, T = positions, Q = groups.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def clipped_surrogate(
    log_ratio: Tensor,
    advantages: Tensor,
    clip_low: float | None,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    *,
    factor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """PPO's clipped objective, to be maximised (specification 2.7).

    `min(w A, clip(w, 1 - clip_low, 1 + clip_high) A)` with `w = exp(log_ratio)`, and with `dual_clip = k` at least
    `k A` where `A < 0`. A tie between both terms keeps the gradient.

    The log-ratio is bounded before the exponential, so that a ratio that overflows does no harm where it is clipped or
    multiplied by 0; anywhere else it gives an infinite objective.

    Args:
        log_ratio: log w, the only differentiable input.
        advantages: A, broadcastable to `log_ratio`.
        clip_low: None for no clipping at all; the other bounds are then ignored.
        factor: constant that multiplies the objective, None for 1.
    Returns:
        The objective, and a bool tensor of the entries whose gradient was cut although `A != 0`.
    """
    scale = advantages if factor is None else advantages * factor
    clipped, bound = torch.zeros_like(log_ratio, dtype=torch.bool), 0.0
    if clip_low is not None:
        high, low = math.log1p(clip_high), math.log1p(-clip_low) if clip_low < 1 else -math.inf
        positive = advantages > 0
        clipped = torch.where(positive, log_ratio > high, log_ratio < low)
        bound = torch.full_like(log_ratio, low).masked_fill_(positive, high)
        if dual_clip is not None:
            floored = ~positive & (log_ratio > math.log(dual_clip))
            clipped, bound = clipped | floored, bound.masked_fill_(floored, math.log(dual_clip))
        clipped = clipped & (advantages != 0)
    return torch.where(clipped | (scale == 0), bound, log_ratio).exp() * scale, clipped


def token_weights(
    agg: str,
    agg_scope: str,
    l_norm: float | None,
    *,
    counted_B: Tensor,
    kept_B: Tensor,
    active_B: Tensor,
    index_B: Tensor,
    sizes_B: Tensor,
) -> Tensor:
    """Weight omega of every token of a completion (specification 2.9), float64, 0 for inactive completions.

    Args:
        counted_B: counted tokens c_i (0 for inactive completions).
        kept_B: the completion's group counts in the denominators.
        active_B: the completion carries loss.
        index_B: group index in 0..; any numbering of the mini-batch's groups.
        sizes_B: completions of the row's group.
    """
    counted_B = counted_B.to(torch.float64)
    if agg == "seq-mean-token-sum-norm":
        denominator_B = kept_B.sum() * float(l_norm) * torch.ones_like(counted_B)
    elif agg == "seq-mean-token-mean":
        denominator_B = prompts(kept_B, index_B) * sizes_B * counted_B
    elif agg_scope == "group":
        groups = int(index_B.max()) + 1 if len(index_B) else 0
        totals_Q = torch.zeros(groups, dtype=torch.float64, device=index_B.device).index_add_(0, index_B, counted_B)
        denominator_B = prompts(kept_B, index_B) * totals_Q[index_B]
    else:
        denominator_B = counted_B.sum() * torch.ones_like(counted_B)
    return reciprocal(denominator_B, active_B)


def sequence_weights(*, kept_B: Tensor, active_B: Tensor, index_B: Tensor, sizes_B: Tensor) -> Tensor:
    """Weight 1/(Q G) of every completion in a sequence objective (specification 2.10), 0 for inactive ones."""
    return reciprocal(prompts(kept_B, index_B) * sizes_B.to(torch.float64), active_B)


def prompts(kept_B: Tensor, index_B: Tensor) -> Tensor:
    """Q, the number of groups that count, as a float64 scalar."""
    return torch.tensor(len(index_B[kept_B].unique()), dtype=torch.float64, device=index_B.device)


def reciprocal(denominator_B: Tensor, where_B: Tensor) -> Tensor:
    """1/denominator where the flag is set and the denominator is positive, else 0."""
    usable_B = where_B & (denominator_B > 0)
    return torch.where(usable_B, 1.0 / denominator_B.clamp(min=1e-300), 0.0)
