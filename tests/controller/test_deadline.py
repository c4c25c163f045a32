from __future__ import annotations

import signal
import time

import pytest

from openrlhf_ext.controller.deadline import Deadline, DeadlineExceeded


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
