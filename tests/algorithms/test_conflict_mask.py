"""Conflict masks against plain loops, and worked examples of lambda."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf_ext.algorithms import RolloutBatch, conflict_mask, get_algorithm
from openrlhf_ext.algorithms.conflict_mask import conflict_spans, conflicting_tokens
from openrlhf_ext.algorithms.groups import Groups
from tests.algorithms import reference


def batch_of(
    tokens: list[list[int]], rewards: list[float], group_ids: list[int] | None = None
) -> RolloutBatch:
    zeros = torch.zeros(sum(map(len, tokens)), dtype=torch.float64)
    return RolloutBatch(
        tokens=torch.tensor([token for ids in tokens for token in ids]),
        lengths=torch.tensor([len(ids) for ids in tokens]),
        rewards=torch.tensor(rewards, dtype=torch.float64),
        group_ids=torch.tensor(group_ids or [0] * len(tokens)),
        old_logprobs=zeros,
        entropies=zeros,
    )


def masks(
    batch: RolloutBatch, signs: list[int], *, backward: bool, anchor: str = "start"
) -> list[list[bool]]:
    groups = Groups.of(batch)
    spans = conflict_spans(
        batch.tokens, groups, torch.tensor(signs).double(), backward=backward, anchor=anchor
    )
    return [mask.tolist() for mask in spans.mask(batch.segments).split(batch.lengths.tolist())]


@pytest.mark.parametrize("rounds", [0, 1, 8])
@pytest.mark.parametrize("window", [1, 3, 64])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_masks_agree_with_plain_loops(rounds: int, window: int, data: st.DataObject) -> None:
    vocabulary = data.draw(st.sampled_from([1, 2, 4, 2**40]))
    ids = st.integers(vocabulary - min(vocabulary, 4), vocabulary - 1)
    tokens = data.draw(st.lists(st.lists(ids, min_size=1, max_size=9), min_size=1, max_size=9))
    signs = data.draw(
        st.lists(st.sampled_from([-1, 0, 1]), min_size=len(tokens), max_size=len(tokens))
    )
    group_ids = data.draw(st.lists(st.integers(0, 2), min_size=len(tokens), max_size=len(tokens)))
    batch = batch_of(tokens, [0.0] * len(tokens), group_ids)
    old = conflict_mask.LEADER_ROUNDS, conflict_mask.FIRST_WINDOW
    conflict_mask.LEADER_ROUNDS, conflict_mask.FIRST_WINDOW = rounds, window
    try:
        for backward in (False, True):
            for anchor in ("start", "first"):
                got = masks(batch, signs, backward=backward, anchor=anchor)
                for row in range(len(tokens)):
                    members = [i for i in range(len(tokens)) if group_ids[i] == group_ids[row]]
                    group = [{"tokens": tokens[i]} for i in members]
                    wanted = reference.conflict_mask(
                        group, [signs[i] for i in members], members.index(row), backward, anchor
                    )
                    assert got[row] == wanted
    finally:
        conflict_mask.LEADER_ROUNDS, conflict_mask.FIRST_WINDOW = old


def test_a_shared_prefix_and_suffix_by_hand() -> None:
    batch = batch_of([[1, 2, 3, 4, 9], [1, 2, 5, 9], [1, 7, 9]], [1.0, 0.0, 0.0])
    signs = [1, -1, -1]
    assert masks(batch, signs, backward=False) == [
        [True, True, False, False, False],
        [True, True, False, False],
        [True, False, False],
    ]
    assert masks(batch, signs, backward=True) == [
        [False, False, False, False, True],
        [False, False, False, True],
        [False, False, True],
    ]


def test_partners_need_not_share_the_prefix() -> None:
    """S-4: ids at equal position only; position 1 is a conflict although position 0 differs, but no
    run starts."""
    batch = batch_of([[1, 2, 3], [5, 2, 3]], [1.0, 0.0])
    assert masks(batch, [1, -1], backward=False) == [[False] * 3, [False] * 3]
    assert masks(batch, [1, -1], backward=False, anchor="first") == [[False, True, True]] * 2


def test_completions_of_the_same_sign_are_no_conflict() -> None:
    batch = batch_of([[1, 2], [1, 2], [3, 4]], [1.0, 1.0, 0.0])
    assert masks(batch, [1, 1, -1], backward=False) == [[False] * 2] * 3


def test_lambda_by_hand() -> None:
    """Overlap of both spans weighs 2 in the paper and 4 in the released code; negatives lose
    both."""
    batch = batch_of([[1, 2, 3], [1, 2, 3], [1, 9, 3]], [1.0, 0.0, 0.0])
    paper = get_algorithm("gtpo_conflict").shape(batch)
    assert paper["lambda"].tolist() == [2.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    product = get_algorithm("gtpo_conflict", overlap="product").shape(batch)
    assert product["lambda"].tolist() == [4.0, 4.0, 4.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]


def test_full_cover_keeps_the_completion_in_the_count() -> None:
    """S-3: a negative completion covered entirely has no gradient but still counts in G."""
    batch = batch_of([[1, 2], [1, 2], [5, 6]], [1.0, 0.0, 0.0])
    algorithm = get_algorithm("gtpo_conflict", filter="off", gamma=0.0)
    shaped = algorithm.shape(batch)
    new = batch.old_logprobs.clone().requires_grad_()
    (grad,) = torch.autograd.grad(algorithm.loss(new, shaped).value, new)
    assert grad[2:4].tolist() == [0.0, 0.0]
    a = (2 / 3) / (shaped["A"].new_tensor([2 / 3, -1 / 3, -1 / 3]).std() + 1e-6)
    assert grad[:2].tolist() == pytest.approx([float(-2.0 * a / (3 * 2))] * 2)


def test_the_filter_switches_on_below_ln_2_only() -> None:
    batch = batch_of([[1, 2], [3, 4]], [1.0, 0.0])
    batch = dataclasses.replace(
        batch, entropies=torch.tensor([0.9, 0.9, 0.8, 0.8], dtype=torch.float64)
    )
    for h_ini, wanted in (
        (None, [0.0, 0.0]),
        (0.5, [0.0, 0.0]),
        (0.6931471805599453, [1.0, 1.0]),
        (0.9, [1.0, 1.0]),
    ):
        assert get_algorithm("gtpo_conflict", h_ini=h_ini).shape(batch)["delta"].tolist() == wanted
    only_negative = get_algorithm("gtpo_conflict", filter="only_neg").shape(batch)
    assert only_negative["delta"].tolist() == [1.0, 0.0]
    at_threshold = get_algorithm("gtpo_conflict", entropy_threshold=0.9).shape(batch)
    assert at_threshold["delta"].tolist() == [1.0, 1.0]


def test_many_distinct_ids_take_the_sorting_path() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 40, (3, 32, 5), generator=generator)
    valid = torch.rand(3, 32, 5, generator=generator) > 0.1
    positive = torch.rand(3, 32, generator=generator) > 0.5
    got = conflicting_tokens(tokens.to(torch.int32), valid, positive)
    for g in range(3):
        for w in range(5):
            for s in range(32):
                partners = [
                    o
                    for o in range(32)
                    if valid[g, o, w]
                    and positive[g, o] != positive[g, s]
                    and tokens[g, o, w] == tokens[g, s, w]
                ]
                assert bool(got[g, s, w]) == (bool(valid[g, s, w]) and bool(partners))


def test_metrics_count_the_masks() -> None:
    batch = batch_of([[1, 2, 3, 9], [1, 2, 5, 9]], [1.0, 0.0])
    metrics = get_algorithm("gtpo_conflict").shape(batch).metrics
    assert metrics["conflict_forward"].item() == pytest.approx(4 / 8)
    assert metrics["conflict_backward"].item() == pytest.approx(2 / 8)
    assert metrics["filtered_completions"].item() == 0.0
