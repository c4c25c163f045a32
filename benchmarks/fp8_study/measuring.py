"""Times that can be compared, and relative errors."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from benchmarks.harness import seconds_in_turns
from tests.gpu.kernels import profiled
from tests.gpu.kit import Machine

_ROUNDS = 5
_WARM_UP = 2


def median_seconds(
    works: Mapping[str, Callable[[], object]], device: torch.device, repeats: int
) -> dict[str, float]:
    """Median seconds of one call of each, in turns.

    On a GPU a timing covers ``repeats`` calls in a row, with what the host needs to start them.
    """
    seconds = seconds_in_turns(
        works,
        _ROUNDS,
        warm_up=_WARM_UP,
        calls=repeats,
        synchronize=functools.partial(synchronize, device),
    )
    return {name: statistics.median(values) for name, values in seconds.items()}


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
