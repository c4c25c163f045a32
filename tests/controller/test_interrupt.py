from __future__ import annotations

import signal
import threading
import time

import pytest

from openrlhf_ext.controller.deadline import DeadlineExceeded
from openrlhf_ext.controller.interrupt import MainThreadInterrupt, ThreadDeadline


def in_thread(function, *args) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


def test_an_error_of_another_thread_ends_a_wait_of_the_main_thread_at_once():
    started = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="of the thread"), MainThreadInterrupt() as interrupt:
        in_thread(interrupt.raise_in_main, ZeroDivisionError("of the thread"))
        threading.Event().wait(20)
    assert time.monotonic() - started < 5


def test_only_the_first_error_counts_and_none_after_the_end():
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(KeyError, match="first"), MainThreadInterrupt() as interrupt:
        in_thread(interrupt.raise_in_main, KeyError("first"))
        try:
            threading.Event().wait(20)
        finally:
            in_thread(interrupt.raise_in_main, KeyError("second")).join()
    in_thread(interrupt.raise_in_main, KeyError("third")).join()
    time.sleep(0.05)
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_late_phase_of_another_thread_is_an_error_of_the_main_thread():
    def late(interrupt: MainThreadInterrupt) -> None:
        with ThreadDeadline(interrupt).limit(0.05, "generating rollouts", "rollout.timeout_s"):
            time.sleep(0.4)

    with pytest.raises(DeadlineExceeded, match="waited 0.05 s while generating rollouts; raise --rollout.timeout_s"):
        with MainThreadInterrupt() as interrupt:
            in_thread(late, interrupt)
            threading.Event().wait(20)


def test_a_phase_in_time_is_none():
    with MainThreadInterrupt() as interrupt:
        with ThreadDeadline(interrupt).limit(0.05, "generating", "rollout.timeout_s"):
            pass
        time.sleep(0.1)


def test_a_suspended_clock_starts_anew():
    started = time.monotonic()

    def recovering(interrupt: MainThreadInterrupt) -> None:
        deadline = ThreadDeadline(interrupt)
        with deadline.suspended():
            pass  # no phase: nothing to stop
        with deadline.limit(0.2, "generating", "rollout.timeout_s"):
            time.sleep(0.1)
            with deadline.suspended():
                time.sleep(0.4)
            time.sleep(1.0)

    with pytest.raises(DeadlineExceeded), MainThreadInterrupt() as interrupt:
        in_thread(recovering, interrupt)
        threading.Event().wait(20)
    assert 0.65 < time.monotonic() - started < 1.4
