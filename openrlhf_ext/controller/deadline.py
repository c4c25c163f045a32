"""A wait that ends: an alarm in the main thread that says what the job was waiting for."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# One signal is not enough: a main thread that has let go of the interpreter lock, but has not entered its system call
# yet, takes it without waking up.
REPEAT_S = 0.02


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
                self._set_alarm()

    @contextmanager
    def limit(self, seconds: float, doing: str, option: str) -> Iterator[None]:
        """Runs the body under a deadline. ``doing`` may be refined meanwhile by setting ``self.doing``."""
        self.doing, self._seconds = doing, seconds

        late = False

        def expire(_number: int, frame: FrameType | None) -> None:
            nonlocal late
            if late or between_blocks(frame):
                return
            late = True
            # of all errors that a signal handler can raise, only this one ends a wait inside Ray: any other is kept
            # until the wait has ended by itself (ray 2.55 _raylet.pyx check_signals)
            raise KeyboardInterrupt

        previous = signal.signal(signal.SIGALRM, expire)
        try:
            try:
                self._set_alarm()
                yield
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except BaseException as error:
            if not late:
                raise
            raise DeadlineExceeded(
                f"waited {seconds:g} s while {self.doing}; raise --{option} if this is expected to take longer"
            ) from (None if isinstance(error, KeyboardInterrupt) else error)
        finally:
            signal.signal(signal.SIGALRM, previous)

    def _set_alarm(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, self._seconds, REPEAT_S)


def between_blocks(frame: FrameType | None) -> bool:
    """Whether code is inside a context manager's own enter or exit, where an error would leave its lock taken."""
    return frame is not None and frame.f_code.co_name in ("__enter__", "__exit__")
