"""Padded tensors without their padding, for the way between processes.

Where lengths differ widely most of a (B, T) tensor is padding: a quarter of it is used by responses of 8,000 tokens on
average of which the longest has 32,000. Arrays of numpy leave a pickle out of band, so that Ray copies them once.

Shape suffixes: B = rows, T = positions, N = entries that are not padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Ragged:
    """The first ``counts_B[b]`` entries of each row b of a (B, ``width``) tensor, one row behind the other."""

    values_N: np.ndarray
    counts_B: np.ndarray
    width: int

    @classmethod
    def of(cls, values_BT: Tensor, counts_B: np.ndarray, dtype: type | None = None) -> Ragged:
        """Of a tensor on any device.

        Args:
            dtype: numpy's, of the entries if they are to travel in another one.
        """
        rows = values_BT.detach().cpu().numpy()
        parts = [row[:count] for row, count in zip(rows, counts_B, strict=True)]
        values_N = np.concatenate([rows[:0].reshape(-1), *parts], dtype=dtype, casting="same_kind")
        return cls(values_N, counts_B, rows.shape[1])

    def padded(self, dtype: type | None = None) -> Tensor:
        """(B, T) on the CPU, 0 in the padding."""
        rows = np.zeros((len(self.counts_B), self.width), dtype or self.values_N.dtype)
        for row, part in zip(rows, self._rows(), strict=True):
            row[: len(part)] = part
        return torch.from_numpy(rows)

    def _rows(self) -> Iterator[np.ndarray]:
        stop = 0
        for count in self.counts_B.tolist():
            start, stop = stop, stop + count
            yield self.values_N[start:stop]
