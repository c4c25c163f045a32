"""Ranks that hang and fail in phases, for test_watchdog.py."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from openrlhf_ext.groups import watchdog
from tests.patience import PATIENCE_S

TIMEOUT_S = 2.0
PATIENCE = timedelta(seconds=PATIENCE_S)  # for whatever is not the subject


def all_cases() -> dict[str, str]:
    """What each rank's phase ended with, case by case. A broken group stays broken: every case has
    its own."""
    dist.init_process_group("gloo", timeout=PATIENCE)
    watchdog.start_watchdog(TIMEOUT_S)
    seen = {}
    for case in (all_is_well, one_rank_sleeps, one_rank_lags, one_rank_raises, one_rank_is_stopped):
        group = dist.new_group(timeout=PATIENCE)
        dist.all_reduce(torch.ones(1), group=group)  # gloo connects lazily
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_S), group)
        dist.barrier()
        started = time.monotonic()
        seen[case.__name__] = _outcome(
            case, lambda group=group: dist.all_reduce(torch.ones(1), group=group)
        )
        seen[f"seconds of {case.__name__}"] = f"{time.monotonic() - started:.2f}"
        dist.barrier()
    watchdog.stop_watchdog()
    return seen


def _outcome(case: Callable, meet: Callable) -> str:
    try:
        case(dist.get_rank(), meet)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        _store().set(f"{case.__name__}/{dist.get_rank()}", "reported")
    return "no error"


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _reports_but_of(case: Callable, *ranks: int) -> list[str]:
    """What the store has when all other ranks are done with the case; a culprit must not go on
    earlier."""
    return [f"{case.__name__}/{rank}" for rank in range(dist.get_world_size()) if rank not in ranks]


def all_is_well(rank: int, meet: Callable) -> None:
    with watchdog.phase("weight sync"), watchdog.phase("probe"):
        meet()


def one_rank_sleeps(rank: int, meet: Callable) -> None:
    """Rank 1 is asleep inside the phase in which the others meet."""
    reports = _reports_but_of(one_rank_sleeps, 1)
    with watchdog.phase("training step"):
        if rank == 1:
            _store().wait(reports, PATIENCE)
        else:
            meet()


def one_rank_lags(rank: int, meet: Callable) -> None:
    """Rank 2 is still in the phase before."""
    reports = _reports_but_of(one_rank_lags, 2)
    with watchdog.phase("forward"):
        if rank == 2:
            with watchdog.phase("reading a file"):
                _store().wait(reports, PATIENCE)
    with watchdog.phase("training step"):
        if rank != 2:
            meet()


def one_rank_raises(rank: int, meet: Callable) -> None:
    """Rank 0 fails in the phase in which the others wait, and goes on living."""
    try:
        with watchdog.phase("loading"):
            if rank == 0:
                raise ValueError("the 3rd expert is missing")
            meet()
    finally:
        if rank == 0:
            _store().wait(_reports_but_of(one_rank_raises, 0), PATIENCE)


def one_rank_is_stopped(rank: int, meet: Callable) -> None:
    """Rank 3's process answers nothing; rank 0 wakes it up at the end."""
    victim = torch.tensor([os.getpid()])
    dist.broadcast(victim, src=3)
    try:
        with watchdog.phase("saving"):
            if rank == 3:
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                meet()
    finally:
        if rank == 0:
            _store().wait(_reports_but_of(one_rank_is_stopped, 0, 3), PATIENCE)
            os.kill(int(victim), signal.SIGCONT)
