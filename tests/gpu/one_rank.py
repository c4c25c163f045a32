"""This process as the only rank of a run, for the checks of calls 2 and 3."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch.distributed as dist

from tests.gpu.kit import Machine
from tests.gpu.te_build import use

SEED = 1234


def ready(machine: Machine) -> None:
    """Before Megatron is imported: it looks for TransformerEngine then, and on a CPU needs the patches."""
    use(machine.bundle)
    from openrlhf_ext import patches

    patches.apply()


@contextmanager
def one_rank(machine: Machine) -> Iterator[ModuleType]:
    """In the body there are Megatron's groups of one rank; gives the module ``tests.gpu.policies``.

    That module is not imported at the top of the checks, because it imports Megatron (``ready``).
    """
    ready(machine)
    policies = importlib.import_module("tests.gpu.policies")
    # this process serves the rendezvous, so that nobody else can take the port
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"RANK": "0", "LOCAL_RANK": str(machine.device.index or 0), "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    policies.initialize_distributed(policies.ParallelLayout(1), machine.seconds, SEED)
    try:
        yield policies
    finally:
        policies.parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
