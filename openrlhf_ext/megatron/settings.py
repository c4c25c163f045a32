"""What ranks are told of the models they build: plain values, which the driver makes without importing Megatron."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from openrlhf_ext.fp8.recipe import Recipe
from openrlhf_ext.megatron.layout import ParallelLayout

# OpenRLHF's (transformers') schedule names -> Megatron's decay style
LR_DECAY_STYLES = {
    "cosine_with_min_lr": "cosine",
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
}


@dataclass(frozen=True)
class Overlap:
    """Communication of the data-parallel ranks beside computation (Megatron's names).

    Attributes:
        grad_reduce: gradients of a bucket are reduced while the backward pass computes the next ones.
        param_gather: a bucket of updated parameters is gathered while the next train step's forward pass computes with
            the one before; needs ``grad_reduce`` and the distributed optimizer.
        bucket_size: parameters of a bucket; None for Megatron's choice.
    """

    grad_reduce: bool = False
    param_gather: bool = False
    bucket_size: int | None = None


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
    lr_warmup_steps: int | None = None
    min_lr_ratio: float = 0.1
    max_steps: int = 1
    distributed: bool = True
    overlap: Overlap = Overlap()

    @property
    def warmup_steps(self) -> int:
        """Optimizer steps of the linear warm-up; lr_scheduler constant has none."""
        if self.lr_scheduler == "constant":
            return 0
        share = math.ceil(self.lr_warmup_ratio * self.max_steps)
        return share if self.lr_warmup_steps is None else self.lr_warmup_steps

    @property
    def min_lr(self) -> float:
        """Final rate of the schedule; only cosine_with_min_lr does not end at zero."""
        return self.lr * self.min_lr_ratio if self.lr_scheduler == "cosine_with_min_lr" else 0.0

    def __post_init__(self) -> None:
        if self.lr_scheduler not in LR_DECAY_STYLES:
            raise ValueError(f"lr_scheduler must be one of {sorted(LR_DECAY_STYLES)}, got {self.lr_scheduler!r}")
        if self.overlap.param_gather and not (self.overlap.grad_reduce and self.distributed):
            raise ValueError(f"overlap.param_gather needs overlap.grad_reduce and distributed, got {self}")


@dataclass(frozen=True)
class Recompute:
    """Activations that are computed again in the backward pass instead of kept.

    Attributes:
        granularity: 'none', 'selective' (the ``modules`` of every layer) or 'full' (whole layers).
        modules: for 'selective': 'core_attn', 'mlp'.
        method: for 'full': 'uniform' keeps the input of every ``num_layers`` layers, 'block' recomputes the first
            ``num_layers`` layers of each model chunk, one by one, and keeps all of the others.
        num_layers: see ``method``; 'uniform' wants a divisor of a chunk's layers.
    """

    granularity: str = "none"
    modules: tuple[str, ...] = ("core_attn",)
    method: str = "uniform"
    num_layers: int = 1

    def arguments(self) -> dict[str, object]:
        """Megatron's names for it."""
        if self.granularity == "full":
            chosen = {"recompute_method": self.method, "recompute_num_layers": self.num_layers}
        else:
            chosen = {"recompute_modules": list(self.modules)}
        return {"recompute_granularity": None if self.granularity == "none" else self.granularity, **chosen}


@dataclass(frozen=True)
class PolicySettings:
    """What a rank needs to know; plain values, so that it travels to Ray workers."""

    model_path: str
    layout: ParallelLayout
    param_dtype: str = "bf16"
    temperature: float = 1.0  # of the rollout distribution: log-probs and entropies are taken under it
    micro_batch_size: int = 1  # training
    forward_micro_batch_size: int = 1  # old-log-prob pass
    max_tokens_per_gpu: int | None = None  # training: tokens of a micro-batch on one rank, instead of sequences
    forward_max_tokens_per_gpu: int | None = None  # the same for the old-log-prob pass
    head: str = "fused"  # see --megatron.head
    head_kernels: str = "auto"  # see --megatron.head_kernels
    head_workspace_bytes: int = 256 << 20
    recompute: Recompute = Recompute()
    rope_fusion: bool = False  # see --megatron.rope_fusion
    fp8: Recipe | None = None  # of the decoder's linear layers; None: as all others
    seed: int = 42
    collective_timeout_s: float = 600.0
    optimizer: OptimizerSettings | None = None  # None: a model that is never trained
    # frozen models of the same shape that score in the policy's place: a folder's weights, kept in host memory, by name
    host_copies: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CriticSettings:
    """What a critic rank needs to know; plain values, so that it travels to Ray workers.

    Attributes:
        model: checkpoint, layout, micro-batches, optimizer.
        value_clip: half-width of the interval around the old value in the value loss; None for no clipping.
        value_head: HF name of the value head; an entry ``value_head_prefix`` of the checkpoint's config.json wins.
    """

    model: PolicySettings
    value_clip: float | None = 0.5
    value_head: str = "score"
