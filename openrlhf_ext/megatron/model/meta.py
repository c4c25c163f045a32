"""The real model of any rank of any layout, without its memory and without the other ranks.

torch's fake process group lets one process take the place of every rank in turn, so that Megatron builds its groups and
this rank's modules as in a run; on the meta device parameters have shapes and no storage.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from openrlhf_ext.megatron.groups import build_groups
from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.megatron.model.build import HiddenStateGPTModel, build_model, transformer_config
from openrlhf_ext.megatron.model.shape import ModelShape
from openrlhf_ext.megatron.settings import Recompute


@contextmanager
def fake_rank(layout: ParallelLayout, rank: int) -> Iterator[None]:
    """In the body this process is ``rank`` of the layout: Megatron's groups exist, collectives do nothing.

    Raises:
        RuntimeError: the process has a process group already.
    """
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


def meta_chunks(shape: ModelShape, layout: ParallelLayout, dtype: torch.dtype) -> list[HiddenStateGPTModel]:
    """The model chunks of the current (fake) rank on the meta device."""
    config = transformer_config(shape, layout, dtype, Recompute())
    config.use_cpu_initialization = True  # on a GPU machine Megatron would name the device itself
    stages = [None] if layout.virtual_pipeline_size == 1 else range(layout.virtual_pipeline_size)
    with torch.device("meta"):
        return [build_model(shape, config, stage, meta=True) for stage in stages]
