"""Waits that end, and say what they waited for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import ray

from openrlhf_ext.checkpoints import CheckpointError
from openrlhf_ext.driver import waits
from openrlhf_ext.driver.guard import Guard
from openrlhf_ext.driver.waits import Deadline, DeadlineExceeded, RanksTimeoutError, call_ranks
from tests.cluster import start_local_ray
from tests.patience import PATIENCE_S, SOONER_S


@pytest.fixture(scope="module", autouse=True)
def ray_session() -> Iterator[None]:
    start_local_ray()
    yield
    ray.shutdown()


@ray.remote(num_cpus=0.1)
def after(seconds: float, result: object) -> object:
    time.sleep(seconds)
    if isinstance(result, Exception):
        raise result
    return result


def test_results_come_in_order_and_others_are_looked_after_meanwhile() -> None:
    deadline, looks = Deadline(), []
    with deadline.limit(PATIENCE_S, "training", "train.x"):
        refs = [after.remote(1.0, "slow"), after.remote(0.0, "fast")]
        assert deadline.get(refs, meanwhile=lambda: looks.append(1)) == ["slow", "fast"]
    assert looks


def test_a_wait_ends_and_says_what_it_was_for() -> None:
    deadline, started = Deadline(), time.monotonic()
    with pytest.raises(
        DeadlineExceeded, match=r"waited 0.5 s while sleeping soundly; raise --train.x"
    ):
        with deadline.limit(0.5, "sleeping", "train.x"):
            deadline.doing = "sleeping soundly"
            deadline.get([after.remote(3600, None)])
    assert time.monotonic() - started < SOONER_S


def test_an_error_does_not_wait_for_the_others() -> None:
    deadline = Deadline()
    with deadline.limit(PATIENCE_S, "training", "train.x"), pytest.raises(ZeroDivisionError):
        deadline.get([after.remote(3600, None), after.remote(0.0, ZeroDivisionError("x"))])


def test_what_happens_meanwhile_may_fail_too() -> None:
    def fail() -> None:
        raise LookupError("the reward function failed")

    deadline = Deadline()
    with deadline.limit(PATIENCE_S, "training", "train.x"), pytest.raises(LookupError):
        deadline.get([after.remote(3600, None)], meanwhile=fail)


def test_the_clock_stands_still_while_it_is_suspended_and_then_starts_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(waits, "time", SimpleNamespace(monotonic=lambda: now[0]))
    deadline = Deadline()
    with deadline.limit(10.0, "working", "train.x"):
        now[0] += 5.0
        assert deadline.remaining == 5.0
        with deadline.suspended(90.0, "replacing"):
            now[0] += 80.0
        assert deadline.remaining == 10.0
        now[0] += 10.5
        with pytest.raises(DeadlineExceeded):
            _ = deadline.remaining
    with deadline.suspended(9.0, "replacing"):
        pass


def test_somebody_outside_knows_until_when_the_driver_will_have_moved_on() -> None:
    """Phases, what comes between them, and replacements are all bounded; questions may begin as
    they end."""
    told: list[tuple[float, str]] = []
    guard = Guard()
    guard.expect = lambda seconds, doing: told.append((seconds, doing))
    deadline = Deadline(guard, between_s=50.0, question_s=3.0)
    with deadline.limit(10.0, "training", "train.x"), deadline.suspended(20.0, "replacing"):
        pass
    assert told == [
        (13.0, "training"),
        (23.0, "replacing"),
        (13.0, "training"),
        (53.0, "after training"),
    ]


def test_a_wait_without_a_deadline_is_refused() -> None:
    with pytest.raises(RuntimeError, match="outside of a phase"):
        Deadline().get([after.remote(0.0, None)])


# ---- waiting for ranks


class Calls:
    """Stands in for Ray: references are numbers; those in ``late`` never get ready, those in
    ``bad`` raise."""

    def __init__(self, late=(), bad=()) -> None:
        self.late, self.bad = set(late), set(bad)

    def wait(self, refs, num_returns, timeout):
        ready = [ref for ref in refs if ref not in self.late][:1]
        return ready, [ref for ref in refs if ref not in ready]

    def get(self, refs):
        if self.bad & set(refs):
            raise CheckpointError("No space left on device")
        return [f"answer {ref}" for ref in refs]


def ask(monkeypatch, calls: Calls) -> list:
    monkeypatch.setattr(waits, "ray", calls)
    group = SimpleNamespace(ask=lambda method, **arguments: [0, 1, 2])
    return call_ranks(group, "critic", "save_state", 7.0, name="critic")


def test_every_rank_answers(monkeypatch):
    assert ask(monkeypatch, Calls()) == ["answer 0", "answer 1", "answer 2"]


def test_late_ranks_are_named(monkeypatch):
    with pytest.raises(
        RanksTimeoutError, match=r"7 s for save_state on the critic ranks, \[1\] have not"
    ):
        ask(monkeypatch, Calls(late=[1]))


def test_an_error_does_not_wait_for_the_other_ranks(monkeypatch):
    with pytest.raises(CheckpointError, match="No space left"):
        ask(monkeypatch, Calls(late=[1], bad=[2]))
