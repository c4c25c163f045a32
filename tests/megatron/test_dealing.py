"""Rows go where they cost least: to ranks, to micro-batches, and next to those of their prompt."""

from __future__ import annotations

import math
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.megatron.model.shape import read_model_shape
from openrlhf_ext.megatron.settings import row_costs
from openrlhf_ext.megatron.step.dealing import (
    RowCosts,
    Sizes,
    balance_rows,
    deal_rows,
    micro_batches,
    plan_micro_batches,
    sequence_costs,
)
from openrlhf_ext.options.sections import Megatron
from tests.models import make_tiny_model
from tests.sequences import grouped

LENGTHS = st.lists(st.integers(2, 60), min_size=1, max_size=40)
RESPONSES = st.lists(st.integers(1, 40), min_size=1, max_size=6)
GROUPS = st.lists(st.tuples(st.integers(1, 30), RESPONSES), min_size=1, max_size=8)


def test_cost_is_linear_in_short_and_quadratic_in_long_sequences():
    assert sequence_costs([10, 20]) == [10, 20]
    short, at_length, long = sequence_costs([1, 1000, 100_000], attention_length=1000)
    assert (short, at_length) == (pytest.approx(1, rel=1e-2), 2000)
    assert long == pytest.approx(100_000**2 / 1000, rel=0.02)


def test_attention_length_is_where_attention_costs_as_much_as_the_matrix_products(tmp_path):
    make_tiny_model(tmp_path, "qwen2")
    shape = read_model_shape(tmp_path)
    # per token and layer: 2 operations a weight of q, o (64 x 64), k, v (64 x 32), gate, up, down
    # (64 x 96)
    products = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96)
    # scores and weighted values: 2 * 2 * 64 operations for each of the (length / 2) tokens seen on
    # average
    assert shape.attention_length == pytest.approx(products / (2 * 2 * 64 / 2))


@given(LENGTHS, st.integers(1, 7), st.sampled_from([math.inf, 20.0]))
def test_every_row_is_dealt_to_the_rank_with_the_least_work(lengths, parts, attention_length):
    dealt = balance_rows(torch.tensor(lengths), parts, attention_length)
    assert sorted(sum(dealt, [])) == list(range(len(lengths))) and len(dealt) == parts
    costs = sequence_costs(lengths, attention_length)
    work = [sum(costs[row] for row in rows) for rows in dealt]
    # a rank cannot have more than another by more than its last row, which went to the rank with
    # least
    for rows, load in zip(dealt, work, strict=True):
        if rows:
            assert load - min(costs[row] for row in rows) <= min(work) + 1e-9


@given(LENGTHS, st.integers(1, 9), st.integers(1, 12))
def test_micro_batches_of_a_fixed_number_of_rows(lengths, size, at_least):
    costs = sequence_costs(lengths)
    plan = micro_batches(costs, [1] * len(lengths), size, at_least)
    assert sorted(sum(plan, [])) == list(range(len(lengths))) and all(
        len(rows) <= size for rows in plan
    )
    assert len(plan) == max(at_least, -(-len(lengths) // size))
    work = [sum(costs[row] for row in rows) for rows in plan]
    assert work == sorted(work, reverse=True)


@given(LENGTHS, st.integers(20, 100))
def test_micro_batches_of_a_token_budget(lengths, budget):
    plan = micro_batches(sequence_costs(lengths), lengths, budget)
    assert sorted(sum(plan, [])) == list(range(len(lengths)))
    for rows in plan:
        assert sum(lengths[row] for row in rows) <= budget or len(rows) == 1, (
            "only a row above the budget stands alone"
        )
    if max(lengths) <= budget:
        assert len(plan) <= 2 * (sum(lengths) / budget) + 1


def test_a_plan_has_no_more_micro_batches_than_rows_and_is_found_without_trying_every_number():
    rows, capacity = 3000, 1000
    assert len(micro_batches([1.0] * rows, [1500] * rows, capacity)) == rows, (
        "rows that do not fit are alone"
    )
    assert len(micro_batches([1.0] * rows, [501] * rows, capacity)) == rows, "no two fit together"
    assert len(micro_batches([1.0] * rows, [334] * rows, capacity)) == rows // 2, (
        "no three fit together"
    )


def test_sixteen_thousand_sequences_are_planned_quickly():
    generator = torch.Generator().manual_seed(0)
    lengths = (
        (torch.randn(16_384, generator=generator).mul(0.8).exp() * 6000).long().clamp(1, 33_000)
    )
    costs, sizes = sequence_costs(lengths.tolist(), 1e5), lengths.tolist()
    started = time.process_time()
    plans = [micro_batches(costs, sizes, capacity) for capacity in (16_384, 32_768)]
    assert time.process_time() - started < 10, "seconds where it once took minutes"
    for plan, capacity in zip(plans, (16_384, 32_768), strict=True):
        filled = [sum(sizes[row] for row in rows) for rows in plan]
        assert all(
            size <= capacity or len(rows) == 1 for size, rows in zip(filled, plan, strict=True)
        )
        least = -(-sum(min(size, capacity) for size in sizes) // capacity)
        assert len(plan) <= 1.15 * least


def test_a_rank_without_rows_gets_empty_micro_batches():
    assert micro_batches([], [], 5, 3) == [[], [], []]


def work(batch, plan, costs):
    return [float(costs.of(batch, rows).sum()) for rows in plan]


@given(GROUPS, st.integers(1, 5), st.sampled_from([math.inf, 20.0]))
def test_rows_are_dealt_along_their_prompts_where_the_fullest_rank_then_has_less_to_do(
    groups, parts, attention_length
):
    batch, costs = grouped(groups), RowCosts(attention_length, shares_prompts=True)
    dealt = deal_rows(batch, parts, costs)
    assert sorted(sum(dealt, [])) == list(range(len(batch))) and len(dealt) == parts
    alone = balance_rows(batch.lengths_B, parts, attention_length)
    assert max(work(batch, dealt, costs)) <= max(work(batch, alone, costs))
    assert deal_rows(batch, parts, RowCosts(attention_length)) == alone, "prompts are not shared"


def test_where_packs_cannot_share_prompts(tmp_path):
    make_tiny_model(tmp_path, "qwen2")
    shape, whole = read_model_shape(tmp_path), ParallelLayout(2)
    assert row_costs(shape, Megatron(), whole) == RowCosts(
        shape.attention_length, shares_prompts=True
    )
    assert not row_costs(
        shape, Megatron(), ParallelLayout(2, context_parallel_size=2)
    ).shares_prompts
    assert not row_costs(shape, Megatron(rope_fusion=True), whole).shares_prompts
    assert not row_costs(shape, Megatron(share_prompts_enable=False), whole).shares_prompts


def test_groups_stay_together_on_ranks_and_in_micro_batches():
    batch, costs = (
        grouped([(20, [9, 12 + i, 10, 11]) for i in range(8)]),
        RowCosts(shares_prompts=True),
    )
    assert deal_rows(batch, 2, costs) == [list(range(16)), list(range(16, 32))]
    sizes = Sizes([1] * 32, [0] * 32, 8)
    plan = plan_micro_batches(batch, sizes, 1, costs, stages=1)
    assert sorted(plan) == [list(range(start, start + 8)) for start in range(0, 32, 8)]
    assert len(plan_micro_batches(batch, sizes, 6, costs, stages=1)) == 6


@given(GROUPS, st.integers(20, 120), st.integers(1, 6), st.integers(1, 4))
def test_micro_batches_along_prompts_keep_the_budget(groups, budget, at_least, stages):
    batch, costs = grouped(groups), RowCosts(shares_prompts=True)
    lengths, repeated = batch.lengths_B.tolist(), batch.prompts.tokens_B.tolist()
    plan = plan_micro_batches(batch, Sizes(lengths, repeated, budget), at_least, costs, stages)
    assert sorted(sum(plan, [])) == list(range(len(batch))) and len(plan) >= at_least
    for rows in plan:
        filled = sum(lengths[row] for row in rows) - sum(batch.repeated(rows))
        assert filled <= budget or len(rows) == 1, "only a row above the budget stands alone"
    alone = micro_batches(sequence_costs(lengths), lengths, budget, at_least)
    ours, theirs = (work(batch, each, costs) for each in (plan, alone))
    assert sum(ours) + (stages - 1) * max(ours) <= sum(theirs) + (stages - 1) * max(theirs)
    assert ours == sorted(ours, reverse=True)
    assert (
        plan_micro_batches(batch, Sizes(lengths, repeated, budget), at_least, RowCosts(), stages)
        == alone
    )
