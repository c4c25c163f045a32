"""The comparison that proves a weight sync."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf_ext.rollout.probe import WeightSyncMismatch, check_sync, limit_of_probe, probe_tokens


@given(vocab=st.integers(20, 500), length=st.integers(2, 300), seed=st.integers(0, 9))
def test_a_probe_is_fixed(vocab: int, length: int, seed: int) -> None:
    probe = probe_tokens(vocab, length, seed)
    assert len(probe) == length
    assert all(0 <= token < vocab for token in probe)
    assert probe == probe_tokens(vocab, length, seed)


def test_a_probe_without_a_scored_token_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 tokens"):
        probe_tokens(100, 1, 0)


def test_the_gauge_is_the_largest_difference_over_engines() -> None:
    policy = torch.tensor([-1.0, -2.0, -3.0])
    gauge = check_sync(policy, [[-1.0, -2.0, -3.0], [-1.0, -2.00003, -3.00001]], tolerance=1e-4, version=1)
    assert gauge == pytest.approx(3e-5, abs=1e-9)


def test_a_mismatch_names_engine_position_and_both_values() -> None:
    with pytest.raises(WeightSyncMismatch) as error:
        check_sync(torch.tensor([-1.0, -2.5]), [[-1.0, -2.5], [-1.0, -4.25]], tolerance=1e-4, version=12)
    text = str(error.value)
    assert "weight sync 12" in text and "more than 0.0001 nats" in text
    assert "engine 0: ok" in text
    assert "engine 1: MISMATCH, worst at position 1: policy -2.500000, engine -4.250000, difference 1.75" in text


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
def test_a_value_that_is_not_finite_is_a_mismatch(bad: float) -> None:
    with pytest.raises(WeightSyncMismatch):
        check_sync(torch.tensor([-1.0, -2.0]), [[bad, -2.0]], tolerance=1e-4, version=1)
    with pytest.raises(WeightSyncMismatch):
        check_sync(torch.tensor([bad, -2.0]), [[-1.0, -2.0]], tolerance=1e-4, version=1)


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"policy 2, engines \[3\]"):
        check_sync(torch.zeros(2), [[0.0, 0.0, 0.0]], tolerance=1.0, version=0)
    with pytest.raises(ValueError, match=r"engines \[\]"):
        check_sync(torch.zeros(2), [], tolerance=1.0, version=0)


def test_later_differences_have_to_stay_near_that_of_the_start() -> None:
    assert limit_of_probe(0.2, None) == 0.2
    assert limit_of_probe(0.2, 0.01) == pytest.approx(0.08)  # 0.17 nats, a hundred missed updates, passed before
    assert limit_of_probe(0.2, 0.19) == 0.2, "never more than at the start"
    assert limit_of_probe(1e-4, 0.0) > 0
