"""The whole configuration of a run: one frozen model whose paths are the option names, with its defaults resolved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import PrivateAttr

from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.options import Int, Section, added, is_set, no_meaning, not_yet
from openrlhf_ext.options.sections import (
    FP8,
    Actor,
    Algo,
    Ckpt,
    Critic,
    Data,
    DeepSpeed,
    Eval,
    Guide,
    Logger,
    Megatron,
    Profile,
    Ref,
    Reward,
    Rollout,
    Train,
    Vllm,
    WeightSync,
)
from openrlhf_ext.options.sections.algo import CUSTOM, GUIDED

_PROBE_LENGTH = 160
_PROBE_TOLERANCE = {"fp32": 1e-4, "bf16": 0.1, "fp8": 0.4}
_FP8_THRESHOLD = (2.0,)  # token-level, clipped: as verl publishes FP8 rollouts (its docs/low_precision/fp8.md)

# OpenRLHF's flags that set an option of the estimator. They act only when given: their defaults are OpenRLHF's, an
# estimator has defaults of its own (DAPO clips at 0.2/0.28, OpenRLHF at 0.2/0.2).
FLAG_KEYS: dict[str, tuple[str, ...]] = {
    "actor.eps_clip": ("clip_low", "clip_high"),
    "actor.eps_clip_low_high": ("clip_low", "clip_high"),
    "actor.dual_clip": ("dual_clip",),
    "actor.loss_agg_mode": ("agg",),
    "algo.advantage.no_std_norm": ("normalize_std",),
    "algo.advantage.gamma": ("gamma",),
    "algo.advantage.lambd": ("lambd",),
    "reward.overlong_buffer_len": ("length_penalty",),
}


@dataclass(frozen=True)
class FlagOption:
    """An option of the estimator that was set by one of OpenRLHF's flags."""

    key: str
    value: Any
    flag: str


class RunConfig(Section):
    """Options of ``openrlhf_ext.cli.train_ppo_ray``, typed; built and checked by :func:`load_config`.

    Which device the run uses cannot be read from a configuration. Options that only mean something on a GPU
    (``vllm.gpu_memory_utilization``, ``vllm.sync_backend nccl``) or only on a CPU (``vllm.kv_cache_mib``) are therefore
    checked where the device is known: by the rollout engines and the policy actors at their start.
    """

    actor: Actor = Actor()
    megatron: Megatron = Megatron()
    fp8: FP8 = FP8()
    vllm: Vllm = Vllm()
    weight_sync: WeightSync = WeightSync()
    rollout: Rollout = Rollout()
    reward: Reward = Reward()
    algo: Algo = Algo()
    train: Train = Train()
    data: Data = Data()
    eval: Eval = Eval()
    ckpt: Ckpt = Ckpt()
    logger: Logger = Logger()
    profile: Profile = Profile()
    ref: Ref = Ref()
    guide: Guide = Guide()
    critic: Critic = Critic()
    ds: DeepSpeed = DeepSpeed()
    local_rank: Int = no_meaning(
        -1, "rank on the node, set by DeepSpeed's launcher", why="Ray places every rank", instead="leave it out"
    )
    use_ms: bool = not_yet(
        False,
        "load models and data from ModelScope",
        why="only local folders and the Hugging Face hub are read",
        instead="download first and give the local paths",
    )
    dry_run: bool = added(False, "say whether the run would start, print memory, places and configuration, and stop")
    dry_run_json: bool = added(False, "a dry run for programs: print options, layout and versions as JSON, and stop")

    _warnings: tuple[str, ...] = PrivateAttr(default=())
    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Settings that are allowed but deserve a look; meant to be logged once at the start."""
        return self._warnings

    @property
    def sources(self) -> dict[str, str]:
        """Where each option that was set got its value: ``{"train.seed": "run.yaml:12"}``."""
        return dict(self._sources)

    @property
    def world_size(self) -> int:
        """Ranks of the policy."""
        return self.actor.num_nodes * self.actor.num_gpus_per_node

    @property
    def layout(self) -> ParallelLayout:
        """How the policy is laid out over its ranks."""
        return self.layout_on(self.world_size)

    def layout_on(self, ranks: int) -> ParallelLayout:
        """A model laid out as the policy over so many ranks."""
        return ParallelLayout.of(self.megatron, ranks)

    @property
    def training_label(self) -> str:
        """What of the policy's layers progress lines, records and checkpoints must not hide; mostly empty."""
        return self.fp8.training_label

    @property
    def has_critic(self) -> bool:
        """Whether the estimator needs values."""
        return self.algo.advantage.estimator == "gae"

    @property
    def critic_layout(self) -> ParallelLayout:
        """How the critic is laid out over its ranks."""
        return ParallelLayout.of(self.critic_megatron, self.critic_ranks)

    @property
    def critic_megatron(self) -> Megatron:
        """``megatron.*`` as it holds for the critic: with ``critic.megatron.*`` where that is set."""
        own = {name: value for name, value in self.critic.megatron if value is not None}
        layout = self.megatron.model_copy(update=own)
        without: dict[str, Any] = {"sequence_parallel_enable": False} if layout.tensor_parallel_size == 1 else {}
        without |= {"virtual_pipeline_size": 1} if layout.pipeline_parallel_size == 1 else {}
        return layout.model_copy(update={name: value for name, value in without.items() if name not in own})

    @property
    def critic_ranks(self) -> int:
        """Ranks of the critic; 0 without one."""
        return self.critic.num_nodes * self.critic.num_gpus_per_node if self.has_critic else 0

    @property
    def has_reference(self) -> bool:
        """Whether a KL penalty needs a reference policy."""
        return self.algo.kl.init_coef > 0 or bool(self.own_options.get("kl_coef"))

    @property
    def reference_ranks(self) -> int:
        """Ranks of the reference's own; 0 where there is none or it is a copy in the policy's host memory."""
        colocated = self.train.colocate_actor_ref or self.train.colocate_all or self.ref.offload
        if not self.has_reference or colocated or not self.ref.model_fields_set & {"num_nodes", "num_gpus_per_node"}:
            return 0
        return self.ref.num_nodes * self.ref.num_gpus_per_node

    @property
    def has_guide(self) -> bool:
        """Whether a guiding policy samples a part of every group."""
        return self.algo.advantage.estimator == GUIDED and self.guide.model_name_or_path is not None

    @property
    def guide_ranks(self) -> int:
        """Ranks of the guide's own; 0 where there is none or it is a copy in the policy's host memory."""
        if not self.has_guide or not self.guide.model_fields_set & {"num_nodes", "num_gpus_per_node"}:
            return 0
        return self.guide.num_nodes * self.guide.num_gpus_per_node

    @property
    def guide_samples(self) -> int:
        """Completions of each group that the guide samples."""
        return self.guide.samples_per_prompt if self.has_guide else 0

    @property
    def model_options(self) -> list[str]:
        """Names of the options that give the models of this run."""
        sections = ["actor", *(["critic"] if self.has_critic else []), *(["guide"] if self.has_guide else [])]
        return [f"{section}.model_name_or_path" for section in sections]

    @property
    def training_ranks(self) -> int:
        """Ranks of policy, critic, reference and guide."""
        return self.world_size + self.critic_ranks + self.reference_ranks + self.guide_ranks

    @property
    def engine_workers(self) -> int:
        """Workers of the rollout engines, those of the guide included."""
        guide_engines = self.guide.num_engines if self.has_guide else 0
        return (self.vllm.num_engines + guide_engines) * self.vllm.tensor_parallel_size

    @property
    def samples_per_rollout(self) -> int:
        """Responses in one batch of rollouts."""
        return self.rollout.batch_size * self.rollout.n_samples_per_prompt

    @property
    def gpu_memory_utilization(self) -> float:
        """``vllm.gpu_memory_utilization`` with its default resolved."""
        if self.vllm.gpu_memory_utilization is not None:
            return self.vllm.gpu_memory_utilization
        return 0.8 if self.train.colocate_all else 0.95

    @property
    def rollout_dtype(self) -> Literal["bf16", "fp32"]:
        """Data type of the engines, with ``vllm.dtype auto`` resolved."""
        return self.megatron.param_dtype if self.vllm.dtype == "auto" else self.vllm.dtype

    @property
    def probe_tolerance(self) -> float:
        """Largest difference of log-probs that rounding explains (nats), with its default resolved.

        A mean over the tokens of a text of the model's own (``rollout.probe``). fp32 on both sides agrees to 1e-4.
        SmolLM2-135M in bf16 differs by 0.016 to 0.035 between three implementations, with FP8 on one side by 0.13 to
        0.18; two exchanged layers make 0.47 (benchmarks/probe.py; docs/weight_sync.md).
        """
        if self.weight_sync.probe_tolerance is not None:
            return self.weight_sync.probe_tolerance
        if self.fp8.enable or self.fp8.rollout_enable:
            return _PROBE_TOLERANCE["fp8"]
        coarser = "bf16" if "bf16" in (self.megatron.param_dtype, self.rollout_dtype) else "fp32"
        return _PROBE_TOLERANCE[coarser]

    @property
    def repeat_tolerance(self) -> float:
        """How far the log-probs of unchanged weights may move (nats): under delayed FP8 scaling its scales do."""
        moves = self.fp8.enable and self.fp8.recipe == "delayed"
        return min(self.probe_tolerance, _PROBE_TOLERANCE["fp8" if moves else self.megatron.param_dtype])

    @property
    def probe_length(self) -> int:
        """Most tokens of the probe's text, with its default resolved; the engine generates one token after it."""
        return self.weight_sync.probe_length or max(2, min(_PROBE_LENGTH, self.data.max_len - 1))

    @property
    def max_staleness(self) -> int:
        """``train.max_staleness`` with its default resolved."""
        if self.train.max_staleness is not None:
            return self.train.max_staleness
        return self.train.async_queue_size if self.train.async_enable else 0

    @property
    def partial_rollouts(self) -> bool:
        """Whether weights change in the middle of requests."""
        return self.train.partial_rollout_enable or not self.train.async_enable

    @property
    def own_options(self) -> dict[str, Any]:
        """``algo.<estimator>`` of the chosen estimator, as it was given."""
        return self.algo.of(self.algo.advantage.estimator)

    @property
    def correction_level(self) -> str:
        """``algo.advantage.is_correction_level`` with its default resolved: off-policy are tokens that lag, and those
        that FP8 engines sampled.
        """
        off_policy = self.max_staleness > 0 or self.fp8.rollout_enable
        if off_policy and not is_set(self, "algo.advantage.is_correction_level"):
            return "token"
        return self.algo.advantage.is_correction_level

    @property
    def correction_mode(self) -> str:
        """``algo.advantage.is_correction_mode`` with its default resolved: truncation beside FP8 engines."""
        can_clip = self.correction_level == "token" and self.algo.advantage.is_correction_gating == "ratio"
        if self.fp8.rollout_enable and can_clip and not is_set(self, "algo.advantage.is_correction_mode"):
            return "clip"
        return self.algo.advantage.is_correction_mode

    @property
    def correction_threshold(self) -> list[float]:
        """[low, high] of the importance correction, with its default resolved; a single value is an upper bound."""
        threshold = self.algo.advantage.is_correction_threshold
        clips = self.fp8.rollout_enable and self.correction_mode == "clip"
        if clips and not is_set(self, "algo.advantage.is_correction_threshold"):
            threshold = _FP8_THRESHOLD
        return [0.0, *threshold] if len(threshold) == 1 else list(threshold)

    def flag_options(self) -> Iterator[FlagOption]:
        """The estimator's options that were set by OpenRLHF's flags."""
        actor, advantage = self.actor, self.algo.advantage
        if actor.eps_clip_low_high is not None:
            yield FlagOption("clip_low", actor.eps_clip_low_high[0], "actor.eps_clip_low_high")
            yield FlagOption("clip_high", actor.eps_clip_low_high[1], "actor.eps_clip_low_high")
        elif is_set(self, "actor.eps_clip"):
            yield FlagOption("clip_low", actor.eps_clip, "actor.eps_clip")
            yield FlagOption("clip_high", actor.eps_clip, "actor.eps_clip")
        if actor.dual_clip is not None:
            yield FlagOption("dual_clip", actor.dual_clip, "actor.dual_clip")
        if is_set(self, "actor.loss_agg_mode"):
            yield FlagOption("agg", actor.loss_agg_mode, "actor.loss_agg_mode")
        if advantage.no_std_norm:
            yield FlagOption("normalize_std", False, "algo.advantage.no_std_norm")
        for key in ("gamma", "lambd"):
            if self.has_critic and is_set(self, f"algo.advantage.{key}"):
                yield FlagOption(key, getattr(advantage, key), f"algo.advantage.{key}")
        if self.reward.overlong_buffer_len is not None:
            yield FlagOption("length_penalty", self._overlong_penalty(), "reward.overlong_buffer_len")

    def _overlong_penalty(self) -> dict[str, Any]:
        """DAPO eq. 13: nothing up to l_max - l_cache, then linear down to -factor at l_max."""
        return {
            "kind": "dapo",
            "l_max": self.rollout.max_new_tokens,
            "l_cache": int(self.reward.overlong_buffer_len or 0),
            "factor": self.reward.overlong_penalty_factor,
        }

    def algorithm_name(self) -> str:
        """The name under which the estimator is registered; for ``custom`` after running the file that registers it.

        Raises:
            ValueError: the file of ``algo.module_path`` cannot be run, or does not register one algorithm.
        """
        if self.algo.advantage.estimator != CUSTOM:
            return self.algo.advantage.estimator
        from openrlhf_ext.algorithms.registry import algorithm_of_file  # late: algorithms import torch

        return algorithm_of_file(self.algo.module_path or "")

    def algorithm_options(self) -> tuple[str, dict[str, Any], dict[str, Any] | None]:
        """Arguments of ``get_algorithm``: (name, options, importance correction or None).

        A KL penalty of ``algo.kl.*`` is in the options under the name ``kl``. Options of ``algo.<estimator>`` win over
        flags; the checks refuse a configuration in which they disagree. What the estimator does not read is left out; a
        warning says so at the start of a run.
        """
        from openrlhf_ext.algorithms.registry import foreign_keys, option_keys, with_published_values  # late, as above

        name = self.algorithm_name()
        known, foreign = option_keys(name), foreign_keys(name)
        options = {option.key: option.value for option in self.flag_options() if option.key in known}
        options |= {key: value for key, value in self.own_options.items() if key not in foreign}
        options |= self._kl_penalty()
        options = with_published_values(name, options, max_length=self.rollout.max_new_tokens)
        return name, options, self._correction()

    def _kl_penalty(self) -> dict[str, Any]:
        kl = self.algo.kl
        if kl.init_coef == 0:
            return {}
        place = "loss" if kl.use_loss else "reward"
        penalty = {"coef": kl.init_coef, "estimator": kl.estimator, "place": place}
        return {"kl": penalty | ({"unbiased_gradient": True} if kl.unbiased_gradient else {})}

    def _correction(self) -> dict[str, Any] | None:
        if self.correction_level == "off":
            return None
        advantage = self.algo.advantage
        return {
            "level": self.correction_level,
            "mode": self.correction_mode,
            "gating": advantage.is_correction_gating,
            "threshold": self.correction_threshold,
        }

    @property
    def initial_entropy_prompts(self) -> int:
        """Prompts over which the trainer measures the initial entropy of gtpo_conflict (``h_ini``); 0 = it does not.

        Not where ``h_ini`` is given, the filter is off, or the preset is ``official``, which knows no initial entropy.
        """
        if self.algo.advantage.estimator != "gtpo_conflict":
            return 0
        from openrlhf_ext.algorithms.gtpo_conflict import GtpoConflictOptions  # late, as above

        given = {key: value for key, value in self.own_options.items() if key in GtpoConflictOptions.model_fields}
        options = GtpoConflictOptions.model_validate(given)
        if "h_ini" in given or options.filter == "off" or options.preset == "official":
            return 0
        return options.initial_entropy_prompts
