"""Ties the life of a process to its parent."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with(parent_pid: int, how: signal.Signals = signal.SIGKILL) -> None:
    """Makes the Linux kernel end this process when its parent ends.

    This works even while native code holds the interpreter lock.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, how)
    if os.getppid() != parent_pid:  # it ended before the kernel got the request
        os._exit(1)
