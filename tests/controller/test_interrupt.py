from __future__ import annotations

import signal
import threading
import time

import pytest

from openrlhf_ext.controller.deadline import DeadlineExceeded
from openrlhf_ext.controller.interrupt import MainThreadInterrupt, ThreadDeadline
from tests.controller.test_deadline import SlowLock
from tests.patience import PATIENCE_S


def in_thread(function, *args) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


def test_an_error_of_another_thread_ends_a_wait_of_the_main_thread():
    with pytest.raises(ZeroDivisionError, match="of the thread"), MainThreadInterrupt() as interrupt:
        in_thread(interrupt.raise_in_main, ZeroDivisionError("of the thread"))
        threading.Event().wait(PATIENCE_S)
        pytest.fail("the wait was not interrupted")


def test_a_signal_that_is_lost_is_sent_again(monkeypatch):
    sent = []

    def lossy(thread: int, number: int) -> None:
        sent.append(number)
        if len(sent) >= 3:
            kill(thread, number)

    kill = signal.pthread_kill
    monkeypatch.setattr(signal, "pthread_kill", lossy)
    with pytest.raises(ZeroDivisionError), MainThreadInterrupt() as interrupt:
        in_thread(interrupt.raise_in_main, ZeroDivisionError())
        threading.Event().wait(PATIENCE_S)
        pytest.fail("the wait was not interrupted")
    assert len(sent) >= 3


def test_an_error_that_comes_while_the_context_ends_is_raised(monkeypatch):
    coming = threading.Event()
    monkeypatch.setattr(signal, "pthread_kill", lambda *_: coming.set())
    with pytest.raises(ZeroDivisionError), MainThreadInterrupt() as interrupt:
        thread = in_thread(interrupt.raise_in_main, ZeroDivisionError())
        assert coming.wait(PATIENCE_S)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_no_lock_stays_taken():
    lock = SlowLock()
    with pytest.raises(ZeroDivisionError), MainThreadInterrupt() as interrupt:
        in_thread(interrupt.raise_in_main, ZeroDivisionError())
        with lock:
            assert lock.taken
            time.sleep(PATIENCE_S)
    assert not lock.taken


def test_only_the_first_error_counts_and_none_after_the_end():
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(KeyError, match="first"), MainThreadInterrupt() as interrupt:
        in_thread(interrupt.raise_in_main, KeyError("first"))
        try:
            threading.Event().wait(PATIENCE_S)
        finally:
            in_thread(interrupt.raise_in_main, KeyError("second")).join()
    in_thread(interrupt.raise_in_main, KeyError("third")).join()
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_late_phase_of_another_thread_is_an_error_of_the_main_thread():
    def late(interrupt: MainThreadInterrupt) -> None:
        with ThreadDeadline(interrupt).limit(0.05, "generating rollouts", "rollout.timeout_s"):
            threading.Event().wait(PATIENCE_S)

    with pytest.raises(DeadlineExceeded, match="waited 0.05 s while generating rollouts; raise --rollout.timeout_s"):
        with MainThreadInterrupt() as interrupt:
            in_thread(late, interrupt)
            threading.Event().wait(PATIENCE_S)


def test_a_phase_in_time_is_none():
    with MainThreadInterrupt() as interrupt:
        with ThreadDeadline(interrupt).limit(2.0, "generating", "rollout.timeout_s"):
            pass
        time.sleep(2.2)


def test_a_suspended_clock_stands_still_and_starts_anew():
    resumed_at = []

    def recovering(interrupt: MainThreadInterrupt) -> None:
        deadline = ThreadDeadline(interrupt)
        with deadline.suspended():
            pass  # no phase: nothing to stop
        with deadline.limit(1.5, "generating", "rollout.timeout_s"):
            time.sleep(0.3)
            with deadline.suspended():
                time.sleep(1.7)
                resumed_at.append(time.monotonic())
            threading.Event().wait(PATIENCE_S)

    with pytest.raises(DeadlineExceeded), MainThreadInterrupt() as interrupt:
        in_thread(recovering, interrupt)
        threading.Event().wait(PATIENCE_S)
    assert resumed_at, "the time of the suspension was counted"
    assert time.monotonic() - resumed_at[0] >= 1.5, "the time before the suspension was counted"
