"""This process as a rank of a layout: the process group and Megatron's groups, real ones or fake
ones for proofs."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

from openrlhf_ext.groups.watchdog import keep_nccl_calls
from openrlhf_ext.megatron.layout import ParallelLayout

JOIN_TIMEOUT_S = 600.0


def initialize_distributed(layout: ParallelLayout, timeout_s: float, seed: int) -> None:
    """Joins the process group (RANK, WORLD_SIZE, MASTER_* in the environment) and builds Megatron's
    groups."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    keep_nccl_calls()
    if not dist.is_initialized():
        # the others may take longer to start than a collective may take
        joining = timedelta(seconds=max(timeout_s, JOIN_TIMEOUT_S))
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=joining)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))
    if dist.get_world_size() != layout.world_size:
        raise ValueError(
            f"the layout is for {layout.world_size} ranks, the process group has "
            f"{dist.get_world_size()}"
        )
    build_groups(layout, timeout_s)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def build_groups(layout: ParallelLayout, timeout_s: float) -> None:
    virtual = layout.virtual_pipeline_size
    parallel_state.initialize_model_parallel(
        layout.tensor_parallel_size,
        layout.pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        context_parallel_size=layout.context_parallel_size,
        expert_model_parallel_size=layout.expert_parallel_size,
        expert_tensor_parallel_size=layout.expert_tensor,
        order=layout.order,
        create_gloo_process_groups=False,
        # declared int, but all Megatron makes of it is a timedelta
        distributed_timeout_minutes=timeout_s / 60,
    )


@contextmanager
def fake_rank(layout: ParallelLayout, rank: int) -> Iterator[None]:
    """In the body this process is ``rank`` of the layout: Megatron's groups exist, collectives do
    nothing."""
    if dist.is_initialized():
        raise RuntimeError("a fake rank needs a process without a process group, this one has one")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    excepthook = sys.excepthook  # torch puts the rank before every line of a traceback
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        build_groups(layout, timeout_s=60)
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        sys.excepthook = excepthook


def random_states() -> dict[str, Any]:
    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
    return states | {
        "tracker": {name: state for name, state in tracked.items() if isinstance(state, Tensor)}
    }


def set_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.set_states({**tracker.get_states(), **states["tracker"]})
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
