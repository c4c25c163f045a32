from __future__ import annotations

from openrlhf_ext.rewards.clock import GradingClock


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_grading_behind_generation_is_not_exposed() -> None:
    time = Time()
    clock = GradingClock(time)
    with clock.generating():
        time.now = 1.0
        with clock.grading():
            time.now = 3.0  # two seconds hidden behind generation
    with clock.grading():
        time.now = 7.0  # four seconds exposed
        with clock.grading():
            time.now = 8.0  # one more, counted once although two samples are being graded
    time.now = 20.0
    assert (clock.busy_seconds, clock.exposed_seconds, clock.active) == (7.0, 5.0, 0)


def test_reset_in_the_middle_keeps_what_is_in_progress() -> None:
    time = Time()
    clock = GradingClock(time)
    with clock.grading():
        time.now = 2.0
        clock.reset()
        time.now = 5.0
        assert clock.active == 1
    assert (clock.busy_seconds, clock.exposed_seconds) == (3.0, 3.0)


def test_a_failing_sample_leaves_the_clock() -> None:
    clock = GradingClock(Time())
    try:
        with clock.grading():
            raise RuntimeError
    except RuntimeError:
        assert clock.active == 0
