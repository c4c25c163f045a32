"""Megatron's (distributed) optimizer and learning-rate schedule with OpenRLHF's options; gradient
norms by group."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    clip_grads,
    get_megatron_optimizer,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.megatron.model.build import has_transformer_engine
from openrlhf_ext.megatron.step import NonFiniteUpdateError
from openrlhf_ext.megatron.step.host_optimizer import HostOptimizer
from openrlhf_ext.options.sections.models import Actor, Megatron, Optimizer

# OpenRLHF's (transformers') schedule names -> Megatron's decay style
DECAY_STYLES = {
    "cosine_with_min_lr": "cosine",
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
GROUPS = ("embedding", "attention", "mlp", "router", "experts", "norms", "head")


class NoGradientError(RuntimeError):
    """The gradient of the adapters is exactly zero although the mini-batch has advantages."""


def build_optimizer(
    models: list[torch.nn.Module],
    options: Optimizer,
    megatron: Megatron,
    dtype: torch.dtype,
    on_host: bool = False,
) -> MegatronOptimizer:
    """Builds Adam over DDP-wrapped model chunks; fp32 master weights where parameters are bf16.

    ``on_host``: its states are in host memory between updates (``HostOptimizer``).
    """
    adam = options.adam
    config = OptimizerConfig(
        optimizer="adam",
        lr=adam.lr,
        min_lr=final_lr(options),
        weight_decay=adam.weight_decay,
        adam_beta1=adam.betas[0],
        adam_beta2=adam.betas[1],
        adam_eps=adam.eps,
        clip_grad=options.max_norm,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=megatron.distributed_optimizer_enable,
        overlap_param_gather=megatron.overlap_param_gather,
    )
    # Without this, the distributed optimizer keeps its own master weights and passes gradients as
    # ``grad`` (megatron-core 0.19.2 optimizer/distrib_optimizer.py:422, 2774).
    config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = on_host
    if has_transformer_engine():
        _take_its_kernels()
    optimizer = get_megatron_optimizer(config, models, use_gloo_process_groups=False)
    for part in single_optimizers(optimizer) if on_host else ():
        if part.optimizer is not None:
            part.optimizer = HostOptimizer(part.optimizer)
    # ``step`` calls this before it clips or changes anything (megatron-core 0.19.2
    # optimizer/optimizer.py:1866).
    optimizer.get_grad_norm = partial(_finite_norm, optimizer.get_grad_norm)
    return optimizer


def _take_its_kernels() -> None:
    """Sets TransformerEngine's kernels for the norm and the clipping of gradients.

    megatron-core 0.19.2 takes them only if one of them is of release 2.14
    (optimizer/clip_grads.py:10), and otherwise waits for the GPU at every tensor.
    """
    from transformer_engine.pytorch import optimizers

    clip_grads.multi_tensor_applier = optimizers.multi_tensor_applier
    clip_grads.l2_norm_impl = optimizers.multi_tensor_l2norm
    clip_grads.multi_tensor_scale_impl = optimizers.multi_tensor_scale


def single_optimizers(optimizer: MegatronOptimizer | None) -> list[MegatronOptimizer]:
    """Returns the optimizers that Megatron has chained: one for experts, one for the other
    parameters.

    A rank without parameters of a kind has an inner optimizer of None for it.
    """
    return [] if optimizer is None else list(getattr(optimizer, "chained_optimizers", [optimizer]))


def host_optimizers(optimizer: MegatronOptimizer | None) -> list[HostOptimizer]:
    inner = [part.optimizer for part in single_optimizers(optimizer)]
    return [each for each in inner if isinstance(each, HostOptimizer)]


def _finite_norm(norm: Callable[[], float]) -> float:
    value = norm()
    if not math.isfinite(value):
        raise NonFiniteUpdateError(
            f"values that are not finite: the train step gave the gradient norm {value}"
        )
    return value


def final_lr(options: Optimizer) -> float:
    """Returns the rate at the end of the schedule; only cosine_with_min_lr does not end at zero."""
    return (
        options.adam.lr * options.min_lr_ratio
        if options.lr_scheduler == "cosine_with_min_lr"
        else 0.0
    )


def warmup_steps(options: Optimizer, updates: int) -> int:
    """Optimizer steps of the linear warm-up; ``lr_scheduler constant`` has none."""
    if options.lr_scheduler == "constant":
        return 0
    counted = options.lr_warmup_steps if isinstance(options, Actor) else None
    return math.ceil(options.lr_warmup_ratio * updates) if counted is None else counted


def build_scheduler(
    optimizer: MegatronOptimizer, options: Optimizer, updates: int
) -> OptimizerParamScheduler:
    """Linear warm-up, then decay. The k-th update (k >= 1) uses the rate of step k: no update is
    lost to rate 0."""
    warmup, decay = warmup_steps(options, updates), options.adam.weight_decay
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=options.adam.lr,
        min_lr=final_lr(options),
        lr_warmup_steps=warmup,
        lr_decay_steps=max(updates, warmup + 1),
        lr_decay_style=DECAY_STYLES[options.lr_scheduler],
        start_wd=decay,
        end_wd=decay,
        wd_incr_steps=max(updates, 1),
        wd_incr_style="constant",
    )


def advance(
    scheduler: OptimizerParamScheduler, options: Optimizer, updates: int, share: Fraction | None
) -> None:
    """Moves a schedule of ``updates`` steps to the rate of the next update.

    That is the rate at ``share`` of the whole, or one step further if ``share`` is None. A warm-up
    given as a number of steps always counts steps.
    """
    is_counted = isinstance(options, Actor) and options.lr_warmup_steps is not None
    if share is None or (is_counted and scheduler.num_steps < scheduler.lr_warmup_steps):
        scheduler.step(1)
        return
    scheduler.num_steps = max(scheduler.num_steps, float(share * updates))
    scheduler.step(0)


# ---- gradient norm by parameter group, over the whole model, each gradient counted once


def group_of(name: str) -> str:
    """The group of a parameter. A tied embedding is 'embedding' and also stands for the head."""
    if "layernorm" in name or "layer_norm" in name:
        return "norms"
    for group, part in (
        ("embedding", "embedding."),
        ("head", "output_layer."),
        ("attention", ".self_attention."),
        ("router", ".mlp.router."),
        ("experts", ".mlp.experts."),
        ("mlp", ".mlp."),
    ):
        if part in name:
            return group
    raise ValueError(f"parameter {name} belongs to none of the groups {GROUPS}")


@torch.no_grad()
def gradient_squares(
    models: Sequence[DistributedDataParallel], layout: ParallelLayout, rank: int
) -> tuple[Tensor, Tensor]:
    """Returns fp64 (groups,) squared norms of this rank's share of the next update's gradients,
    before clipping, and whether it has any gradient of the group.

    ``gradient_norms`` needs their sums over all ranks.
    """
    device = models[0].buffers[0].grad_data.device
    squares = torch.zeros(len(GROUPS), dtype=torch.float64, device=device)
    gradients: dict[str, list[Tensor]] = {group: [] for group in GROUPS}
    for model in models:
        for name, gradient in _counted_gradients(model, layout, rank):
            gradients[group_of(name)].append(gradient)
    for i, group in enumerate(GROUPS):
        if gradients[group]:
            squares[i] = torch.stack(torch._foreach_norm(gradients[group])).double().square().sum()
    present = [float(bool(gradients[group])) for group in GROUPS]
    return squares, torch.tensor(present, dtype=torch.float64).to(device)


def gradient_norms(squares: Sequence[float], present: Sequence[float]) -> dict[str, float]:
    """Returns ``{"grad_norm/<group>": norm}`` of the whole model.

    The squares of all groups add up to the square of the global norm. Groups without own parameters
    are left out (the head of a model with tied embeddings).
    """
    found = zip(GROUPS, squares, present, strict=True)
    return {f"grad_norm/{group}": math.sqrt(square) for group, square, ranks in found if ranks}


def buffers_of(model: DistributedDataParallel) -> list[Any]:
    """Megatron's buffers of parameters and gradients, those of experts last."""
    return [*model.buffers, *model.expert_parallel_buffers]


def _counted_gradients(
    model: DistributedDataParallel, layout: ParallelLayout, rank: int
) -> Iterator[tuple[str, Tensor]]:
    """Yields (parameter, gradient) of the elements that this rank counts: no other rank counts the
    same elements."""
    names = {parameter: name for name, parameter in model.module.named_parameters()}
    sharded = model.ddp_config.use_distributed_optimizer
    copies = [(buffer, layout.copy(rank)) for buffer in model.buffers]
    copies += [
        (buffer, layout.place(rank).expert_replica) for buffer in model.expert_parallel_buffers
    ]
    for buffer in [buffer for buffer, copy in copies if sharded or copy == 0]:
        for parameter, (start, stop, bucket) in buffer.param_index_map.items():
            if not (
                param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter)
            ):
                continue
            if sharded:  # the reduction leaves the sum in this rank's part of the bucket only
                low, high = _own_range(buffer, bucket)
                start, stop = max(start, low), min(stop, high)
            if start < stop:
                yield names[parameter], buffer.grad_data[start:stop]


def _own_range(buffer, bucket: int) -> tuple[int, int]:
    part = buffer.buckets[bucket]
    size = part.grad_data.numel() // buffer.data_parallel_world_size
    low = part.offset + buffer.data_parallel_group.rank() * size
    return low, low + size
