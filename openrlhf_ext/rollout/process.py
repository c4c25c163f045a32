"""A process that starts others: what it can tell about itself, and how they end when it does."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import psutil

_TAIL_LINES = 40
_guards: list[subprocess.Popen] = []
"""Kept so that their pipes stay open as long as this process lives."""


def own_stderr_path() -> Path | None:
    """The file that standard error of this process and its children goes to, None if it is not a file."""
    path = Path(os.readlink("/proc/self/fd/2"))
    return path if path.is_file() else None


def own_stderr_tail(lines: int = _TAIL_LINES) -> str:
    """The end of that file."""
    path = own_stderr_path()
    if path is None:
        return "(standard error of this process is not a file)"
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def take_down_with_me() -> None:
    """Have every present descendant killed when this process ends, however it ends.

    vLLM's engine process does not notice that the actor that started it was killed, and keeps its memory.
    """
    descendants = " ".join(str(child.pid) for child in psutil.Process().children(recursive=True))
    if not descendants:
        return
    # The shell reads until this process's end of the pipe is closed, which the kernel does whatever happens.
    guard = subprocess.Popen(["sh", "-c", f"read _; kill -KILL {descendants} 2>/dev/null"], stdin=subprocess.PIPE)
    _guards.append(guard)


def describe_process() -> dict[str, Any]:
    """pid, pids of all descendants, host name, and the log file."""
    children = psutil.Process().children(recursive=True)
    path = own_stderr_path()
    return {
        "pid": os.getpid(),
        "children": [child.pid for child in children],
        "host": socket.gethostname(),
        "log": None if path is None else str(path),
    }
