"""The comparison that proves a weight sync."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf_ext.rollout.probe import (
    WeightSyncMismatch,
    check_sync,
    end_of_probe,
    limit_of_probe,
    relative_difference,
)

LOGPROBS = st.floats(-20.0, -0.01)


@given(pairs=st.lists(st.tuples(LOGPROBS, LOGPROBS), min_size=1, max_size=50))
def test_a_difference_is_in_nats_and_of_unlikely_tokens_the_share(
    pairs: list[tuple[float, float]],
) -> None:
    expected = sum(abs(a - b) / max(1.0, -max(a, b) / 5) for a, b in pairs) / len(pairs)
    one, other = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    assert relative_difference(one, other).mean == pytest.approx(expected, rel=1e-9, abs=1e-15)
    assert relative_difference(other, one).mean == pytest.approx(expected, rel=1e-9, abs=1e-15)


def test_rounding_of_a_token_that_nobody_samples_is_no_alarm() -> None:
    """What a real model gave in bf16 to a token drawn at random: the first run with one ended by
    it."""
    policy, engine = torch.tensor([-0.7, -17.79]), [-0.71, -17.49]
    expected = (0.01 + 0.3 * 5 / 17.49) / 2
    assert check_sync(policy, [engine], tolerance=0.1, version=2) == pytest.approx(
        expected, rel=1e-3
    )


def test_rounding_of_a_policy_that_has_left_the_text_is_no_alarm() -> None:
    """What the model of wide_model.py gave after 251 updates; weighed by probabilities it was a
    mean of 0.115 nats."""
    policy, engine = torch.tensor([-17.84, -4.339, -16.2, -13.91]), [-18.02, -4.480, -16.1, -13.92]
    assert check_sync(policy, [engine], tolerance=0.1, version=251) < 0.06


def test_a_token_that_becomes_likely_for_one_side_only_is_a_mismatch() -> None:
    with pytest.raises(WeightSyncMismatch, match="worst at position 1"):
        check_sync(torch.tensor([-0.7, -17.0]), [[-0.7, -0.5]], tolerance=0.1, version=2)


def test_the_gauge_is_the_largest_over_engines() -> None:
    policy = torch.tensor([-2.0, -2.0, -2.0], dtype=torch.float64)
    gauge = check_sync(
        policy, [[-2.0, -2.0, -2.0], [-2.0, -2.00003, -2.0]], tolerance=1e-4, version=1
    )
    assert gauge == pytest.approx(1e-5, rel=1e-3)


def test_the_last_token_alone_shows_a_cache_of_old_weights() -> None:
    policy = torch.full((159,), -1.0)
    engine = [-1.0] * 158 + [-2.0]
    assert relative_difference(policy, torch.tensor(engine)).mean < 0.01
    with pytest.raises(
        WeightSyncMismatch, match="0.00629 on average, 1 at the last token, worst at position 158"
    ):
        check_sync(policy, [engine], tolerance=0.1, version=1)


@pytest.mark.parametrize("others", [0.01, 1.0])
def test_a_last_token_out_of_proportion_is_looked_at_with_two_others(others: float) -> None:
    """A run in bf16 ended by the rounding of one token: policy -5.11, engine -4.55. Keys and values
    of old weights change the last token wherever the text ends."""
    policy = torch.full((80,), -3.0)
    policy[70:72] = -0.7
    asked = []

    def score(length: int) -> list[list[float]]:
        asked.append(length)
        return [[-3.0] * (length - 2) + [float(policy[length - 2]) - others]]

    def check() -> float:
        engine = [*policy[:-1].tolist(), -3.56]
        return check_sync(policy, [engine], 0.1, 12, score=score)

    if others < 0.4:
        assert check() < 0.1
    else:
        with pytest.raises(WeightSyncMismatch, match=", 1 at the last token"):
            check()
    assert asked == [72, 73]  # the tokens whose probability is one half


def test_exact_mode_takes_no_second_look() -> None:
    def score(length: int) -> list[list[float]]:
        raise AssertionError("one other bit is a mismatch")

    with pytest.raises(WeightSyncMismatch):
        check_sync(torch.full((40,), -1.0), [[-1.0] * 39 + [-1.1]], 0.0, 3, score=score)


@given(logprobs=st.lists(LOGPROBS, min_size=1, max_size=60))
def test_the_text_ends_where_the_model_was_of_two_minds(logprobs: list[float]) -> None:
    end = end_of_probe(logprobs)
    assert max(0, len(logprobs) - 16) < end <= len(logprobs)
    assert all(
        abs(math.exp(logprobs[end - 1]) - 0.5) <= abs(math.exp(x) - 0.5) for x in logprobs[-16:]
    )


def test_a_mismatch_names_engine_position_and_both_values() -> None:
    with pytest.raises(WeightSyncMismatch) as error:
        check_sync(
            torch.tensor([-1.0, -2.5]), [[-1.0, -2.5], [-1.0, -4.25]], tolerance=1e-4, version=12
        )
    text = str(error.value)
    assert "weight sync 12" in text and "more than 0.0001 nats" in text
    assert "engine 0: ok" in text
    assert (
        "engine 1: MISMATCH, 0.875 on average, 1.75 at the last token, worst at position 1: "
        in text
    )
    assert "policy -2.500000, engine -4.250000" in text


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
def test_a_value_that_is_not_finite_is_a_mismatch(bad: float) -> None:
    with pytest.raises(WeightSyncMismatch):
        check_sync(
            torch.tensor([-1.0, -2.0]), [[-1.0, -2.0], [bad, -2.0]], tolerance=1e-4, version=1
        )
    with pytest.raises(WeightSyncMismatch):
        check_sync(torch.tensor([bad, -2.0]), [[-1.0, -2.0]], tolerance=1e-4, version=1)


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"policy 2, engines \[3\]"):
        check_sync(torch.zeros(2), [[0.0, 0.0, 0.0]], tolerance=1.0, version=0)
    with pytest.raises(ValueError, match=r"engines \[\]"):
        check_sync(torch.zeros(2), [], tolerance=1.0, version=0)


def test_more_than_at_the_start_is_said_and_more_than_rounding_ends_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy = torch.tensor([-1.0, -1.0])

    def check(off: float) -> float:
        return check_sync(policy, [[-1.0 - off, -1.0 - off]], 0.1, 7, limit_of_probe(0.1, 0.01))

    check(0.05)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert check(0.08) == pytest.approx(0.08, rel=1e-3)
    assert "after weight sync 7 policy and engines differ more than at the start" in caplog.text
    with pytest.raises(WeightSyncMismatch):
        check(0.11)


def test_later_differences_are_expected_near_that_of_the_start() -> None:
    assert limit_of_probe(0.1, None) == 0.1
    assert limit_of_probe(0.1, 0.01) == pytest.approx(0.055)
    assert limit_of_probe(0.1, 0.09) == 0.1, "never more than at the start"
    assert limit_of_probe(1e-4, 0.0) > 0
