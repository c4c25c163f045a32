"""Sets a deadline for every wait of the driver for Ray, and reports what it waited for."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray

from openrlhf_ext.driver.guard import Guard
from openrlhf_ext.driver.placement import RankGroup

logger = logging.getLogger(__name__)

_LOOK_S = 0.05
_ASK_AGAIN_S = 1.0


class DeadlineExceeded(TimeoutError):
    """A phase of the job took longer than its deadline."""


class Deadline:
    """The deadline of the driver's current phase; phases do not nest."""

    def __init__(
        self, guard: Guard | None = None, between_s: float = math.inf, question_s: float = 0.0
    ) -> None:
        """Reports to ``guard`` by when the driver will move on. The time between two phases may be
        ``between_s``. ``question_s`` extends the reports for a call to an engine, which has its own
        deadline and may begin as a phase ends. ``of_ranks`` returns the ranks' progress."""
        self._doing, self._option, self._seconds = "starting", "", 0.0
        self._ends: float | None = None
        self.of_ranks: Callable[[], str] = str
        self._guard, self._between_s, self._question_s = guard or Guard(), between_s, question_s

    @contextmanager
    def limit(self, seconds: float, doing: str, option: str) -> Iterator[None]:
        """Limits the waits in the body to ``seconds`` in total; ``option`` sets this limit. The
        body may refine ``doing``."""
        self._doing, self._option, self._seconds = doing, option, seconds
        self._begin()
        try:
            yield
        finally:
            self._ends = None
            self._expect(self._between_s, f"after {doing}")

    @contextmanager
    def suspended(self, seconds: float, doing: str) -> Iterator[None]:
        """Suspends the phase's deadline and restarts it afterwards: the body has its own
        deadlines."""
        self._expect(seconds, doing)
        try:
            yield
        finally:
            if self._ends is not None:
                self._begin()

    @property
    def doing(self) -> str:
        """The purpose of the phase's waits."""
        return self._doing

    @doing.setter
    def doing(self, doing: str) -> None:
        self._doing = doing
        self._expect(self.remaining, doing)

    def progress(self, detail: str) -> None:
        """Reports the phase's progress for the status line."""
        self._guard.progress(detail)

    def _begin(self) -> None:
        self._ends = time.monotonic() + self._seconds
        self._expect(self._seconds, self.doing)

    def _expect(self, seconds: float, doing: str) -> None:
        self._guard.expect(seconds + self._question_s, doing)

    @property
    def remaining(self) -> float:
        """Seconds left in the phase. Raises DeadlineExceeded; RuntimeError outside of a phase;
        KeyboardInterrupt if the run must end."""
        self._guard.check()
        if self._ends is None:
            raise RuntimeError("a wait outside of a phase with a deadline")
        if (left := self._ends - time.monotonic()) <= 0:
            raise DeadlineExceeded(
                f"waited {self._seconds:g} s while {self.doing}; raise --{self._option} if this "
                "is expected to take longer"
            )
        return left

    def get(self, refs: Sequence[Any], meanwhile: Callable[[], None] | None = None) -> list[Any]:
        """Returns the results of Ray calls in order; raises the first error at once. Calls
        ``meanwhile``, which must return soon, between polls."""
        waiting = list(refs)
        while waiting:
            pause = min(self.remaining, _ASK_AGAIN_S if meanwhile is None else _LOOK_S)
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=pause)
            ray.get(ready)
            if detail := self.of_ranks():
                self.progress(detail)
            if meanwhile is not None:
                meanwhile()
        return ray.get(list(refs))


class RanksTimeoutError(TimeoutError):
    """Some ranks did not answer in time; the message names them and what they were doing."""


def call_ranks(group: RankGroup, who: str, method: str, timeout_s: float, **arguments: Any) -> list:
    """Returns the results of a method on every rank; raises the first error at once. ``who`` names
    the group in messages. Raises RanksTimeoutError."""
    return await_ranks(group.ask(method, **arguments), who, method, timeout_s)


def await_ranks(refs: Sequence[Any], who: str, method: str, timeout_s: float) -> list:
    """Returns the results of a method already called on every rank, as :func:`call_ranks` does."""
    waiting, deadline = list(refs), time.monotonic() + timeout_s
    while waiting:
        ready, waiting = ray.wait(
            waiting, num_returns=1, timeout=max(0.0, deadline - time.monotonic())
        )
        if not ready:
            ranks = [i for i, ref in enumerate(refs) if ref in waiting]
            raise RanksTimeoutError(
                f"waited {timeout_s:g} s for {method} on the {who} ranks, {ranks} have not "
                "finished; raise --train.step_timeout_s if this is expected to take longer"
            )
        ray.get(ready)
    return ray.get(refs)
