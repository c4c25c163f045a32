from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from openrlhf_ext.megatron.step.batch import SequenceBatch, sequence_batch

LENGTHS = st.lists(st.integers(2, 60), min_size=1, max_size=40)


def ragged(lengths: list[tuple[int, int]]) -> SequenceBatch:
    """Sequences of (prompt, response) tokens."""
    sequences = [np.arange(1, p + r + 1, dtype=np.int32) for p, r in lengths]
    return sequence_batch(sequences, [[(p, p + r)] for p, r in lengths])


def test_targets_are_the_response_tokens():
    batch = ragged([(3, 2), (1, 4)])
    assert batch.lengths_B.tolist() == [5, 5] and batch.counts_B.tolist() == [2, 4]
    assert batch.targets_N.tolist() == [4, 5, 2, 3, 4, 5]
    assert batch.predict_N.tolist() == [2, 3, 0, 1, 2, 3]


def test_interrupted_responses_keep_their_positions():
    batch = sequence_batch([np.arange(10, 16), np.arange(20, 23)], [[(2, 3), (4, 6)], [(1, 2)]])
    assert batch.predict_N.tolist() == [1, 3, 4, 0] and batch.counts_B.tolist() == [3, 1]
    assert batch.targets_N.tolist() == [12, 14, 15, 21]
    turned = batch.select([1, 0])
    assert turned.targets_N.tolist() == [21, 12, 14, 15] and turned.ranges_B.tolist() == [1, 2]


@pytest.mark.parametrize("spans", [[(0, 2)], [(2, 1)], [(1, 7)], [(3, 5), (4, 6)]])
def test_response_tokens_lie_behind_a_token_and_one_behind_the_other(spans):
    with pytest.raises(ValueError, match="row 1 of 6 tokens cannot have its response tokens at"):
        sequence_batch([np.arange(3), np.arange(6)], [[(1, 3)], spans])


def test_a_selection_has_the_rows_in_its_order():
    part = ragged([(3, 2), (4, 9), (2, 2)]).select([2, 0])
    assert part.tokens_M.tolist() == [1, 2, 3, 4, 1, 2, 3, 4, 5] and part.lengths_B.tolist() == [
        4,
        5,
    ]
    assert part.counts_B.tolist() == [2, 2]


def test_a_batch_travels_out_of_band():
    batch = ragged([(3, 2), (4, 5000), (2, 2)])
    assert pickle.loads(pickle.dumps(batch)).experts_MYK is None
    experts = [np.full((length - 1, 1, 2), length, np.uint16) for length in (5, 5004, 4)]
    batch = dataclasses.replace(
        batch.with_experts(experts), routed_B=(("a", 0), ("b", 1), ("a", 1))
    )
    assert batch.select([2, 0]).routed_B == (("a", 1), ("a", 0))
    assert batch.select([2]).experts_MYK[:, 0, 0].tolist() == [
        4,
        4,
        4,
        0,
    ] and batch.told_B.tolist() == [4, 5003, 3]
    for part in (
        batch,
        batch.select([2]),
        batch.select([]),
        batch.select(slice(1, 3)),
        SequenceBatch.padding_row(),
    ):
        copy = pickle.loads(pickle.dumps(part))
        for field in dataclasses.fields(part):
            tensor, other = getattr(part, field.name), getattr(copy, field.name)
            if not torch.is_tensor(tensor):  # references, and a padding row's experts
                assert other == tensor
                continue
            assert other.dtype == tensor.dtype and torch.equal(other, tensor), field.name
    buffers: list[pickle.PickleBuffer] = []
    assert len(pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)) < 2000
    # of two experts, 2 bytes each
    assert max(len(buffer.raw()) for buffer in buffers) == 4 * len(batch.tokens_M)


def test_padding_row_has_no_response():
    row = SequenceBatch.padding_row()
    assert (
        len(row) == 1
        and row.counts_B.tolist() == [0]
        and len(row.targets_N) == len(row.predict_N) == 0
    )
