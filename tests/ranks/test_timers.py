from __future__ import annotations

import os

import pytest

from openrlhf_ext.ranks import timers as rank_clock
from openrlhf_ext.ranks.timers import RankClock, timed


@pytest.fixture
def now(monkeypatch):
    """A clock that moves when the test says so."""
    time = [100.0]
    monkeypatch.setattr(rank_clock, "_now", lambda: time[0])

    def advance(seconds: float) -> None:
        time[0] += seconds

    return advance


def test_waiting_does_not_count_and_reports_start_anew(now):
    clock = RankClock()
    reduction = clock.without(now)
    for own, waited in ((2.0, 5.0), (1.0, 7.0)):
        with clock.phase("train"):
            now(own)
            reduction(waited)
    with clock.phase("sync"):
        now(4.0)
    report = clock.report(3)
    assert report.rank == 3 and report.seconds == {"train": 3.0, "sync": 4.0}
    assert report.busy_seconds == 3.0
    assert clock.report(3).seconds == {}


def test_time_counts_when_a_phase_fails(now):
    clock = RankClock()

    def fails() -> None:
        now(2.0)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), clock.phase("train"):
        now(1.0)
        clock.without(fails)()
    assert clock.report(0).seconds == {"train": 1.0}


def test_a_timed_method_keeps_its_result_and_name(now):
    class Actor:
        clock = RankClock()

        @timed("logprob")
        def forward(self, seconds: float) -> str:
            """Doc."""
            now(seconds)
            return "done"

    assert Actor().forward(seconds=3.0) == "done" and Actor.forward.__doc__ == "Doc."
    assert Actor.clock.report(0).seconds == {"logprob": 3.0}


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_the_peak_of_this_process_is_plausible():
    held = bytearray(64 << 20)
    held[:: 4 << 10] = b"x" * len(held[:: 4 << 10])
    assert 64 << 20 < RankClock().report(0).memory_bytes < 1 << 40
