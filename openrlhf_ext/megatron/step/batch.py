"""Sequences as the policy sees them, which rows are computed together, and the packs of these, without padding.

Every sequence has a slot in the pack. A slot is as long as its sequence, except that context parallelism cuts every
slot into ``2 * cp`` chunks of equal length, sequence parallelism cuts a rank's whole share into ``tp`` pieces, and
layers may want multiples of something: that takes a few tokens of padding per sequence, and some at the end of the
pack. Padding stands behind its sequence, so that causal attention never lets a real token see it, and nothing reads
what it computes.

Context parallelism cuts like Megatron and TransformerEngine do ("zig-zag"): of the ``2 * cp`` chunks of a slot, rank r
holds chunk r and chunk ``2 * cp - 1 - r``, which gives all ranks the same work under a causal mask.

Shape suffixes: B = sequences, M = tokens of all sequences (prompts and responses), R = ranges of response tokens, N =
response tokens of all (of a pack: that this rank predicts), P = tokens of the whole pack, L = those on this rank.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from openrlhf_ext.algorithms.segments import RowSelection, Segments, packed, unpacked


@dataclass(frozen=True)
class SequenceBatch:
    """Concatenated sequences without padding, and where their response tokens are: in several ranges (of several turns)
    or in none. A response token at position p is predicted by the hidden state at p - 1."""

    tokens_M: Tensor  # int32
    lengths_B: Tensor  # int64, tokens of each sequence
    ranges_R2: Tensor  # int64, [start, stop) of response tokens in their sequence, 1 or more, ascending
    ranges_B: Tensor  # int64, how many ranges each sequence has

    def __len__(self) -> int:
        return len(self.lengths_B)

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: packed(getattr(self, f.name)) for f in dataclasses.fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({name: unpacked(value) for name, value in state.items()})

    @cached_property
    def sequences(self) -> Segments:
        return Segments(self.lengths_B)

    @cached_property
    def responses(self) -> Segments:
        return Segments(self._ranges.sums(self.ranges_R2[:, 1] - self.ranges_R2[:, 0]).long())

    @cached_property
    def _ranges(self) -> Segments:
        return Segments(self.ranges_B)

    @property
    def counts_B(self) -> Tensor:
        return self.responses.lengths_B

    @property
    def targets_N(self) -> Tensor:
        first_R = torch.from_numpy(self.sequences.bounds[:-1]).repeat_interleave(self.ranges_B)
        spans = (self.ranges_R2 + first_R[:, None]).tolist()
        return torch.cat([self.tokens_M[:0], *(self.tokens_M[start:stop] for start, stop in spans)])

    @property
    def predict_N(self) -> Tensor:
        """(N,) int64 position in its sequence of the hidden state that predicts each response token."""
        spans = self.ranges_R2.tolist()
        return torch.cat([self.lengths_B[:0], *(torch.arange(start - 1, stop - 1) for start, stop in spans)])

    def select(self, rows: RowSelection) -> SequenceBatch:
        index = rows if isinstance(rows, slice) else torch.as_tensor(rows, dtype=torch.long)
        return SequenceBatch(
            self.sequences.take(self.tokens_M, rows),
            self.lengths_B[index],
            self._ranges.take(self.ranges_R2, rows),
            self.ranges_B[index],
        )

    @classmethod
    def padding_row(cls) -> SequenceBatch:
        """One row without response tokens: what a data-parallel rank runs when it got no sequence of its own."""
        return sequence_batch([np.zeros(2, np.int32)], [()])


def sequence_batch(sequences: Sequence[np.ndarray], actions: Sequence[Sequence[tuple[int, int]]]) -> SequenceBatch:
    """Builds a batch of (S_i,) int32 sequences, prompt and response, whose response tokens are at ascending [start,
    stop). Raises ValueError, naming the row whose ranges are not in order between its second token and its end."""
    lengths, ranges = [len(tokens) for tokens in sequences], [len(spans) for spans in actions]
    for row, (length, spans) in enumerate(zip(lengths, actions, strict=True)):
        edges = [1, *(edge for span in spans for edge in span), length]
        if any(later < earlier for earlier, later in zip(edges, edges[1:], strict=False)):
            raise ValueError(f"row {row} of {length} tokens cannot have its response tokens at {list(spans)}")
    return SequenceBatch(
        torch.from_numpy(np.concatenate([np.zeros(0, np.int32), *sequences], dtype=np.int32, casting="same_kind")),
        torch.tensor(lengths, dtype=torch.long),
        torch.tensor([span for spans in actions for span in spans], dtype=torch.long).view(-1, 2),
        torch.tensor(ranges, dtype=torch.long),
    )


# ---- which rows are computed together ------------------------------------------------------------------------------


def sequence_costs(lengths: Sequence[int], attention_length: float = math.inf) -> list[float]:
    """Relative computing time: ``length * (1 + length / attention_length)`` (``ModelShape``); infinite: tokens alone
    count."""
    return [length * (1.0 + length / attention_length) for length in lengths]


def balance_rows(lengths_B: Tensor, parts: int, attention_length: float = math.inf) -> list[list[int]]:
    """Deals rows to ``parts`` data-parallel ranks so that they compute for about as long; some may stay empty. The
    longest go first, each to the rank with the least work so far: never worse than 4/3 of the optimum (Graham 1969)."""
    costs = sequence_costs(lengths_B.tolist(), attention_length)
    bins = _deal(costs, [0] * len(costs), 1, parts)
    assert bins is not None, "rows of size 0 fit everywhere"
    return bins


def micro_batches(costs: Sequence[float], sizes: Sequence[int], capacity: int, at_least: int = 1) -> list[list[int]]:
    """Row indices of each micro-batch: about as few as the capacity allows, of about equal cost, the costliest first.

    ``sizes``: what each row takes of a micro-batch's capacity (tokens, or 1 to count rows); a row larger than that gets
    a micro-batch of its own. ``at_least``: how many to make even if fewer would do, empty ones when rows are few.
    """
    # rows that cannot share a micro-batch with each other, and those that fill one
    alone = sum(2 * size > capacity for size in sizes)
    least = max(at_least, alone, -(-sum(min(size, capacity) for size in sizes) // capacity))
    bins, count, step = _deal(costs, sizes, capacity, least), least, 1 + least // 256
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
    """Rows in descending order of cost, each into the cheapest of ``count`` bins with room; None if one finds none.
    Bins without room wait apart, by what they hold, until a smaller row comes: sizes mostly fall with the costs."""
    bin_of, loads, filled = [0] * len(costs), [0.0] * count, [0] * count
    open_bins = [(0.0, i) for i in range(count)]  # heap of (cost so far, bin)
    tight: list[tuple[int, int]] = []  # heap of (filled, bin)
    for row in sorted(range(len(costs)), key=lambda row: -costs[row]):
        most = capacity - sizes[row]
        while tight and tight[0][0] <= most:
            _, chosen = heapq.heappop(tight)
            heapq.heappush(open_bins, (loads[chosen], chosen))
        while open_bins and filled[open_bins[0][1]] > max(most, 0):  # an empty one takes any row
            _, chosen = heapq.heappop(open_bins)
            heapq.heappush(tight, (filled[chosen], chosen))
        if not open_bins:
            return None
        chosen = open_bins[0][1]
        bin_of[row] = chosen
        loads[chosen] += costs[row]
        filled[chosen] += sizes[row]
        heapq.heapreplace(open_bins, (loads[chosen], chosen))
    bins: list[list[int]] = [[] for _ in range(count)]
    for row, chosen in enumerate(bin_of):
        bins[chosen].append(row)
    return bins


class LogprobEntropy(NamedTuple):
    """fp32 (N,) log-probabilities and entropies of the response tokens."""

    logprobs_N: Tensor
    entropies_N: Tensor


@dataclass(frozen=True)
class ValueTargets:
    """What the values of a mini-batch are trained towards: returns (fp32 advantages plus old values), with the old
    values around which new ones are clipped. ``segments``: which of the N response tokens are whose. ``tokens``:
    response tokens of the whole mini-batch, of which these rows may be a share."""

    old_values_N: Tensor
    returns_N: Tensor
    segments: Segments
    tokens: Tensor

    def __getstate__(self) -> dict[str, Any]:
        return {name: packed(value) for name, value in vars(self).items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({name: unpacked(value) for name, value in state.items()})

    def select(self, rows: RowSelection) -> ValueTargets:
        values_N, returns_N = (self.segments.take(x_N, rows) for x_N in (self.old_values_N, self.returns_N))
        return ValueTargets(values_N, returns_N, self.segments.select(rows), self.tokens)

    def to(self, device: torch.device) -> ValueTargets:
        return ValueTargets(*(value.to(device) for value in vars(self).values()))


@dataclass(frozen=True)
class PackedBatch:
    """A micro-batch as this rank computes it, its N response tokens (under context parallelism perhaps none) in the
    order of the batch. What is known before the device computes is a plain value or an index, so that nothing has to be
    read back."""

    packed_L: Tensor  # int64 token ids
    positions_L: Tensor  # int64, position of each token in its sequence
    hidden_N: Tensor  # int64, which of this rank's L tokens' hidden states predict the N response tokens
    places_N: Tensor  # int64, which of the micro-batch's response tokens they are
    targets_N: Tensor  # int64, their token ids
    rows: slice  # which rows of the whole batch these are, and which of its response tokens, in the order of the plan
    tokens: slice
    boundaries: Tensor  # (sequences + 1,) int32, where the slots of the whole pack begin and end
    slots: tuple[int, ...]  # length of each slot in the whole pack
    piece_counts: tuple[int, ...]  # how many of the N hidden states are in each piece of this rank's L tokens

    @property
    def response_tokens(self) -> int:
        return self.tokens.stop - self.tokens.start

    def to(self, device: torch.device) -> PackedBatch:
        """A copy on ``device``; the host does not wait for a GPU, which fetches it from pinned memory on its own."""
        tensors: dict[str, Any] = {name: value for name, value in vars(self).items() if torch.is_tensor(value)}
        if device.type == "cuda":
            tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
        return replace(self, **{name: t.to(device, non_blocking=True) for name, t in tensors.items()})


@dataclass(frozen=True)
class PackShape:
    """What the lengths of a pack must be multiples of. ``pieces``: those of a rank's share of the pack, each a multiple
    of ``piece_unit`` tokens: the tensor-parallel size under sequence parallelism, else 1."""

    context_parallel_size: int = 1
    pieces: int = 1
    piece_unit: int = 1

    @property
    def unit(self) -> int:
        return 2 * self.context_parallel_size if self.context_parallel_size > 1 else 1

    @property
    def pack_unit(self) -> int:
        return math.lcm(self.unit, self.context_parallel_size * self.pieces * self.piece_unit)

    def slots(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Length of each sequence's slot; the last one takes what the whole pack needs to be cut evenly."""
        slots = [-(-length // self.unit) * self.unit for length in lengths]
        slots[-1] += -sum(slots) % self.pack_unit
        return tuple(slots)

    def tokens_per_rank(self, lengths: Sequence[int]) -> int:
        return sum(self.slots(lengths)) // (self.context_parallel_size * self.pieces)


@dataclass
class TokenCount:
    """Tokens in the packs that were made: of sequences, and with the padding behind them."""

    real: int = 0
    packed: int = 0


def pack(
    batch: SequenceBatch, shape: PackShape, *, first_row: int = 0, first_token: int = 0, context_parallel_rank: int = 0
) -> PackedBatch:
    """Packs the sequences of a micro-batch; ``first_row``, ``first_token``: rows and response tokens before it."""
    slots = shape.slots(batch.lengths_B.tolist())
    ends = list(itertools.accumulate(slots, initial=0))
    starts_B = torch.tensor(ends[:-1])
    tokens_P, positions_P = _whole_pack(batch, slots, starts_B)
    mine_L = local_places(slots, shape.context_parallel_size, context_parallel_rank)
    place_P = torch.full_like(tokens_P, -1).scatter_(0, mine_L, torch.arange(len(mine_L)))
    hidden = place_P[batch.responses.spread(starts_B) + batch.predict_N]
    here = hidden >= 0
    piece = torch.div(hidden[here], len(mine_L) // shape.pieces, rounding_mode="floor")
    return PackedBatch(
        packed_L=tokens_P[mine_L],
        positions_L=positions_P[mine_L],
        hidden_N=hidden[here],
        places_N=here.nonzero().squeeze(1),
        targets_N=batch.targets_N[here].long(),
        rows=slice(first_row, first_row + len(batch)),
        tokens=slice(first_token, first_token + len(hidden)),
        boundaries=torch.tensor(ends, dtype=torch.int32),
        slots=slots,
        piece_counts=tuple(torch.bincount(piece, minlength=shape.pieces).tolist()),
    )


def local_places(slots: Sequence[int], context_parallel_size: int, context_parallel_rank: int) -> Tensor:
    """(L,) int64: which places of the whole pack this context-parallel rank holds, in the order in which it does."""
    if context_parallel_size == 1:
        return torch.arange(sum(slots))
    chunks = (context_parallel_rank, 2 * context_parallel_size - 1 - context_parallel_rank)
    pieces = []
    for start, slot in zip(itertools.accumulate(slots, initial=0), slots, strict=False):
        chunk = slot // (2 * context_parallel_size)
        pieces += [torch.arange(start + i * chunk, start + (i + 1) * chunk) for i in chunks]
    return torch.cat(pieces)


def _whole_pack(batch: SequenceBatch, slots: Sequence[int], starts_B: Tensor) -> tuple[Tensor, Tensor]:
    """(P,) token ids, 0 in padding, and (P,) positions."""
    whole = batch.sequences.block(slice(None))
    tokens_P = torch.zeros(sum(slots), dtype=torch.long)
    tokens_P[whole.positions(starts_B)] = batch.tokens_M.long()
    return tokens_P, torch.cat([torch.arange(slot) for slot in slots])
