"""Searches all layouts of a run on a number of GPUs, the fewest GPUs that suffice, and the most
helpful changes.

The configuration's own rules decide whether a layout is allowed, so a run accepts every layout that
plan writes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any

from openrlhf_ext.config import RunConfig, Violation, value_of
from openrlhf_ext.config.model_rules import divisible, shape_violations
from openrlhf_ext.config.rules import LAYOUT_RULES
from openrlhf_ext.megatron.layout import PIPELINE_ENDS
from openrlhf_ext.options import is_set
from openrlhf_ext.planning.candidate import (
    ACTOR,
    CRITIC,
    REWARDS,
    SHARE,
    Candidate,
    Costs,
    Models,
    Options,
    PlanError,
    order,
    with_options,
)
from openrlhf_ext.planning.memory import TrainedModel, moments, param_bytes
from openrlhf_ext.ranks.shared_gpu import state_bytes

_DEGREES = (1, 2, 4, 8)
_MOST_STAGES, _CHUNKS = 16, (1, 2, 4)
_MOST_GPUS, _FEW_NODES = 4096, 8
SIZES = tuple(f"megatron.{axis}_parallel_size" for axis in ("tensor", "pipeline", "context"))
EXPERTS = ("megatron.expert_parallel_size", "megatron.expert_tensor_parallel_size")
"""Sizes of a mixture. A layout deals the experts over ranks and splits none, unless the run says
otherwise."""
ENDS = tuple(f"megatron.{name}" for name in PIPELINE_ENDS)
_SEQUENCE, _CHUNKED = "megatron.sequence_parallel_enable", "megatron.virtual_pipeline_size"
_ENGINES, _ENGINE_SIZE, _RECOMPUTE = (
    "vllm.num_engines",
    "vllm.tensor_parallel_size",
    "megatron.recompute",
)
CHOSEN = (*SIZES, EXPERTS[0], _CHUNKED, _SEQUENCE, *ENDS, _ENGINES, _ENGINE_SIZE)
"""Options of the run that a layout replaces, unless the command line gives them."""
_KEPT = (*CHOSEN, EXPERTS[1], _RECOMPUTE, "train.max_tokens_per_gpu", "actor.num_nodes")
_SHOWN = ("actor.num_nodes", "actor.num_gpus_per_node", *CHOSEN, _RECOMPUTE)
SHARES = (0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
"""Shares of a GPU for its engine, tried if the run sets none."""
SHARING = {"train.colocate_all": True, "ds.enable_sleep": True, "vllm.enable_sleep": True}
"""Options for policy and engines on the same GPUs."""
DYNAMIC = {"train.dynamic_batch_enable": True}
_LENGTH_STEP, _MOST_TOKENS = 1024, 1 << 20
_OTHER_GPUS = ("H200", "B200")


@dataclass(frozen=True)
class Planner(Costs):
    """Plans layouts of a run in place of the configured one.

    ``coarse``: tries only layouts that often include the best one, with context parallelism of 1 or
    of this degree. ``free``: also tries sizes other than those on the command line. ``own``: plans
    for the run's GPUs, with its engines and all sizes that it sets.
    """

    coarse: int = 0
    free: bool = False
    own: bool = False

    @cached_property
    def kept(self) -> dict[str, Any]:
        """Sizes that every layout keeps because the command line gives them."""
        if self.own:
            names = [
                name
                for name in (*SIZES, *EXPERTS, _SEQUENCE, _RECOMPUTE)
                if is_set(self.config, name)
            ]
        else:
            names = [name for name in _KEPT if self._on_command_line(name) and not self.free]
        return {name: value_of(self.config, name) for name in names}

    @property
    def replaced(self) -> dict[str, Any]:
        """Sizes from a file that layouts replace."""
        names = [
            name for name in CHOSEN if is_set(self.config, name) and not self._on_command_line(name)
        ]
        return {name: value_of(self.config, name) for name in names}

    def _on_command_line(self, name: str) -> bool:
        return self.config.sources.get(name, "").startswith("command line")

    def _tried(self, name: str, values: Sequence[Any]) -> Sequence[Any]:
        return (self.kept[name],) if name in self.kept else values

    @property
    def is_allowed(self) -> bool:
        return not self._broken(self.config)

    def _broken(self, config: RunConfig) -> list[Violation]:
        return [*self._models_broken(config), *(v for rule in LAYOUT_RULES for v in rule(config))][
            :1
        ]

    def _models_broken(self, config: RunConfig) -> Iterator[Violation]:
        yield from shape_violations(config, self.shape, ACTOR)
        if config.has_critic:
            yield from divisible(
                CRITIC, self.shape_of(CRITIC), "critic.megatron.{}".format, config.critic_megatron
            )
        if config.has_reward_model:
            yield from divisible(
                REWARDS, self.shape_of(REWARDS), "megatron.{}".format, config.even_megatron
            )

    def unmet(self) -> Iterator[str]:
        """Yields the reasons why no layout allows the kept sizes."""
        per_node = self.config.actor.num_gpus_per_node
        for name, what in (
            (_ENGINE_SIZE, "an engine stays"),
            (SIZES[0], "ranks that share a layer stay"),
        ):
            if (size := self.kept.get(name, 1)) > per_node:
                yield (
                    f"{name} must not exceed actor.num_gpus_per_node: {what} within a node; got "
                    f"{size} and {per_node}"
                )
        yield from (
            one.message
            for one in self._models_broken(self.config)
            if self.kept.keys() & set(one.options)
        )

    # ---- layouts

    def candidates(self, gpus: int) -> list[Candidate]:
        """Returns all layouts of the run on ``gpus`` GPUs that the rules allow; those that fit come
        first, the fastest ahead."""
        return sorted(self._allowed(gpus), key=order)

    def _allowed(self, gpus: int, *, if_states_fit: bool = False) -> Iterator[Candidate]:
        for ranks, engine_gpus in self._divisions(gpus):
            nodes = self._nodes(ranks)
            engines = [*self._engine_options(engine_gpus)] if nodes else []
            allowed = None
            for options, config in (
                self._trainings(nodes, engines[0], if_states_fit) if nodes and engines else ()
            ):
                # The rules of the engines do not depend on the policy's degrees, so one check
                # suffices.
                if allowed is None:
                    allowed = [
                        one for one in engines if not self._broken(with_options(config, one))
                    ]
                models = self.models(config)
                for one in allowed:
                    yield self.with_best_share({**options, **one}, models)

    def layouts(self) -> Iterator[Candidate]:
        """Yields the layouts of the run on its own GPUs with its engines, which keep the options
        that the run sets."""
        for options, config in self._trainings({}, {}, if_states_fit=True):
            yield self.candidate(options, config, self.models(config))

    def as_configured(self) -> Candidate:
        names = [name for name in _SHOWN if name not in EXPERTS or self.shape.num_experts]
        options = {name: value_of(self.config, name) for name in names}
        return self.candidate(options, self.config, self.models(self.config))

    def with_best_share(self, options: Options, models: Models | None = None) -> Candidate:
        """Returns the layout with the run's share for the engines, or else with the fastest share
        that leaves room; of equally fast shares, the largest."""
        config = with_options(self.config, options)
        models = models or self.models(config)
        if config.vllm.gpu_memory_utilization is not None:
            return self.candidate(options, config, models)
        tried = ({SHARE: share} for share in (SHARES[1::2] if self.coarse else SHARES))
        found = (
            self.candidate({**options, **share}, with_options(config, share), models)
            for share in tried
        )
        return min(found, key=lambda one: (one.short, one.tight(), *order(one)[1:2], -one.share))

    def critic_layouts(self) -> Iterator[Options]:
        """Yields separate sizes of the critic that its ranks allow, in order of the ranks of a
        copy; none if the run sets its sizes."""
        config, layers = self.config, self.shape_of(CRITIC).num_layers
        stages = [n for n in range(1, _MOST_STAGES + 1) if layers % n == 0]
        allowed = [
            (tp, pp, cp)
            for tp, pp, cp in itertools.product(_DEGREES, stages, _DEGREES)
            if tp <= config.critic.num_gpus_per_node and config.critic_ranks % (tp * pp * cp) == 0
        ]
        if not any(is_set(config, f"critic.{name}") for name in SIZES):
            for degrees in sorted(allowed, key=math.prod):
                yield {
                    f"critic.{name}": degree for name, degree in zip(SIZES, degrees, strict=True)
                }

    def _divisions(self, gpus: int) -> Iterator[tuple[int, int]]:
        """Yields (ranks of the policy, GPUs of the engines): all GPUs for both, or quarters, and
        whole nodes close to quarters and thirds."""
        if self.config.has_guide:
            raise PlanError(
                "guide.model_name_or_path: a guide's ranks and engines are not planned; leave "
                "it out"
            )
        if self.config.engines_share_gpus:
            yield gpus, gpus
            return
        left = gpus - (self.config.training_gpus - self.config.world_size)
        per_node = self.config.actor.num_gpus_per_node
        parts = [left * quarters // 4 for quarters in (1, 2, 3)]
        if _ENGINES in self.kept:
            parts = [left - self.kept[_ENGINES] * tp for tp in self._tried(_ENGINE_SIZE, _DEGREES)]
        elif "actor.num_nodes" in self.kept:
            parts = [self.config.world_size]
        elif left > per_node and not self.coarse:
            parts += [
                max(1, round(part * left / per_node)) * per_node
                for part in (1 / 4, 1 / 3, 1 / 2, 2 / 3, 3 / 4)
            ]
        yield from ((ranks, left - ranks) for ranks in dict.fromkeys(parts) if 0 < ranks < left)

    def _nodes(self, ranks: int) -> dict[str, int] | None:
        """Returns nodes with as many GPUs as the configuration's; fewer ranks make one smaller
        node; None if ranks are left over."""
        per_node = min(self.config.actor.num_gpus_per_node, ranks)
        if ranks % per_node or ranks // per_node not in self._tried(
            "actor.num_nodes", (ranks // per_node,)
        ):
            return None
        return {"actor.num_nodes": ranks // per_node, "actor.num_gpus_per_node": per_node}

    def _engine_options(self, gpus: int) -> Iterator[dict[str, int]]:
        per_node = min(self.config.actor.num_gpus_per_node, gpus)
        for tp in self._tried(_ENGINE_SIZE, _DEGREES):
            if (
                gpus % tp == 0
                and tp <= per_node
                and gpus // tp in self._tried(_ENGINES, (gpus // tp,))
            ):
                yield {_ENGINES: gpus // tp, _ENGINE_SIZE: tp}

    def _trainings(
        self, nodes: dict[str, int], engines: dict[str, int], if_states_fit: bool
    ) -> Iterator[tuple[dict[str, Any], RunConfig]]:
        """Yields the options of the policy's layouts on these nodes that the rules allow, with the
        resulting configuration."""
        base = with_options(self.config, nodes)
        ranks, per_node = base.world_size, base.actor.num_gpus_per_node
        stages = _DEGREES if self.coarse else range(1, _MOST_STAGES + 1)
        contexts = sorted({1, self.coarse}) if self.coarse else _DEGREES
        degrees = (
            self._tried(name, tried)
            for name, tried in zip(SIZES, (_DEGREES, stages, contexts), strict=True)
        )
        recomputes = ({},) if _RECOMPUTE in self.kept else self._recomputes
        for tp, pp, cp in itertools.product(*degrees):
            if tp > per_node or ranks % (tp * pp * cp):
                continue
            experts = [
                ep
                for ep in self._expert_sizes(tp, pp, cp, ranks, per_node)
                if not if_states_fit or self._states_fit(tp, pp, ep, ranks)
            ]
            tried = itertools.product(experts, self._chunks(pp), recomputes, self._budgets(cp))
            for ep, chunks, recompute, budget in tried:
                cut = {**dict(zip(SIZES, (tp, pp, cp), strict=True)), **chunks, _SEQUENCE: tp > 1}
                dealt = {EXPERTS[0]: ep} if self.shape.num_experts else {}
                for options in self._cut({**nodes, **cut, **dealt, **recompute, **budget}):
                    options |= {
                        name: value
                        for name, value in self.kept.items()
                        if name in (_SEQUENCE, *ENDS)
                    }
                    config = with_options(self.config, {**options, **engines})
                    if not self._broken(config):
                        yield options, config

    @property
    def _recomputes(self) -> tuple[dict[str, Any], ...]:
        return (
            {_RECOMPUTE: "none"},
            {
                _RECOMPUTE: "selective",
                "megatron.recompute_modules": (self.shape.mlp.recompute_module,),
            },
            {
                _RECOMPUTE: "full",
                "megatron.recompute_method": "uniform",
                "megatron.recompute_num_layers": 1,
            },
        )

    def _expert_sizes(self, tp: int, pp: int, cp: int, ranks: int, per_node: int) -> Sequence[int]:
        """Returns the numbers of ranks over which a mixture's experts may be dealt without
        splitting one.

        They stay within a node, where GPUs exchange tokens fastest, unless not even the states fit
        then.
        """
        experts, stage = self.shape.num_experts, ranks // pp
        if not experts:
            return (1,)
        shared = self.kept.get(EXPERTS[1]) or 1
        found = [
            ep for ep in range(1, experts + 1) if experts % ep == 0 and stage % (ep * shared) == 0
        ]
        if EXPERTS[0] in self.kept:
            return [ep for ep in found if ep == self.kept[EXPERTS[0]]]
        if tp * cp > 1 and EXPERTS[1] not in self.kept:
            # Experts that are on all ranks are split like the other layers.
            found = [ep for ep in found if ep > 1] or found
        within = [ep for ep in found if ep * shared <= per_node]
        if any(self._states_fit(tp, pp, ep, ranks) for ep in within):
            found = within
        return found

    def _chunks(self, stages: int) -> list[dict[str, int]]:
        if self.own:
            return [{}]
        tried = _CHUNKS[: 2 if self.coarse else 3] if stages > 1 else (1,)
        return [{_CHUNKED: chunks} for chunks in self._tried(_CHUNKED, tried)]

    def _budgets(self, cp: int) -> Iterator[dict[str, int]]:
        """Yields token budgets: the longest sequence, twice that, and the configuration's value."""
        train = self.config.train
        if self.own or not train.dynamic_batch_enable:
            yield {}
            return
        least = math.ceil(self.config.data.max_len / cp / 128) * 128
        forward = self.config.rollout.max_tokens_per_gpu or train.max_tokens_per_gpu
        tried = sorted({least, 2 * least, max(least, train.max_tokens_per_gpu)})
        for tokens in self._tried("train.max_tokens_per_gpu", tried):
            yield {
                "train.max_tokens_per_gpu": tokens,
                "rollout.max_tokens_per_gpu": max(forward, tokens),
            }

    def _cut(self, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the layout with equal stages, and with the first and last stage that make the
        slowest stage fastest, including the head."""
        policy = TrainedModel(with_options(self.config, options), self.work, self.shape)
        layers, layout = self.shape.num_layers, policy.layout
        stages, chunks = layout.pipeline_parallel_size, layout.virtual_pipeline_size
        if layers % (stages * chunks) == 0:
            yield options | {name: None for name in ENDS if value_of(self.config, name) is not None}
        head = round(self.clock.head_layers(policy), 1) if stages > 1 else 0.0
        if stages > 1 and (ends := balanced_ends(layers, stages, chunks, head)) is not None:
            yield options | dict(zip(ENDS, ends, strict=True))

    def _states_fit(self, tp: int, pp: int, ep: int, ranks: int) -> bool:
        """Whether the states alone could fit: a quick bound that rejects nothing that fits."""
        of_experts, size = (
            self.shape.num_layers * self.shape.mlp.expert_weights,
            param_bytes(self.config.megatron),
        )
        shared = ep * (self.kept.get(EXPERTS[1]) or (tp if ep == 1 else 1))
        least = 0
        for entries, cut in ((self.parameters - of_experts, tp * pp), (of_experts, shared * pp)):
            mean = entries // cut  # the fullest rank holds at least that many
            shards = ranks // cut if self.config.megatron.distributed_optimizer_enable else 1
            states = state_bytes(mean, size, shards, self.config.ds.optimizer_on_host)
            least += mean * size if self.config.ds.lora.enabled else states
        return least <= self.clock.gpu.memory

    # ---- longest sequences, fewest GPUs, most helpful changes

    @property
    def to_host(self) -> Options:
        """Options that move Adam's states to host memory; {} if they are there already, or cannot
        move."""
        config = self.config
        stays = config.ds.lora.enabled or not config.megatron.distributed_optimizer_enable
        return {} if config.ds.adam_offload or stays else {"ds.adam_offload": True}

    def longest(self, candidate: Candidate, changes: Options = MappingProxyType({})) -> int:
        """Returns the tokens of the longest sequence (prompt and response) with which a layout
        still fits.

        In steps of 1,024, up to the model's window; 0 if not even the shortest fits. ``changes``:
        further options.
        """
        base, window = (
            with_options(self.config, {**candidate.options, **changes}),
            self.shape.max_positions,
        )
        planned, most = self.config.data.max_len, window or _MOST_TOKENS
        tried = sorted({*range(_LENGTH_STEP, most, _LENGTH_STEP), min(planned, most), most})
        prompt = planned - self.work.longest

        def fits(tokens: int) -> bool:
            config = with_options(
                base, {"data.max_len": tokens, "rollout.max_new_tokens": max(1, tokens - prompt)}
            )
            one = dataclasses.replace(self, config=config, response_tokens=None, prompt_tokens=None)
            return one.candidate({}, config, one.models(config)).short == 0

        return [0, *tried][bisect_left(tried, True, key=lambda tokens: not fits(tokens))]

    def fewest_gpus(self) -> int | None:
        """Returns the smallest number of GPUs on which a layout fits: within one node, then whole
        nodes.

        Returns None if no layout fits on up to 4,096 GPUs. Above eight nodes, the search assumes
        that more GPUs fit if fewer do.
        """
        per_node = self.config.actor.num_gpus_per_node
        if not any(self._engine_fits(tp) for tp in _DEGREES):
            return None
        few = [*range(1, per_node), *(per_node * nodes for nodes in range(1, _FEW_NODES + 1))]
        if (found := next(filter(self.fits, few), None)) is not None:
            return found
        many = range(few[-1] + per_node, _MOST_GPUS + 1, per_node)
        enough = bisect_left(many, True, key=self.fits)
        return many[enough] if enough < len(many) else None

    def fits(self, gpus: int) -> bool:
        return any(candidate.seconds for candidate in self._allowed(gpus, if_states_fit=True))

    def _engine_fits(self, tp: int) -> bool:
        """Whether an engine of ``tp`` GPUs fits without a policy, with one of the longest
        sequences."""
        given = self.config.vllm.gpu_memory_utilization
        for share in SHARES if given is None else (given,):
            engines = self.clock.engines(
                with_options(self.config, {_ENGINE_SIZE: tp, SHARE: share})
            )
            sampling, *_ = moments(self.config, self.sent, engines.parts, ({}, {}))
            if engines.lacking <= 0 and sampling.total <= self.clock.gpu.memory:
                return True
        return False

    def with_(self, options: Options, **changes: Any) -> Planner:
        """Returns a planner of the run with other options, and with other fields."""
        return dataclasses.replace(self, config=with_options(self.config, options), **changes)

    def levers(self, gpus: int, cp: int) -> Iterator[tuple[str, Candidate]]:
        """Yields the most helpful changes, each described in words, with the best layout that a
        coarse search finds with it."""
        config, free = self.config, [name for name in self.kept if name.startswith("megatron.")]
        sharing = {} if config.engines_share_gpus or config.has_guide else SHARING
        dynamic = {} if config.train.dynamic_batch_enable else DYNAMIC
        changes: dict[str, Options] = {
            "policy and engines on the same GPUs": sharing,
            "dynamic batches": dynamic,
            "both": sharing | dynamic if sharing and dynamic else {},
            "adapters instead of all weights": {}
            if config.ds.lora.enabled
            else {"ds.lora.rank": 16},
            "Adam's states in host memory": self.to_host,
        }
        tries = [
            (f"{what} ({_words(new)})", self.with_(new), gpus)
            for what, new in changes.items()
            if new
        ]
        if free:
            tries.append((f"{', '.join(free)} left to plan", self.with_({}, free=True), gpus))
        tries.append((f"{2 * gpus} {self.gpu_name}", self, 2 * gpus))
        for name in _OTHER_GPUS:
            if name != self.gpu_name:
                tries.append(
                    (
                        f"{gpus} {name}",
                        self.with_({"megatron.gpu_memory_gib": None}, gpu_name=name),
                        gpus,
                    )
                )
        for what, planner, count in tries:
            if found := dataclasses.replace(planner, coarse=cp).candidates(count):
                yield what, found[0]


def _words(options: Options) -> str:
    return " ".join(
        f"--{name}" if value is True else f"--{name} {value}" for name, value in options.items()
    )


@cache
def balanced_ends(
    num_layers: int, stages: int, chunks: int, head: float
) -> tuple[int | None, int] | None:
    """Returns the layers of the first stage (None: the same as the middle ones) and of the last
    stage for the fastest slowest stage; None if even stages are as fast.

    ``head``: number of layers that take as long as the last stage's head. Ties go to the smallest
    first stage, which keeps most activations.
    """
    slowest = num_layers / stages + head if num_layers % (stages * chunks) == 0 else math.inf
    best, ends = (slowest, math.inf), None
    for last in range(chunks, num_layers, chunks):
        for middle in range(chunks, num_layers, chunks) if stages > 2 else (num_layers - last,):
            first = num_layers - last - middle * (stages - 2)
            found = max(first, middle, last + head), float(first)
            if first > 0 and first % chunks == 0 and found[0] < slowest and found < best:
                best, ends = found, (None if first == middle else first, last)
    return ends
