"""How much of the grading time is hidden behind generation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class GradingClock:
    """Wall time in which samples were being graded, split by whether any other sample was being generated meanwhile.

    Not thread-safe: made for the one event loop of a rollout engine.

    Args:
        now: monotonic clock in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._changed_at = now()
        self._generating = 0
        self._grading = 0
        self._busy_s = 0.0
        self._exposed_s = 0.0

    @property
    def active(self) -> int:
        """Samples being generated or graded now."""
        return self._generating + self._grading

    @property
    def busy_seconds(self) -> float:
        """Seconds in which at least one sample was being graded, its wait for a worker included."""
        self._advance()
        return self._busy_s

    @property
    def exposed_seconds(self) -> float:
        """The part of :attr:`busy_seconds` in which no sample was being generated."""
        self._advance()
        return self._exposed_s

    def reset(self) -> None:
        """Set both totals to zero; samples in progress stay in progress."""
        self._advance()
        self._busy_s = self._exposed_s = 0.0

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Around the generation of one sample."""
        self._advance()
        self._generating += 1
        try:
            yield
        finally:
            self._advance()
            self._generating -= 1

    @contextmanager
    def grading(self) -> Iterator[None]:
        """Around the grading of one sample."""
        self._advance()
        self._grading += 1
        try:
            yield
        finally:
            self._advance()
            self._grading -= 1

    def _advance(self) -> None:
        now = self._now()
        elapsed, self._changed_at = now - self._changed_at, now
        if self._grading:
            self._busy_s += elapsed
            if not self._generating:
                self._exposed_s += elapsed
