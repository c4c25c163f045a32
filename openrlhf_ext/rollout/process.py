"""What this process can tell about itself: for error messages that have to carry another process's words."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import psutil

_TAIL_LINES = 40


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
