"""What ranks are told of the models they build: the sections of a run's options, and what these do
not say."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from openrlhf_ext.fp8 import wheel_folder
from openrlhf_ext.megatron.layers import LayerConverter
from openrlhf_ext.megatron.layers.exact import ExactLayers
from openrlhf_ext.megatron.layers.fp8 import FP8Layers
from openrlhf_ext.megatron.layers.lora import LoRALayers
from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.megatron.model.adapter import chosen_adapter
from openrlhf_ext.megatron.model.family import Family
from openrlhf_ext.megatron.model.shape import ModelShape
from openrlhf_ext.megatron.step.dealing import RowCosts
from openrlhf_ext.options.sections import Megatron, Rollout, Train
from openrlhf_ext.options.sections.models import Optimizer


@dataclass(frozen=True)
class ModelSettings:
    """A model, its layout and how it computes."""

    model_path: str
    layout: ParallelLayout
    megatron: Megatron = Megatron()
    rollout: Rollout = Rollout()  # temperature of log-probs; micro-batches without gradients
    train: Train = Train()  # micro-batches of training; the seed
    converters: tuple[LayerConverter, ...] = ()  # of the decoder's layers, in this order
    optimizer: Optimizer | None = None  # None: a model that is never trained
    updates: int = 1  # optimizer steps of the whole run
    # folders of frozen models of the same shape
    host_copies: Mapping[str, str] = field(default_factory=dict)
    # of critic and reward model: HF name; ``value_head_prefix`` of its config.json wins
    value_head: str = "score"
    # of the loss that balances the load of experts (``experts.balance_loss``)
    aux_loss_coef: float = 0.0
    adam_offload: bool = False  # Adam's states wait in host memory (``step.host_optimizer``)
    # tokens of the longest sequence, by which longrope chooses its frequencies
    max_len: int | None = None
    # that it is trained through, where that is not its tokenizer's own
    chat_template: str | None = None
    normalize_values: bool = False  # values minus mean, by std, of the checkpoint's config.json

    def tokens_per_micro_batch(self, forward_only: bool) -> int | None:
        """Tokens that a rank's micro-batches are filled up to; None: they hold a number of
        samples."""
        if not self.train.dynamic_batch_enable:
            return None
        tokens = self.train.max_tokens_per_gpu
        return (self.rollout.max_tokens_per_gpu or tokens) if forward_only else tokens


def row_costs(shape: ModelShape, megatron: Megatron, layout: ParallelLayout) -> RowCosts:
    """What rows cost in a model of this shape, and whether their packs share prompts: not where
    context parallelism cuts every sequence, nor where a kernel counts positions from the beginning
    of each."""
    whole = layout.context_parallel_size > 1 or megatron.rope_fusion
    return RowCosts(shape.attention_length, megatron.share_prompts_enable and not whole)


_FEWEST_POSITIONS = 128
"""Of the fixed sequence that a model computes before the first step (``MegatronModel.warm_up``)."""

# oneDNN, and torch around it, keep a kernel for every shape of a batch, 1,024 by default: a process
# that computes on a CPU grows by a MiB a step for a thousand steps. With so few no step is slower
# (benchmarks/results/soak_cpu.json).
_KERNELS_KEPT = 16
_KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def training_environment(config: Any) -> dict[str, str]:
    """What a training process must find in its environment before its layers are imported, of a
    ``RunConfig``."""
    env = {name: os.environ.get(name, str(_KERNELS_KEPT)) for name in _KERNEL_CACHES}
    if (cudnn := wheel_folder("cudnn")) is not None:
        # TransformerEngine 2.11 looks for libcudnn.so in the CUDA toolkit before torch's wheel (its
        # common/__init__.py:296-307), and would load a second one. That is not all it takes: the
        # libraries beside libcudnn.so are loaded by patches/transformer_engine_cudnn.py
        env["CUDNN_HOME"] = os.environ.get("CUDNN_HOME", str(cudnn))
    if config.train.full_determinism_enable:
        env["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"  # read by TransformerEngine's attention
    for converter in _fp8_layers(config):
        env |= converter.environment()
    return env


KNOWN: tuple[type[LayerConverter], ...] = (FP8Layers,)


def layer_converters(config: Any, family: Family) -> tuple[LayerConverter, ...]:
    """Of the policy's decoder, a model of this family, from the sections of a ``RunConfig``, in the
    order in which they are applied. Raises InputError: adapters that cannot be
    (``chosen_adapter``)."""
    lora = config.ds.lora
    adapters = (
        (LoRALayers(chosen_adapter(lora, family), config.train.seed, lora.path),)
        if lora.enabled
        else ()
    )
    return (*_fp8_layers(config), *adapters)


def without_adapters(converters: Sequence[LayerConverter]) -> tuple[LayerConverter, ...]:
    """Those of a model that is never trained."""
    return tuple(each for each in converters if not isinstance(each, LoRALayers))


def exact_layers(config: Any) -> tuple[ExactLayers, ...]:
    """The converter of exact mode, from the sections of a ``RunConfig``."""
    if not config.train.exact_rollout_enable:
        return ()
    return (ExactLayers(max(config.data.max_len, _FEWEST_POSITIONS)),)


def _fp8_layers(config: Any) -> tuple[FP8Layers, ...]:
    recipe = config.fp8.training_recipe
    return () if recipe is None else (FP8Layers(recipe),)
