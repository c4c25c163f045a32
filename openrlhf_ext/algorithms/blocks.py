"""Row blocks: large tensors are processed a few rows at a time, so that temporaries stay in the cache."""

from __future__ import annotations

from collections.abc import Iterator

BLOCK_ELEMENTS = 1 << 18
"""Elements of a (rows, T) block."""


def row_blocks(rows: int, positions: int) -> Iterator[slice]:
    """Slices that cover all rows, each of about BLOCK_ELEMENTS elements."""
    step = max(1, BLOCK_ELEMENTS // max(1, positions))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))
