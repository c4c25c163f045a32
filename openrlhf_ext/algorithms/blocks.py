"""Blocks of rows: large tensors are processed a few rows at a time, so that temporaries stay in the cache.

A fresh (B, T) temporary costs its page faults; a block's temporaries are reused by the allocator.

Shape suffixes: B = rows, T = positions, Q = groups.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 18
"""Elements of a (rows, T) block."""


def rows_per_block(positions: int) -> int:
    """Rows of a block of about BLOCK_ELEMENTS elements."""
    return max(1, BLOCK_ELEMENTS // max(1, positions))


def row_blocks(rows: int, positions: int) -> Iterator[slice]:
    """Slices that cover all rows."""
    step = rows_per_block(positions)
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def group_blocks(sizes_Q: Tensor, positions: int) -> list[slice]:
    """Slices of the rows in group order, each of whole groups; larger than a block only where one group is."""
    if len(sizes_Q) == 0:
        return []
    first_Q = sizes_Q.cumsum(0) - sizes_Q
    block_Q = first_Q // rows_per_block(positions)
    _, groups = block_Q.unique_consecutive(return_counts=True)
    starts = first_Q[groups.cumsum(0) - groups].tolist()
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], int(sizes_Q.sum())], strict=True)]


def row_sums(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """(B,) float64 sum over each row's masked entries."""
    out_B = torch.zeros(len(values_BT), dtype=torch.float64, device=values_BT.device)
    for rows in row_blocks(*values_BT.shape):
        out_B[rows] = torch.where(mask_BT[rows], values_BT[rows], 0.0).sum(dim=1, dtype=torch.float64)
    return out_B


def row_counts(mask_BT: Tensor) -> Tensor:
    """(B,) int64 True entries per row."""
    out_B = torch.zeros(len(mask_BT), dtype=torch.int64, device=mask_BT.device)
    for rows in row_blocks(*mask_BT.shape):
        out_B[rows] = mask_BT[rows].sum(dim=1)
    return out_B
