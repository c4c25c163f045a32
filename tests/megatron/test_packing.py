from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf_ext.megatron.step.batch import PackShape, local_places, pack
from tests.sequences import grouped, masked_batch

SHAPES = st.builds(
    PackShape,
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 16, 128]),
)
# prompt, response
ROWS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=6)


def ragged(rows):
    start, sequences = 1, []
    for prompt, response in rows:  # every token is different
        sequences.append(torch.arange(start, start + prompt + response))
        start += prompt + response
    return masked_batch(sequences, [torch.tensor([0] * (p - 1) + [1] * r) for p, r in rows])


@given(SHAPES, st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_slots_are_no_longer_than_cutting_them_evenly_takes(shape, lengths):
    slots = shape.slots(lengths)
    assert all(
        slot % shape.unit == 0 and slot >= length
        for slot, length in zip(slots, lengths, strict=True)
    )
    assert all(
        slot - length < shape.unit for slot, length in list(zip(slots, lengths, strict=True))[:-1]
    )
    assert (
        sum(slots) % shape.pack_unit == 0 and slots[-1] - lengths[-1] < shape.unit + shape.pack_unit
    )
    assert shape.tokens_per_rank(lengths) * shape.context_parallel_size * shape.pieces == sum(slots)
    assert shape.tokens_per_rank(lengths) % shape.piece_unit == 0
    if shape == PackShape():
        assert slots == tuple(lengths), "nothing is padded where nothing is cut"


@given(SHAPES, ROWS)
def test_the_ranks_hold_every_token_once_and_predict_every_response_token_once(shape, rows):
    batch = ragged(rows)
    parts = [
        pack(batch, shape, context_parallel_rank=rank)
        for rank in range(shape.context_parallel_size)
    ]
    held = torch.cat([part.packed_L for part in parts])
    assert sorted(held[held > 0].tolist()) == list(range(1, sum(p + r for p, r in rows) + 1))
    predicted = torch.cat([part.places_N for part in parts])
    assert torch.equal(predicted.sort().values, torch.arange(sum(r for _, r in rows)))
    for part in parts:
        assert len(part.packed_L) == len(parts[0].packed_L), "equal work"
        # the token after the one whose hidden state is taken is the target: tokens are consecutive
        # numbers
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
        pieces = [
            ((part.hidden_N >= i * length) & (part.hidden_N < (i + 1) * length))
            for i in range(shape.pieces)
        ]
        assert part.piece_counts == tuple(int(piece.sum()) for piece in pieces)


def test_moving_keeps_everything():
    part = pack(ragged([(2, 3), (1, 1)]), PackShape(2), first_row=7, first_token=20)
    moved = part.to(torch.device("cpu"))
    assert moved.slots == part.slots and torch.equal(moved.hidden_N, part.hidden_N)
    assert (moved.rows, moved.tokens) == (slice(7, 9), slice(20, 24))
    assert moved.boundaries.tolist() == [0, *itertools.accumulate(part.slots)]


@given(SHAPES, st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_what_fits_a_whole_number_of_pack_units_fits_with_its_padding(shape, lengths):
    """How a budget of tokens is kept: micro-batches are filled by slots, up to a multiple of the
    pack's unit."""
    apart = PackShape(shape.context_parallel_size)
    filled = sum(apart.slots([length])[0] for length in lengths)
    capacity = -(-filled // shape.pack_unit) * shape.pack_unit
    assert sum(shape.slots(lengths)) <= capacity


RESPONSES = st.lists(st.integers(1, 12), min_size=1, max_size=5)
GROUPS = st.lists(st.tuples(st.integers(1, 9), RESPONSES), min_size=1, max_size=4)


@given(GROUPS, st.sampled_from([1, 2, 4]), st.sampled_from([1, 16]))
def test_a_prompt_of_several_responses_is_in_the_pack_once(groups, pieces, unit):
    batch, shape = grouped(groups), PackShape(1, pieces, unit, shares_prompts=True)
    part, alone = pack(batch, shape), pack(batch, PackShape(1, pieces, unit))
    saved = sum((prompt - 1) * (len(responses) - 1) for prompt, responses in groups)
    if saved * 32 < len(batch.tokens_M):
        assert part.shared is None and torch.equal(part.packed_L, alone.packed_L), "not worth it"
        return
    held = part.packed_L[part.packed_L > 0]
    assert len(held) == len(batch.tokens_M) - saved
    # all but the last token of a prompt, which predicts the first of its own response
    twice = {int(token) for token in held if (held == token).sum() > 1}
    predicting = batch.sequences.bounds[:-1] + batch.prompts.tokens_B
    assert twice <= set(batch.tokens_M[torch.from_numpy(predicting)].tolist())
    assert len(part.packed_L) == shape.tokens_per_rank(batch.lengths_B.tolist(), saved) * pieces
    assert len(part.packed_L) % (pieces * unit) == 0 and part.boundaries[-1] == len(
        part.shared.computed_P
    )
    whole, positions = (
        part.packed_L[part.shared.computed_P],
        part.positions_L[part.shared.computed_P],
    )
    for row, start in enumerate(part.boundaries[:-1].tolist()):
        span = slice(start, start + int(batch.lengths_B[row]))
        assert torch.equal(whole[span], batch.sequences.take(batch.tokens_M, [row]).long())
        assert torch.equal(positions[span], torch.arange(span.stop - span.start))
    assert torch.equal(part.shared.computed_P[part.shared.kept_L], torch.arange(len(part.packed_L)))
    states = torch.randn(len(part.packed_L), 3)
    torch.testing.assert_close(
        states[part.hidden_N], states[part.shared.computed_P][alone.hidden_N]
    )
    assert torch.equal(part.targets_N, alone.targets_N) and sum(part.piece_counts) == len(
        part.targets_N
    )


def test_ranges_of_several_turns_and_rows_without_any_share_nothing_they_predict():
    tokens = torch.arange(1, 11)
    masks = [
        torch.tensor(mask)
        for mask in ([0, 0, 1, 1, 0, 0, 1, 1, 0], [0, 0, 1, 0, 0, 0, 0, 0, 0], [0] * 9)
    ]
    batch = masked_batch([tokens, tokens, tokens], masks)
    assert batch.prompts.tokens_B.tolist() == [2, 2, 0] and batch.repeated([1, 2, 0]) == [0, 0, 2]
    part = pack(batch, PackShape(shares_prompts=True))
    assert len(part.packed_L) == 28 and torch.equal(
        part.packed_L[part.hidden_N] + 1, part.targets_N
    )
