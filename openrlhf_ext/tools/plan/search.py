"""Every layout of a run on so many GPUs: what it holds, how long a step takes, what binds.

A layout is a set of options on top of the run's configuration. Whether it is allowed is asked of the configuration's
own rules, so that what plan writes is what a run takes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from openrlhf_ext.config import RunConfig, Violation, value_of
from openrlhf_ext.config.estimator import old_logprobs
from openrlhf_ext.config.files import model_folder, unknown_model
from openrlhf_ext.config.model_rules import divisible, shape_violations
from openrlhf_ext.config.rules import LAYOUT_RULES
from openrlhf_ext.inputs import nearest
from openrlhf_ext.megatron.layout import PIPELINE_ENDS, ParallelLayout
from openrlhf_ext.megatron.model.shape import ModelShape, read_model_shape, read_value_shape
from openrlhf_ext.options import Section, is_set, nest
from openrlhf_ext.options.sections import Megatron
from openrlhf_ext.tools.plan.memory import (
    GIB,
    REWARD,
    Moment,
    StateOptions,
    Trained,
    TrainedModel,
    activation_bytes,
    adapter_entries,
    checkpoints,
    critic_in,
    frozen_weights,
    host_memory,
    moments,
    param_bytes,
    policy_in,
    policy_training,
    rank_states,
    sends_adapters,
    trained,
)
from openrlhf_ext.tools.plan.seconds import GPUS, Assumptions, Clock, Engines, Seconds, Sync, Workload

_ACTOR, _CRITIC = "actor.model_name_or_path", "critic.model_name_or_path"
_DEGREES = (1, 2, 4, 8)
_MOST_STAGES, _CHUNKS = 16, (1, 2, 4)
_RECOMPUTES: tuple[dict[str, Any], ...] = (
    {"megatron.recompute": "none"},
    {"megatron.recompute": "selective", "megatron.recompute_modules": ("mlp",)},
    {"megatron.recompute": "full", "megatron.recompute_method": "uniform", "megatron.recompute_num_layers": 1},
)
_MOST_GPUS, _FEW_NODES = 4096, 8
ALIKE = 0.05
"""Steps that differ by a smaller share count as equally long."""
TIGHT = 0.95
"""A layout that takes a larger share of a GPU comes after all others that fit: parts of the sum are estimates."""
SHARE = "vllm.gpu_memory_utilization"
SHARES = (0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
"""Of a GPU for its engine, tried where the run sets none."""
KV_CACHE = "engine: KV cache"
SIZES = tuple(f"megatron.{axis}_parallel_size" for axis in ("tensor", "pipeline", "context"))
ENDS = tuple(f"megatron.{name}" for name in PIPELINE_ENDS)
_SEQUENCE, _CHUNKED = "megatron.sequence_parallel_enable", "megatron.virtual_pipeline_size"
_ENGINE_SIZE = "vllm.tensor_parallel_size"
CHOSEN = (
    "megatron.tensor_parallel_size", "megatron.pipeline_parallel_size", "megatron.context_parallel_size",
    "megatron.virtual_pipeline_size", "megatron.sequence_parallel_enable", *ENDS, "vllm.num_engines",
    "vllm.tensor_parallel_size",
)  # fmt: skip
"""Options of the run that a layout replaces, unless the command line gives them."""
_KEPT = (*CHOSEN, "megatron.recompute", "train.max_tokens_per_gpu", "actor.num_nodes")
SHARING = {"train.colocate_all": True, "ds.enable_sleep": True, "vllm.enable_sleep": True}
"""What policy and engines on the same GPUs take."""

DYNAMIC = {"train.dynamic_batch_enable": True}
_OTHER_GPUS = ("H200", "B200")
_SAME_CARD = 0.85  # of two names, with one slip; A100-24 is no A100-40

Options = Mapping[str, Any]


class PlanError(ValueError):
    """The run is of a kind that is not planned."""


@dataclass(frozen=True)
class Candidate:
    """A layout with what it holds and takes.

    Attributes:
        moments: the fullest GPU while engines sample and while the policy is trained, and while a critic is; other
            GPUs each time unless all are colocated.
        host: bytes of a node's memory, by part.
        share: of a GPU for its engine (``vllm.gpu_memory_utilization``).
        concurrency: requests that an engine works on at a time; 0 if its cache does not hold the longest sequence.
        short: bytes that a GPU or an engine's share lacks; 0 where the layout fits.
        seconds: of a step; None where the layout does not fit.
    """

    options: Options
    policy: TrainedModel
    engines: Engines
    moments: tuple[Moment, ...]
    host: Mapping[str, int]
    share: float
    concurrency: int
    memory: int
    short: int
    seconds: Seconds | None

    @property
    def fullest(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)

    def tight(self, moment: Moment | None = None) -> bool:
        """Whether a moment, or the fullest, leaves so little that the estimates in the sum decide."""
        return (moment or self.fullest).total > TIGHT * self.memory


@dataclass(frozen=True)
class Planner:
    """Plans one run on one kind of GPU, in place of the layout that its configuration has.

    Mean lengths are by default 0.6 of the longest response, and what is left of ``data.max_len`` beside it, at most
    512; ``device_memory``: bytes of the GPU that is there, or ``megatron.gpu_memory_gib``, or those of the data sheet.
    ``coarse``: only layouts are tried that the best one is often among, without context parallelism or with so much;
    ``free``: also with other sizes than the command line gives.
    """

    config: RunConfig
    gpu_name: str = "H100"
    response_tokens: int | None = None
    prompt_tokens: int | None = None
    assumed: Assumptions = Assumptions()
    device_memory: int | None = None
    coarse: int = 0
    free: bool = False

    def __post_init__(self) -> None:
        if self.gpu_name not in GPUS:
            near = nearest(self.gpu_name, GPUS, cutoff=_SAME_CARD)
            hint = f"did you mean {near}?" if near else "of another card give the nearest one, and its memory as "
            raise PlanError(
                f"--gpu must be one of {', '.join(GPUS)}: got {self.gpu_name}; {hint}"
                f"{'' if near else 'megatron.gpu_memory_gib'}"
            )

    # ---- the run ------------------------------------------------------------------------------------------------

    @cached_property
    def shape(self) -> ModelShape:
        """Of the policy. Raises PlanError: the model is a hub name, of which nothing is known here."""
        return read_model_shape(self._folder(self.config.actor.model_name_or_path or ""))

    @staticmethod
    def _folder(name: str) -> str:
        if (folder := model_folder(name)) is None:
            raise PlanError(f"{_ACTOR}: {unknown_model(name)}")
        return folder

    @cached_property
    def parameters(self) -> int:
        return rank_states(self.shape, ParallelLayout(1), 0, StateOptions()).parameters

    @cached_property
    def adapters(self) -> int:
        """Entries of the policy's adapters."""
        return adapter_entries(self.config, self.shape)

    @cached_property
    def sent(self) -> int:
        """Bytes of an update of the engines: all weights, or adapters in the engines' data type."""
        if sends_adapters(self.config):
            return self.adapters * (2 if self.config.rollout_dtype == "bf16" else 4)
        return self.parameters * param_bytes(self.config.megatron)

    @cached_property
    def work(self) -> Workload:
        config, rollout = self.config, self.config.rollout
        longest = rollout.max_new_tokens or config.data.max_len // 2
        prompt = self.prompt_tokens or min(512, config.data.max_len - longest)
        response = self.response_tokens or max(1, int(0.6 * longest))
        batch = min(config.train.batch_size, config.samples_per_rollout)
        return Workload(
            rollout.batch_size, rollout.n_samples_per_prompt, prompt, response, longest, batch,
            config.train.max_epochs, scored_by=(old_logprobs(config)[0] == "policy") + config.has_reference,
            frozen=config.ds.lora.enabled,
        )  # fmt: skip

    @cached_property
    def kept(self) -> dict[str, Any]:
        """Sizes that the command line gives: every layout has them."""
        return {name: value_of(self.config, name) for name in _KEPT if self._is_kept(name) and not self.free}

    @property
    def replaced(self) -> dict[str, Any]:
        """Sizes that a file gives, which layouts have in the place of."""
        names = [name for name in CHOSEN if is_set(self.config, name) and not self._is_kept(name)]
        return {name: value_of(self.config, name) for name in names}

    def _is_kept(self, name: str) -> bool:
        return self.config.sources.get(name, "").startswith("command line")

    def _tried(self, name: str, values: Sequence[Any]) -> Sequence[Any]:
        return (self.kept[name],) if name in self.kept else values

    @cached_property
    def clock(self) -> Clock:
        gpu = GPUS[self.gpu_name]
        given = int((self.config.megatron.gpu_memory_gib or 0) * GIB)
        gpu = dataclasses.replace(gpu, memory=self.device_memory or given or gpu.memory)
        return Clock(gpu, self.shape, self.parameters, self.work, self.sent, self.assumed)

    # ---- what there is --------------------------------------------------------------------------------------------

    def candidates(self, gpus: int) -> list[Candidate]:
        """All layouts of the run on so many GPUs that the rules allow; those that fit come first, the fastest ahead."""
        return sorted(self._allowed(gpus), key=order)

    def _allowed(self, gpus: int, *, if_states_fit: bool = False) -> Iterator[Candidate]:
        for ranks, engine_gpus in self._divisions(gpus):
            nodes = self._nodes(ranks)
            engines = [*self._engine_options(engine_gpus)] if nodes else []
            allowed = None
            for options, config in self._trainings(nodes, engines[0], if_states_fit) if nodes and engines else ():
                if allowed is None:  # what one side's rules say does not depend on the other's degrees
                    allowed = [one for one in engines if not self._broken(with_options(config, one))]
                models = self._trained(config)
                for one in allowed:
                    yield self._with_best_share({**options, **one}, with_options(config, one), models)

    def as_configured(self) -> Candidate:
        config = self.config
        return self._candidate({name: value_of(config, name) for name in _SHOWN}, config, self._trained(config))

    def timed(self) -> Seconds:
        """Of the layout as configured, whether or not it fits: for runs of others, which did."""
        models = self._trained(self.config)
        return self._seconds(self.config, models.policy, models.critic, self.clock.engines(self.config))

    def layouts(self) -> Iterator[Candidate]:
        """Those of the run on its own GPUs, with the engines that it has, that keep to what it sets."""
        for options in self._own_options():
            config = with_options(self.config, options)
            if not self._broken(config):
                yield self._candidate(options, config, self._trained(config))

    def critic_layouts(self) -> Iterator[Options]:
        """Sizes of the critic's own that its ranks allow, the fewest ranks of a copy ahead; none where it has some."""
        config, shape = self.config, self._value_shape
        stages = [n for n in range(1, _MOST_STAGES + 1) if shape.num_layers % n == 0]
        allowed = [
            (tp, pp, cp)
            for tp, pp, cp in itertools.product(_DEGREES, stages, _DEGREES)
            if tp <= config.critic.num_gpus_per_node and config.critic_ranks % (tp * pp * cp) == 0
        ]
        if not any(is_set(config, f"critic.{name}") for name in SIZES):
            for degrees in sorted(allowed, key=math.prod):
                yield {f"critic.{name}": degree for name, degree in zip(SIZES, degrees, strict=True)}

    def with_best_share(self, candidate: Candidate) -> Candidate:
        """With a smaller share of a GPU for its engine, where the run sets none and shares GPUs."""
        config = with_options(self.config, candidate.options)
        return self._with_best_share(candidate.options, config, self._trained(config))

    def _own_options(self) -> Iterator[Options]:
        config, ranks = self.config, self.config.world_size
        degrees = [
            (value_of(config, name),) if is_set(config, name) else tried
            for name, tried in zip(SIZES, (_DEGREES, range(1, _MOST_STAGES + 1), _DEGREES), strict=True)
        ]  # fmt: skip
        recomputes = ({},) if is_set(config, "megatron.recompute") else _RECOMPUTES
        for tp, pp, cp in itertools.product(*degrees):
            if tp > config.actor.num_gpus_per_node or ranks % (tp * pp * cp) or not self._states_fit(tp, pp, ranks):
                continue
            sequence = {} if is_set(config, _SEQUENCE) else {_SEQUENCE: tp > 1}
            for recompute in recomputes:
                yield from self._cut({**dict(zip(SIZES, (tp, pp, cp), strict=True)), **sequence, **recompute})

    @property
    def is_allowed(self) -> bool:
        return not self._broken(self.config)

    @property
    def critic_takes_turns(self) -> bool:
        """Whether a critic works before or after the policy, not at the same time (driver/loop.py, ``train``)."""
        return self.config.train.colocate_all

    @property
    def configured_gpus(self) -> int:
        config = self.config
        return config.training_gpus + (0 if config.engines_share_gpus else config.engine_workers)

    def distinct(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        best: dict[ParallelLayout, Candidate] = {}
        for candidate in candidates:
            best.setdefault(candidate.policy.training.layout, candidate)
        return list(best.values())

    def fewest_gpus(self) -> int | None:
        """The smallest number of GPUs on which a layout fits: of one node, then whole nodes.

        None if none does on up to 4,096. Above eight nodes, more GPUs are taken to do where fewer do.
        """
        per_node = self.config.actor.num_gpus_per_node
        if not any(self._engine_fits(tp) for tp in _DEGREES):
            return None
        few = [*range(1, per_node), *(per_node * nodes for nodes in range(1, _FEW_NODES + 1))]
        if (found := next(filter(self.fits, few), None)) is not None:
            return found
        failed = few[-1]
        while failed <= _MOST_GPUS // 2 and not self.fits(2 * failed):
            failed *= 2
        if failed > _MOST_GPUS // 2:
            return None
        return next(filter(self.fits, range(failed + per_node, 2 * failed + 1, per_node)))

    def fits(self, gpus: int) -> bool:
        return any(candidate.seconds for candidate in self._allowed(gpus, if_states_fit=True))

    def _engine_fits(self, tp: int) -> bool:
        """Whether an engine of so many GPUs fits without a policy, with one of the longest sequences."""
        given = self.config.vllm.gpu_memory_utilization
        for share in SHARES if given is None else (given,):
            config = with_options(self.config, {"vllm.tensor_parallel_size": tp, SHARE: share})
            engines = self.clock.engines(config)
            sampling, *_ = moments(config, self.sent, self._engine_parts(engines), ({}, {}))
            if self.clock.concurrency(engines) and sampling.total <= self.clock.gpu.memory:
                return True
        return False

    def with_(self, options: Options, gpu_name: str | None = None, coarse: int = 0) -> Planner:
        """Of the run with other options, and on another GPU."""
        config = with_options(self.config, options)
        return dataclasses.replace(self, config=config, gpu_name=gpu_name or self.gpu_name, coarse=coarse)

    def levers(self, gpus: int, cp: int) -> Iterator[tuple[str, Candidate]]:
        """What may help most, in words, with the best layout that a coarse search finds with it."""
        config, free = self.config, [name for name in self.kept if name.startswith("megatron.")]
        sharing = {} if config.engines_share_gpus or config.has_guide else SHARING
        dynamic = {} if config.train.dynamic_batch_enable else DYNAMIC
        changes: dict[str, Options] = {
            "policy and engines on the same GPUs": sharing, "dynamic batches": dynamic,
            "both": sharing | dynamic if sharing and dynamic else {},
            "adapters instead of all weights": {} if config.ds.lora.enabled else {"ds.lora.rank": 16},
        }  # fmt: skip
        tries = [(f"{what} ({_words(new)})", self.with_(new, coarse=cp), gpus) for what, new in changes.items() if new]
        if free:
            tries.append((f"{', '.join(free)} left to plan", dataclasses.replace(self, coarse=cp, free=True), gpus))
        tries.append((f"{2 * gpus} {self.gpu_name}", self.with_({}, coarse=cp), 2 * gpus))
        for name in _OTHER_GPUS:
            if name != self.gpu_name:
                tries.append((f"{gpus} {name}", self.with_({"megatron.gpu_memory_gib": None}, name, cp), gpus))
        for what, planner, count in tries:
            if found := planner.candidates(count):
                yield what, found[0]

    def _divisions(self, gpus: int) -> Iterator[tuple[int, int]]:
        """(ranks of the policy, GPUs of the engines): all; or quarters, and whole nodes next to quarters and thirds."""
        if self.config.has_guide:
            raise PlanError("guide.model_name_or_path: a guide's ranks and engines are not planned; leave it out")
        if self.config.engines_share_gpus:
            yield gpus, gpus
            return
        left = gpus - (self.config.training_gpus - self.config.world_size)
        per_node = self.config.actor.num_gpus_per_node
        parts = [left * quarters // 4 for quarters in (1, 2, 3)]
        if "vllm.num_engines" in self.kept:
            parts = [left - self.kept["vllm.num_engines"] * tp for tp in self._tried(_ENGINE_SIZE, _DEGREES)]
        elif "actor.num_nodes" in self.kept:
            parts = [self.config.world_size]
        elif left > per_node and not self.coarse:
            parts += [max(1, round(part * left / per_node)) * per_node for part in (1 / 4, 1 / 3, 1 / 2, 2 / 3, 3 / 4)]
        yield from ((ranks, left - ranks) for ranks in dict.fromkeys(parts) if 0 < ranks < left)

    def _nodes(self, ranks: int) -> dict[str, int] | None:
        """Nodes of as many GPUs as the configuration's; fewer than one are one small one; None if some are left."""
        per_node = min(self.config.actor.num_gpus_per_node, ranks)
        if ranks % per_node or ranks // per_node not in self._tried("actor.num_nodes", (ranks // per_node,)):
            return None
        return {"actor.num_nodes": ranks // per_node, "actor.num_gpus_per_node": per_node}

    def _trainings(
        self, nodes: dict[str, int], engines: dict[str, int], if_states_fit: bool
    ) -> Iterator[tuple[dict[str, Any], RunConfig]]:
        ranks, per_node = nodes["actor.num_nodes"] * nodes["actor.num_gpus_per_node"], nodes["actor.num_gpus_per_node"]
        stages = _DEGREES if self.coarse else range(1, _MOST_STAGES + 1)
        contexts = sorted({1, self.coarse}) if self.coarse else _DEGREES
        degrees = (self._tried(name, tried) for name, tried in zip(SIZES, (_DEGREES, stages, contexts), strict=True))
        recomputes = ({},) if "megatron.recompute" in self.kept else _RECOMPUTES
        for tp, pp, cp in itertools.product(*degrees):
            if tp > per_node or ranks % (tp * pp * cp) or (if_states_fit and not self._states_fit(tp, pp, ranks)):
                continue
            chunks = self._tried(_CHUNKED, _CHUNKS[: 2 if self.coarse else 3] if pp > 1 else (1,))
            for vp, recompute, budget in itertools.product(chunks, recomputes, self._budgets(cp)):
                cut = {**dict(zip(SIZES, (tp, pp, cp), strict=True)), _CHUNKED: vp, _SEQUENCE: tp > 1}
                for options in self._cut({**nodes, **cut, **recompute, **budget}):
                    options |= {name: value for name, value in self.kept.items() if name in (_SEQUENCE, *ENDS)}
                    config = with_options(self.config, {**options, **engines})
                    if not self._broken(config):
                        yield options, config

    def _cut(self, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """With stages of equally many layers, and with the first and last stage with which the slowest one, the head of
        the last included, has least to do."""
        training = policy_training(with_options(self.config, options))
        stages, chunks = training.layout.pipeline_parallel_size, training.layout.virtual_pipeline_size
        if self.shape.num_layers % (stages * chunks) == 0:
            yield options | {name: None for name in ENDS if value_of(self.config, name) is not None}
        head = round(self.clock.head_layers(training), 1) if stages > 1 else 0.0
        if stages > 1 and (ends := balanced_ends(self.shape.num_layers, stages, chunks, head)) is not None:
            yield options | dict(zip(ENDS, ends, strict=True))

    def _states_fit(self, tp: int, pp: int, ranks: int) -> bool:
        """Whether the states alone could fit: a bound that is quick to tell and refuses nothing that fits."""
        mean = self.parameters // (tp * pp)  # the fullest rank holds at least as many
        shards = ranks // (tp * pp) if self.config.megatron.distributed_optimizer_enable else 1
        size = param_bytes(self.config.megatron)
        if self.config.ds.lora.enabled:
            return mean * size <= self.clock.gpu.memory
        return mean * (size + 4) + mean * (12 if size == 2 else 8) // shards <= self.clock.gpu.memory

    def _budgets(self, cp: int) -> Iterator[dict[str, int]]:
        """Token budgets: room for the longest sequence, for twice as much, and what the configuration says."""
        train = self.config.train
        if not train.dynamic_batch_enable:
            yield {}
            return
        least = math.ceil(self.config.data.max_len / cp / 128) * 128
        forward = self.config.rollout.max_tokens_per_gpu or train.max_tokens_per_gpu
        tried = sorted({least, 2 * least, max(least, train.max_tokens_per_gpu)})
        for tokens in self._tried("train.max_tokens_per_gpu", tried):
            yield {"train.max_tokens_per_gpu": tokens, "rollout.max_tokens_per_gpu": max(forward, tokens)}

    def _engine_options(self, gpus: int) -> Iterator[dict[str, int]]:
        per_node = min(self.config.actor.num_gpus_per_node, gpus)
        for tp in self._tried(_ENGINE_SIZE, _DEGREES):
            if gpus % tp == 0 and tp <= per_node and gpus // tp in self._tried("vllm.num_engines", (gpus // tp,)):
                yield {"vllm.num_engines": gpus // tp, _ENGINE_SIZE: tp}

    def _broken(self, config: RunConfig) -> list[Violation]:
        return [*self._models_broken(config), *(v for rule in LAYOUT_RULES for v in rule(config))][:1]

    def _models_broken(self, config: RunConfig) -> Iterator[Violation]:
        yield from shape_violations(config, self.shape, _ACTOR)
        if config.has_critic:
            yield from divisible(_CRITIC, self._value_shape, "critic.megatron.{}".format, config.critic_megatron)
        if config.has_reward_model:
            yield from divisible(
                "reward.model_name_or_path", self._reward_shape, "megatron.{}".format, config.even_megatron
            )

    # ---- one layout -----------------------------------------------------------------------------------------------

    def _trained(self, config: RunConfig) -> Trained:
        critic = critic_in(config, self._value_shape) if config.has_critic else None
        frozen = {}
        if config.reference_ranks:
            frozen["reference"] = frozen_weights(config, self.shape, config.layout_on(config.reference_ranks))
        if config.has_reward_model and not (config.reward.offload and config.train.colocate_all):
            frozen[REWARD] = frozen_weights(config, self._reward_shape, config.reward_layout)
        if config.guide_ranks:
            frozen["guide"] = frozen_weights(config, self._guide_shape, config.layout_on(config.guide_ranks))
        return trained(config, self.work, policy_in(config, self.shape), critic, frozen)

    def _with_best_share(self, options: Options, config: RunConfig, models: Trained) -> Candidate:
        """The layout with the engines' share that the run sets, or else with the best one: the first in the order."""
        if config.vllm.gpu_memory_utilization is not None:
            return self._candidate(options, config, models)
        tried = (with_options(config, {SHARE: share}) for share in (SHARES[1::2] if self.coarse else SHARES))
        found = (self._candidate({**options, SHARE: one.gpu_memory_utilization}, one, models) for one in tried)
        return min(found, key=order)

    def _candidate(self, options: Options, config: RunConfig, models: Trained) -> Candidate:
        engines, memory = self.clock.engines(config), self.clock.gpu.memory
        engine = self._engine_parts(engines)
        found = moments(config, self.sent, engine, models.policy_parts, models.critic_parts, models.frozen)
        concurrency = self.clock.concurrency(engines)
        pool = self.clock.engine_weights(engines) + self.clock.engine_sampler(engines)
        needed = pool + self.clock.engine_room + self.clock.longest_bytes(engines)
        needed -= int(config.gpu_memory_utilization * memory)
        short = max(0, needed, *(moment.total - memory for moment in found))
        seconds = None if short else self._seconds(config, models.policy, models.critic, engines)
        return Candidate(
            options, models.policy, engines, found, host_memory(config, models.policy, pool),
            config.gpu_memory_utilization, concurrency, memory, short, seconds,
        )  # fmt: skip

    @cached_property
    def _reward_shape(self) -> ModelShape:
        return read_value_shape(
            self._folder(self.config.reward.model_name_or_path or ""), self.config.ds.value_head_prefix
        )

    @cached_property
    def _guide_shape(self) -> ModelShape:
        return read_model_shape(self._folder(self.config.guide.model_name_or_path or ""))

    @cached_property
    def _value_shape(self) -> ModelShape:
        return read_value_shape(self._folder(self.config.critic_model or ""), self.config.ds.value_head_prefix)

    def _engine_parts(self, engines: Engines) -> dict[str, int]:
        return {
            "engine: weights": self.clock.engine_weights(engines), KV_CACHE: engines.kv_bytes,
            "engine: sampler (requests x vocabulary)": self.clock.engine_sampler(engines),
            "engine: activations, CUDA graphs (estimate)": self.clock.engine_room,
        }  # fmt: skip

    def activations_by_mode(self, candidate: Candidate) -> dict[str, int]:
        """Bytes of activations of the first stage for each recompute mode, everything else being equal."""
        config = with_options(self.config, candidate.options)
        mlp = Megatron(recompute="selective", recompute_modules=("mlp",))
        modes = {"none": Megatron(), "selective: mlp": mlp, "full": Megatron(recompute="full")}
        return {name: activation_bytes(config, self.work, candidate.policy, 0, mode) for name, mode in modes.items()}

    def head_layers(self, candidate: Candidate) -> float:
        """How many layers take as long as the head, which the last stage holds too."""
        return self.clock.head_layers(candidate.policy.training)

    def syncs(self, candidate: Candidate) -> dict[str, Sync]:
        """Every way to send the weights."""
        return self.clock.syncs(with_options(self.config, candidate.options), candidate.policy, candidate.engines)

    def disk(self) -> dict[str, int]:
        return checkpoints(self.config, self.parameters, self.adapters)

    def _seconds(
        self, config: RunConfig, policy: TrainedModel, critic: TrainedModel | None, engines: Engines
    ) -> Seconds:
        clock = self.clock
        rollout = clock.rollout(engines)
        if self._last.get("policy") is not policy:  # the same beside all engines
            training = policy.training
            self._last.update(policy=policy, seconds=(clock.logprobs(training), clock.train(training, policy.fullest)))
        logprobs, train = self._last["seconds"]
        sync = clock.sync(config, policy, engines)
        sleeps = config.engines_share_gpus and config.ds.enable_sleep
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

    @cached_property
    def _last(self) -> dict[str, Any]:
        return {}

    def _critic_clock(self, critic: TrainedModel) -> Clock:
        work = dataclasses.replace(self.work, scored_by=1)
        return dataclasses.replace(self.clock, shape=critic.shape, parameters=critic.parameters, work=work)


_SHOWN = ("actor.num_nodes", "actor.num_gpus_per_node", *CHOSEN, "megatron.recompute")


@cache
def balanced_ends(num_layers: int, stages: int, chunks: int, head: float) -> tuple[int | None, int] | None:
    """Layers of the first (None: as many as those between) and of the last stage, whose head takes as long as so many
    layers, for the fastest slowest stage; of equals the one with the smallest first stage, which keeps most
    activations. None: even stages are as fast."""
    slowest = num_layers / stages + head if num_layers % (stages * chunks) == 0 else math.inf
    best, ends = (slowest, math.inf), None
    for last in range(chunks, num_layers, chunks):
        for middle in range(chunks, num_layers, chunks) if stages > 2 else (num_layers - last,):
            first = num_layers - last - middle * (stages - 2)
            found = max(first, middle, last + head), float(first)
            if first > 0 and first % chunks == 0 and found[0] < slowest and found < best:
                best, ends = found, (None if first == middle else first, last)
    return ends


def order(candidate: Candidate) -> tuple[float, ...]:
    """Steps that differ by less than the model of seconds knows are as good as equal: then the layout whose copies take
    the fewest ranks is ahead, and of those the one that takes least memory. What does not fit comes last."""
    if candidate.seconds is None:  # the nearest to fitting first
        return math.inf, candidate.short, candidate.fullest.total
    alike = int(math.log(candidate.seconds.step) / math.log(1 + ALIKE))
    ranks = candidate.policy.training.layout.model_parallel_size
    return candidate.tight(), alike, ranks, candidate.fullest.total, candidate.seconds.step


def _words(options: Options) -> str:
    return " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in options.items())


def with_options(config: RunConfig, options: Options) -> RunConfig:
    return _changed(config, nest(options))


def _changed(section: Any, tree: Mapping[str, Any]) -> Any:
    """A section with the leaves of a tree in the place of its own."""
    inner = {name: getattr(section, name) for name in tree}
    changed = {
        name: _changed(inner[name], value) if isinstance(inner[name], Section) else value
        for name, value in tree.items()
    }
    return section.model_copy(update=changed)


def binding(candidate: Candidate) -> str:
    """One sentence: what keeps the step from being shorter, and how full the GPU is."""
    seconds = candidate.seconds
    if seconds is None:
        return lacking(candidate)
    phases = dataclasses.asdict(seconds)
    longest = max(phases, key=lambda name: phases[name])
    named = f"{longest} (grading, waking up)" if longest == "other" else longest
    fullest = candidate.fullest
    tight = "; that is tight, and parts of the sum are estimates" if candidate.tight() else ""
    return (f"{named} takes most of a step ({phases[longest] / seconds.step:.0%}); memory is fullest while "
        f"{fullest.doing}, {fullest.total / candidate.memory:.0%} of a GPU, and {fullest.largest} is the largest part "
        f"of that{tight}")  # fmt: skip


def lacking(candidate: Candidate) -> str:
    """What does not fit: an engine into its share, or a GPU's parts into its memory."""
    moment, gib = candidate.fullest, 1 << 30
    if moment.total - candidate.memory < candidate.short:
        return (f"an engine lacks {candidate.short / gib:.1f} GiB of its share of a GPU ({SHARE} {candidate.share:g}) "
            "for its weights, activations and one of the longest sequences in its KV cache")  # fmt: skip
    if moment.doing == "sampling" and moment.largest == KV_CACHE:
        return (f"the engines' share of a GPU ({SHARE} {candidate.share:g}) leaves {candidate.short / gib:.1f} GiB too "
            "little for the rest")  # fmt: skip
    return (f"memory while {moment.doing}: {candidate.short / gib:.1f} GiB are missing, and {moment.largest} is the "
        "largest part")  # fmt: skip
