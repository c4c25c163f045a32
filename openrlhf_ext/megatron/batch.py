"""Sequences as the policy sees them: token rows, the positions whose hidden states predict response tokens, and which
rows are computed together.

Shape suffixes: B = sequences, S = tokens of a sequence (prompt and response), T = response tokens of a sequence, N =
response tokens of all.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from openrlhf_ext.algorithms.blocks import row_blocks, row_counts
from openrlhf_ext.algorithms.ragged import Ragged


@dataclass(frozen=True)
class SequenceBatch:
    """Right-padded sequences and where their response tokens are.

    ``predict_BT[b, t]`` is the position whose hidden state predicts response token t of sequence b, which is
    ``tokens_BS[b, predict_BT[b, t] + 1]``. Responses may be interrupted (several turns); only ``mask_BT`` says which
    entries exist: the first ones of each row. It pickles without its padding.
    """

    tokens_BS: Tensor  # int64
    lengths_B: Tensor  # int64, tokens of each sequence without padding
    predict_BT: Tensor  # int64
    mask_BT: Tensor  # bool

    def __len__(self) -> int:
        return self.tokens_BS.shape[0]

    @property
    def targets_BT(self) -> Tensor:
        """(B, T) int64 response tokens; 0 where ``mask_BT`` is false."""
        targets_BT, last = torch.empty_like(self.predict_BT), self.tokens_BS.shape[1] - 1
        for rows in row_blocks(*self.predict_BT.shape):
            next_bT = (self.predict_BT[rows] + 1).clamp(max=last)
            targets_BT[rows] = self.tokens_BS[rows].gather(1, next_bT) * self.mask_BT[rows]
        return targets_BT

    @property
    def counts_B(self) -> Tensor:
        """(B,) int64 response tokens of each sequence."""
        return row_counts(self.mask_BT)

    def response_values(self, values_BT: Tensor) -> Tensor:
        """(N,) entries of the response tokens, one row behind the other: what a rank sends back of its results."""
        rows = (row[:count] for row, count in zip(values_BT, self.counts_B.tolist(), strict=True))
        return torch.cat([values_BT.new_zeros(0), *rows])

    def __reduce__(self) -> tuple[Callable[..., SequenceBatch], tuple]:
        tokens = Ragged.of(self.tokens_BS, self.lengths_B.numpy(), np.int32)
        return _padded_batch, (tokens, Ragged.of(self.predict_BT, self.counts_B.numpy(), np.int32))

    def select(self, rows: Tensor | Sequence[int]) -> SequenceBatch:
        """These rows, without the padding that only longer sequences needed (the width T is kept)."""
        index = torch.as_tensor(rows, dtype=torch.long)
        lengths_B = self.lengths_B[index]
        width = max(int(lengths_B.max()), 2) if len(index) else 2
        return SequenceBatch(self.tokens_BS[index, :width], lengths_B, self.predict_BT[index], self.mask_BT[index])

    @classmethod
    def padding_row(cls, response_width: int) -> SequenceBatch:
        """One row without response tokens: what a data-parallel rank runs when it got no sequence of its own."""
        return cls(
            torch.zeros(1, 2, dtype=torch.long),
            torch.full((1,), 2, dtype=torch.long),
            torch.zeros(1, response_width, dtype=torch.long),
            torch.zeros(1, response_width, dtype=torch.bool),
        )


def _padded_batch(tokens: Ragged, predict: Ragged) -> SequenceBatch:
    lengths_B, counts_B = (torch.tensor(part.counts_B) for part in (tokens, predict))
    mask_BT = torch.arange(predict.width) < counts_B[:, None]
    return SequenceBatch(tokens.padded(np.int64), lengths_B, predict.padded(np.int64), mask_BT)


def sequence_batch(sequences: Sequence[Tensor], action_masks: Sequence[Tensor]) -> SequenceBatch:
    """Builds a batch from unpadded rows.

    Args:
        sequences: (S_i,) int64 token rows, prompt and response.
        action_masks: (S_i - 1,) 0/1 rows in OpenRLHF's convention: entry p says that token p + 1 is a response token.
    """
    positions = [torch.nonzero(mask).squeeze(1) for mask in action_masks]
    width_S = max(len(s) for s in sequences)
    width_T = max(1, *(len(p) for p in positions)) if len(positions) > 1 else max(1, len(positions[0]))
    tokens_BS = torch.zeros(len(sequences), width_S, dtype=torch.long)
    predict_BT = torch.zeros(len(sequences), width_T, dtype=torch.long)
    mask_BT = torch.zeros(len(sequences), width_T, dtype=torch.bool)
    for row, (sequence, position) in enumerate(zip(sequences, positions, strict=True)):
        tokens_BS[row, : len(sequence)] = sequence
        predict_BT[row, : len(position)] = position
        mask_BT[row, : len(position)] = True
    return SequenceBatch(tokens_BS, torch.tensor([len(s) for s in sequences]), predict_BT, mask_BT)


# ---- which rows are computed together ------------------------------------------------------------------------------


def sequence_costs(lengths: Sequence[int], attention_length: float = math.inf) -> list[float]:
    """Relative computing time of each sequence: ``length * (1 + length / attention_length)``.

    Args:
        attention_length: tokens of a sequence at which attention (quadratic) takes as long as everything else
            (linear); see ``ModelShape.attention_length``. Infinite: tokens alone count.
    """
    return [length * (1.0 + length / attention_length) for length in lengths]


def balance_rows(lengths_B: Tensor, parts: int, attention_length: float = math.inf) -> list[list[int]]:
    """Deals rows to ``parts`` data-parallel ranks so that they compute for about as long; some may stay empty.

    The longest go first, each to the rank with the least work so far: never worse than 4/3 of the optimum (Graham
    1969), and near it when rows are many. Rows of a part are in ascending order.
    """
    costs = sequence_costs(lengths_B.tolist(), attention_length)
    return _deal(costs, [0] * len(costs), 1, parts)


def micro_batches(costs: Sequence[float], sizes: Sequence[int], capacity: int, at_least: int = 1) -> list[list[int]]:
    """Row indices of each micro-batch: about as few as the capacity allows, of about equal cost, the costliest first.

    Args:
        costs: relative computing time of each row, > 0.
        sizes: what each row takes of a micro-batch's capacity (tokens, or 1 to count rows).
        capacity: of a micro-batch; a row larger than that gets a micro-batch of its own.
        at_least: how many micro-batches to make even if fewer would do; empty ones when there are not enough rows.
    """
    # rows that cannot share a micro-batch with each other, and those that fill one
    alone = sum(2 * size > capacity for size in sizes)
    least = max(at_least, alone, -(-sum(min(size, capacity) for size in sizes) // capacity))
    bins, count, step = _deal(costs, sizes, capacity, least), least, 1
    while bins is None:
        least, count, step = count + 1, count + step, 2 * step
        bins = _deal(costs, sizes, capacity, count)
    while least < count:
        middle = (least + count) // 2
        fewer = _deal(costs, sizes, capacity, middle)
        if fewer is None:
            least = middle + 1
        else:
            bins, count = fewer, middle
    return sorted(bins, key=lambda rows: -sum(costs[row] for row in rows))


def _deal(costs: Sequence[float], sizes: Sequence[int], capacity: int, count: int) -> list[list[int]] | None:
    """Rows in descending order of cost, each into the cheapest of ``count`` bins with room; None if one finds none."""
    bins: list[list[int]] = [[] for _ in range(count)]
    filled, smallest = [0] * count, min(sizes, default=0)
    cheapest = [(0.0, i) for i in range(count)]  # heap of (cost so far, bin), without the bins that are full
    for row in sorted(range(len(costs)), key=lambda row: -costs[row]):
        too_full = []
        while cheapest and bins[cheapest[0][1]] and filled[cheapest[0][1]] + sizes[row] > capacity:
            too_full.append(heapq.heappop(cheapest))
        if not cheapest:
            return None
        load, chosen = heapq.heappop(cheapest)
        bins[chosen].append(row)
        filled[chosen] += sizes[row]
        for entry in [*too_full, (load + costs[row], chosen)]:
            if filled[entry[1]] + smallest <= capacity:
                heapq.heappush(cheapest, entry)
    return [sorted(rows) for rows in bins]


class LogprobEntropy(NamedTuple):
    """fp32 (B, T) log-probabilities and entropies of the response tokens, 0 elsewhere."""

    logprobs_BT: Tensor
    entropies_BT: Tensor


@dataclass(frozen=True)
class ValueTargets:
    """What the values of a mini-batch are trained towards.

    Attributes:
        old_values_BT: fp32 values of the rollout, around which new values are clipped.
        returns_BT: fp32 advantages plus old values.
        tokens: response tokens of the whole mini-batch, of which these rows may be a share.
    """

    old_values_BT: Tensor
    returns_BT: Tensor
    tokens: Tensor

    def select(self, rows: Tensor | Sequence[int]) -> ValueTargets:
        """These rows, with the denominator of the whole mini-batch."""
        index = torch.as_tensor(rows, dtype=torch.long, device=self.old_values_BT.device)
        return dataclasses.replace(self, old_values_BT=self.old_values_BT[index], returns_BT=self.returns_BT[index])

    def to(self, device: torch.device) -> ValueTargets:
        """A copy on ``device``."""
        return ValueTargets(*(tensor.to(device) for tensor in vars(self).values()))
