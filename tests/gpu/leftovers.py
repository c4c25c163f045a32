"""What a check started ends with it: processes in sessions of their own, and those whose parents
have died."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SET_SUBREAPER, _GET_SUBREAPER = 36, 37
_END_S = 30.0  # a process may be in a driver's call for a while


@contextmanager
def none_left() -> Iterator[None]:
    """Processes that are started in the body, by this one or by those that it starts, are killed at
    its end."""
    before, adopted = set(_descendants(os.getpid(), set())), _adopts()
    _adopt(True)
    try:
        yield
    finally:
        _end(before)
        _adopt(adopted)


def _end(before: set[int]) -> None:
    deadline = time.monotonic() + _END_S
    while (left := _descendants(os.getpid(), before)) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):  # not a child of this one, or not yet
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)
    if left:
        print(f"processes that do not end: {sorted(left)}", file=sys.stderr, flush=True)


def _descendants(pid: int, but: set[int]) -> list[int]:
    """Processes under this one, those in ``but`` and under them left out."""
    return list(_below(pid, _parents(), but))


def _below(pid: int, parents: dict[int, int], but: set[int]) -> Iterator[int]:
    for child, parent in parents.items():
        if parent == pid and child not in but:
            yield child
            yield from _below(child, parents, but)


def _parents() -> dict[int, int]:
    """Of every process of this machine, by its id."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            found[int(file.parent.name)] = int(file.read_text().rsplit(")", 1)[1].split()[1])
    return found


def _adopt(adopt: bool) -> None:
    """Whose parents die become children of this process; or no longer."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_SUBREAPER, int(adopt))


def _adopts() -> bool:
    if sys.platform != "linux":
        return False
    answer = ctypes.c_int()
    ctypes.CDLL(None).prctl(_GET_SUBREAPER, ctypes.byref(answer))
    return bool(answer.value)
