from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from openrlhf_ext.megatron.step.batch import TokenCount
from openrlhf_ext.ranks import policy as policy_module
from openrlhf_ext.ranks import timers as timers_module
from openrlhf_ext.ranks.policy import PolicyActor
from openrlhf_ext.ranks.timers import PhaseTimers, timed


@pytest.fixture
def now(monkeypatch):
    """A clock that moves when the test says so."""
    time = [100.0]
    monkeypatch.setattr(timers_module, "_now", lambda: time[0])

    def advance(seconds: float) -> None:
        time[0] += seconds

    return advance


def test_waiting_does_not_count_and_reports_start_anew(now):
    timers = PhaseTimers()
    reduction = timers.without(now)
    for own, waited in ((2.0, 5.0), (1.0, 7.0)):
        with timers.phase("train"):
            now(own)
            reduction(waited)
    with timers.phase("sync"):
        now(4.0)
    report = timers.report(3)
    assert report.rank == 3 and report.seconds == {"train": 3.0, "sync": 4.0}
    assert report.busy_seconds == 3.0
    assert timers.report(3).seconds == {}


def test_time_counts_when_a_phase_fails(now):
    timers = PhaseTimers()

    def fails() -> None:
        now(2.0)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), timers.phase("train"):
        now(1.0)
        timers.without(fails)()
    assert timers.report(0).seconds == {"train": 1.0}


def test_a_timed_method_keeps_its_result_and_name(now):
    class Actor:
        timers = PhaseTimers()

        @timed("logprob")
        def forward(self, seconds: float) -> str:
            """Doc."""
            now(seconds)
            return "done"

    assert Actor().forward(seconds=3.0) == "done" and Actor.forward.__doc__ == "Doc."
    assert Actor.timers.report(0).seconds == {"logprob": 3.0}


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_the_peak_of_this_process_is_plausible():
    held = bytearray(64 << 20)
    held[:: 4 << 10] = b"x" * len(held[:: 4 << 10])
    assert 64 << 20 < PhaseTimers().report(0).memory_bytes < 1 << 40


def test_a_rank_reports_the_padding_of_its_packs(monkeypatch):
    monkeypatch.setattr(policy_module.dist, "get_rank", lambda: 3)
    actor = PolicyActor.__new__(PolicyActor)
    schedule = SimpleNamespace(take_count=lambda: TokenCount(real=90, packed=96))
    actor.timers, actor.policy = PhaseTimers(), SimpleNamespace(schedule=schedule)
    actor.movement = SimpleNamespace(take=lambda: None)
    report = actor.rank_report()
    assert (report.rank, report.packed_tokens, report.padding_tokens) == (3, 96, 6)
