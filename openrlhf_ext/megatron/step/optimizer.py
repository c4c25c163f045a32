"""Megatron's (distributed) optimizer and learning-rate schedule with OpenRLHF's options."""

from __future__ import annotations

import math

import torch
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from openrlhf_ext.megatron.settings import LR_DECAY_STYLES, OptimizerSettings


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
    )
    return get_megatron_optimizer(config, models, use_gloo_process_groups=False)


def build_scheduler(optimizer: MegatronOptimizer, settings: OptimizerSettings) -> OptimizerParamScheduler:
    """Linear warm-up, then decay. The k-th update (k >= 1) uses the rate of step k: no update is lost to rate 0."""
    style = LR_DECAY_STYLES[settings.lr_scheduler]
    warmup = 0 if settings.lr_scheduler == "constant" else math.ceil(settings.lr_warmup_ratio * settings.max_steps)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=max(settings.max_steps, warmup + 1),
        lr_decay_style=style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=max(settings.max_steps, 1),
        wd_incr_style="constant",
    )
