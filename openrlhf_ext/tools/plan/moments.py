"""What a layout keeps on a GPU while engines sample and while models are trained, in host memory and on disk."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from openrlhf_ext.config import RunConfig
from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.megatron.model.shape import ModelShape
from openrlhf_ext.megatron.settings import layer_converters
from openrlhf_ext.options.sections import Megatron
from openrlhf_ext.ranks.shared_gpu import RESERVE_BYTES, Parts, shared_parts
from openrlhf_ext.tools.plan.memory import Pass, StateOptions, States, activations, rank_states
from openrlhf_ext.tools.plan.seconds import Training, Workload

_CONTEXTS = "CUDA contexts and NCCL (estimate)"
_FRAGMENTS = 0.1
"""Of the activations: what torch's allocator loses to fragments. An estimate."""


@dataclass(frozen=True)
class Moment:
    """What is on a GPU at a time, by part, in bytes; ``doing`` says when."""

    doing: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def largest(self) -> str:
        return max(self.parts, key=lambda name: self.parts[name])


@dataclass(frozen=True)
class TrainedModel:
    """Policy or critic in a layout; ``states`` are those of the ranks of each stage."""

    shape: ModelShape
    training: Training
    states: tuple[States, ...]

    @property
    def parameters(self) -> int:
        return rank_states(self.shape, ParallelLayout(1), 0, StateOptions()).parameters

    @property
    def fullest(self) -> States:
        return max(self.states, key=lambda one: one.total)


def policy_in(config: RunConfig, shape: ModelShape) -> TrainedModel:
    megatron, layout = config.megatron, config.layout
    buckets = megatron.ddp_bucket_size or max(40_000_000, 1_000_000 * layout.data_parallel_size)
    options = StateOptions(
        param_bytes(megatron),
        megatron.distributed_optimizer_enable,
        buckets if megatron.overlap_grad_reduce else None,
        layer_converters(config),
    )
    training = _training(
        config, megatron, layout, config.actor.num_gpus_per_node, fp8=config.fp8.enable and not config.fp8.emulate
    )
    return TrainedModel(shape, training, _by_stage(shape, layout, options))


def critic_in(config: RunConfig, shape: ModelShape) -> TrainedModel:
    """The critic as the configuration lays it out; its layers are not in FP8."""
    megatron, layout = config.critic_megatron, config.critic_layout
    options = StateOptions(param_bytes(megatron), megatron.distributed_optimizer_enable)
    training = _training(config, megatron, layout, config.critic.num_gpus_per_node, fp8=False)
    return TrainedModel(shape, training, _by_stage(shape, layout, options))


def _training(config: RunConfig, megatron: Megatron, layout: ParallelLayout, near_ranks: int, *, fp8: bool) -> Training:
    train, rollout, dynamic = config.train, config.rollout, config.train.dynamic_batch_enable
    return Training(
        layout,
        megatron,
        train.max_tokens_per_gpu if dynamic else None,
        train.micro_batch_size,
        (rollout.max_tokens_per_gpu or train.max_tokens_per_gpu) if dynamic else None,
        rollout.micro_batch_size,
        near_ranks,
        fp8,
    )


def _by_stage(shape: ModelShape, layout: ParallelLayout, options: StateOptions) -> tuple[States, ...]:
    return tuple(rank_states(shape, layout, stage, options) for stage in range(layout.pipeline_parallel_size))


def param_bytes(megatron: Megatron) -> int:
    """Of one parameter."""
    return 2 if megatron.param_dtype == "bf16" else 4


# ---- on a GPU -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """The models that are trained, with what the fullest ranks of each hold: states, and what training adds to them."""

    policy: TrainedModel
    critic: TrainedModel | None
    policy_parts: tuple[Parts, Parts]
    critic_parts: tuple[Parts, Parts] | None


def trained(config: RunConfig, work: Workload, policy: TrainedModel, critic: TrainedModel | None) -> Trained:
    """What the ranks of policy and critic hold."""
    return Trained(
        policy, critic, _heaviest(config, work, policy), None if critic is None else _heaviest(config, work, critic)
    )


def moments(
    config: RunConfig, engine: Parts, policy: tuple[Parts, Parts], critic: tuple[Parts, Parts] | None = None
) -> tuple[Moment, ...]:
    """The fullest GPU at each time; engines and a critic may be on GPUs of their own.

    Args:
        engine: what an engine worker that is awake holds, by part.
        policy, critic: states, and what training adds to them, of the fullest ranks.
    """
    staging = 2 * config.weight_sync.bucket_mib << 20
    (states, working), (critic_states, critic_working) = policy, critic or ({}, {})
    if not config.train.colocate_all:
        buffers = {"buffers of the weight sync": staging}
        sampling = {**engine, **buffers, _CONTEXTS: RESERVE_BYTES // 2}  # of one process
        found = [Moment("sampling", sampling)]
        found.append(Moment("training", {**states, **working, **buffers, _CONTEXTS: RESERVE_BYTES}))
        if critic is not None:
            found.append(Moment("training the critic", {**critic_states, **critic_working, _CONTEXTS: RESERVE_BYTES}))
        return tuple(found)
    asleep, engine_sleeps = config.ds.enable_sleep, config.vllm.enable_sleep
    awake = {} if asleep else {f"{name} of the critic": size for name, size in critic_states.items()}
    sampling, training = shared_parts(engine, states, staging, policy_sleeps=asleep, engine_sleeps=engine_sleeps)
    found = [Moment("sampling", {**sampling, **awake}), Moment("training", {**training, **working, **awake})]
    if critic is not None:
        _, training = shared_parts(engine, critic_states, staging, policy_sleeps=asleep, engine_sleeps=engine_sleeps)
        awake = {} if asleep else {f"{name} of the policy": size for name, size in states.items()}
        found.append(Moment("training the critic", {**training, **critic_working, **awake}))
    return tuple(found)


def _heaviest(config: RunConfig, work: Workload, model: TrainedModel) -> tuple[Parts, Parts]:
    """What the fullest ranks of a model hold in its training: states, and the rest."""
    stages = [_stage(config, work, model, stage) for stage in range(len(model.states))]
    return max(stages, key=lambda parts: sum(parts[0].values()) + sum(parts[1].values()))


def _stage(config: RunConfig, work: Workload, model: TrainedModel, stage: int) -> tuple[Parts, Parts]:
    kept, states = activation_bytes(config, work, model, stage, model.training.megatron), model.states[stage]
    working = {"activations": kept, "fragments (estimate)": int(_FRAGMENTS * kept)}
    if stage == len(model.states) - 1 and model.shape.value_head is None:
        working["head: workspace, hidden states and their gradient"] = _head(config, work, model)
    return states.parts, working


def activation_bytes(config: RunConfig, work: Workload, model: TrainedModel, stage: int, megatron: Megatron) -> int:
    """Of a stage's ranks, at the peak of its schedule."""
    training = model.training
    count = training.micro_batches(min(work.batch, work.samples), work.length)
    size = param_bytes(config.megatron)
    one = Pass(_tokens(config, training), config.data.max_len, "flash", size, training.fp8, megatron)
    return activations(model.shape, training.layout, stage, one, count).peak


def _tokens(config: RunConfig, training: Training) -> int:
    """Of a training micro-batch on one rank: its budget, or as many of the longest sequences as it has."""
    if training.budget is not None:
        return training.budget
    return math.ceil(training.sequences * config.data.max_len / training.layout.context_parallel_size)


def _head(config: RunConfig, work: Workload, model: TrainedModel) -> int:
    """Its workspace; hidden states of response tokens and their gradient (docs/head.md)."""
    tokens = _tokens(config, model.training) * work.response_tokens // work.length
    states = tokens * model.shape.hidden_size * 2 * param_bytes(config.megatron)
    return (config.megatron.head_workspace_mib << 20) + states


# ---- elsewhere ------------------------------------------------------------------------------------------------------


def host_memory(config: RunConfig, policy: TrainedModel) -> dict[str, int]:
    """Of a node, by part, if all its ranks were the fullest."""
    fullest = max(policy.states, key=lambda one: one.weights + one.optimizer)
    per_node = config.actor.num_gpus_per_node
    moved = fullest.weights + fullest.optimizer
    parts = {
        "states of sleeping ranks": per_node * moved if config.ds.enable_sleep else 0,
        "reference policy": per_node * fullest.weights if config.has_reference else 0,
        "checkpoint on its way to disk": per_node * moved if config.ckpt.async_enable and config.ckpt.saves else 0,
    }
    return {name: size for name, size in parts.items() if size}


def checkpoints(config: RunConfig, parameters: int) -> dict[str, int]:
    """Bytes on disk of the policy's checkpoints that are kept, by form."""
    ckpt, size = config.ckpt, param_bytes(config.megatron)
    resumable = parameters * (size + 12 if size == 2 else 12)
    kept = ckpt.max_num if ckpt.saves else 0
    parts = {
        f"{kept} to resume from": 0 if ckpt.disable_ds else kept * resumable,
        f"{kept} in Hugging Face form": kept * parameters * size if ckpt.save_hf else 0,
        "the final one in Hugging Face form": parameters * size,
    }
    return {name: size for name, size in parts.items() if size}
