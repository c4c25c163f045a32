"""Settings of the ranks, and values that several parts derive from the configuration."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from openrlhf_ext.algorithms import Algorithm, get_algorithm
from openrlhf_ext.config import RunConfig
from openrlhf_ext.config.estimator import algorithm_options
from openrlhf_ext.megatron.model.shape import read_model_shape
from openrlhf_ext.megatron.settings import (
    ModelSettings,
    exact_layers,
    layer_converters,
    training_environment,
)
from openrlhf_ext.options import required
from openrlhf_ext.options.sections.algo import CUSTOM
from openrlhf_ext.ranks.publishing import SyncSettings
from openrlhf_ext.rollout.sync import choose_transport

_MIXTURE_TOLERANCE = 0.4  # nats


def policy_path(config: RunConfig) -> str:
    return required(config.actor.model_name_or_path, "actor.model_name_or_path")


def worker_env(config: RunConfig) -> dict[str, str]:
    env = {
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "0" if config.logger.verbose else "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(_threads_per_process(config))),
        "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1",
        # NCCL's watchdog requests a dump at any error of any group, the weight sync's included, and
        # ends the process 480 s later, whatever TORCH_NCCL_ASYNC_ERROR_HANDLING says (torch 2.13
        # ProcessGroupNCCL.hpp:665, 1379): one dead engine would end policy and engines. Our own
        # report reads the recorder (docs/operating.md).
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    }
    env |= training_environment(config)
    for converter in exact_layers(config):
        env |= converter.environment()  # one thread, whatever the machine has
    if Path(policy_path(config)).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    return env


def _threads_per_process(config: RunConfig) -> int:
    """Assumes that all nodes are like this one, with the processes spread evenly."""
    processes = max(config.training_ranks, config.engine_workers)
    return max(1, (os.cpu_count() or 1) * config.actor.num_nodes // processes)


def build_algorithm(config: RunConfig, **measured: Any) -> Algorithm:
    """Builds the estimator with its options and ``measured`` values. The ranks receive it with
    their shards. They cannot import the file of a user's own algorithm, so its class is pickled by
    value."""
    name, options, correction = algorithm_options(config)
    # load_config has logged the warnings
    algorithm = get_algorithm(name, correction=correction, warn=False, **options, **measured)
    if config.algo.advantage.estimator == CUSTOM:
        ray.cloudpickle.register_pickle_by_value(sys.modules[type(algorithm).__module__])
    return algorithm


def policy_settings(config: RunConfig, steps: int) -> ModelSettings:
    actor = config.actor
    if config.train.drift_check:
        actor = actor.model_copy(update={"adam": actor.adam.model_copy(update={"lr": 0.0})})
    return ModelSettings(
        policy_path(config),
        config.layout,
        config.megatron,
        config.rollout,
        config.train,
        (
            *layer_converters(config, read_model_shape(policy_path(config)).family),
            *exact_layers(config),
        ),
        actor,
        optimizer_updates(config, steps - frozen_steps(config)),
        {model.name: model.path for model in frozen_models(config) if not model.ranks},
        aux_loss_coef=actor.aux_loss_coef,
        adam_offload=config.ds.optimizer_on_host,
        max_len=config.data.max_len,
    )


@dataclass(frozen=True)
class FrozenModel:
    """A language model ('reference' or 'guide') that scores completions and is never trained. With
    ``ranks`` 0 it is a copy in the host memory of the policy's ranks."""

    name: str
    path: str
    ranks: int


def frozen_models(config: RunConfig) -> list[FrozenModel]:
    models = []
    if config.has_reference:
        models.append(FrozenModel("reference", policy_path(config), config.reference_ranks))
    if config.has_guide:
        path = required(config.guide.model_name_or_path, "guide.model_name_or_path")
        models.append(FrozenModel("guide", path, config.guide_ranks))
    return models


def critic_path(config: RunConfig) -> str:
    return required(config.critic_model, "critic.model_name_or_path")


def reward_path(config: RunConfig) -> str:
    return required(config.reward.model_name_or_path, "reward.model_name_or_path")


def critic_settings(config: RunConfig, policy: ModelSettings, steps: int) -> ModelSettings:
    """Returns the settings of every critic rank: micro-batches, precision, and seed from the
    policy; the rest from the critic's own options."""
    return dataclasses.replace(
        _of_values(config, policy),
        model_path=critic_path(config),
        layout=config.critic_layout,
        megatron=config.critic_megatron,
        optimizer=config.critic,
        updates=optimizer_updates(config, steps),
    )


def reward_settings(config: RunConfig, policy: ModelSettings) -> ModelSettings:
    """Returns the settings of every reward model rank: the policy's layout and precision, without
    FP8."""
    return dataclasses.replace(
        _of_values(config, policy), model_path=reward_path(config), layout=config.reward_layout
    )


def _of_values(config: RunConfig, policy: ModelSettings) -> ModelSettings:
    """Returns the policy's settings with a value head instead of the policy's own features."""
    head, normalize = config.ds.value_head_prefix, config.reward.normalize_enable
    return dataclasses.replace(
        policy,
        converters=(),
        optimizer=None,
        host_copies={},
        aux_loss_coef=0.0,
        value_head=head,
        normalize_values=normalize,
    )


def frozen_steps(config: RunConfig) -> int:
    """Returns the number of training steps at the start that train only the critic."""
    return config.critic.freezing_steps + 1 if config.has_critic else 0


def check_frozen_steps(config: RunConfig, steps: int) -> None:
    """Raises ValueError if the steps that train only the critic cover the whole run."""
    if frozen_steps(config) >= steps:
        raise ValueError(
            "critic.freezing_steps must be below the number of training steps - 1, or the "
            f"policy is never trained: got {config.critic.freezing_steps} (the first "
            f"{frozen_steps(config)} steps) and {steps} steps; lower it"
        )


def optimizer_updates(config: RunConfig, steps: int) -> int:
    """Returns the optimizer updates of ``steps`` training steps, at least 1."""
    return max(
        1,
        steps
        * config.train.max_epochs
        * math.ceil(config.samples_per_rollout / config.train.batch_size),
    )


def training_steps(config: RunConfig, prompts: int) -> int:
    """Returns the number of batches of groups in the whole run. The last batch may be smaller, and
    dynamic sampling reduces the number."""
    return math.ceil(prompts * config.train.num_episodes / config.rollout.batch_size)


def probe_tolerance(config: RunConfig) -> float:
    """Returns the tolerance of the options; 0 in exact mode. The default for a mixture of experts in bf16 is larger:
    its routers round too and choose other experts, so single tokens differ by more than a nat.
    Checksums of experts cover single experts."""
    if config.train.exact_rollout_enable:
        return 0.0
    given, default = config.weight_sync.probe_tolerance, config.probe_tolerance
    if given is None and "bf16" in (config.megatron.param_dtype, config.rollout_dtype):
        shape = read_model_shape(policy_path(config))
        return max(default, _MIXTURE_TOLERANCE) if shape.is_mixture else default
    return default


def sync_settings(config: RunConfig, use_gpu: bool, probe: Sequence[int]) -> SyncSettings:
    transport = choose_transport(
        config.vllm.sync_backend,
        on_gpu=use_gpu,
        colocated=config.engines_share_gpus,
        deterministic=config.train.full_determinism_enable or config.train.exact_rollout_enable,
    )
    workers, tolerance = config.vllm.tensor_parallel_size, probe_tolerance(config)
    travels, dtype = config.vllm.lora, config.rollout_dtype
    return SyncSettings(
        transport, workers, config.weight_sync, tolerance, tuple(probe), travels, dtype
    )
