"""Runs a function on several real processes with a rendezvous; many cases per launch, because start-up dominates."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.patience import PATIENCE_S

_WORKER = """
import faulthandler, importlib, os, pickle, sys
faulthandler.enable()
module, function, payload, out = sys.argv[1:]
sys.path.insert(0, {root!r})
from openrlhf_ext import patches
patches.apply()
from openrlhf_ext.imports import without_collection
with without_collection():
    module = importlib.import_module(module)
result = getattr(module, function)(**pickle.load(open(payload, "rb")))
with open(out, "wb") as file:
    pickle.dump(result, file)
import torch.distributed as dist
if dist.is_initialized():
    dist.barrier()  # no rank may leave while another still talks to it
sys.stdout.flush(); sys.stderr.flush()
os._exit(0)  # gloo's threads may outlive the interpreter's own clean-up, which then aborts ("terminate called ...")
"""


def launch(module: str, function: str, world_size: int, /, **kwargs: Any) -> list[Any]:
    """Calls ``module.function(**kwargs)`` on ``world_size`` ranks and returns every rank's result.

    Raises:
        AssertionError: a rank failed or the deadline passed; the message holds the ranks' stderr.
    """
    root = Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory() as folder:
        payload = Path(folder) / "payload"
        payload.write_bytes(pickle.dumps(kwargs))
        # this process serves the rendezvous, so that nobody else can take the port before the ranks do
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks = []
        for rank in range(world_size):
            env = os.environ | {
                "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
            }  # fmt: skip
            command = [sys.executable, "-c", _WORKER.format(root=str(root)), module, function, str(payload)]
            stderr = open(f"{folder}/stderr{rank}", "w+")  # noqa: SIM115
            process = subprocess.Popen([*command, f"{folder}/out{rank}"], env=env, stdout=stderr, stderr=stderr)
            ranks.append((process, stderr))
        _join(ranks)
        return [pickle.loads(Path(f"{folder}/out{rank}").read_bytes()) for rank in range(world_size)]


def _join(ranks: list) -> None:
    problems = []
    for rank, (process, _) in enumerate(ranks):
        try:
            if process.wait(timeout=PATIENCE_S if not problems else 20):
                problems.append(f"rank {rank}: exit code {process.returncode}")
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # faulthandler writes down where every thread is
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            process.kill()
            process.wait()
            problems.append(f"rank {rank}: not finished after {PATIENCE_S:g} s")
    texts = []
    for rank, (_, stderr) in enumerate(ranks):
        stderr.seek(0)
        texts.append(f"--- rank {rank}\n{stderr.read()[-8000:]}")
        stderr.close()
    assert not problems, "\n".join(problems + texts)
