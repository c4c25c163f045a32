from __future__ import annotations

import signal
import threading
import time

import pytest

from openrlhf_ext.controller.deadline import Deadline, DeadlineExceeded
from tests.patience import PATIENCE_S


def test_a_wait_ends_and_says_what_it_was_for():
    deadline = Deadline()
    with pytest.raises(DeadlineExceeded, match=r"waited 0.2 s while sleeping soundly; raise --train.x"):
        with deadline.limit(0.2, "sleeping", "train.x"):
            deadline.doing = "sleeping soundly"
            time.sleep(PATIENCE_S)


def test_nothing_is_left_behind_after_a_phase():
    before = signal.getsignal(signal.SIGALRM)
    with Deadline().limit(PATIENCE_S, "working", "train.x"):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert signal.getsignal(signal.SIGALRM) == before


def test_the_clock_stands_still_while_it_is_suspended_and_then_starts_anew():
    deadline = Deadline()
    resumed_at = None
    with pytest.raises(DeadlineExceeded):
        with deadline.limit(1.5, "working", "train.x"):
            time.sleep(0.3)
            with deadline.suspended():
                time.sleep(1.7)
                resumed_at = time.monotonic()
            time.sleep(PATIENCE_S)
    assert resumed_at is not None, "the time of the suspension was counted"
    assert time.monotonic() - resumed_at >= 1.5, "the time before the suspension was counted"
    with deadline.suspended():
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


class SlowLock:
    """A lock that is taken only after the deadline."""

    def __init__(self) -> None:
        self.taken = False

    def __enter__(self) -> None:
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            pass
        self.taken = True

    def __exit__(self, *_: object) -> None:
        self.taken = False


def test_no_lock_stays_taken_after_a_deadline():
    lock = SlowLock()
    with pytest.raises(DeadlineExceeded):
        with Deadline().limit(0.1, "waiting for a lock", "train.x"), lock:
            assert lock.taken
            time.sleep(PATIENCE_S)
    assert not lock.taken


def test_an_error_that_the_late_body_raises_instead_is_the_cause():
    with pytest.raises(DeadlineExceeded) as caught, Deadline().limit(0.1, "working", "train.x"):
        try:
            threading.Event().wait(PATIENCE_S)
        except KeyboardInterrupt:
            raise RuntimeError("cannot release un-acquired lock") from None
    assert isinstance(caught.value.__cause__, RuntimeError)
