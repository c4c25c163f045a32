"""Megatron's (distributed) optimizer and learning-rate schedule with OpenRLHF's options; gradient norms by group."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from openrlhf_ext.megatron.settings import LR_DECAY_STYLES, OptimizerSettings

GROUPS = ("embedding", "attention", "mlp", "norms", "head")


class NonFiniteUpdateError(FloatingPointError):
    """The loss or the gradient norm of a train step is NaN or infinite; the step was not applied."""


def build_optimizer(
    models: list[torch.nn.Module], settings: OptimizerSettings, dtype: torch.dtype
) -> MegatronOptimizer:
    """Adam over DDP-wrapped model chunks; fp32 master weights where parameters are bf16."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        adam_eps=settings.eps,
        clip_grad=settings.max_norm,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=settings.distributed,
        overlap_param_gather=settings.overlap.param_gather,
    )
    optimizer = get_megatron_optimizer(config, models, use_gloo_process_groups=False)
    # what its step asks for before it clips and moves anything (megatron-core 0.16.1 optimizer/optimizer.py:1314)
    optimizer.get_grad_norm = partial(_finite_norm, optimizer.get_grad_norm)
    return optimizer


def _finite_norm(norm: Callable[[], float]) -> float:
    """The gradient norm, the same on all ranks of the model. Raises NonFiniteUpdateError: it is NaN or infinite."""
    value = norm()
    if not math.isfinite(value):
        raise NonFiniteUpdateError(f"values that are not finite: the train step gave the gradient norm {value}")
    return value


def build_scheduler(optimizer: MegatronOptimizer, settings: OptimizerSettings) -> OptimizerParamScheduler:
    """Linear warm-up, then decay. The k-th update (k >= 1) uses the rate of step k: no update is lost to rate 0."""
    style = LR_DECAY_STYLES[settings.lr_scheduler]
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=max(settings.max_steps, settings.warmup_steps + 1),
        lr_decay_style=style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=max(settings.max_steps, 1),
        wd_incr_style="constant",
    )


# ---- the norm of the gradient by group of parameters, of the whole model, each gradient counted once ----------------


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
