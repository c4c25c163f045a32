from __future__ import annotations

import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf_ext.megatron.batch import SequenceBatch, balance_rows, micro_batches, sequence_batch, sequence_costs
from openrlhf_ext.megatron.hf_config import read_model_shape
from tests.models import make_tiny_model

LENGTHS = st.lists(st.integers(2, 60), min_size=1, max_size=40)


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


def test_a_batch_pickles_without_its_padding():
    batch = ragged([(3, 2), (4, 5000), (2, 2)])
    for part in (batch, batch.select([2]), batch.select([]), SequenceBatch.padding_row(5)):
        copy = pickle.loads(pickle.dumps(part))
        for name, tensor in vars(part).items():
            other = getattr(copy, name)
            assert other.dtype == tensor.dtype and torch.equal(other, tensor), name
    assert len(pickle.dumps(batch)) < 5004 * 8 + 5000


def test_padding_row_has_no_response():
    row = SequenceBatch.padding_row(5)
    assert len(row) == 1 and row.mask_BT.shape == (1, 5) and not row.mask_BT.any()


def test_cost_is_linear_in_short_and_quadratic_in_long_sequences():
    assert sequence_costs([10, 20]) == [10, 20]
    short, at_length, long = sequence_costs([1, 1000, 100_000], attention_length=1000)
    assert (short, at_length) == (pytest.approx(1, rel=1e-2), 2000)
    assert long == pytest.approx(100_000**2 / 1000, rel=0.02)


def test_attention_length_is_where_attention_costs_as_much_as_the_matrix_products(tmp_path):
    make_tiny_model(tmp_path, "qwen2")
    shape = read_model_shape(tmp_path)
    # per token and layer: 2 operations a weight of q, o (64 x 64), k, v (64 x 32), gate, up, down (64 x 96)
    products = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96)
    # scores and weighted values: 2 * 2 * 64 operations for each of the (length / 2) tokens seen on average
    assert shape.attention_length == pytest.approx(products / (2 * 2 * 64 / 2))


@given(LENGTHS, st.integers(1, 7), st.sampled_from([math.inf, 20.0]))
def test_every_row_is_dealt_to_the_rank_with_the_least_work(lengths, parts, attention_length):
    dealt = balance_rows(torch.tensor(lengths), parts, attention_length)
    assert sorted(sum(dealt, [])) == list(range(len(lengths))) and len(dealt) == parts
    costs = sequence_costs(lengths, attention_length)
    work = [sum(costs[row] for row in rows) for rows in dealt]
    # a rank cannot have more than another by more than its last row, which went to the rank with least
    for rows, load in zip(dealt, work, strict=True):
        if rows:
            assert load - min(costs[row] for row in rows) <= min(work) + 1e-9


@given(LENGTHS, st.integers(1, 9), st.integers(1, 12))
def test_micro_batches_of_a_fixed_number_of_rows(lengths, size, at_least):
    costs = sequence_costs(lengths)
    plan = micro_batches(costs, [1] * len(lengths), size, at_least)
    assert sorted(sum(plan, [])) == list(range(len(lengths))) and all(len(rows) <= size for rows in plan)
    assert len(plan) == max(at_least, -(-len(lengths) // size))
    work = [sum(costs[row] for row in rows) for rows in plan]
    assert work == sorted(work, reverse=True)


@given(LENGTHS, st.integers(20, 100))
def test_micro_batches_of_a_token_budget(lengths, budget):
    plan = micro_batches(sequence_costs(lengths), lengths, budget)
    assert sorted(sum(plan, [])) == list(range(len(lengths)))
    for rows in plan:
        assert sum(lengths[row] for row in rows) <= budget or len(rows) == 1, "only a row above the budget stands alone"
    if max(lengths) <= budget:
        assert len(plan) <= 2 * (sum(lengths) / budget) + 1


def test_a_plan_has_no_more_micro_batches_than_rows_and_is_found_without_trying_every_number():
    rows, capacity = 3000, 1000
    assert len(micro_batches([1.0] * rows, [1500] * rows, capacity)) == rows, "rows that do not fit are alone"
    assert len(micro_batches([1.0] * rows, [501] * rows, capacity)) == rows, "no two fit together"
    assert len(micro_batches([1.0] * rows, [334] * rows, capacity)) == rows // 2, "no three fit together"


def test_a_rank_without_rows_gets_empty_micro_batches():
    assert micro_batches([], [], 5, 3) == [[], [], []]
