"""What ranks of a model exchange besides Megatron's own messages. Each is a collective of the ranks it names."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from openrlhf_ext.megatron.model.context_parallel import sum_ranks
from openrlhf_ext.megatron.step.packing import PackedBatch


def agreed(tensor: Tensor, device: torch.device) -> Tensor:
    """What the first tensor-parallel rank has, on the CPU: the others' copies may differ in the last bit."""
    on_device = tensor.to(device)
    group = parallel_state.get_tensor_model_parallel_group()
    dist.broadcast(on_device, parallel_state.get_tensor_model_parallel_src_rank(), group=group)
    return on_device.cpu()


def sum_over_replicas(tensor: Tensor, device: torch.device) -> Tensor:
    """Sum over the data-parallel ranks, the same bits on every rank if those of each replica agree."""
    group, on_device = parallel_state.get_data_parallel_group(), tensor.to(device)
    if not tensor.is_floating_point():
        dist.all_reduce(on_device, group=group)
        return on_device.to(tensor.device)
    # in the order of the ranks: what a reduction adds first is its own business, and may differ between groups
    parts = [torch.empty_like(on_device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, on_device, group=group)
    return torch.stack(parts).sum(0).to(tensor.device)


def broadcast_from_last_stage(tensor: Tensor, device: torch.device) -> None:
    """Overwrites ``tensor`` (any device) with what the last pipeline stage holds."""
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        on_device = tensor.to(device)
        dist.broadcast(
            on_device,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
        tensor.copy_(on_device)


def gather_tokens(values_N: Tensor, part: PackedBatch) -> Tensor:
    """The values of all response tokens of this micro-batch in order; differentiable.

    A collective of the context-parallel ranks: each gives the values of its own response tokens and gets all. When
    all of them go on to compute the same loss, the gradient of each entry goes to the rank that gave it.
    """
    mine = values_N.new_zeros(part.response_tokens).scatter(0, part.places_N, values_N)
    return sum_ranks(mine, parallel_state.get_context_parallel_group())
