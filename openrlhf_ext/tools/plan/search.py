"""Every layout of a run on so many GPUs: what it holds, how long a step takes, and what binds.

A layout is a set of options on top of the run's configuration. Whether it is allowed is asked of the configuration's
own rules, so that what plan writes is what a run takes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from openrlhf_ext.config import RunConfig, Violation
from openrlhf_ext.config.model_rules import shape_violations
from openrlhf_ext.config.rules import RULES
from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.megatron.model.shape import ModelShape, read_model_shape, read_value_shape
from openrlhf_ext.megatron.settings import Recompute
from openrlhf_ext.tools.plan.memory import StateOptions, rank_states
from openrlhf_ext.tools.plan.moments import (
    Moment,
    TrainedModel,
    activation_bytes,
    checkpoints,
    critic_in,
    host_memory,
    moments,
    policy_in,
)
from openrlhf_ext.tools.plan.seconds import (
    GPUS,
    Assumptions,
    Clock,
    Engines,
    Seconds,
    Workload,
    engine_weights,
)

_ACTOR = "actor.model_name_or_path"
_MOST_REQUESTS = 1024  # rollout/launch.py's default on a GPU
_DEGREES = (1, 2, 4, 8)
_MOST_STAGES, _CHUNKS = 16, (1, 2, 4)
_RECOMPUTES: tuple[dict[str, Any], ...] = (
    {"megatron.recompute": "none"},
    {"megatron.recompute": "selective", "megatron.recompute_modules": ("mlp",)},
    {"megatron.recompute": "full", "megatron.recompute_method": "uniform", "megatron.recompute_num_layers": 1},
)
_MOST_GPUS = 4096
ALIKE = 0.05
"""Steps that differ by a smaller share count as equally long."""
FULL = 0.95
"""Share of a GPU that a layout may take: fragments, contexts and NCCL's buffers are estimates."""

Options = Mapping[str, Any]


class PlanError(ValueError):
    """The run is of a kind that is not planned."""


@dataclass(frozen=True)
class Candidate:
    """A layout with what it holds and takes.

    Attributes:
        options: of the layout, by their names.
        moments: the fullest GPU while engines sample and while the policy is trained, and while a critic is; other
            GPUs each time unless all are colocated.
        seconds: of a step; None where the layout does not fit.
        host: bytes of a node's memory, by part.
        concurrency: requests that an engine works on at a time; 0 if its cache does not hold the longest sequence.
    """

    options: Options
    policy: TrainedModel
    engines: Engines
    moments: tuple[Moment, ...]
    host: Mapping[str, int]
    concurrency: int
    seconds: Seconds | None

    @property
    def fullest(self) -> Moment:
        """Where memory is tightest."""
        return max(self.moments, key=lambda moment: moment.total)


@dataclass(frozen=True)
class Planner:
    """Plans one run on one kind of GPU.

    Attributes:
        config: of the run; the layout in it is replaced.
        response_tokens, prompt_tokens: mean lengths; None for 0.6 of the longest response, and for what is left of
            ``data.max_len`` beside it, at most 512.
    """

    config: RunConfig
    gpu_name: str = "H100"
    response_tokens: int | None = None
    prompt_tokens: int | None = None
    assumed: Assumptions = Assumptions()

    def __post_init__(self) -> None:
        if self.gpu_name not in GPUS:
            raise PlanError(f"--gpu must be one of {', '.join(GPUS)}: got {self.gpu_name}")
        unplanned = {
            "guide.model_name_or_path": self.config.has_guide,
            "ref.num_gpus_per_node": self.config.reference_ranks,
        }
        for name, there in unplanned.items():
            if there:
                raise PlanError(f"{name}: ranks and engines beside policy and critic are not planned; leave it out")

    # ---- the run ------------------------------------------------------------------------------------------------

    @cached_property
    def shape(self) -> ModelShape:
        """Of the policy.

        Raises:
            PlanError: the model is a hub name, of which nothing is known here.
        """
        path = self.config.actor.model_name_or_path or ""
        try:
            return read_model_shape(path)
        except ValueError as error:
            raise PlanError(
                f"{_ACTOR}: {error}; a plan needs config.json alone: give a folder that has it, such as those of "
                "configs/models"
            ) from error

    @cached_property
    def parameters(self) -> int:
        """Of the whole policy."""
        return rank_states(self.shape, ParallelLayout(1), 0, StateOptions()).parameters

    @cached_property
    def work(self) -> Workload:
        """One step."""
        config, rollout = self.config, self.config.rollout
        longest = rollout.max_new_tokens or config.data.max_len // 2
        return Workload(
            rollout.batch_size,
            rollout.n_samples_per_prompt,
            self.prompt_tokens or min(512, config.data.max_len - longest),
            self.response_tokens or max(1, int(0.6 * longest)),
            longest,
            min(config.train.batch_size, config.samples_per_rollout),
            config.train.max_epochs,
            1 + config.has_reference,
        )

    @cached_property
    def clock(self) -> Clock:
        """Seconds of this run's phases."""
        return Clock(GPUS[self.gpu_name], self.shape, self.parameters, self.work, self.assumed)

    # ---- what there is --------------------------------------------------------------------------------------------

    def candidates(self, gpus: int) -> list[Candidate]:
        """All layouts of the run on so many GPUs that the rules allow; those that fit come first, the fastest ahead."""
        found = []
        for ranks, engine_gpus in self._divisions(gpus):
            nodes = self._nodes(ranks)
            engines = [*self._engine_options(engine_gpus)] if nodes else []
            trainings = [*self._trainings(nodes, engines[0])] if nodes and engines else []
            # what one side's rules say does not depend on the other's degrees, beyond the number of GPUs
            allowed = [one for one in engines if trainings and not self._broken(with_options(trainings[0][1], one))]
            for (options, config), one in itertools.product(trainings, allowed):
                found.append(self._candidate({**options, **one}, with_options(config, one)))
        return sorted(found, key=_order)

    def as_configured(self) -> Candidate:
        """The layout that the configuration has."""
        config = self.config
        shown = [
            "actor.num_nodes", "actor.num_gpus_per_node", *(f"megatron.{leaf}" for leaf in _MEGATRON),
            "vllm.num_engines", "vllm.tensor_parallel_size",
        ]  # fmt: skip
        options = {name: getattr(getattr(config, name.split(".")[0]), name.split(".")[1]) for name in shown}
        return self._candidate(options, config)

    @property
    def critic_takes_turns(self) -> bool:
        """Whether a critic works before or after the policy, not at the same time (driver/loop.py, ``train``)."""
        return self.config.train.colocate_all

    @property
    def configured_gpus(self) -> int:
        """GPUs of the configuration as it is."""
        config = self.config
        if config.train.colocate_all:
            return config.world_size
        return config.world_size + config.engine_workers + config.critic_ranks

    def distinct(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The first of every way to cut the policy; in the order given."""
        best: dict[ParallelLayout, Candidate] = {}
        for candidate in candidates:
            best.setdefault(candidate.policy.training.layout, candidate)
        return list(best.values())

    def fewest_gpus(self, above: int) -> int | None:
        """The fewest GPUs, more than ``above``, on which a layout fits: parts of a node by halves, then whole nodes.

        None if none does on up to 4,096.
        """
        per_node = self.config.actor.num_gpus_per_node
        failed, tried = above, _double(above, per_node)
        while tried <= _MOST_GPUS and not self._fits(tried):
            failed, tried = tried, _double(tried, per_node)
        if tried > _MOST_GPUS:
            return None
        between = range(failed // per_node * per_node + per_node, tried, per_node) if tried > per_node else ()
        return next((gpus for gpus in between if self._fits(gpus)), tried)

    def _fits(self, gpus: int) -> bool:
        return any(candidate.seconds for candidate in self.candidates(gpus))

    def _divisions(self, gpus: int) -> Iterator[tuple[int, int]]:
        """(ranks of the policy, GPUs of the engines)."""
        if self.config.train.colocate_all:
            yield gpus, gpus
            return
        left = gpus - self.config.critic_ranks
        for quarters in (1, 2, 3):
            if (ranks := left * quarters // 4) and left > ranks:
                yield ranks, left - ranks

    def _nodes(self, ranks: int) -> dict[str, int] | None:
        """Nodes of as many GPUs as the configuration's; fewer than one are one small one; None if some are left."""
        per_node = min(self.config.actor.num_gpus_per_node, ranks)
        if ranks % per_node:
            return None
        return {"actor.num_nodes": ranks // per_node, "actor.num_gpus_per_node": per_node}

    def _trainings(self, nodes: dict[str, int], engines: dict[str, int]) -> Iterator[tuple[dict[str, Any], RunConfig]]:
        ranks, per_node = nodes["actor.num_nodes"] * nodes["actor.num_gpus_per_node"], nodes["actor.num_gpus_per_node"]
        stages = [n for n in range(1, _MOST_STAGES + 1) if self.shape.num_layers % n == 0]
        for tp, pp, cp in itertools.product(_DEGREES, stages, _DEGREES):
            if tp > per_node or ranks % (tp * pp * cp):
                continue
            for vp, recompute, budget in itertools.product(_CHUNKS if pp > 1 else (1,), _RECOMPUTES, self._budgets(cp)):
                options = nodes | {
                    "megatron.tensor_parallel_size": tp,
                    "megatron.sequence_parallel_enable": tp > 1,
                    "megatron.pipeline_parallel_size": pp,
                    "megatron.context_parallel_size": cp,
                    "megatron.virtual_pipeline_size": vp,
                    **recompute,
                    **budget,
                }
                config = with_options(self.config, {**options, **engines})
                if not self._broken(config):
                    yield options, config

    def _budgets(self, cp: int) -> Iterator[dict[str, int]]:
        """Token budgets: room for the longest sequence, for twice as much, and what the configuration says."""
        train = self.config.train
        if not train.dynamic_batch_enable:
            yield {}
            return
        least = math.ceil(self.config.data.max_len / cp / 128) * 128
        forward = self.config.rollout.max_tokens_per_gpu or train.max_tokens_per_gpu
        for tokens in sorted({least, 2 * least, max(least, train.max_tokens_per_gpu)}):
            yield {"train.max_tokens_per_gpu": tokens, "rollout.max_tokens_per_gpu": max(forward, tokens)}

    def _engine_options(self, gpus: int) -> Iterator[dict[str, int]]:
        per_node = min(self.config.actor.num_gpus_per_node, gpus)
        for tp in _DEGREES:
            if gpus % tp == 0 and tp <= per_node:
                yield {"vllm.num_engines": gpus // tp, "vllm.tensor_parallel_size": tp}

    def _broken(self, config: RunConfig) -> list[Violation]:
        return [*shape_violations(config, self.shape, _ACTOR), *(v for rule in RULES for v in rule(config))][:1]

    # ---- one layout -----------------------------------------------------------------------------------------------

    def _candidate(self, options: Options, config: RunConfig) -> Candidate:
        policy, engines = policy_in(config, self.shape), self._engines(config)
        critic = critic_in(config, self._value_shape) if config.has_critic else None
        found = moments(config, self.work, policy, critic, self._engine_parts(engines))
        concurrency = self.clock.concurrency(engines)
        fits = concurrency > 0 and all(moment.total <= FULL * self.clock.gpu.memory for moment in found)
        seconds = self._seconds(config, policy, critic, engines) if fits else None
        return Candidate(options, policy, engines, found, host_memory(config, policy), concurrency, seconds)

    @cached_property
    def _value_shape(self) -> ModelShape:
        path = self.config.critic.model_name_or_path or self.config.actor.model_name_or_path or ""
        return read_value_shape(path, self.config.ds.value_head_prefix)

    def _engines(self, config: RunConfig) -> Engines:
        tp, fp8 = config.vllm.tensor_parallel_size, config.fp8.rollout_enable
        weights = engine_weights(self.shape, self.parameters, tp, fp8)
        share = int(config.gpu_memory_utilization * self.clock.gpu.memory)
        cache = max(0, share - weights - self._engine_room)
        most = config.vllm.max_num_seqs or _MOST_REQUESTS
        return Engines(config.vllm.num_engines, tp, cache, most, config.vllm.enable_prefix_caching, fp8)

    @property
    def _engine_room(self) -> int:
        return int(self.assumed.engine_gib * 2**30)

    def _engine_parts(self, engines: Engines) -> dict[str, int]:
        weights = engine_weights(self.shape, self.parameters, engines.tensor_parallel_size, engines.fp8)
        return {
            "engine: weights": weights,
            "engine: KV cache": engines.kv_bytes,
            "engine: activations, CUDA graphs (estimate)": self._engine_room,
        }

    def activations_by_mode(self, candidate: Candidate) -> dict[str, int]:
        """Bytes of activations of the first stage for each recompute mode, everything else being equal."""
        config = with_options(self.config, candidate.options)
        modes = {"none": Recompute(), "selective: mlp": Recompute("selective", ("mlp",)), "full": Recompute("full")}
        return {name: activation_bytes(config, self.work, candidate.policy, 0, mode) for name, mode in modes.items()}

    def disk(self) -> dict[str, int]:
        """Bytes of checkpoints that are kept."""
        return checkpoints(self.config, self.parameters)

    def _seconds(
        self, config: RunConfig, policy: TrainedModel, critic: TrainedModel | None, engines: Engines
    ) -> Seconds:
        clock, training = self.clock, policy.training
        rollout = clock.rollout(engines)
        logprobs, train = clock.logprobs(training), clock.train(training, policy.fullest)
        sync = clock.sync(training.layout.world_size <= training.near_ranks)
        sleeps = config.train.colocate_all and config.ds.enable_sleep
        moves = clock.moves(policy.fullest) if sleeps else 0.0
        if critic is not None:
            own = self._critic_clock(critic)
            together = sum if self.critic_takes_turns else max
            logprobs = together((logprobs, own.logprobs(critic.training)))
            train = together((train, own.train(critic.training, critic.fullest)))
            moves += own.moves(critic.fullest) if sleeps else 0.0
        if config.max_staleness > 0:  # engines sample while the policy is trained
            rollout = max(0.0, rollout - logprobs - train)
        return Seconds(rollout, logprobs, train, sync, moves, self.assumed.fixed_s)

    def _critic_clock(self, critic: TrainedModel) -> Clock:
        work = dataclasses.replace(self.work, scored_by=1)
        return dataclasses.replace(self.clock, shape=critic.shape, parameters=critic.parameters, work=work)


_MEGATRON = (
    "tensor_parallel_size", "sequence_parallel_enable", "pipeline_parallel_size", "context_parallel_size",
    "virtual_pipeline_size", "recompute",
)  # fmt: skip


def _order(candidate: Candidate) -> tuple[float, ...]:
    """Steps that differ by less than the model of seconds knows are as good as equal: then the layout whose copies take
    the fewest ranks is ahead, and of those the one that takes least memory. What does not fit comes last."""
    if candidate.seconds is None:  # the nearest to fitting first
        return math.inf, candidate.fullest.total if candidate.concurrency else math.inf
    alike = int(math.log(candidate.seconds.step) / math.log(1 + ALIKE))
    return alike, candidate.policy.training.layout.model_parallel_size, candidate.fullest.total, candidate.seconds.step


def _double(gpus: int, per_node: int) -> int:
    """Twice as many; whole nodes where that is more than one."""
    return 2 * gpus if 2 * gpus <= per_node else -(-2 * gpus // per_node) * per_node


def with_options(config: RunConfig, options: Options) -> RunConfig:
    """The configuration with other values of options of the form section.leaf; no rule is asked."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in options.items():
        section, leaf = name.split(".")
        sections.setdefault(section, {})[leaf] = value
    changed = {name: getattr(config, name).model_copy(update=leaves) for name, leaves in sections.items()}
    return config.model_copy(update=changed)


def binding(candidate: Candidate, memory: int) -> str:
    """One sentence: what keeps the step from being shorter, and how full the GPU is."""
    seconds = candidate.seconds
    if seconds is None:
        moment = candidate.fullest
        if candidate.concurrency == 0 and moment.total <= FULL * memory:
            return "the KV cache of an engine does not hold one of the longest sequences"
        return f"memory while {moment.doing}: {moment.largest} is the largest part"
    phases = dataclasses.asdict(seconds)
    longest = max(phases, key=lambda name: phases[name])
    fullest = candidate.fullest
    return (
        f"{longest} takes most of a step ({phases[longest] / seconds.step:.0%}); memory is fullest while "
        f"{fullest.doing}, {fullest.total / memory:.0%} of a GPU, and {fullest.largest} is the largest part of that"
    )
