"""Streaming trains what it samples, whatever its length, unless late groups are dropped."""

from __future__ import annotations

from benchmarks.lengths import simulate


def test_every_group_that_begins_is_trained_once():
    for staleness in (0, 2, 4):
        found = simulate(staleness, "train", steps=12, seed=0)
        assert found["ks"] == 0 and found["mean"] == 1 and (found["late"] > 0) == (staleness > 0)


def test_batches_that_wait_are_in_order_and_none_is_late():
    found = simulate(2, "wait", steps=12, seed=0)
    assert found["ks"] == found["late"] == found["dropped"] == 0 and found["first_batch"] > 0.95


def test_dropping_late_groups_makes_completions_shorter():
    found = simulate(2, "drop", steps=20, seed=0)
    assert found["dropped"] > 0.02 and found["mean"] < 0.99 and found["percentile_95"] < 0.98
