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
from openrlhf_ext.config.sections import Megatron
from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.megatron.model.shape import ModelShape, read_model_shape, read_value_shape
from openrlhf_ext.megatron.settings import Recompute
from openrlhf_ext.ranks.shared_gpu import ASLEEP_BYTES, RESERVE_BYTES
from openrlhf_ext.tools.plan.memory import Pass, StateOptions, States, activations, rank_states
from openrlhf_ext.tools.plan.seconds import (
    GPUS,
    Assumptions,
    Clock,
    Engines,
    Seconds,
    Training,
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
_FRAGMENTS = 0.1
"""Of the activations: what torch's allocator loses to fragments. An estimate."""
_MOST_GPUS = 4096
ALIKE = 0.05
"""Steps that differ by a smaller share count as equally long."""
FULL = 0.95
"""Share of a GPU that a layout may take: fragments, contexts and NCCL's buffers are estimates."""

Options = Mapping[str, Any]


class PlanError(ValueError):
    """The run is of a kind that is not planned."""


@dataclass(frozen=True)
class Moment:
    """What is on a GPU at a time, by part, in bytes; ``doing`` says when."""

    doing: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """All parts."""
        return sum(self.parts.values())

    @property
    def largest(self) -> str:
        """The part that takes most."""
        return max(self.parts, key=lambda name: self.parts[name])


@dataclass(frozen=True)
class Candidate:
    """A layout with what it holds and takes.

    Attributes:
        options: of the layout, by their names.
        moments: the fullest GPU while engines sample and while the policy is trained; two kinds of GPUs if they are
            apart.
        seconds: of a step; None where the layout does not fit.
        host: bytes of a node's memory, by part.
        concurrency: requests that an engine works on at a time; 0 if its cache does not hold the longest sequence.
    """

    options: Options
    training: Training
    engines: Engines
    states: tuple[States, ...]
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
            best.setdefault(candidate.training.layout, candidate)
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
        training, engines = self._training(config), self._engines(config)
        states = self._states(config)
        moments = self._moments(config, training, engines, states)
        concurrency = self.clock.concurrency(engines)
        fits = concurrency > 0 and all(moment.total <= FULL * self.clock.gpu.memory for moment in moments)
        seconds = self._seconds(config, training, engines, states) if fits else None
        host = self._host(config, states)
        return Candidate(options, training, engines, states, moments, host, concurrency, seconds)

    def _training(self, config: RunConfig) -> Training:
        train, megatron, dynamic = config.train, config.megatron, config.train.dynamic_batch_enable
        return Training(
            config.layout,
            Recompute(
                megatron.recompute, megatron.recompute_modules, megatron.recompute_method, megatron.recompute_num_layers
            ),
            train.max_tokens_per_gpu if dynamic else None,
            train.micro_batch_size,
            (config.rollout.max_tokens_per_gpu or train.max_tokens_per_gpu) if dynamic else None,
            config.rollout.micro_batch_size,
            config.actor.num_gpus_per_node,
            config.fp8.enable and not config.fp8.emulate,
        )

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

    def _states(self, config: RunConfig) -> tuple[States, ...]:
        """Of the ranks of each stage."""
        overlap = config.megatron.overlap_grad_reduce
        buckets = config.megatron.ddp_bucket_size or max(40_000_000, 1_000_000 * config.layout.data_parallel_size)
        options = StateOptions(
            _param_bytes(config.megatron),
            config.megatron.distributed_optimizer_enable,
            buckets if overlap else None,
            config.fp8.training_recipe,
        )
        return tuple(
            rank_states(self.shape, config.layout, stage, options)
            for stage in range(config.layout.pipeline_parallel_size)
        )

    def _critic(self, config: RunConfig) -> int:
        """Bytes of a critic's states on the fullest of its ranks."""
        if not config.has_critic:
            return 0
        path = config.critic.model_name_or_path or config.actor.model_name_or_path or ""
        shape, layout = read_value_shape(path, config.ds.value_head_prefix), config.critic_layout
        options = StateOptions(_param_bytes(config.megatron), config.megatron.distributed_optimizer_enable)
        return max(rank_states(shape, layout, stage, options).total for stage in range(layout.pipeline_parallel_size))

    def _moments(
        self, config: RunConfig, training: Training, engines: Engines, states: tuple[States, ...]
    ) -> tuple[Moment, ...]:
        sampling = self._sampling(engines)
        resident: dict[str, int] = {}
        shared = config.train.colocate_all
        if shared and config.vllm.enable_sleep:
            resident["the engine asleep (estimate)"] = ASLEEP_BYTES
        elif shared:
            resident |= {name: size for name, size in sampling.items() if name.startswith("engine")}
        if shared and (critic := self._critic(config)):
            resident["the critic's states"] = critic
        stages = [self._stage(config, training, stage, states[stage]) for stage in range(len(states))]
        heaviest = max(stages, key=lambda parts: sum(parts.values()))
        common = self._common(config)
        if shared and not (config.ds.enable_sleep and config.vllm.enable_sleep):
            fullest = max(states, key=lambda one: one.total)
            sampling |= {"states of the policy, which does not sleep": fullest.total}
        return Moment("sampling", sampling | common), Moment("training", heaviest | resident | common)

    def _sampling(self, engines: Engines) -> dict[str, int]:
        weights = engine_weights(self.shape, self.parameters, engines.tensor_parallel_size, engines.fp8)
        return {
            "engine: weights": weights,
            "engine: KV cache": engines.kv_bytes,
            "engine: activations, CUDA graphs (estimate)": self._engine_room,
        }

    def _common(self, config: RunConfig) -> dict[str, int]:
        return {
            "buckets of the weight sync": 2 * config.weight_sync.bucket_mib << 20,
            "CUDA contexts and NCCL (estimate)": RESERVE_BYTES,
        }

    def _stage(self, config: RunConfig, training: Training, stage: int, states: States) -> dict[str, int]:
        """What the ranks of a stage hold in training."""
        kept = self._activations(config, training, stage, training.recompute)
        parts = {
            "weights": states.weights,
            "gradients (fp32)": states.gradients,
            "optimizer": states.optimizer,
            "FP8 copies of weights": states.fp8_copies,
            "activations": kept,
            "fragments (estimate)": int(_FRAGMENTS * kept),
        }
        if stage == training.layout.pipeline_parallel_size - 1:
            parts["head: workspace, hidden states and their gradient"] = self._head(config, training)
        return {name: size for name, size in parts.items() if size}

    def _tokens(self, training: Training) -> int:
        """Of a training micro-batch on one rank: its budget, or as many of the longest sequences as it has."""
        if training.budget is not None:
            return training.budget
        return math.ceil(training.sequences * self.config.data.max_len / training.layout.context_parallel_size)

    def _activations(self, config: RunConfig, training: Training, stage: int, recompute: Recompute) -> int:
        tokens = self._tokens(training)
        samples = min(self.work.batch, self.work.samples)
        count = training.micro_batches(samples, self.work.length)
        work = Pass(tokens, config.data.max_len, "flash", _param_bytes(config.megatron), training.fp8, recompute)
        return activations(self.shape, training.layout, stage, work, count).peak

    def activations_by_mode(self, candidate: Candidate) -> dict[str, int]:
        """Bytes of activations of the first stage for each recompute mode, everything else being equal."""
        config = with_options(self.config, candidate.options)
        modes = {"none": Recompute(), "selective: mlp": Recompute("selective", ("mlp",)), "full": Recompute("full")}
        return {name: self._activations(config, candidate.training, 0, mode) for name, mode in modes.items()}

    def _head(self, config: RunConfig, training: Training) -> int:
        """Its workspace; hidden states of response tokens and their gradient; all logits, four times, where it is naive
        (docs/head.md)."""
        tokens = self._tokens(training) * self.work.response_tokens // self.work.length
        rows = (
            self.shape.padded_vocab_size(training.layout.tensor_parallel_size) // training.layout.tensor_parallel_size
        )
        naive = config.megatron.head == "naive"
        room = 4 * 4 * tokens * rows if naive else config.megatron.head_workspace_mib << 20
        return room + tokens * self.shape.hidden_size * 2 * _param_bytes(config.megatron)

    def _host(self, config: RunConfig, states: tuple[States, ...]) -> dict[str, int]:
        """Of a node, if all its ranks were the fullest."""
        fullest = max(states, key=lambda one: one.weights + one.optimizer)
        per_node = config.actor.num_gpus_per_node
        moved = fullest.weights + fullest.optimizer
        parts = {
            "states of sleeping ranks": per_node * moved if config.ds.enable_sleep else 0,
            "reference policy": per_node * fullest.weights if config.has_reference else 0,
            "checkpoint on its way to disk": per_node * moved if config.ckpt.async_enable and config.ckpt.saves else 0,
        }
        return {name: size for name, size in parts.items() if size}

    def disk(self) -> dict[str, int]:
        """Bytes of checkpoints that are kept."""
        ckpt, size = self.config.ckpt, _param_bytes(self.config.megatron)
        resumable = self.parameters * (size + 12 if size == 2 else 12)
        kept = ckpt.max_num if ckpt.saves else 0
        parts = {
            f"{kept} to resume from": 0 if ckpt.disable_ds else kept * resumable,
            f"{kept} in Hugging Face form": kept * self.parameters * size if ckpt.save_hf else 0,
            "the final one in Hugging Face form": self.parameters * size,
        }
        return {name: size for name, size in parts.items() if size}

    def _seconds(self, config: RunConfig, training: Training, engines: Engines, states: tuple[States, ...]) -> Seconds:
        clock, fullest = self.clock, max(states, key=lambda one: one.total)
        rollout = clock.rollout(engines)
        logprobs, train = clock.logprobs(training), clock.train(training, fullest)
        near = training.layout.world_size <= training.near_ranks
        sync = clock.sync(near)
        moves = clock.moves(fullest) if config.train.colocate_all and config.ds.enable_sleep else 0.0
        if config.max_staleness > 0:  # engines sample while the policy is trained
            rollout = max(0.0, rollout - logprobs - train)
        return Seconds(rollout, logprobs, train, sync, moves, self.assumed.fixed_s)


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
    return alike, candidate.training.layout.model_parallel_size, candidate.fullest.total, candidate.seconds.step


def _double(gpus: int, per_node: int) -> int:
    """Twice as many; whole nodes where that is more than one."""
    return 2 * gpus if 2 * gpus <= per_node else -(-2 * gpus // per_node) * per_node


def _param_bytes(megatron: Megatron) -> int:
    return 2 if megatron.param_dtype == "bf16" else 4


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
