"""The concatenated sequences of a micro-batch, without padding, as one rank computes them.

Every sequence has a slot in the pack. A slot is as long as its sequence, except that context parallelism cuts every
slot into ``2 * cp`` chunks of equal length, sequence parallelism cuts a rank's whole share into ``tp`` pieces, and
layers may want multiples of something: that takes a few tokens of padding per sequence, and some at the end of
the pack. Padding stands behind its sequence, so that causal attention never lets a real token see it, and nothing reads
what it computes.

Context parallelism cuts like Megatron and TransformerEngine do ("zig-zag"): of the ``2 * cp`` chunks of a slot, rank r
holds chunk r and chunk ``2 * cp - 1 - r``, which gives all ranks the same work under a causal mask.

Shape suffixes: B = sequences, M = tokens of all sequences, P = tokens of the whole pack, L = tokens of the pack on this
rank, N = response tokens that this rank predicts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from openrlhf_ext.megatron.step.batch import SequenceBatch


@dataclass(frozen=True)
class PackedBatch:
    """A micro-batch as this rank computes it.

    The N response tokens that this rank predicts are in the order of the batch. Without context parallelism they are
    all of the micro-batch's; with it, each of those is predicted by one of the context-parallel ranks, and a rank may
    have none. Everything that is known before the device computes is a plain value or an index, so that nothing has to
    be read back from the device.
    """

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
    """What the lengths of a pack must be multiples of.

    ``pieces`` is how many pieces a rank's share of the pack is cut into: the tensor-parallel size under sequence
    parallelism, else 1. The tokens of a piece are a multiple of ``piece_unit``.
    """

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
    """Packs the sequences of a micro-batch.

    Args:
        first_row, first_token: rows and response tokens of the micro-batches before it.
    """
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
