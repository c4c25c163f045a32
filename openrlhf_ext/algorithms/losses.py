"""Pieces of policy losses: ratios, the clipped surrogate, aggregation weights, metrics, the search for what overflows.

Shape suffixes: B = completions, N = tokens of all completions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from openrlhf_ext.algorithms.batch import check_values
from openrlhf_ext.algorithms.groups import segment_sum
from openrlhf_ext.algorithms.shaped import Loss, ShapedBatch


def promote(logprobs: Tensor) -> Tensor:
    """Log-probs in at least float32, differentiably."""
    return logprobs.to(torch.promote_types(logprobs.dtype, torch.float32))


def masked_log_ratio(new_logprobs: Tensor, shaped: ShapedBatch) -> Tensor:
    """(N,) `log w = new - old` on loss tokens, 0 elsewhere."""
    if new_logprobs.shape != shaped.old_logprobs.shape:
        raise ValueError(
            f"new_logprobs has shape {tuple(new_logprobs.shape)}, the shaped batch {tuple(shaped.old_logprobs.shape)}"
        )
    return torch.where(shaped.loss_mask, promote(new_logprobs) - shaped.old_logprobs, 0.0)


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


def token_weights(shaped: ShapedBatch, counted_B: Tensor, *, agg: str, agg_scope: str, l_norm: float | None) -> Tensor:
    """Weight omega of every token of a completion (specification 2.9), float64, 0 for inactive completions.

    Args:
        counted_B: counted tokens c_i (0 for inactive completions).
    """
    counted_B = counted_B.to(torch.float64)
    if agg == "seq-mean-token-sum-norm":
        return reciprocal(shaped.kept.sum(dtype=torch.float64) * l_norm, shaped.active)  # n_seq l_norm
    if agg == "seq-mean-token-mean":
        return reciprocal(prompts(shaped) * shaped.group_sizes * counted_B, shaped.active)  # Q G c_i
    if agg_scope == "group":
        ids_Q, index_B = shaped.group_ids.unique(return_inverse=True)
        in_group_B = segment_sum(counted_B, index_B, len(ids_Q))[index_B]
        return reciprocal(prompts(shaped) * in_group_B, shaped.active)
    return reciprocal(counted_B.sum(), shaped.active)


def sequence_weights(shaped: ShapedBatch) -> Tensor:
    """Weight 1/(Q G) of every completion in a sequence objective (specification 2.10), 0 for inactive ones."""
    return reciprocal(prompts(shaped) * shaped.group_sizes.to(torch.float64), shaped.active)


def prompts(shaped: ShapedBatch) -> int:
    """Q, the number of groups of the mini-batch that were not dropped."""
    return len(shaped.kept_groups)


def reciprocal(denominator: Tensor, where_B: Tensor) -> Tensor:
    """(B,) 1/denominator, float64, where the flag is set and the denominator is positive, else 0."""
    usable_B = where_B & (denominator > 0)
    return torch.where(usable_B, 1.0 / denominator.clamp(min=1e-300), 0.0)


def share(values_N: Tensor, shaped: ShapedBatch) -> Tensor:
    """This share's part of the mean over the loss tokens of the whole mini-batch."""
    return values_N.detach().sum(dtype=torch.float64) / shaped.denominators["tokens"].clamp(min=1.0)


def ratio_metrics(log_ratio_N: Tensor, clipped_N: Tensor | None, shaped: ShapedBatch) -> dict[str, Tensor]:
    """Mean of `old - new`, and clip fractions by sign of the advantage."""
    metrics = {"policy_kl": -share(log_ratio_N, shaped)}
    if clipped_N is not None:
        up_N = clipped_N & (shaped.advantages > 0)
        metrics["clip_fraction"] = share(clipped_N, shaped)
        metrics["clip_fraction_high"] = share(up_N, shaped)
        metrics["clip_fraction_low"] = metrics["clip_fraction"] - metrics["clip_fraction_high"]
    return metrics


def checked(
    loss: Loss, terms: Sequence[Tensor], new_logprobs: Tensor, log_ratio_N: Tensor, shaped: ShapedBatch
) -> Loss:
    """The loss; on the CPU a ValueError that names what makes it, or a log-ratio, infinite or NaN.

    Args:
        terms: (N,) or (B,) what the loss is the sum of.
    """
    if loss.value.device.type != "cpu" or bool(torch.isfinite(loss.value.detach() + log_ratio_N.detach().sum())):
        return loss
    check_values("new_logprobs", new_logprobs, shaped.segments)
    worst = max((term.detach().abs().nan_to_num(nan=torch.inf) for term in terms), key=lambda term: float(term.max()))
    token = int(worst.argmax())
    if len(worst) < len(log_ratio_N):  # of completions
        span = shaped.segments.span(slice(token, token + 1))
        token = span.start + int(log_ratio_N.detach()[span].abs().argmax())
    row, position = shaped.segments.place(token)
    raise ValueError(
        f"the loss is {float(loss.value.detach())}: at row {row}, position {position} (new log-prob "
        f"{float(new_logprobs.detach()[token])}, old {float(shaped.old_logprobs[token])}) a ratio or KL "
        f"term overflows {log_ratio_N.dtype} that neither clipping nor a zero advantage silences. Bound the ratios of "
        "negative advantages by dual_clip, or look for log-probs of other weights or of another tokenisation"
    )
