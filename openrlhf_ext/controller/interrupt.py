"""How a thread beside the main one ends the job: its error is raised in the main thread, wherever that is waiting.

A signal does it, because Python runs signal handlers in the main thread. The handler raises KeyboardInterrupt, the only
error that ends a wait inside Ray at once (any other is kept until the wait has ended by itself; ray 2.55 _raylet.pyx
check_signals); where the context ends it becomes the error that was meant.

The signal is repeated until it has raised (see ``deadline.REPEAT_S``).
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from openrlhf_ext.controller.deadline import REPEAT_S, DeadlineExceeded, between_blocks

_SIGNAL = signal.SIGUSR1


class MainThreadInterrupt:
    """A context of the main thread in which other threads can raise an error there; the first one counts.

    To the code inside it looks like Ctrl-C.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._open = self._delivered = False
        self._previous = None

    def __enter__(self) -> MainThreadInterrupt:
        self._previous = signal.signal(_SIGNAL, self._deliver)
        self._open = True
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        with self._lock:
            self._open = False
        signal.signal(_SIGNAL, self._previous)
        if self._error is not None and (self._delivered or error is None):
            # whatever leaves the body after the interrupt is a consequence of it
            raise self._error from (None if isinstance(error, KeyboardInterrupt) else error)

    def raise_in_main(self, error: BaseException) -> None:
        """From any thread; returns when the main thread has the error.

        Does nothing after another error, or when the context has been left.
        """
        with self._lock:
            if not self._open or self._error is not None:
                return
            self._error = error
        while True:
            with self._lock:
                if not self._open or self._delivered:
                    return
                signal.pthread_kill(threading.main_thread().ident, _SIGNAL)
            time.sleep(REPEAT_S)

    def _deliver(self, _number: int, frame: FrameType | None) -> None:
        # reads without the lock: the main thread may hold it
        if self._open and not self._delivered and not between_blocks(frame):
            self._delivered = True
            raise KeyboardInterrupt


class ThreadDeadline:
    """``Deadline`` for another thread: when a phase is late, ``DeadlineExceeded`` is raised in the main thread."""

    def __init__(self, interrupt: MainThreadInterrupt) -> None:
        self._interrupt = interrupt
        self._timer: threading.Timer | None = None

    @contextmanager
    def limit(self, seconds: float, doing: str, option: str) -> Iterator[None]:
        """Runs the body under a deadline; one phase at a time."""
        error = DeadlineExceeded(
            f"waited {seconds:g} s while {doing}; raise --{option} if this is expected to take longer"
        )
        self._start(seconds, error)
        try:
            yield
        finally:
            self._timer.cancel()
            self._timer = None

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """The clock of the phase under way stands still, and then starts anew; without a phase nothing happens."""
        if (timer := self._timer) is not None:
            timer.cancel()
        try:
            yield
        finally:
            if timer is not None:
                self._start(timer.interval, *timer.args)

    def _start(self, seconds: float, error: DeadlineExceeded) -> None:
        self._timer = threading.Timer(seconds, self._interrupt.raise_in_main, args=(error,))
        self._timer.daemon = True
        self._timer.start()
