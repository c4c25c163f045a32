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

    @contextmanager
    def limit(self, seconds: float, doing: str, option: str) -> Iterator[None]:
        """Runs the body under a deadline. ``doing`` may be refined meanwhile by setting ``self.doing``."""
        self.doing = doing

        def expire(*_) -> None:
            raise DeadlineExceeded(
                f"waited {seconds:g} s while {self.doing}; raise --{option} if this is expected to take longer"
            )

        previous = signal.signal(signal.SIGALRM, expire)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
