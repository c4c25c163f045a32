"""Costs of a run's layout on one kind of GPU: memory of the fullest GPUs, seconds of a step, and
the limiting part.

A layout is a set of options on top of the run's configuration.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from openrlhf_ext.config import RunConfig, value_of
from openrlhf_ext.config.drafts import read_head
from openrlhf_ext.config.estimator import old_logprobs
from openrlhf_ext.config.files import model_folder, unknown_model
from openrlhf_ext.inputs import did_you_mean
from openrlhf_ext.megatron.model.shape import ModelShape, read_model_shape, read_value_shape
from openrlhf_ext.options import Section, nest
from openrlhf_ext.planning.memory import (
    GIB,
    REWARD,
    TOTAL,
    Moment,
    TrainedModel,
    Workload,
    adapter_entries,
    entries,
    frozen_weights,
    host_memory,
    moments,
    param_bytes,
    sends_adapters,
)
from openrlhf_ext.planning.seconds import GPUS, KV_CACHE, Assumptions, Clock, Engines, Seconds

ACTOR, CRITIC, REWARDS, GUIDE = (
    f"{name}.model_name_or_path" for name in ("actor", "critic", "reward", "guide")
)
ALIKE = 0.05
"""Steps that differ by a smaller fraction count as equally long."""
TIGHT = 0.9
"""A layout that takes a larger fraction of a GPU comes after all others that fit: parts of the sum
are estimates."""
SHARE = "vllm.gpu_memory_utilization"
_SAME_CARD = 0.85  # of two names, with one typo; A100-24 is not A100-40

Options = Mapping[str, Any]


class PlanError(ValueError):
    """The planner does not support this kind of run."""


@dataclass(frozen=True)
class Candidate:
    """A layout with its memory and its seconds.

    Attributes:
        moments: the fullest GPU while engines sample, while the policy trains, and while a critic
            trains; different GPUs each time unless all are colocated.
        host: bytes of a node's memory, by part.
        share: fraction of a GPU for its engine (``vllm.gpu_memory_utilization``).
        concurrency: requests that an engine processes at a time; 0 if its cache does not hold the
            longest sequence.
        memory: bytes of a GPU.
        short: bytes that a GPU or an engine's share lacks; 0 if the layout fits.
        seconds: of a step; None if the layout does not fit.
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
        return max(self.moments, key=TOTAL)

    @property
    def decisive(self) -> tuple[Moment, ...]:
        """The moments that decide whether a layout fits: an engine with its own GPU takes its
        share, whatever it or the policy needs."""
        return self.moments if self.policy.config.engines_share_gpus else self.moments[1:]

    @property
    def fits(self) -> bool:
        return all(moment.total <= self.memory for moment in self.decisive)

    @property
    def stands(self) -> bool:
        """Whether the layout fits without activations, which shorter sequences reduce."""
        return all(moment.standing.total <= self.memory for moment in self.decisive)

    def tight(self, moment: Moment | None = None) -> bool:
        """Whether a moment, or the fullest one, leaves so little memory that the estimates in the
        sum decide."""
        return (moment or self.fullest).total > TIGHT * self.memory

    @property
    def binding(self) -> str:
        """One sentence: which phase limits the step, and how full the GPU is."""
        if self.seconds is None:
            return self.lacking
        phases, fullest = dataclasses.asdict(self.seconds), self.fullest
        longest = max(phases, key=lambda name: phases[name])
        named = f"{longest} (grading, waking up)" if longest == "other" else longest
        tight = "; that is tight, and parts of the sum are estimates" if self.tight() else ""
        return (
            f"{named} takes most of a step ({phases[longest] / self.seconds.step:.0%}); memory "
            f"is fullest while {fullest.doing}, {fullest.total / self.memory:.0%} of a GPU, and "
            f"{fullest.largest} is the largest part of that{tight}"
        )

    @property
    def lacking(self) -> str:
        """The part that does not fit: an engine in its share, or a GPU's parts in its memory."""
        moment, short = self.fullest, f"{self.short / GIB:.1f} GiB"
        if moment.total - self.memory < self.short:
            return (
                f"an engine needs {short} more than its share of a GPU ({SHARE} {self.share:g}) "
                "for its weights, activations and a KV cache for one of the longest sequences"
            )
        if moment.doing == "sampling" and moment.largest == KV_CACHE:
            return (
                f"the engines' share of a GPU ({SHARE} {self.share:g}) leaves {short} too little "
                "for the rest"
            )
        return (
            f"memory is {short} short while {moment.doing}, and {moment.largest} is the largest "
            "part"
        )


def order(candidate: Candidate) -> tuple[float, ...]:
    """Sort key of layouts.

    Steps that differ by less than the model's accuracy count as equal; then the layout whose copies
    take the fewest ranks comes first, and among those the one whose training takes the least
    memory. Layouts that do not fit come last.
    """
    if candidate.seconds is None:  # the nearest to fitting first
        return math.inf, candidate.short, candidate.fullest.total
    alike = int(math.log(candidate.seconds.step) / math.log(1 + ALIKE))
    ranks, tight = candidate.policy.layout.copy_ranks, any(map(candidate.tight, candidate.decisive))
    return tight, alike, ranks, max(map(TOTAL, candidate.moments[1:])), candidate.seconds.step


@dataclass(frozen=True)
class Models:
    """The models of a layout, the same for all engines.

    ``frozen``: bytes of the models that only score and have separate ranks, by name.
    """

    clock: Clock
    policy: TrainedModel
    critic: TrainedModel | None
    frozen: Mapping[str, int]

    @cached_property
    def seconds(self) -> tuple[float, float, float]:
        """Seconds of log-probs, of training, and of moving states to host memory and back."""
        clock, config = self.clock, self.policy.config
        trained = [self.policy, *([self.critic] if self.critic else [])]
        # A colocated critic takes turns with the policy: driver/loop.py, ``train``.
        together: Any = sum if config.train.colocate_all else max
        sleeps = config.engines_share_gpus and config.ds.enable_sleep
        moves = sum(map(clock.moves, trained)) if sleeps else 0.0
        return together(map(clock.logprobs, trained)), together(map(clock.train, trained)), moves


@dataclass(frozen=True)
class Costs:
    """Memory and seconds of one run's layouts on one kind of GPU.

    The mean response length defaults to 0.6 of the longest response, the mean prompt length to the
    rest of ``data.max_len``, at most 512. ``device_memory``: bytes of the present GPU; otherwise
    ``megatron.gpu_memory_gib`` or the data sheet applies.
    """

    config: RunConfig
    gpu_name: str = "H100"
    response_tokens: int | None = None
    prompt_tokens: int | None = None
    assumed: Assumptions = Assumptions()
    device_memory: int | None = None

    def __post_init__(self) -> None:
        if self.gpu_name not in GPUS:
            other = (
                "for another card, give the closest one, and its memory as megatron.gpu_memory_gib"
            )
            hint = did_you_mean(self.gpu_name, GPUS, other, cutoff=_SAME_CARD)
            raise PlanError(f"--gpu must be one of {', '.join(GPUS)}: got {self.gpu_name}; {hint}")

    # ---- the run

    @property
    def shape(self) -> ModelShape:
        return self.shape_of(ACTOR)

    def shape_of(self, option: str) -> ModelShape:
        """The shape of a model of the run. Raises PlanError for a hub name whose config.json is not
        on this machine."""
        if option not in self._shapes:
            name = self.config.critic_model if option == CRITIC else value_of(self.config, option)
            if (folder := model_folder(name or "")) is None:
                raise PlanError(f"{ACTOR}: {unknown_model(name or '')}")
            has_value = option in (CRITIC, REWARDS)
            value_head = self.config.ds.value_head_prefix
            self._shapes[option] = (
                read_value_shape(folder, value_head) if has_value else read_model_shape(folder)
            )
        return self._shapes[option]

    @cached_property
    def _shapes(self) -> dict[str, ModelShape]:
        return {}

    @property
    def parameters(self) -> int:
        return entries(self.shape)

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
            rollout.batch_size,
            rollout.n_samples_per_prompt,
            prompt,
            response,
            longest,
            batch,
            config.train.max_epochs,
            scored_by=(old_logprobs(config)[0] == "policy") + config.has_reference,
            frozen=config.ds.lora.enabled,
        )

    @cached_property
    def clock(self) -> Clock:
        gpu, given = GPUS[self.gpu_name], int((self.config.megatron.gpu_memory_gib or 0) * GIB)
        gpu = dataclasses.replace(gpu, memory=self.device_memory or given or gpu.memory)
        drafts = self.config.vllm.speculative
        return Clock(
            gpu,
            self.shape,
            self.work,
            self.sent,
            self.assumed,
            self.config.ds.optimizer_on_host,
            read_head(drafts.path) if drafts.method == "eagle3" and drafts.path else None,
        )

    # ---- one layout

    def timed(self) -> Seconds:
        """Seconds of the configured layout, whether or not it fits: for published runs, which did
        fit."""
        return self._seconds(self.models(self.config), self.clock.engines(self.config))

    def models(self, config: RunConfig) -> Models:
        critic, frozen = None, {}
        if config.has_critic:
            work = dataclasses.replace(self.work, scored_by=1)
            critic = TrainedModel(config, work, self.shape_of(CRITIC), is_critic=True)
        if config.reference_ranks:
            frozen["reference"] = frozen_weights(
                config, self.shape, config.layout_on(config.reference_ranks)
            )
        if config.has_reward_model and not (config.reward.offload and config.train.colocate_all):
            frozen[REWARD] = frozen_weights(config, self.shape_of(REWARDS), config.reward_layout)
        if config.guide_ranks:
            frozen["guide"] = frozen_weights(
                config, self.shape_of(GUIDE), config.layout_on(config.guide_ranks)
            )
        return Models(self.clock, TrainedModel(config, self.work, self.shape), critic, frozen)

    def candidate(self, options: Options, config: RunConfig, models: Models) -> Candidate:
        engines, memory = self.clock.engines(config), self.clock.gpu.memory
        critic = models.critic.parts if models.critic else None
        found = moments(
            config, self.sent, engines.parts, models.policy.parts, critic, models.frozen
        )
        short = max(0, engines.lacking, *(moment.total - memory for moment in found))
        on_its_gpus = models.critic if config.train.colocate_all else None
        return Candidate(
            options,
            models.policy,
            engines,
            found,
            host_memory(config, models.policy, engines.pool, on_its_gpus),
            config.gpu_memory_utilization,
            self.clock.concurrency(engines),
            memory,
            short,
            None if short else self._seconds(models, engines),
        )

    def _seconds(self, models: Models, engines: Engines) -> Seconds:
        rollout, (logprobs, train, moves) = self.clock.rollout(engines), models.seconds
        sync = self.clock.sync(models.policy, engines)
        if self.config.max_staleness > 0:  # engines sample while the policy is trained
            rollout = max(0.0, rollout - logprobs - train)
        return Seconds(rollout, logprobs, train, sync, moves, self.assumed.fixed_s)


def with_options(config: RunConfig, options: Options) -> RunConfig:
    return _changed(config, nest(options))


def _changed(section: Any, tree: Mapping[str, Any]) -> Any:
    """A section in which the leaves of ``tree`` replace its own values."""
    inner = {name: getattr(section, name) for name in tree}
    changed = {
        name: _changed(inner[name], value) if isinstance(inner[name], Section) else value
        for name, value in tree.items()
    }
    return section.model_copy(update=changed)
