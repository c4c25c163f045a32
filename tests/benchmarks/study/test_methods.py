"""The methods that only studies have: what each leaves of the method that it takes apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf_ext.algorithms import RolloutBatch, get_algorithm
from openrlhf_ext.algorithms.registry import algorithm_of_file

METHODS = Path(__file__).resolve().parents[3] / "benchmarks/study/methods"
GROUP = 8


def of_file(name: str, **options: object):
    return get_algorithm(algorithm_of_file(str(METHODS / f"{name}.py")), **options)


@st.composite
def batches(draw) -> RolloutBatch:
    """Groups of eight completions, right and wrong, of any lengths."""
    rows = GROUP * draw(st.integers(1, 4))
    lengths = torch.tensor(draw(st.lists(st.integers(1, 12), min_size=rows, max_size=rows)))
    rewards = torch.tensor(
        draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=rows, max_size=rows))
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    tokens = int(lengths.sum())
    return RolloutBatch(
        tokens=torch.randint(0, 4, (tokens,), generator=generator),
        lengths=lengths,
        rewards=rewards.double(),
        group_ids=torch.arange(rows) // GROUP,
        old_logprobs=-torch.rand(tokens, generator=generator),
        entropies=0.1 + torch.rand(tokens, generator=generator),
        group_size=GROUP,
    )


@given(batches())
def test_in_pools_of_completions_and_without_entropy_it_is_dapo_bit_for_bit(batch):
    """Hypothesis H1a of docs/science.md."""
    pools = of_file("completion_pools", alpha1=1.0, alpha2=0.0, ddof_tok=1).shape(batch)
    dapo = get_algorithm("dapo").shape(batch)
    assert torch.equal(pools.advantages, dapo.advantages)
    new = batch["old_logprobs"] + 0.3 * torch.sin(torch.arange(len(batch.tokens)))
    assert torch.equal(pools.algorithm.loss(new, pools).value, dapo.algorithm.loss(new, dapo).value)


@given(batches())
def test_the_advantage_in_pools_of_tokens_follows_from_the_share_of_tokens(batch):
    """H1: sqrt((1 - q)/q) with q of tokens; dapo's has p of completions in its place."""
    shaped = get_algorithm("gtpo_entropy", alpha1=1.0, alpha2=0.0).shape(batch)
    first = slice(0, GROUP)
    right, lengths = batch.rewards[first] > 0, batch.lengths[first].double()
    if not 0 < int(right.sum()) < GROUP:
        return  # a group without a signal is dropped
    q = float(lengths[right].sum() / lengths.sum())
    row = int(right.nonzero()[0])
    place = int(lengths[:row].sum())
    assert float(shaped.advantages[place]) == pytest.approx(((1 - q) / q) ** 0.5, rel=1e-4)


@given(batches())
def test_half_of_the_masks_leaves_wrong_completions_as_they_are(batch):
    options = {"gamma": 0.0, "filter": "off"}
    whole, half = (
        get_algorithm("gtpo_conflict", **options).shape(batch),
        of_file("positive_weights", **options).shape(batch),
    )
    wrong_N = batch.segments.spread(whole["A"] < 0)
    assert torch.equal(half["lambda"][wrong_N], torch.ones(int(wrong_N.sum())))
    assert torch.equal(half["lambda"][~wrong_N], whole["lambda"][~wrong_N])
