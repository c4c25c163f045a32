"""This process as the only rank of a run, for the checks of calls 2 and 3."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch.distributed as dist

from tests.gpu.kit import Machine, join_alone
from tests.gpu.te_build import use

SEED = 1234


def ready(machine: Machine) -> None:
    """Before Megatron is imported: it looks for TransformerEngine then, and on a CPU needs the
    patches."""
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
    join_alone()
    policies.initialize_distributed(policies.ParallelLayout(1), machine.seconds, SEED)
    try:
        yield policies
    finally:
        policies.parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
