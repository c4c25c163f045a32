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


def log_files() -> list[Path]:
    """The files that standard output and error of this process and its children go to; terminals are left out."""
    targets = {Path(os.readlink(f"/proc/self/fd/{descriptor}")) for descriptor in (1, 2)}
    return sorted(target for target in targets if target.is_file())


def log_tail(lines: int = _TAIL_LINES) -> str:
    """The end of each of these files."""
    tails = [[f"--- {path}", *path.read_text(errors="replace").splitlines()[-lines:]] for path in log_files()]
    return "\n".join(line for tail in tails for line in tail)


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
    """pid, pids of all descendants, host name, and log files."""
    children = psutil.Process().children(recursive=True)
    return {
        "pid": os.getpid(),
        "children": [child.pid for child in children],
        "host": socket.gethostname(),
        "logs": [str(path) for path in log_files()],
    }
