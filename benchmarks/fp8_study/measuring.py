"""Times that can be compared, and relative errors."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tests.gpu.kernels import profiled
from tests.gpu.kit import Machine

_ROUNDS = 5
_WARM_UP = 2


def seconds_in_turns(
    works: Mapping[str, Callable[[], object]], device: torch.device, repeats: int
) -> dict[str, float]:
    """Median seconds of one call of each; they take turns, so that a change of clock or load hits
    all.

    On a GPU a timing covers ``repeats`` calls in a row, with what the host needs to start them.
    """
    for work in works.values():
        for _ in range(_WARM_UP):
            work()
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(_ROUNDS):
        for name, work in works.items():
            times[name].append(seconds_of(work, device, repeats))
    return {name: statistics.median(values) for name, values in times.items()}


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int = 1) -> float:
    """Seconds of one call, averaged over ``repeats`` in a row."""
    synchronize(device)
    started = time.perf_counter()
    for _ in range(repeats):
        work()
    synchronize(device)
    return (time.perf_counter() - started) / repeats


def device_seconds(
    works: Mapping[str, Callable[[], object]], machine: Machine, repeats: int
) -> dict[str, float]:
    """Seconds of the kernels of one call of each, from torch's profiler: without the gaps in which
    the device waits for the host, which events around a call would count. On a CPU those of torch's
    operations."""

    def all_of(work: Callable[[], object]) -> None:
        for _ in range(repeats):
            work()

    return {
        name: profiled(machine, functools.partial(all_of, work))["seconds"] / repeats
        for name, work in works.items()
    }


def synchronize(device: torch.device) -> None:
    """Waits for what the device was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """|found - wanted| / |wanted|, Frobenius norms."""
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()
