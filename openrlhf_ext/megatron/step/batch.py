"""Sequences as the policy computes them, and packs of sequences without padding.

Every sequence has a slot in the pack. A slot is as long as its sequence, with three exceptions:
context parallelism cuts every slot into ``2 * cp`` chunks of equal length, sequence parallelism
cuts a rank's whole share into ``tp`` pieces, and some layers require multiples of a unit. That
takes a few padding tokens per sequence, and some at the end of the pack. Padding follows its
sequence, so causal attention never lets a real token see it, and nothing reads its results.

Context parallelism cuts like Megatron and TransformerEngine do ("zig-zag"): of the ``2 * cp``
chunks of a slot, rank r holds chunk r and chunk ``2 * cp - 1 - r``, which gives all ranks the same
work under a causal mask.

Sequences of a pack with the same prompt share its computation, except for its last token, which
predicts the first response token of its own sequence. The pack holds the prompt once, and only
attention sees whole sequences (``SharedPrompts``). Context parallelism does not share prompts,
because every rank holds pieces of every sequence.

Shape suffixes: B = sequences, M = tokens of all sequences (prompts and responses), R = ranges of
response tokens, N = response tokens of all sequences (in a pack: those that this rank predicts), P
= tokens of the whole pack (each prompt counted once per sequence), L = tokens that this rank
computes, X = tokens of shared prompts, Y = layers, K = experts of each token.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from openrlhf_ext.algorithms.segments import Packed, RowSelection, Segments


class Prompts(NamedTuple):
    """The prompt of each row without its last token: (B,) its length, and the first row with the
    same prompt."""

    tokens_B: np.ndarray
    first_B: np.ndarray


@dataclass(frozen=True)
class SequenceBatch(Packed):
    """Concatenated sequences without padding, and the positions of their response tokens.

    A sequence has several ranges of response tokens (several turns), or none. The hidden state at p
    - 1 predicts the response token at position p.

    If experts are given, routers take them for the first ``told_B`` tokens of each sequence (None:
    for all tokens). If experts travel by reference, ``routed_B`` holds for each sequence the
    reference to fetch and the sequence's place in it.
    """

    tokens_M: Tensor  # int32
    lengths_B: Tensor  # int64, tokens of each sequence
    # int64, [start, stop) of response tokens in their sequence, 1 or more, ascending
    ranges_R2: Tensor
    ranges_B: Tensor  # int64, number of ranges of each sequence
    experts_MYK: Tensor | None = None  # uint8 or int16
    told_B: Tensor | None = None  # int64
    routed_B: tuple[tuple[Any, int], ...] | None = None

    def __len__(self) -> int:
        return len(self.lengths_B)

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
        """(N,) int64 position in its sequence of the hidden state that predicts each response
        token."""
        spans = self.ranges_R2.tolist()
        return torch.cat(
            [self.lengths_B[:0], *(torch.arange(start - 1, stop - 1) for start, stop in spans)]
        )

    @cached_property
    def prompts(self) -> Prompts:
        """The tokens before the one that predicts the first response token; length 0 for a row
        without responses."""
        turns_B = self.ranges_B.numpy()
        first_range_B = np.cumsum(turns_B) - turns_B
        answered_B = turns_B > 0
        lengths_B = np.zeros(len(self), np.int64)
        lengths_B[answered_B] = self.ranges_R2.numpy()[first_range_B[answered_B], 0] - 1

        tokens_M = self.tokens_M.numpy()
        rows: dict[bytes, int] = {}
        first = []
        for row, start in enumerate(self.sequences.bounds[:-1].tolist()):
            prompt = tokens_M[start : start + lengths_B[row]].tobytes()
            first.append(rows.setdefault(prompt, row))
        return Prompts(lengths_B, np.array(first, np.int64))

    def repeated(self, rows: Iterable[int]) -> list[int]:
        """Returns, for each of these rows, how many leading tokens an earlier row shares: its
        prompt, or 0."""
        seen = set()
        counts = []
        for row in rows:
            first = int(self.prompts.first_B[row])
            shared = int(self.prompts.tokens_B[row]) if first in seen else 0
            counts.append(shared)
            seen.add(first)
        return counts

    def select(self, rows: RowSelection) -> SequenceBatch:
        index = rows if isinstance(rows, slice) else torch.as_tensor(rows, dtype=torch.long)
        experts_MYK = self.experts_MYK
        if experts_MYK is not None:
            experts_MYK = self.sequences.take(experts_MYK, rows)
        told_B = self.told_B
        if told_B is not None:
            told_B = told_B[index]
        routed_B = self.routed_B
        if routed_B is not None:
            routed_B = tuple(routed_B[row] for row in torch.arange(len(self))[index])
        return SequenceBatch(
            self.sequences.take(self.tokens_M, rows),
            self.lengths_B[index],
            self._ranges.take(self.ranges_R2, rows),
            self.ranges_B[index],
            experts_MYK,
            told_B,
            routed_B,
        )

    def with_experts(self, experts_B: Sequence[np.ndarray]) -> SequenceBatch:
        """Returns a copy with the experts of the first tokens of each sequence, (R_i, Y, K) uint8
        or uint16."""
        told_B = np.array([len(rows) for rows in experts_B], np.int64)
        layers_YK = experts_B[0].shape[1:]
        experts_MYK = np.zeros((len(self.tokens_M), *layers_YK), experts_B[0].dtype)
        for start, rows_RYK in zip(self.sequences.bounds[:-1].tolist(), experts_B, strict=True):
            experts_MYK[start : start + len(rows_RYK)] = rows_RYK
        signed = experts_MYK.view(np.int16) if experts_MYK.dtype == np.uint16 else experts_MYK
        return replace(
            self,
            experts_MYK=torch.from_numpy(signed),
            told_B=torch.from_numpy(told_B),
            routed_B=None,
        )

    @classmethod
    def padding_row(cls) -> SequenceBatch:
        """Returns one row without response tokens, for a data-parallel rank that got no
        sequence."""
        return sequence_batch([np.zeros(2, np.int32)], [()])


def sequence_batch(
    sequences: Sequence[np.ndarray], actions: Sequence[Sequence[tuple[int, int]]]
) -> SequenceBatch:
    """Builds a batch of (S_i,) int32 sequences (prompt and response) with response tokens at
    ascending [start, stop).

    Raises ValueError with the row if its ranges are not in order between its second token and its
    end.
    """
    lengths = [len(tokens) for tokens in sequences]
    for row, (length, spans) in enumerate(zip(lengths, actions, strict=True)):
        edges = [1, *itertools.chain.from_iterable(spans), length]
        if any(later < earlier for earlier, later in itertools.pairwise(edges)):
            raise ValueError(
                f"row {row} of {length} tokens cannot have its response tokens at {list(spans)}"
            )

    tokens_M = np.concatenate(
        [np.zeros(0, np.int32), *sequences], dtype=np.int32, casting="same_kind"
    )
    ranges = list(itertools.chain.from_iterable(actions))
    return SequenceBatch(
        torch.from_numpy(tokens_M),
        torch.tensor(lengths, dtype=torch.long),
        torch.tensor(ranges, dtype=torch.long).view(-1, 2),
        torch.tensor([len(spans) for spans in actions], dtype=torch.long),
    )


class LogprobEntropy(NamedTuple):
    """fp32 (N,) log-probabilities and entropies of the response tokens."""

    logprobs_N: Tensor
    entropies_N: Tensor


@dataclass(frozen=True)
class ValueTargets(Packed):
    """Targets of the critic's values on a mini-batch: returns (fp32 advantages plus old values),
    and the old values around which new values are clipped.

    ``segments``: which of the N response tokens belong to which row. ``tokens``: response tokens of
    the whole mini-batch; these rows may be a share of it.
    """

    old_values_N: Tensor
    returns_N: Tensor
    segments: Segments
    tokens: Tensor

    def select(self, rows: RowSelection) -> ValueTargets:
        segments = self.segments
        return ValueTargets(
            segments.take(self.old_values_N, rows),
            segments.take(self.returns_N, rows),
            segments.select(rows),
            self.tokens,
        )

    def to(self, device: torch.device) -> ValueTargets:
        return ValueTargets(*(value.to(device) for value in vars(self).values()))


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a copy on ``device``. The host does not wait for a GPU: the copy comes from pinned
    memory."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


@dataclass(frozen=True)
class SharedPrompts:
    """Maps between the computed tokens and the whole sequences that attention needs."""

    computed_P: Tensor  # int64, index into the L computed tokens of every token of the whole pack
    # int64, position in the whole pack of each computed token; a prompt is in its first sequence
    kept_L: Tensor
    # int64, the computed tokens of shared prompts, those of the most sequences first
    prompts_X: Tensor
    # int64, positions in the whole pack of the second copy of these X tokens, then of the third
    # copy of the first of them, ...
    copies: Tensor
    copy_counts: tuple[int, ...]  # tokens of each further copy

    def to(self, device: torch.device) -> SharedPrompts:
        return SharedPrompts(
            _moved(self.computed_P, device),
            _moved(self.kept_L, device),
            _moved(self.prompts_X, device),
            _moved(self.copies, device),
            self.copy_counts,
        )


class Routing(NamedTuple):
    """The input of a mixture's routers for the tokens that this rank computes (under sequence
    parallelism, for its piece of them).

    ``times_L``: how many of the micro-batch's tokens each computed token stands for, 0 for padding.
    ``experts_LYK``: given experts of the tokens ``told_L``; routers choose for all others,
    including padding and last tokens. The micro-batch's tokens ``own_H``, in rows ``row_H``, are
    the computed tokens ``seen_H``: a token computed once for several rows is in each of them.
    ``weight_B``: the load-balancing loss's weight of a token, divided by the number of tokens of
    each row; None: there is no such loss.
    """

    times_L: Tensor  # int64
    told_L: Tensor | None  # bool
    experts_LYK: Tensor | None  # uint8 or int16
    own_H: Tensor  # int64
    row_H: Tensor  # int64
    seen_H: Tensor  # int64
    weight_B: Tensor | None = None  # fp64

    def to(self, device: torch.device) -> Routing:
        return Routing(*(None if tensor is None else _moved(tensor, device) for tensor in self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class PackedBatch:
    """A micro-batch as this rank computes it.

    Its N response tokens (possibly none under context parallelism) are in the order of the batch.
    Values known before the device computes are plain values or indices, so nothing is read back.
    """

    packed_L: Tensor  # int64 token ids
    positions_L: Tensor  # int64, position of each token in its sequence
    # int64, which of this rank's L tokens have the hidden states that predict the N response tokens
    hidden_N: Tensor
    places_N: Tensor  # int64, which of the micro-batch's response tokens they are
    targets_N: Tensor  # int64, their token ids
    # Which rows and response tokens of the whole batch these are, in the order of the plan.
    rows: slice
    tokens: slice
    boundaries: Tensor  # (sequences + 1,) int32, boundaries of the slots of the whole pack
    slots: tuple[int, ...]  # length of each slot in the whole pack
    # Number of the N hidden states in each piece of this rank's L tokens.
    piece_counts: tuple[int, ...]
    shared: SharedPrompts | None  # None: every sequence has its own prompt
    routing: Routing | None  # None: a dense model

    @property
    def response_tokens(self) -> int:
        return self.tokens.stop - self.tokens.start

    def to(self, device: torch.device) -> PackedBatch:
        tensors: dict[str, Any] = {
            name: _moved(value, device)
            for name, value in vars(self).items()
            if torch.is_tensor(value)
        }
        shared = None if self.shared is None else self.shared.to(device)
        routing = None if self.routing is None else self.routing.to(device)
        return replace(self, **tensors, shared=shared, routing=routing)


@dataclass(frozen=True)
class PackShape:
    """The units of a pack's lengths.

    ``pieces``: number of pieces of a rank's share of the pack, each a multiple of ``piece_unit``
    tokens: the tensor-parallel size under sequence parallelism, else 1. ``shares_prompts``: a
    prompt of several sequences is computed once. ``is_mixture``: routers need data about tokens
    (``Routing``).
    """

    context_parallel_size: int = 1
    pieces: int = 1
    piece_unit: int = 1
    shares_prompts: bool = False
    is_mixture: bool = False

    @property
    def unit(self) -> int:
        return 2 * self.context_parallel_size if self.context_parallel_size > 1 else 1

    @property
    def pack_unit(self) -> int:
        return math.lcm(self.unit, self.context_parallel_size * self.pieces * self.piece_unit)

    def repeated(self, batch: SequenceBatch, rows: Sequence[int]) -> list[int]:
        """Returns how many leading tokens of each row of a pack are not computed again."""
        counts = batch.repeated(rows) if self.shares_prompts else [0] * len(rows)
        worth = sum(counts) * _SHARED_FROM >= np.diff(batch.sequences.bounds)[list(rows)].sum()
        return counts if worth else [0] * len(rows)

    def slots(self, lengths: Sequence[int], repeated: int = 0) -> tuple[int, ...]:
        """Returns the length of each sequence's slot.

        The last slot takes the padding that makes the computed tokens (all but ``repeated``) divide
        evenly.
        """
        slots = [-(-length // self.unit) * self.unit for length in lengths]
        slots[-1] += -(sum(slots) - repeated) % self.pack_unit
        return tuple(slots)

    def tokens_per_rank(self, lengths: Sequence[int], repeated: int = 0) -> int:
        return (sum(self.slots(lengths, repeated)) - repeated) // (
            self.context_parallel_size * self.pieces
        )


# Sharing must save at least one in this many of a pack's tokens: gathering whole sequences around
# attention moves some 50 kB per token and layer of a 7B model, which takes an H100 about a
# hundredth of its layer's time.
_SHARED_FROM = 32


@dataclass
class TokenCount:
    """Token counts of the packs: of sequences, with padding, and of prompts that were not computed
    again."""

    real: int = 0
    packed: int = 0
    repeated: int = 0


def pack(
    batch: SequenceBatch,
    shape: PackShape,
    *,
    first_row: int = 0,
    first_token: int = 0,
    context_parallel_rank: int = 0,
    piece: int = 0,
) -> PackedBatch:
    """Packs the sequences of a micro-batch.

    ``first_row``, ``first_token``: number of rows and response tokens before it; ``piece``: which
    piece of its share this rank has.
    """
    repeated = shape.repeated(batch, range(len(batch)))
    slots = shape.slots(batch.lengths_B.tolist(), sum(repeated))
    ends = list(itertools.accumulate(slots, initial=0))
    starts_B = torch.tensor(ends[:-1])
    tokens_P, positions_P = _whole_pack(batch, slots, starts_B)
    shared = share_prompts(batch, ends, repeated) if any(repeated) else None
    if shared is None:
        mine_L = local_places(slots, shape.context_parallel_size, context_parallel_rank)
    else:
        mine_L = shared.kept_L
    routing = None
    if shape.is_mixture:
        routing = _routing(batch, starts_B, mine_L, shape.pieces, piece, shared)

    place_P = torch.full_like(tokens_P, -1).scatter_(0, mine_L, torch.arange(len(mine_L)))
    hidden = place_P[batch.responses.spread(starts_B) + batch.predict_N]
    here = hidden >= 0
    hidden_N = hidden[here]
    pieces_N = torch.div(hidden_N, len(mine_L) // shape.pieces, rounding_mode="floor")
    return PackedBatch(
        packed_L=tokens_P[mine_L],
        positions_L=positions_P[mine_L],
        hidden_N=hidden_N,
        places_N=here.nonzero().squeeze(1),
        targets_N=batch.targets_N[here].long(),
        rows=slice(first_row, first_row + len(batch)),
        tokens=slice(first_token, first_token + len(hidden)),
        boundaries=torch.tensor(ends, dtype=torch.int32),
        slots=slots,
        piece_counts=tuple(torch.bincount(pieces_N, minlength=shape.pieces).tolist()),
        shared=shared,
        routing=routing,
    )


def _routing(
    batch: SequenceBatch,
    starts_B: Tensor,
    mine_L: Tensor,
    pieces: int,
    piece: int,
    shared: SharedPrompts | None,
) -> Routing:
    """Returns the routing of a piece of the tokens at these places of the whole pack. A shared
    prompt has the experts of its first row."""
    places_M = batch.sequences.block(slice(None)).positions(starts_B)
    each = len(mine_L) // pieces
    own_L = mine_L[piece * each : (piece + 1) * each]
    last = max(int(mine_L.max()), int(places_M.max()))
    if shared is None:
        number_P = torch.full((last + 1,), -1).scatter_(0, mine_L, torch.arange(len(mine_L)))
    else:
        number_P = shared.computed_P

    seen_M = number_P[places_M] - piece * each
    row_M = torch.arange(len(batch)).repeat_interleave(batch.lengths_B)
    own_H = ((seen_M >= 0) & (seen_M < each)).nonzero().squeeze(1)
    row_H = row_M[own_H]
    seen_H = seen_M[own_H]
    times_L = torch.bincount(seen_H, minlength=each) * int(batch.responses.tokens > 0)
    if batch.experts_MYK is None:
        return Routing(times_L, None, None, own_H, row_H, seen_H)

    place_M = torch.cat([torch.arange(length) for length in batch.lengths_B.tolist()])
    told_B = batch.lengths_B if batch.told_B is None else batch.told_B
    told_M = place_M < told_B.repeat_interleave(batch.lengths_B)
    source_P = torch.full((last + 1,), -1)
    source_P[places_M[told_M]] = told_M.nonzero().squeeze(1)
    source_L = source_P[own_L]
    experts_LYK = batch.experts_MYK[source_L.clamp(min=0)]
    return Routing(times_L, source_L >= 0, experts_LYK, own_H, row_H, seen_H)


def share_prompts(
    batch: SequenceBatch, ends: Sequence[int], repeated: Sequence[int]
) -> SharedPrompts:
    """Computes every prompt in the slot of its first sequence.

    ``ends``: the boundaries of the slots in the whole pack. ``repeated``: leading tokens of each
    sequence that an earlier sequence shares.
    """
    first = batch.prompts.first_B.tolist()
    # The first row of each shared prompt -> the starts of the other rows' slots.
    copies: dict[int, list[int]] = {}
    kept_P = torch.ones(ends[-1], dtype=torch.bool)
    for row, count in enumerate(repeated):
        if count:
            copies.setdefault(first[row], []).append(ends[row])
            kept_P[ends[row] : ends[row] + count] = False
    computed_P = kept_P.cumsum(0) - 1

    prompts: list[Tensor] = []
    again: list[list[Tensor]] = [[] for _ in range(max(map(len, copies.values())))]
    for row, starts in sorted(copies.items(), key=lambda item: -len(item[1])):
        count = int(batch.prompts.tokens_B[row])
        own = computed_P[ends[row] : ends[row] + count]
        prompts.append(own)
        for number, start in enumerate(starts):
            computed_P[start : start + count] = own
            again[number].append(torch.arange(start, start + count))
    return SharedPrompts(
        computed_P=computed_P,
        kept_L=kept_P.nonzero().squeeze(1),
        prompts_X=torch.cat(prompts),
        copies=torch.cat(list(itertools.chain.from_iterable(again))),
        copy_counts=tuple(sum(map(len, number)) for number in again),
    )


def local_places(
    slots: Sequence[int], context_parallel_size: int, context_parallel_rank: int
) -> Tensor:
    """Returns (L,) int64: the places of the whole pack that this context-parallel rank holds, in
    its order."""
    if context_parallel_size == 1:
        return torch.arange(sum(slots))
    chunks = (context_parallel_rank, 2 * context_parallel_size - 1 - context_parallel_rank)
    pieces = []
    for start, slot in zip(itertools.accumulate(slots, initial=0), slots, strict=False):
        chunk = slot // (2 * context_parallel_size)
        pieces += [torch.arange(start + i * chunk, start + (i + 1) * chunk) for i in chunks]
    return torch.cat(pieces)


def _whole_pack(
    batch: SequenceBatch, slots: Sequence[int], starts_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns (P,) token ids, 0 in padding, and (P,) positions."""
    whole = batch.sequences.block(slice(None))
    tokens_P = torch.zeros(sum(slots), dtype=torch.long)
    tokens_P[whole.positions(starts_B)] = batch.tokens_M.long()
    return tokens_P, torch.cat([torch.arange(slot) for slot in slots])
