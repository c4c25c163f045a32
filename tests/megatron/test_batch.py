from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf_ext.megatron.batch import SequenceBatch, balance_rows, micro_batches, sequence_batch


def ragged(lengths: list[tuple[int, int]]) -> SequenceBatch:
    sequences = [torch.arange(1, p + r + 1) for p, r in lengths]
    masks = [torch.tensor([0] * (p - 1) + [1] * r) for p, r in lengths]
    return sequence_batch(sequences, masks)


def test_targets_are_the_response_tokens():
    batch = ragged([(3, 2), (1, 4)])
    assert batch.lengths_B.tolist() == [5, 5]
    assert batch.targets_BT.tolist() == [[4, 5, 0, 0], [2, 3, 4, 5]]


def test_interrupted_responses_keep_their_positions():
    batch = sequence_batch([torch.arange(10, 16)], [torch.tensor([0, 1, 0, 1, 1])])
    assert batch.predict_BT.tolist() == [[1, 3, 4]]
    assert batch.targets_BT.tolist() == [[12, 14, 15]]


def test_select_drops_padding_that_only_longer_rows_needed():
    part = ragged([(3, 2), (4, 9), (2, 2)]).select([2, 0])
    assert part.tokens_BS.shape == (2, 5) and part.lengths_B.tolist() == [4, 5]
    assert part.mask_BT.sum(1).tolist() == [2, 2]


@given(st.lists(st.integers(2, 60), min_size=1, max_size=40), st.integers(1, 7), st.integers(1, 9))
def test_every_row_is_dealt_exactly_once(lengths, parts, size):
    tensor = torch.tensor(lengths)
    dealt = balance_rows(tensor, parts)
    assert sorted(sum(dealt, [])) == list(range(len(lengths))) and len(dealt) == parts
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    plan = micro_batches(tensor, size)
    assert sorted(sum(plan, [])) == list(range(len(lengths))) and all(len(rows) <= size for rows in plan)


def test_padding_row_has_no_response():
    row = SequenceBatch.padding_row(5)
    assert len(row) == 1 and row.mask_BT.shape == (1, 5) and not row.mask_BT.any()
