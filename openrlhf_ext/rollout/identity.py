"""Which process this is, for others who may be on another machine."""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path
from typing import Any


@cache
def machine_id() -> str:
    """Equal in two processes if and only if process ids, and /proc, mean the same in both.

    That is one start of one kernel, and one container. Host names do not tell: cloned machines and containers of
    different nodes may have the same one.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def own_identity() -> dict[str, Any]:
    """Of this process: ``pid``; ``host`` name, for people; ``machine`` (:func:`machine_id`).

    Of the Ray actor that it is: ``actor`` and ``node``, ids in hexadecimal; None elsewhere.
    """
    import ray  # not at the top: vLLM's workers import this

    context = ray.get_runtime_context() if ray.is_initialized() else None
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "machine": machine_id(),
        "actor": context.get_actor_id() if context is not None else None,
        "node": context.get_node_id() if context is not None else None,
    }
