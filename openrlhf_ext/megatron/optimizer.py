"""Megatron's (distributed) optimizer and learning-rate schedule with OpenRLHF's options."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

# OpenRLHF's (transformers') schedule names -> Megatron's decay style
LR_DECAY_STYLES = {
    "cosine_with_min_lr": "cosine",
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
}


@dataclass(frozen=True)
class OptimizerSettings:
    """Adam and its schedule. ``max_steps`` counts optimizer steps of the whole run."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_norm: float = 1.0  # 0 turns gradient clipping off
    lr_scheduler: str = "cosine_with_min_lr"
    lr_warmup_ratio: float = 0.03
    min_lr_ratio: float = 0.1
    max_steps: int = 1
    distributed: bool = True

    @property
    def min_lr(self) -> float:
        """Final rate of the schedule; only cosine_with_min_lr does not end at zero."""
        return self.lr * self.min_lr_ratio if self.lr_scheduler == "cosine_with_min_lr" else 0.0

    def __post_init__(self) -> None:
        if self.lr_scheduler not in LR_DECAY_STYLES:
            raise ValueError(f"lr_scheduler must be one of {sorted(LR_DECAY_STYLES)}, got {self.lr_scheduler!r}")


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
