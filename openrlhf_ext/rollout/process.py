"""A process: which one it is, what it can tell, and how those that it starts end when it does."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import socket
import subprocess
import time
from functools import cache
from pathlib import Path
from typing import Any

import psutil

_TAIL_LINES = 40
_TAIL_BYTES = 4000
_DUMP_S = 0.5
_guards: list[subprocess.Popen] = []
"""Kept so that their pipes stay open as long as this process lives."""


@cache
def machine_id() -> str:
    """Equal in two processes if and only if process ids, and /proc, mean the same in both: one
    start of one kernel, and one container. Host names do not tell: cloned machines and containers
    of different nodes may have the same one."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def own_identity() -> dict[str, Any]:
    """``pid``; ``host`` name, for people; ``machine``; the ``actor`` that it is and its ``node``,
    Ray's ids or None."""
    import ray  # not at the top: vLLM's workers import this, and have no use for it

    context = ray.get_runtime_context() if ray.is_initialized() else None
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "machine": machine_id(),
        "actor": context.get_actor_id() if context is not None else None,
        "node": context.get_node_id() if context is not None else None,
    }


def log_files() -> list[Path]:
    """Where standard output and error of this process and its children go; terminals are left
    out."""
    targets = {Path(os.readlink(f"/proc/self/fd/{descriptor}")) for descriptor in (1, 2)}
    return sorted(target for target in targets if target.is_file())


def log_tail(lines: int = _TAIL_LINES) -> str:
    tails = [
        [f"--- {path}", *path.read_text(errors="replace").splitlines()[-lines:]]
        for path in log_files()
    ]
    return "\n".join(line for tail in tails for line in tail)


def ray_log_tail(pid: int) -> str:
    """The end of what Ray's worker process ``pid`` of this node, which has died, wrote to standard
    error and output."""
    import ray

    time.sleep(0.2)  # its last lines
    if not ray.is_initialized():
        return ""
    node: Any = ray._private.worker._global_node
    folder = Path(node.get_logs_dir_path())
    paths = [
        path for end in ("err", "out") for path in sorted(folder.glob(f"worker-*-{pid}.{end}"))
    ]
    texts = [path.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip() for path in paths]
    return "\n".join(text for text in texts if text)


def answer_where() -> None:
    """From now on ``ray_frames`` is answered, whatever holds the interpreter: Ray's log of this
    process gets them."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def ray_frames(pid: int) -> str:
    """Where every thread of Ray's worker process ``pid`` of this node is, innermost frames first;
    '' if it has not called ``answer_where`` (the signal would end it), or does not answer."""
    import ray

    status = Path(f"/proc/{pid}/status")
    caught = (
        re.search(r"^SigCgt:\s*(\w+)", status.read_text(), re.MULTILINE)
        if status.exists()
        else None
    )
    if caught is None or not int(caught[1], 16) >> (signal.SIGUSR1 - 1) & 1:
        return ""
    node: Any = ray._private.worker._global_node
    logs = {
        path: path.stat().st_size
        for path in Path(node.get_logs_dir_path()).glob(f"worker-*-{pid}.err")
    }
    os.kill(pid, signal.SIGUSR1)
    time.sleep(_DUMP_S)
    return "\n".join(
        path.read_bytes()[size:].decode(errors="replace") for path, size in logs.items()
    )


def take_down_with_me() -> None:
    """Have every present descendant killed when this process ends, however it ends. vLLM's engine
    process does not notice that the actor that started it was killed, and keeps its memory."""
    descendants = " ".join(str(child.pid) for child in psutil.Process().children(recursive=True))
    if not descendants:
        return
    # The shell reads until this process's end of the pipe is closed, which the kernel does whatever
    # happens.
    guard = subprocess.Popen(
        ["sh", "-c", f"read _; kill -KILL {descendants} 2>/dev/null"], stdin=subprocess.PIPE
    )
    _guards.append(guard)


def describe_process() -> dict[str, Any]:
    """``own_identity``, and pids of all descendants (``children``) and log files (``logs``)."""
    children = psutil.Process().children(recursive=True)
    return {
        **own_identity(),
        "children": [child.pid for child in children],
        "logs": [str(path) for path in log_files()],
    }
