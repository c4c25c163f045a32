"""Ranks that hang and fail in phases, for test_phases.py."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from openrlhf_ext.megatron import phases

TIMEOUT_S = 1.2
LATE_S = TIMEOUT_S + 1.3


def all_cases() -> dict[str, str]:
    """What each rank's phase ended with, case by case. A broken group stays broken: every case has its own."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    phases.start_monitor(TIMEOUT_S)
    seen = {}
    for case in (all_is_well, one_rank_sleeps, one_rank_lags, one_rank_raises, one_rank_is_stopped):
        group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
        dist.all_reduce(torch.ones(1), group=group)  # gloo connects lazily
        started = time.monotonic()
        seen[case.__name__] = _outcome(case, lambda group=group: dist.all_reduce(torch.ones(1), group=group))
        seen[f"seconds of {case.__name__}"] = f"{time.monotonic() - started:.2f}"
        dist.barrier()
    phases.stop_monitor()
    return seen


def _outcome(case: Callable, meet: Callable) -> str:
    try:
        case(dist.get_rank(), meet)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def all_is_well(rank: int, meet: Callable) -> None:
    with phases.phase("weight sync"), phases.phase("probe"):
        meet()


def one_rank_sleeps(rank: int, meet: Callable) -> None:
    """Rank 1 is asleep inside the phase in which the others meet."""
    with phases.phase("training step"):
        if rank == 1:
            time.sleep(LATE_S)
        else:
            meet()


def one_rank_lags(rank: int, meet: Callable) -> None:
    """Rank 2 is still in the phase before."""
    with phases.phase("forward"):
        if rank == 2:
            with phases.phase("reading a file"):
                time.sleep(LATE_S)
    with phases.phase("training step"):
        if rank != 2:
            meet()


def one_rank_raises(rank: int, meet: Callable) -> None:
    """Rank 0 fails in the phase in which the others wait, and goes on living."""
    try:
        with phases.phase("loading"):
            if rank == 0:
                raise ValueError("the 3rd expert is missing")
            meet()
    finally:
        if rank == 0:
            time.sleep(LATE_S)


def one_rank_is_stopped(rank: int, meet: Callable) -> None:
    """Rank 3's process answers nothing; rank 0 wakes it up at the end."""
    victim = torch.tensor([os.getpid()])
    dist.broadcast(victim, src=3)
    try:
        with phases.phase("saving"):
            if rank == 3:
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                meet()
    finally:
        if rank == 0:
            time.sleep(1.0)  # until the others have asked too
            os.kill(int(victim), signal.SIGCONT)
