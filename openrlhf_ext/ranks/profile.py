"""Where a rank's seconds go in one step: torch's profiler, a trace for chrome://tracing, and sums by kind of work.

Imported by a rank when its first profiled step begins, and by none otherwise.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

# what an operation is goes by its own name and those of the operations around it; the first kind that knows one counts
KINDS = {
    "communication": ("c10d::", "nccl", "gloo:", "record_param_comms", "_c10d_functional"),
    "optimizer": ("Optimizer.",),
    "head": ("_LinearLogprobEntropy", "_LinearTokenLoss"),
    "attention": (
        "scaled_dot_product",
        "_flash_attention",
        "FlashAttn",
        "FusedAttn",
        "flash_attn",
        "UnfusedDotProduct",
    ),
    "GEMM": (
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::matmul",
        "aten::linear",
        "_Linear",
        "gemm",
    ),
}
OTHER, IDLE = "other", "idle"


class StepProfile:
    """Profiles from its creation until ``finish``."""

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=activities)
        self._profiler.start()
        self._started = time.perf_counter()

    def finish(self, trace: Path) -> dict[str, Any]:
        """Writes the trace; returns ``wall`` and ``seconds`` by kind, ``host`` and ``trace``.

        Raises:
            OSError: the trace cannot be written.
        """
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        wall = time.perf_counter() - self._started
        self._profiler.stop()
        trace.parent.mkdir(parents=True, exist_ok=True)
        partial = trace.with_name(f".{os.getpid()}.{trace.name}")
        self._profiler.export_chrome_trace(str(partial))  # compressed, as its name ends in .gz
        os.replace(partial, trace)
        seconds = seconds_by_kind(self._profiler.events() or [], wall)
        return {"wall": wall, "seconds": seconds, "host": socket.gethostname(), "trace": f"profile/{trace.name}"}


def seconds_by_kind(events: Iterable[FunctionEvent], wall: float) -> dict[str, float]:
    """Seconds of each kind of work, and of none (``idle``): waiting for others, Python.

    On a GPU the time of its kernels by the operation that started them, and what is idle is the device; kernels that
    run side by side count both. On CPU the time of the operations themselves.
    """
    seconds = dict.fromkeys((*KINDS, OTHER, IDLE), 0.0)
    events = list(events)
    kernels = sorted((e.time_range.start, e.time_range.end) for e in events if e.device_type == DeviceType.CUDA)
    for event in events:
        if event.device_type == DeviceType.CPU and not event.is_async:
            own = sum(k.duration for k in event.kernels) if kernels else event.self_cpu_time_total
            seconds[kind_of(event)] += own / 1e6
    busy = sum(_merged(kernels)) / 1e6 if kernels else sum(seconds.values())
    seconds[IDLE] = max(0.0, wall - busy)
    return seconds


def kind_of(event: FunctionEvent) -> str:
    """The kind of work of an operation."""
    names: list[str] = []
    around: FunctionEvent | None = event
    while around is not None:
        names.append(around.name)
        around = around.cpu_parent
    return next((k for k, marks in KINDS.items() if any(m in name for name in names for m in marks)), OTHER)


def _merged(spans: Iterable[tuple[float, float]]) -> Iterator[float]:
    """Lengths of the parts that any of the spans, sorted by their starts, covers."""
    end = 0.0
    for start, stop in spans:
        yield max(0.0, stop - max(start, end))
        end = max(end, stop)
