"""Time during which at least one of several overlapping activities was going on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class OverlapTimer:
    """Length of the union of intervals, in seconds. Not thread-safe: one event loop, one clock."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._running = 0
        self._since = 0.0
        self._total = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """An activity; any number of them may overlap."""
        if self._running == 0:
            self._since = self._now()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if self._running == 0:
                self._total += self._now() - self._since

    @property
    def count(self) -> int:
        return self._running

    def take(self) -> float:
        """Seconds since the last `take`, an activity still going on included."""
        now = self._now()
        total = self._total + (now - self._since if self._running else 0.0)
        self._total, self._since = 0.0, now
        return total
