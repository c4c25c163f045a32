"""Between the thread that makes rollouts and the one that trains on them: a bounded queue, and turns at the engines."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

_T = TypeVar("_T")
_POLL_S = 1.0


class Stopped(Exception):
    """The other side has ended; nothing more is wanted."""


class RolloutQueue(Generic[_T]):
    """Batches on their way to training; at most ``size`` are finished or being made and not yet taken.

    The maker reserves a place before it begins a batch, so that no batch is older than ``size`` updates when its
    training begins.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"train.async_queue_size must be at least 1, got {size}")
        self._size = size
        self._batches: deque[_T] = deque()
        self._reserved = 0
        self._finished = self._stopped = False
        self._changed = threading.Condition()

    def __len__(self) -> int:
        """Batches that are waiting."""
        with self._changed:
            return len(self._batches)

    def reserve(self) -> None:
        """Waits for a place; raises ``Stopped`` when no more batches are wanted.

        (Without a deadline of its own: a place becomes free when training takes a batch, and training has deadlines.)
        """
        with self._changed:
            while not self._stopped and self._reserved + len(self._batches) >= self._size:
                self._changed.wait(_POLL_S)
            if self._stopped:
                raise Stopped
            self._reserved += 1

    def put(self, batch: _T) -> None:
        """Hands a batch over into its reserved place."""
        with self._changed:
            self._reserved -= 1
            self._batches.append(batch)
            self._changed.notify_all()

    def give_back(self) -> None:
        """Gives a reserved place back: the batch came to nothing."""
        with self._changed:
            self._reserved -= 1
            self._changed.notify_all()

    def finish(self) -> None:
        """There will be no more batches."""
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def stop(self) -> None:
        """No more batches are wanted."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def take(self, maker_is_alive: Callable[[], bool]) -> _T | None:
        """The next batch in the order in which they were made; None when there are no more.

        Raises:
            RuntimeError: the maker ended without a batch, an error or ``finish``.
        """
        with self._changed:
            while not self._batches and not self._finished:
                if not maker_is_alive():
                    raise RuntimeError("the thread that makes rollouts ended without saying why")
                self._changed.wait(_POLL_S)
            if not self._batches:
                return None
            batch = self._batches.popleft()
            self._changed.notify_all()
            return batch


class EngineTurns:
    """Rollouts and weight syncs take turns at the engines; a sync that waits goes before the next rollouts."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._generating = self._syncing = self._stopped = False

    @contextmanager
    def generating(self) -> Iterator[None]:
        """A batch of rollouts; waits while a sync is under way or waiting. Raises ``Stopped`` after ``stop``."""
        with self._changed:
            while self._syncing and not self._stopped:
                self._changed.wait(_POLL_S)  # a sync has a deadline
            if self._stopped:
                raise Stopped
            self._generating = True
        try:
            yield
        finally:
            with self._changed:
                self._generating = False
                self._changed.notify_all()

    @contextmanager
    def syncing(self) -> Iterator[None]:
        """A weight sync; waits until the rollouts under way have ended, which have a deadline."""
        with self._changed:
            self._syncing = True
            try:
                while self._generating:
                    self._changed.wait(_POLL_S)
            except BaseException:
                self._end_sync()
                raise
        try:
            yield
        finally:
            with self._changed:
                self._end_sync()

    def stop(self) -> None:
        """No more rollouts."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _end_sync(self) -> None:
        self._syncing = False
        self._changed.notify_all()
