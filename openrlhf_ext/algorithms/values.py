"""The critic's side of `gae`: value loss, and how good the values are.

Shape suffixes: N = tokens of all completions.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from openrlhf_ext.algorithms.segments import BLOCK_TOKENS

_ROUNDING = 1e-12  # relative variance of equal numbers that went through fp32 sums


def value_loss(
    values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, *, clip: float | None, tokens: Tensor
) -> Tensor:
    """`1/2` mean of the (clipped) squared error over `tokens` tokens of the whole mini-batch:
    shares add up.

    With `clip`, the larger of the errors of V and of V clipped to `old +- clip`, as in PPO.
    """
    error_N = (values_N - returns_N) ** 2
    if clip is not None:
        near_N = values_N.clamp(old_values_N - clip, old_values_N + clip)
        error_N = torch.maximum(error_N, (near_N - returns_N) ** 2)
    return 0.5 * error_N.sum() / tokens.to(error_N.dtype)


@torch.no_grad()
def value_clip_fraction(
    values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, *, clip: float, tokens: Tensor
) -> Tensor:
    """Share of the `tokens` tokens whose value gets no gradient, because the clipped value has the
    larger error."""
    # V itself inside: a sum would round it
    near_N = values_N.clamp(old_values_N - clip, old_values_N + clip)
    cut_N = (near_N - returns_N) ** 2 > (values_N - returns_N) ** 2
    return cut_N.sum() / tokens.to(values_N.dtype)


def explained_variance(values_N: Tensor, returns_N: Tensor) -> Tensor | None:
    """`1 - Var(returns - values) / Var(returns)` over the completion tokens, float64; None if the
    returns are equal up to rounding.

    1: the critic knows the returns; 0: it is as good as their mean; negative: worse.
    """
    variance, mean = _moments(returns_N)
    if variance <= _ROUNDING * (variance + mean * mean):
        return None
    return 1.0 - _moments(returns_N, values_N)[0] / variance


def _moments(values_N: Tensor, minus_N: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Population variance and mean of `values - minus`, float64, in two passes over blocks."""

    def blocks() -> Iterator[Tensor]:
        for start in range(0, len(values_N), BLOCK_TOKENS):
            n = slice(start, start + BLOCK_TOKENS)
            yield values_N[n].double() - (0.0 if minus_N is None else minus_N[n])

    zero = torch.zeros((), dtype=torch.float64, device=values_N.device)
    mean = sum((block_n.sum() for block_n in blocks()), zero) / len(values_N)
    return sum((((block_n - mean) ** 2).sum() for block_n in blocks()), zero) / len(values_N), mean
