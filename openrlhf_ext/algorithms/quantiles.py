"""Exact order statistics of large masked tensors with little memory.

Values are ranked by their bit patterns, 16 bits per pass over blocks of rows: no sort, no index tensor, the same
result for any order of the rows.

Shape suffixes: B = rows, T = positions, b = rows of a block.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from openrlhf_ext.algorithms.blocks import row_blocks

_BITS = {torch.float32: (torch.int32, 32), torch.float64: (torch.int64, 64)}
_DIGIT = 16


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


def order_statistic(values_BT: Tensor, mask_BT: Tensor, rank: int) -> Tensor:
    """The value of 0-based `rank` in ascending order among the masked entries; float32 or float64, 0-d."""
    width = _BITS[values_BT.dtype][1]
    known = None
    for shift in range(width - _DIGIT, -1, -_DIGIT):
        counts = torch.zeros(1 << _DIGIT, dtype=torch.int64, device=values_BT.device)
        for rows in row_blocks(*values_BT.shape):
            bits = _ordered_bits(values_BT[rows][mask_BT[rows]])
            if known is not None:
                bits = bits[(bits >> (shift + _DIGIT)) == known]
            # The top digit is signed; the lower ones are not.
            digit = (bits >> shift) + (1 << (_DIGIT - 1)) if known is None else (bits >> shift) & ((1 << _DIGIT) - 1)
            counts += torch.bincount(digit, minlength=1 << _DIGIT)
        below = counts.cumsum(0)
        digit = int(torch.searchsorted(below, rank, right=True))
        rank -= int(below[digit - 1]) if digit else 0
        known = digit - (1 << (_DIGIT - 1)) if known is None else (known << _DIGIT) | digit
    return _from_bits(known, values_BT.dtype).to(values_BT.device)


def upper_threshold(values_BT: Tensor, mask_BT: Tensor, fraction: float) -> tuple[Tensor, Tensor]:
    """The (1 - fraction) quantile, linearly interpolated, of the masked entries; 0 if there are none.

    Returns:
        tau, 0-d float64; and the smallest number >= tau in the dtype of the values, so that `values >= cut` decides
        exactly as a comparison with tau itself.
    """
    count = int(mask_BT.sum())
    if count == 0:
        return torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=values_BT.dtype, device=values_BT.device)
    position = (1.0 - fraction) * (count - 1)
    below = min(count - 1, math.floor(position))
    low = order_statistic(values_BT, mask_BT, below)
    high = order_statistic(values_BT, mask_BT, min(count - 1, below + 1)) if position > below else low
    tau = low.double() + (position - below) * (high.double() - low.double())
    cut = tau.to(values_BT.dtype)
    if float(cut) < float(tau):
        cut = torch.nextafter(cut, torch.full_like(cut, torch.inf))
    return tau, cut
