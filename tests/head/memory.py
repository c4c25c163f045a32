"""Memory of a process by measuring it, not by reading the code."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

MIB = 1 << 20
# what the libraries keep for themselves: packed operands of a product, an allocator's rounding
SLACK = 4 * MIB

_libc = ctypes.CDLL(None)
# On import, before a test has made large tensors: by itself glibc comes to keep what is freed, up
# to tens of MiB, in a heap with holes, and a run would then be charged for the memory of the one
# before.
_M_MMAP_THRESHOLD = -3
_libc.mallopt(_M_MMAP_THRESHOLD, MIB)


def status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def peak_extra_bytes(function: Callable[[], object]) -> int | None:
    """Growth of the resident peak during one run; None where the kernel cannot reset that peak."""
    gc.collect()
    _libc.malloc_trim(0)  # memory that was freed but not given back would hide what the run takes
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    before = status_bytes("VmRSS")
    function()
    return status_bytes("VmHWM") - before
