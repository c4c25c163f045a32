"""Union of overlapping intervals."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from openrlhf_ext.rollout.engine import OverlapTimer


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_overlapping_activities_count_once_and_gaps_do_not() -> None:
    time = Time()
    clock = OverlapTimer(time)
    with ExitStack() as first:
        first.enter_context(clock.running())
        time.now = 2.0
        with clock.running():
            time.now = 3.0
            assert clock.count == 2
    time.now = 10.0
    with clock.running():
        time.now = 11.5
    assert clock.take() == pytest.approx(4.5)
    assert clock.take() == 0.0


def test_take_includes_what_is_still_going_on_and_does_not_count_it_twice() -> None:
    time = Time()
    clock = OverlapTimer(time)
    with clock.running():
        time.now = 4.0
        assert clock.take() == 4.0
        time.now = 5.0
    assert clock.take() == 1.0


def test_an_activity_that_fails_ends() -> None:
    clock = OverlapTimer(Time())
    with pytest.raises(KeyError), clock.running():
        raise KeyError
    assert clock.count == 0
