"""Exact order statistics of large tensors with little memory.

Values are ranked by their bit patterns, 16 bits per pass over blocks: no sort, no index tensor, the
same result for any order of the entries.

Shape suffixes: N = entries, n = those of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from openrlhf_ext.algorithms.segments import BLOCK_TOKENS

_BITS = {torch.float32: (torch.int32, 32), torch.float64: (torch.int64, 64)}
_DIGIT = 16
_SIGN = 1 << (_DIGIT - 1)


def _ordered_bits(values: Tensor) -> Tensor:
    """Signed integers in the order of the floats (negative floats have their magnitude bits
    flipped)."""
    integer, width = _BITS[values.dtype]
    # Adding 0 turns -0.0 into 0.0, which must rank alike.
    bits = (values + 0.0).view(integer)
    return bits ^ ((bits >> (width - 1)) & ((1 << (width - 1)) - 1))


def _from_bits(bits: int, dtype: torch.dtype) -> Tensor:
    integer, width = _BITS[dtype]
    if bits < 0:
        bits ^= (1 << (width - 1)) - 1
    return torch.tensor(bits, dtype=integer).view(dtype)


def order_statistic(
    values_N: Tensor,
    among_N: Tensor | None,
    rank: int,
    total: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> tuple[Tensor, int]:
    """The value of 0-based `rank` in ascending order among the flagged entries; float32 or float64.

    Args:
        among_N: which entries count; None: all.
        total: sums an int64 tensor over processes that hold a part of the values each; all then
        find the same.
    Returns:
        the value, 0-d; and how many entries are less than or equal to it.
    """
    width = _BITS[values_N.dtype][1]
    known: int | None = None
    below = 0
    for shift in range(width - _DIGIT, -1, -_DIGIT):
        counts = total(_digit_counts(values_N, among_N, shift, known))
        reached = counts.cumsum(0) + below
        digit = int(torch.searchsorted(reached, rank, right=True))
        below = int(reached[digit - 1]) if digit else below
        known = digit - _SIGN if known is None else (known << _DIGIT) | digit
    assert known is not None, "every width has a digit"
    return _from_bits(known, values_N.dtype).to(values_N.device), int(reached[digit])


def _digit_counts(
    values_N: Tensor, among_N: Tensor | None, shift: int, known: int | None
) -> Tensor:
    """(2^16,) entries per digit at `shift`, of those whose higher bits are `known`."""
    digits = 1 << _DIGIT
    counts = torch.zeros(digits, dtype=torch.int64, device=values_N.device)
    for values_n in _flagged(values_N, among_N):
        bits_n = _ordered_bits(values_n)
        # The top digit is signed, the lower ones are not.
        if known is None:
            digit_n = (bits_n >> shift) + _SIGN
        else:
            digit_n = (bits_n[(bits_n >> (shift + _DIGIT)) == known] >> shift) & (digits - 1)
        counts += torch.bincount(digit_n, minlength=digits)
    return counts


def _flagged(values_N: Tensor, among_N: Tensor | None) -> Iterator[Tensor]:
    """The entries that count, block by block."""
    if among_N is None:
        yield from values_N.split(BLOCK_TOKENS)
        return
    for values_n, among_n in zip(
        values_N.split(BLOCK_TOKENS), among_N.split(BLOCK_TOKENS), strict=True
    ):
        yield values_n[among_n]


def _next_larger(values_N: Tensor, among_N: Tensor | None, value: Tensor) -> Tensor:
    """The smallest flagged entry above `value`, 0-d."""
    best = torch.full_like(value, torch.inf)
    for values_n in _flagged(values_N, among_N):
        above_n = values_n[values_n > value]
        best = torch.minimum(best, above_n.amin()) if len(above_n) else best
    return best


def upper_threshold(
    values_N: Tensor, among_N: Tensor | None, fraction: float
) -> tuple[Tensor, Tensor]:
    """The (1 - fraction) quantile, linearly interpolated, of the flagged entries (None: all); 0 if
    there are none.

    Returns:
        tau, 0-d float64; and the smallest number >= tau in the dtype of the values, so that `values
        >= cut` decides exactly as a comparison with tau itself.
    """
    count = len(values_N) if among_N is None else int(among_N.sum())
    if count == 0:
        nothing = values_N.new_zeros(())
        return nothing.double(), nothing
    position = (1.0 - fraction) * (count - 1)
    below = min(count - 1, math.floor(position))
    low, reached = order_statistic(values_N, among_N, below)
    between = position > below and reached == below + 1
    high = _next_larger(values_N, among_N, low) if between else low
    tau = low.double() + (position - below) * (high.double() - low.double())
    cut = tau.to(values_N.dtype)
    if float(cut) < float(tau):
        cut = torch.nextafter(cut, torch.full_like(cut, torch.inf))
    return tau, cut
