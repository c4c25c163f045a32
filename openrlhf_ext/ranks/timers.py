"""What one rank measures of itself: its own time in each phase, its memory, and a profile of single
steps."""

from __future__ import annotations

import functools
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from openrlhf_ext.ranks.movement import Moved

# what an operation is goes by its own name and those of the operations around it; the first kind
# that knows one counts
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


@dataclass(frozen=True)
class RankReport:
    """What a rank did since its last report.

    Attributes:
        seconds: by phase ('logprob', 'train', 'sync'), without the time in which the rank waited
        for other replicas.
        memory_bytes: peak since the process began: allocated device memory, or resident memory of
        the process on CPU.
        device_bytes: most that was in use on its GPU at the end of a phase, by all processes and
            libraries (an engine that shares it, NCCL's buffers, fragments, CUDA contexts); 0
            without a GPU.
        moved: None if no optimizer step was made.
    """

    rank: int
    host: str
    device: str
    seconds: dict[str, float]
    memory_bytes: int
    device_bytes: int = 0
    packed_tokens: int = 0
    padding_tokens: int = 0
    repeated_tokens: int = 0
    moved: Moved | None = None

    @property
    def busy_seconds(self) -> float:
        """Time in the phases that depend on the rank's own share of the batch."""
        return self.seconds.get("logprob", 0.0) + self.seconds.get("train", 0.0)


class PhaseTimers:
    """Adds up this rank's time by phase. All ranks leave a training step together; what differs is
    how long a replica takes until its gradients are ready. The reduction, in which it waits for the
    slowest, is not counted (``without``)."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._waited = 0.0
        self._device_bytes = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started, waited = _now(), self._waited
        try:
            yield
        finally:
            spent = _now() - started - (self._waited - waited)
            self._seconds[name] = self._seconds.get(name, 0.0) + spent
            self._device_bytes = max(self._device_bytes, device_memory_bytes())

    def without(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time no phase counts."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            started = _now()
            try:
                return function(*args, **kwargs)
            finally:
                self._waited += _now() - started

        return wrapped

    def report(self, rank: int) -> RankReport:
        seconds, self._seconds = self._seconds, {}
        used, self._device_bytes = self._device_bytes, 0
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        return RankReport(rank, socket.gethostname(), device, seconds, peak_memory_bytes(), used)


def peak_memory_bytes() -> int:
    """Peak of this process since it began: device memory where there is a GPU, resident memory
    elsewhere."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/self/status has no VmHWM")


def device_memory_bytes() -> int:
    """In use on this process's GPU, by whomever; 0 without one."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def _now() -> float:
    """Seconds; what was launched on the device before has ended."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(phase: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a method of an object with ``timers``: its calls count as ``phase``."""

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self.timers.phase(phase):
                return method(self, *args, **kwargs)

        return wrapped

    return decorate


class StepProfile:
    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=activities)
        self._profiler.start()
        self._started = time.perf_counter()

    def finish(self, trace: Path) -> dict[str, Any]:
        """Writes the trace; returns ``wall`` and ``seconds`` by kind, ``host`` and ``trace``."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        wall = time.perf_counter() - self._started
        self._profiler.stop()
        trace.parent.mkdir(parents=True, exist_ok=True)
        partial = trace.with_name(f".{os.getpid()}.{trace.name}")
        self._profiler.export_chrome_trace(str(partial))  # compressed, as its name ends in .gz
        os.replace(partial, trace)
        seconds = seconds_by_kind(self._profiler.events() or [], wall)
        return {
            "wall": wall,
            "seconds": seconds,
            "host": socket.gethostname(),
            "trace": f"profile/{trace.name}",
        }


def seconds_by_kind(events: Iterable[FunctionEvent], wall: float) -> dict[str, float]:
    """Seconds of each kind of work, and of none (``idle``): waiting for others, Python. On a GPU
    the time of its kernels by the operation that started them; those that run side by side count
    both. On CPU the time of the operations themselves."""
    seconds = dict.fromkeys((*KINDS, OTHER, IDLE), 0.0)
    events = list(events)
    kernels = sorted(
        (e.time_range.start, e.time_range.end) for e in events if e.device_type == DeviceType.CUDA
    )
    for event in events:
        if event.device_type == DeviceType.CPU and not event.is_async:
            own = sum(k.duration for k in event.kernels) if kernels else event.self_cpu_time_total
            seconds[kind_of(event)] += own / 1e6
    busy = sum(_merged(kernels)) / 1e6 if kernels else sum(seconds.values())
    seconds[IDLE] = max(0.0, wall - busy)
    return seconds


def kind_of(event: FunctionEvent) -> str:
    names: list[str] = []
    around: FunctionEvent | None = event
    while around is not None:
        names.append(around.name)
        around = around.cpu_parent
    return next(
        (k for k, marks in KINDS.items() if any(m in name for name in names for m in marks)), OTHER
    )


def _merged(spans: Iterable[tuple[float, float]]) -> Iterator[float]:
    """Lengths of the parts that any of the spans, sorted by their starts, covers."""
    end = 0.0
    for start, stop in spans:
        yield max(0.0, stop - max(start, end))
        end = max(end, stop)
