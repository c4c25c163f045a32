from __future__ import annotations

import dataclasses
import math
import pickle
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf_ext.megatron.model.shape import read_model_shape
from openrlhf_ext.megatron.step.batch import SequenceBatch, sequence_batch
from openrlhf_ext.megatron.step.dealing import balance_rows, micro_batches, sequence_costs
from tests.models import make_tiny_model

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
    assert part.tokens_M.tolist() == [1, 2, 3, 4, 1, 2, 3, 4, 5] and part.lengths_B.tolist() == [4, 5]
    assert part.counts_B.tolist() == [2, 2]


def test_a_batch_travels_out_of_band():
    batch = ragged([(3, 2), (4, 5000), (2, 2)])
    for part in (batch, batch.select([2]), batch.select([]), batch.select(slice(1, 3)), SequenceBatch.padding_row()):
        copy = pickle.loads(pickle.dumps(part))
        for field in dataclasses.fields(part):
            tensor, other = getattr(part, field.name), getattr(copy, field.name)
            assert other.dtype == tensor.dtype and torch.equal(other, tensor), field.name
    buffers: list[pickle.PickleBuffer] = []
    assert len(pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)) < 2000
    assert max(len(buffer.raw()) for buffer in buffers) == 4 * len(batch.tokens_M)


def test_padding_row_has_no_response():
    row = SequenceBatch.padding_row()
    assert len(row) == 1 and row.counts_B.tolist() == [0] and len(row.targets_N) == len(row.predict_N) == 0


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


def test_sixteen_thousand_sequences_are_planned_quickly():
    generator = torch.Generator().manual_seed(0)
    lengths = (torch.randn(16_384, generator=generator).mul(0.8).exp() * 6000).long().clamp(1, 33_000)
    costs, sizes = sequence_costs(lengths.tolist(), 1e5), lengths.tolist()
    started = time.process_time()
    plans = [micro_batches(costs, sizes, capacity) for capacity in (16_384, 32_768)]
    assert time.process_time() - started < 10, "seconds where it once took minutes"
    for plan, capacity in zip(plans, (16_384, 32_768), strict=True):
        filled = [sum(sizes[row] for row in rows) for rows in plan]
        assert all(size <= capacity or len(rows) == 1 for size, rows in zip(filled, plan, strict=True))
        least = -(-sum(min(size, capacity) for size in sizes) // capacity)
        assert len(plan) <= 1.15 * least


def test_a_rank_without_rows_gets_empty_micro_batches():
    assert micro_batches([], [], 5, 3) == [[], [], []]
