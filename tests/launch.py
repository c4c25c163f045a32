"""Runs a function on several real processes with a rendezvous; many cases per launch, because
start-up dominates."""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.patience import PATIENCE_S

# Every rank is forked from a process that has imported what ranks need and done nothing else: it
# has one thread and no group, and a test's own modules are imported by the rank. A process that has
# asked CUDA for devices must not fork.
_START = "spawn" if torch.cuda.is_available() else "forkserver"
_CONTEXT = multiprocessing.get_context(_START)
if _START == "forkserver":
    _CONTEXT.set_forkserver_preload(["tests.preloaded"])


def launch(module: str, function: str, world_size: int, /, **kwargs: Any) -> list[Any]:
    """Calls ``module.function(**kwargs)`` on ``world_size`` ranks and returns every rank's result.

    Raises:
        AssertionError: a rank failed or the deadline passed; the message holds the ranks' stderr.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "payload").write_bytes(pickle.dumps(kwargs))
        # this process serves the rendezvous, so that nobody else can take the port before the ranks
        # do
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port, ranks = store.port, []
        for rank in range(world_size):
            env = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
            }
            ranks.append(_CONTEXT.Process(target=_work, args=(module, function, folder, rank, env)))
            ranks[-1].start()
        try:
            _join(ranks, folder)
        finally:
            del store  # not kept, with its port and threads, by the traceback of a test that failed
        return [pickle.loads((folder / f"out{rank}").read_bytes()) for rank in range(world_size)]


def _work(module: str, function: str, folder: Path, rank: int, env: Mapping[str, str]) -> None:
    with open(folder / f"stderr{rank}", "w") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    faulthandler.enable()
    assert _START == "spawn" or "tests.preloaded" in sys.modules, (
        "multiprocessing passes over what it cannot import"
    )
    os.environ.clear()
    os.environ.update(env)
    # a forked rank has torch already, which reads OMP_NUM_THREADS when it is imported
    torch.set_num_threads(1)

    from openrlhf_ext import patches
    from openrlhf_ext.imports import without_collection

    patches.apply()
    with without_collection():
        called = getattr(importlib.import_module(module), function)
    result = called(**pickle.loads((folder / "payload").read_bytes()))
    (folder / f"out{rank}").write_bytes(pickle.dumps(result))
    if dist.is_initialized():
        dist.barrier()  # no rank may leave while another still talks to it
    sys.stdout.flush()
    sys.stderr.flush()
    # gloo's threads may outlive the interpreter's own clean-up, which then aborts ("terminate
    # called ...")
    os._exit(0)


def _join(ranks: list[BaseProcess], folder: Path) -> None:
    problems = []
    for rank, process in enumerate(ranks):
        process.join(PATIENCE_S if not problems else 20)
        if process.is_alive():
            os.kill(process.pid, signal.SIGABRT)  # faulthandler writes down where every thread is
            process.join(10)
            process.kill()
            process.join()
            problems.append(f"rank {rank}: not finished after {PATIENCE_S:g} s")
        elif process.exitcode:
            problems.append(f"rank {rank}: exit code {process.exitcode}")
    texts = [
        f"--- rank {rank}\n{(folder / f'stderr{rank}').read_text()[-8000:]}"
        for rank in range(len(ranks))
    ]
    assert not problems, "\n".join(problems + texts)
