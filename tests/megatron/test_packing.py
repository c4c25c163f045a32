from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf_ext.megatron.step.batch import PackShape, local_places, pack
from tests.sequences import masked_batch

SHAPES = st.builds(PackShape, st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 16, 128]))
ROWS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=6)  # prompt, response


def ragged(rows):
    start, sequences = 1, []
    for prompt, response in rows:  # every token is different
        sequences.append(torch.arange(start, start + prompt + response))
        start += prompt + response
    return masked_batch(sequences, [torch.tensor([0] * (p - 1) + [1] * r) for p, r in rows])


@given(SHAPES, st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_slots_are_no_longer_than_cutting_them_evenly_takes(shape, lengths):
    slots = shape.slots(lengths)
    assert all(slot % shape.unit == 0 and slot >= length for slot, length in zip(slots, lengths, strict=True))
    assert all(slot - length < shape.unit for slot, length in list(zip(slots, lengths, strict=True))[:-1])
    assert sum(slots) % shape.pack_unit == 0 and slots[-1] - lengths[-1] < shape.unit + shape.pack_unit
    assert shape.tokens_per_rank(lengths) * shape.context_parallel_size * shape.pieces == sum(slots)
    assert shape.tokens_per_rank(lengths) % shape.piece_unit == 0
    if shape == PackShape():
        assert slots == tuple(lengths), "nothing is padded where nothing is cut"


@given(SHAPES, ROWS)
def test_the_ranks_hold_every_token_once_and_predict_every_response_token_once(shape, rows):
    batch = ragged(rows)
    parts = [pack(batch, shape, context_parallel_rank=rank) for rank in range(shape.context_parallel_size)]
    held = torch.cat([part.packed_L for part in parts])
    assert sorted(held[held > 0].tolist()) == list(range(1, sum(p + r for p, r in rows) + 1))
    predicted = torch.cat([part.places_N for part in parts])
    assert torch.equal(predicted.sort().values, torch.arange(sum(r for _, r in rows)))
    for part in parts:
        assert len(part.packed_L) == len(parts[0].packed_L), "equal work"
        # the token after the one whose hidden state is taken is the target: tokens are consecutive numbers
        assert torch.equal(part.packed_L[part.hidden_N] + 1, part.targets_N)
        assert torch.equal(batch.targets_N[part.places_N].long(), part.targets_N)


@given(ROWS)
def test_positions_start_again_with_every_sequence(rows):
    part = pack(ragged(rows), PackShape())
    assert part.positions_L.tolist() == [i for p, r in rows for i in range(p + r)]
    assert part.slots == tuple(p + r for p, r in rows)


def test_a_rank_holds_a_piece_from_the_front_and_one_from_the_back():
    assert local_places([8, 4], 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert local_places([8, 4], 2, 1).tolist() == [2, 3, 4, 5, 9, 10]


@given(SHAPES, ROWS)
def test_the_pieces_of_a_rank_know_how_many_of_its_hidden_states_are_wanted(shape, rows):
    for rank in range(shape.context_parallel_size):
        part = pack(ragged(rows), shape, context_parallel_rank=rank)
        length = len(part.packed_L) // shape.pieces
        pieces = [((part.hidden_N >= i * length) & (part.hidden_N < (i + 1) * length)) for i in range(shape.pieces)]
        assert part.piece_counts == tuple(int(piece.sum()) for piece in pieces)


def test_moving_keeps_everything():
    part = pack(ragged([(2, 3), (1, 1)]), PackShape(2), first_row=7, first_token=20)
    moved = part.to(torch.device("cpu"))
    assert moved.slots == part.slots and torch.equal(moved.hidden_N, part.hidden_N)
    assert (moved.rows, moved.tokens) == (slice(7, 9), slice(20, 24))
    assert moved.boundaries.tolist() == [0, *itertools.accumulate(part.slots)]


@given(SHAPES, st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_what_fits_a_whole_number_of_pack_units_fits_with_its_padding(shape, lengths):
    """How a budget of tokens is kept: micro-batches are filled by slots, up to a multiple of the pack's unit."""
    apart = PackShape(shape.context_parallel_size)
    filled = sum(apart.slots([length])[0] for length in lengths)
    capacity = -(-filled // shape.pack_unit) * shape.pack_unit
    assert sum(shape.slots(lengths)) <= capacity
