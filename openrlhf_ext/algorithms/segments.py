"""Segments: rows of different lengths concatenated in flat tensors, and sums over the rows.

A (N,) tensor holds the tokens of all rows, without padding. Large tensors are processed a few rows
at a time, so that temporaries stay in the cache: a fresh (N,) temporary costs page faults, while
the allocator reuses the memory of a block.

Shape suffixes: B = rows, N = tokens of all rows, Q = groups, b = rows of a block, n = tokens of a
block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

BLOCK_TOKENS = 1 << 18
"""Maximum tokens of a block of rows; a longer row is a block of its own."""

RowSelection = Tensor | Sequence[int] | slice


class Segments:
    """The positions of B rows in flat (N,) tensors.

    Attributes:
        lengths_B: (B,) int64 tokens of each row, on the device of the flat tensors.
        bounds: (B + 1,) int64 boundaries of the rows, always on the host, so that slicing needs no
            device sync.
    """

    def __init__(self, lengths_B: Tensor, bounds: np.ndarray | None = None) -> None:
        self.lengths_B = lengths_B
        self.bounds = (
            np.concatenate([[0], np.cumsum(lengths_B.to("cpu").numpy())])
            if bounds is None
            else bounds
        )

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getstate__(self) -> np.ndarray:
        return self.bounds

    def __setstate__(self, bounds: np.ndarray) -> None:
        self.lengths_B, self.bounds = torch.from_numpy(np.diff(bounds)), bounds

    @property
    def tokens(self) -> int:
        """N."""
        return int(self.bounds[-1])

    @cached_property
    def single(self) -> bool:
        """True if every row is one token, so that rows and tokens are the same."""
        return self.tokens == len(self) and bool((np.diff(self.bounds) == 1).all())

    def to(self, device: torch.device | str) -> Segments:
        """A copy for tensors on another device."""
        return Segments(self.lengths_B.to(device), self.bounds)

    def span(self, rows: slice) -> slice:
        """The token slice of neighboring rows."""
        first, stop, step = rows.indices(len(self))
        if step != 1:
            raise ValueError(f"rows of a slice must be neighbors, got step {step}")
        return slice(int(self.bounds[first]), int(self.bounds[max(first, stop)]))

    def select(self, rows: RowSelection) -> Segments:
        """The segments of the selected rows, concatenated."""
        if isinstance(rows, slice):
            first, stop, _ = rows.indices(len(self))
            bounds = self.bounds[first : max(first, stop) + 1]
            return Segments(self.lengths_B[rows], bounds - bounds[0])
        lengths = np.diff(self.bounds)[_on_host(rows)]
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        return Segments(torch.from_numpy(lengths).to(self.lengths_B.device), bounds)

    def take(self, values_N: Tensor, rows: RowSelection) -> Tensor:
        """The entries of the selected rows, concatenated; a view if `rows` is a slice."""
        if isinstance(rows, slice):
            return values_N[self.span(rows)]
        index = _on_host(rows)
        spans = zip(self.bounds[index].tolist(), self.bounds[index + 1].tolist(), strict=True)
        return torch.cat([values_N[:0], *(values_N[start:stop] for start, stop in spans)])

    def put(
        self, target_N: Tensor | np.ndarray, values_n: Tensor | np.ndarray, rows: RowSelection
    ) -> None:
        """Writes entries of some rows, as ``take`` returns them, to the positions of these rows."""
        index, start = _on_host(rows), 0
        for first, stop in zip(
            self.bounds[index].tolist(), self.bounds[index + 1].tolist(), strict=True
        ):
            target_N[first:stop] = values_n[start : start + stop - first]  # type: ignore[assignment] # both are one kind
            start += stop - first

    def spread(self, values_B: Tensor) -> Tensor:
        """(N,) each token gets the entry of its row."""
        if self.single:
            return values_B
        out_N = values_B.new_empty(self.tokens)
        for block in self.blocks():
            out_N[block.tokens] = block.spread(values_B[block.rows])
        return out_N

    def sums(self, values_N: Tensor) -> Tensor:
        """(B,) float64 sum over each row's tokens, differentiable."""
        blocks = list(self.blocks())
        # One split: the gradient of each separate slice would be a full-size tensor.
        parts = values_N.split([block.size for block in blocks])
        sums = [block.sums(values_n) for block, values_n in zip(blocks, parts, strict=True)]
        return torch.cat([values_N[:0].to(torch.float64), *sums])

    def maxima(self, values_N: Tensor) -> Tensor:
        """(B,) largest entry of each row; no row may be empty."""
        return torch.segment_reduce(values_N, "max", lengths=self.lengths_B, unsafe=True)

    def place(self, token: int) -> tuple[int, int]:
        """The row of a token, and the token's position in that row."""
        row = int(np.searchsorted(self.bounds, token, side="right")) - 1
        return row, token - int(self.bounds[row])

    def last(self) -> Tensor:
        """(B,) flat index of each row's last token."""
        return self.lengths_B.cumsum(0) - 1

    def block(self, rows: slice | Tensor) -> Block:
        """These rows as a block."""
        if isinstance(rows, slice):
            return Block(rows, self.span(rows), self.lengths_B[rows])
        index = _on_host(rows)
        lengths = np.diff(self.bounds)[index]
        # The offset between a row's place in the batch and its place in the block.
        start = self.bounds[index] - (np.cumsum(lengths) - lengths)
        tokens = torch.from_numpy(np.repeat(start, lengths) + np.arange(lengths.sum()))
        return Block(rows, tokens.to(self.lengths_B.device), self.lengths_B[rows])

    def blocks(self) -> Iterator[Block]:
        """Blocks of neighboring rows that cover all rows."""
        first = 0
        while first < len(self):
            fitting = (
                int(np.searchsorted(self.bounds, self.bounds[first] + BLOCK_TOKENS, side="right"))
                - 1
            )
            stop = max(first + 1, fitting)
            yield self.block(slice(first, stop))
            first = stop


@dataclass(frozen=True)
class Block:
    """Some rows of a batch.

    Attributes:
        rows, tokens: which rows, and which entries of the flat tensors; slices if they are
            neighbors.
        lengths_b: int64 tokens of each row.
    """

    rows: slice | Tensor
    tokens: slice | Tensor
    lengths_b: Tensor

    @cached_property
    def size(self) -> int:
        """n, the number of tokens."""
        return (
            len(self.tokens)
            if isinstance(self.tokens, Tensor)
            else self.tokens.stop - self.tokens.start
        )

    @cached_property
    def row_n(self) -> Tensor:
        """(n,) int64 row of each token, numbered within the block."""
        rows_b = torch.arange(len(self.lengths_b), device=self.lengths_b.device)
        return torch.repeat_interleave(rows_b, self.lengths_b, output_size=self.size)

    def token(self, index: int) -> int:
        """The batch token index of the block's token `index`."""
        return (
            int(self.tokens[index])
            if isinstance(self.tokens, Tensor)
            else self.tokens.start + index
        )

    def positions(self, first_b: Tensor) -> Tensor:
        """(n,) int64 position of each token in its row, counted from `first_b`."""
        start_b = self.lengths_b.cumsum(0) - self.lengths_b
        return self.spread(first_b - start_b).add_(torch.arange(self.size, device=first_b.device))

    def spread(self, values_b: Tensor) -> Tensor:
        """(n,) each token gets the entry of its row."""
        return values_b.index_select(0, self.row_n)

    def sums(self, values_n: Tensor) -> Tensor:
        """(b,) float64 sum over each row's tokens, differentiable."""
        # `unsafe` skips a check of the lengths that would synchronize with the device.
        return torch.segment_reduce(
            values_n.to(torch.float64), "sum", lengths=self.lengths_b, unsafe=True
        )


def group_blocks(segments: Segments, order_B: Tensor, sizes_Q: Tensor) -> list[tuple[slice, Block]]:
    """Blocks of whole groups that cover all rows; a block exceeds `BLOCK_TOKENS` only if a single
    group does.

    Args:
        order_B: rows in the order of their groups.
        sizes_Q: rows of each group.
    Returns:
        Pairs of a slice of `order_B` and the block of these rows.
    """
    if len(sizes_Q) == 0:
        return []
    stop_Q = sizes_Q.cumsum(0)
    tokens_B = segments.lengths_B[order_B].cumsum(0)
    # tokens before each group
    first_Q = torch.cat([tokens_B.new_zeros(1), tokens_B[stop_Q[:-1] - 1]])
    _, groups = (first_Q // BLOCK_TOKENS).unique_consecutive(return_counts=True)
    stops = stop_Q[groups.cumsum(0) - 1].tolist()
    in_order = bool((order_B[1:] > order_B[:-1]).all())
    cuts = [slice(a, b) for a, b in zip([0, *stops[:-1]], stops, strict=True)]
    return [(cut, segments.block(cut if in_order else order_B[cut])) for cut in cuts]


def float64_sum(values_N: Tensor) -> Tensor:
    """Sum of a large tensor, without a copy in float64."""
    return sum(block_n.sum(dtype=torch.float64) for block_n in values_N.split(BLOCK_TOKENS))


def plain(tensor: Tensor) -> np.ndarray:
    """A tensor's entries as a numpy array on the CPU. Pickle sends it out of band, so Ray copies it
    once."""
    return tensor.detach().cpu().contiguous().numpy()


def from_plain(array: np.ndarray) -> Tensor:
    """The tensor of a numpy array; a copy if the array is read-only, as arrays read from Ray
    are."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


class Packed:
    """A dataclass whose tensors travel to another process as numpy arrays."""

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: packed(getattr(self, each.name)) for each in dataclasses.fields(self)}  # type: ignore[arg-type]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(unpacked(state))


def packed(value: Any) -> Any:
    """A tensor, or a dict with tensors among its values, converted for another process."""
    if isinstance(value, dict):
        return {key: packed(item) for key, item in value.items()}
    return plain(value) if isinstance(value, Tensor) else value


def unpacked(value: Any) -> Any:
    """The inverse of ``packed``."""
    if isinstance(value, dict):
        return {key: unpacked(item) for key, item in value.items()}
    return from_plain(value) if isinstance(value, np.ndarray) else value


def _on_host(rows: RowSelection) -> np.ndarray:
    index = torch.as_tensor(rows)
    index = index.nonzero().flatten() if index.dtype == torch.bool else index.long()
    return index.to("cpu").numpy()
