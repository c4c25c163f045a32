from __future__ import annotations

import signal
import time

import pytest

from openrlhf_ext.controller.deadline import Deadline, DeadlineExceeded
from openrlhf_ext.controller.interrupt import MainThreadInterrupt, ThreadDeadline


def test_a_wait_ends_and_says_what_it_was_for():
    deadline = Deadline()
    with pytest.raises(DeadlineExceeded, match=r"waited 0.2 s while sleeping soundly; raise --train.x"):
        with deadline.limit(0.2, "sleeping", "train.x"):
            deadline.doing = "sleeping soundly"
            time.sleep(5)


def test_nothing_is_left_behind_after_a_phase():
    before = signal.getsignal(signal.SIGALRM)
    with Deadline().limit(0.1, "working", "train.x"):
        pass
    time.sleep(0.2)
    assert signal.getsignal(signal.SIGALRM) == before


def test_the_clock_stands_still_while_it_is_suspended_and_then_starts_anew():
    deadline = Deadline()
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        with deadline.limit(0.4, "working", "train.x"):
            time.sleep(0.2)
            with deadline.suspended():
                time.sleep(0.6)
            time.sleep(5)
    assert 1.1 < time.monotonic() - started < 3
    with deadline.suspended():
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_the_clock_of_another_thread_too():
    interrupt = MainThreadInterrupt()
    deadline = ThreadDeadline(interrupt)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="waited 0.4 s while working"):
        with interrupt, deadline.limit(0.4, "working", "train.x"):
            with deadline.suspended():
                time.sleep(0.6)
            time.sleep(5)
    assert 0.9 < time.monotonic() - started < 3
    with deadline.suspended():
        pass
