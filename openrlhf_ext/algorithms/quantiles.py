"""Exact order statistics of large masked tensors with little memory.

Values are ranked by their bit patterns, 16 bits per pass over blocks of rows: no sort, no index tensor, the same
result for any order of the rows.

Shape suffixes: B = rows, T = positions, b = rows of a block.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from openrlhf_ext.algorithms.blocks import row_blocks, row_counts

_BITS = {torch.float32: (torch.int32, 32), torch.float64: (torch.int64, 64)}
_DIGIT = 16
_SIGN = 1 << (_DIGIT - 1)


def _ordered_bits(values: Tensor) -> Tensor:
    """Signed integers in the order of the floats (negative floats have their magnitude bits flipped)."""
    integer, width = _BITS[values.dtype]
    # Adding 0 turns -0.0 into 0.0, which must rank alike.
    bits = (values + 0.0).view(integer)
    return bits ^ ((bits >> (width - 1)) & ((1 << (width - 1)) - 1))


def _from_bits(bits: int, dtype: torch.dtype) -> Tensor:
    integer, width = _BITS[dtype]
    if bits < 0:
        bits ^= (1 << (width - 1)) - 1
    return torch.tensor(bits, dtype=integer).view(dtype)


def order_statistic(values_BT: Tensor, mask_BT: Tensor, rank: int) -> tuple[Tensor, int]:
    """The value of 0-based `rank` in ascending order among the masked entries; float32 or float64.

    Returns:
        the value, 0-d; and how many masked entries are less than or equal to it.
    """
    width = _BITS[values_BT.dtype][1]
    known, below = None, 0
    for shift in range(width - _DIGIT, -1, -_DIGIT):
        counts = _digit_counts(values_BT, mask_BT, shift, known)
        reached = counts.cumsum(0) + below
        digit = int(torch.searchsorted(reached, rank, right=True))
        below = int(reached[digit - 1]) if digit else below
        known = digit - _SIGN if known is None else (known << _DIGIT) | digit
    return _from_bits(known, values_BT.dtype).to(values_BT.device), int(reached[digit])


def _digit_counts(values_BT: Tensor, mask_BT: Tensor, shift: int, known: int | None) -> Tensor:
    """(2^16,) masked entries per digit at `shift`, of those whose higher bits are `known`."""
    outside = 1 << _DIGIT
    counts = torch.zeros(outside + 1, dtype=torch.int64, device=values_BT.device)
    for rows in row_blocks(*values_BT.shape):
        bits_bT = _ordered_bits(values_BT[rows])
        # The top digit is signed, the lower ones are not.
        if known is None:
            digit_bT = torch.where(mask_BT[rows], (bits_bT >> shift) + _SIGN, outside)
        else:
            matches_bT = mask_BT[rows] & ((bits_bT >> (shift + _DIGIT)) == known)
            digit_bT = torch.where(matches_bT, (bits_bT >> shift) & (outside - 1), outside)
        counts += torch.bincount(digit_bT.flatten(), minlength=outside + 1)
    return counts[:-1]


def _next_larger(values_BT: Tensor, mask_BT: Tensor, value: Tensor) -> Tensor:
    """The smallest masked entry above `value`, 0-d."""
    best = torch.full_like(value, torch.inf)
    for rows in row_blocks(*values_BT.shape):
        above_bT = mask_BT[rows] & (values_BT[rows] > value)
        best = torch.minimum(best, torch.where(above_bT, values_BT[rows], torch.inf).amin())
    return best


def upper_threshold(values_BT: Tensor, mask_BT: Tensor, fraction: float) -> tuple[Tensor, Tensor]:
    """The (1 - fraction) quantile, linearly interpolated, of the masked entries; 0 if there are none.

    Returns:
        tau, 0-d float64; and the smallest number >= tau in the dtype of the values, so that `values >= cut` decides
        exactly as a comparison with tau itself.
    """
    count = int(row_counts(mask_BT).sum())
    if count == 0:
        nothing = values_BT.new_zeros(())
        return nothing.double(), nothing
    position = (1.0 - fraction) * (count - 1)
    below = min(count - 1, math.floor(position))
    low, reached = order_statistic(values_BT, mask_BT, below)
    between = position > below and reached == below + 1
    high = _next_larger(values_BT, mask_BT, low) if between else low
    tau = low.double() + (position - below) * (high.double() - low.double())
    cut = tau.to(values_BT.dtype)
    if float(cut) < float(tau):
        cut = torch.nextafter(cut, torch.full_like(cut, torch.inf))
    return tau, cut
