"""L2 norm of the gradient by group of parameters, of the whole model, each gradient counted once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

GROUPS = ("embedding", "attention", "mlp", "norms", "head")


def group_of(name: str) -> str:
    """The group of a parameter. A tied embedding is 'embedding' and also stands for the head."""
    if "layernorm" in name or "layer_norm" in name:
        return "norms"
    for group, part in (("embedding", "embedding."), ("head", "output_layer."), ("attention", ".self_attention.")):
        if part in name:
            return group
    if ".mlp." in name:
        return "mlp"
    raise ValueError(f"parameter {name} belongs to none of the groups {GROUPS}")


@torch.no_grad()
def gradient_norms(models: Sequence[DistributedDataParallel]) -> dict[str, float]:
    """``{"grad_norm/<group>": norm}`` of the gradients that the next update will use, before clipping.

    A collective over all ranks of the model, to be called between the gradient reduction and the optimizer's step. The
    squares of all groups add up to that of the global norm. Groups without parameters of their own are left out (the
    head of a model with tied embeddings).
    """
    device = models[0].buffers[0].grad_data.device
    squares = torch.zeros(len(GROUPS), dtype=torch.float64, device=device)
    present = torch.zeros(len(GROUPS), dtype=torch.float64, device=device)
    gradients: dict[str, list[Tensor]] = {group: [] for group in GROUPS}
    for model in models:
        for name, gradient in _counted_gradients(model):
            gradients[group_of(name)].append(gradient)
    for i, group in enumerate(GROUPS):
        if gradients[group]:
            present[i] = 1
            squares[i] = torch.stack(torch._foreach_norm(gradients[group])).double().square().sum()
    both = torch.stack([squares, present])
    dist.all_reduce(both)
    return {
        f"grad_norm/{group}": math.sqrt(square)
        for group, square, ranks in zip(GROUPS, *both.tolist(), strict=True)
        if ranks
    }


def _counted_gradients(model: DistributedDataParallel) -> Iterator[tuple[str, Tensor]]:
    """(parameter, gradient) of what this rank counts: no other rank counts the same elements."""
    names = {parameter: name for name, parameter in model.module.named_parameters()}
    sharded = model.ddp_config.use_distributed_optimizer
    if not sharded and parallel_state.get_data_parallel_rank(with_context_parallel=True) != 0:
        return
    for buffer in [*model.buffers, *model.expert_parallel_buffers]:
        for parameter, (start, stop, bucket) in buffer.param_index_map.items():
            if not (param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter)):
                continue
            if sharded:  # the reduction left the sum in this rank's part of the bucket only
                low, high = _own_range(buffer, bucket)
                start, stop = max(start, low), min(stop, high)
            if start < stop:
                yield names[parameter], buffer.grad_data[start:stop]


def _own_range(buffer, bucket: int) -> tuple[int, int]:
    part = buffer.buckets[bucket]
    size = part.grad_data.numel() // buffer.data_parallel_world_size
    low = part.offset + buffer.data_parallel_group.rank() * size
    return low, low + size
