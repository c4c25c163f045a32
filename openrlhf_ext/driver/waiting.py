"""Waits that end: a phase of the driver has a deadline, and every wait for Ray within it says what it waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray

_LOOK_S = 0.05


class DeadlineExceeded(TimeoutError):
    """A phase of the job took longer than its deadline."""


class Deadline:
    """The deadline of the phase that the driver is in; phases do not nest."""

    def __init__(self) -> None:
        self.doing, self._option, self._seconds = "starting", "", 0.0
        self._ends: float | None = None

    @contextmanager
    def limit(self, seconds: float, doing: str, option: str) -> Iterator[None]:
        """Waits in the body may take ``seconds`` together. ``doing`` may be refined meanwhile by setting ``doing``.

        Args:
            option: that sets the seconds, for the message.
        """
        self.doing, self._option, self._seconds = doing, option, seconds
        self._ends = time.monotonic() + seconds
        try:
            yield
        finally:
            self._ends = None

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """The clock of the phase stands still, and then starts anew: what happens inside has a deadline of its own."""
        try:
            yield
        finally:
            if self._ends is not None:
                self._ends = time.monotonic() + self._seconds

    @property
    def remaining(self) -> float:
        """Seconds that are left of the phase.

        Raises:
            DeadlineExceeded: none.
            RuntimeError: outside of a phase.
        """
        if self._ends is None:
            raise RuntimeError("a wait outside of a phase with a deadline")
        if (left := self._ends - time.monotonic()) <= 0:
            raise self.exceeded()
        return left

    def exceeded(self) -> DeadlineExceeded:
        """The error that says what was waited for, how long, and which option changes that."""
        return DeadlineExceeded(
            f"waited {self._seconds:g} s while {self.doing}; raise --{self._option} if this is expected to take longer"
        )

    def get(self, refs: Sequence[Any], meanwhile: Callable[[], None] | None = None) -> list[Any]:
        """The results of Ray calls, in order; the first error is raised at once.

        Args:
            meanwhile: called every now and then; it must return soon.

        Raises:
            DeadlineExceeded: the phase ended before the calls.
        """
        waiting = list(refs)
        while waiting:
            pause = self.remaining if meanwhile is None else min(self.remaining, _LOOK_S)
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=pause)
            ray.get(ready)
            if meanwhile is not None:
                meanwhile()
        return ray.get(list(refs))
