"""A wait that ends: an alarm in the main thread that says what the job was waiting for."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class DeadlineExceeded(TimeoutError):
    """A phase of the job took longer than its deadline."""


class Deadline:
    """Raises ``DeadlineExceeded`` in the main thread when a phase outlasts its seconds; one phase at a time."""

    def __init__(self) -> None:
        self.doing = "starting"
        self._seconds = 0.0

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """The clock of the phase under way stands still, and then starts anew; without a phase nothing happens."""
        remaining, _ = signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            yield
        finally:
            if remaining > 0:
                signal.setitimer(signal.ITIMER_REAL, self._seconds)

    @contextmanager
    def limit(self, seconds: float, doing: str, option: str) -> Iterator[None]:
        """Runs the body under a deadline. ``doing`` may be refined meanwhile by setting ``self.doing``."""
        self.doing, self._seconds = doing, seconds

        late = False

        def expire(*_) -> None:
            nonlocal late
            late = True
            # of all errors that a signal handler can raise, only this one ends a wait inside Ray: any other is kept
            # until the wait has ended by itself (ray 2.55 _raylet.pyx check_signals)
            raise KeyboardInterrupt

        previous = signal.signal(signal.SIGALRM, expire)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        except KeyboardInterrupt:
            if not late:
                raise
            raise DeadlineExceeded(
                f"waited {seconds:g} s while {self.doing}; raise --{option} if this is expected to take longer"
            ) from None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
