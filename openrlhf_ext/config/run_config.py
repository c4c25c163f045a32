"""The whole configuration of a run: one frozen model whose paths are the option names, and their
table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from openrlhf_ext.config.trained import TrainedConfig
from openrlhf_ext.megatron.layout import PIPELINE_ENDS, ParallelLayout
from openrlhf_ext.options import Int, added, is_set, no_meaning, not_yet, sections
from openrlhf_ext.options.sections.algo import CUSTOM, GUIDED, MIXED, OPENRLHF, OPENRLHF_KL
from openrlhf_ext.options.sections.models import FP8
from openrlhf_ext.options.table import OptionTable, table_of

if TYPE_CHECKING:
    from openrlhf_ext.algorithms.base import Algorithm

_PROBE_LENGTH = 160
_PROBE_TOLERANCE = {"fp32": 1e-4, "bf16": 0.1, "fp8": 0.4}
# token-level, clipped: as verl publishes FP8 rollouts (its docs/low_precision/fp8.md)
_FP8_THRESHOLD = (2.0,)


class RunConfig(TrainedConfig):
    """Options of ``openrlhf_ext.cli.train_ppo_ray``, typed; built and checked by
    :func:`load_config`.

    Which device the run uses cannot be read from a configuration. Options that only mean something
    on a GPU (``vllm.gpu_memory_utilization``, ``vllm.sync_backend nccl``) or only on a CPU
    (``vllm.kv_cache_mib``) are therefore checked where the device is known: by the rollout engines
    and the policy actors at their start.
    """

    usage: ClassVar[str] = """\
usage: openrlhf-ext train [--config FILE.yaml ...] [--section.name value ...]

Names are OpenRLHF's; options marked + are added by openrlhf_ext. Precedence: defaults, then files in order, then the
command line. A bare --x.y_enable switches a flag on, --no-x.y_enable off, true and false are accepted too; null
unsets a value. --help SECTION shows one group, --help algo.ESTIMATOR the options of one estimator. Options of
OpenRLHF that are refused are listed at the end.
"""
    trained: ClassVar[str] = "actor"
    rank_options: ClassVar[str] = "actor.num_nodes * actor.num_gpus_per_node"
    data_options: ClassVar[tuple[str, ...]] = ("data.prompt_dataset", "eval.dataset")
    code_options: ClassVar[tuple[str, ...]] = (
        "reward.remote_url",
        "eval.remote_url",
        "train.agent_func_path",
        "algo.module_path",
    )

    actor: sections.Actor = sections.Actor()
    megatron: sections.Megatron = sections.Megatron()
    fp8: FP8 = FP8()
    vllm: sections.Vllm = sections.Vllm()
    weight_sync: sections.WeightSync = sections.WeightSync()
    rollout: sections.Rollout = sections.Rollout()
    reward: sections.Reward = sections.Reward()
    algo: sections.Algo = sections.Algo()
    train: sections.Train = sections.Train()
    data: sections.Data = sections.Data()
    eval: sections.Eval = sections.Eval()
    ckpt: sections.Ckpt = sections.Ckpt()
    logger: sections.Logger = sections.Logger()
    profile: sections.Profile = sections.Profile()
    ref: sections.Ref = sections.Ref()
    guide: sections.Guide = sections.Guide()
    critic: sections.Critic = sections.Critic()
    ds: sections.DeepSpeed = sections.DeepSpeed()
    local_rank: Int = no_meaning(
        -1,
        "rank on the node, set by DeepSpeed's launcher",
        why="Ray places every rank",
        instead="leave it out",
    )
    use_ms: bool = not_yet(
        False,
        "load models and data from ModelScope",
        why="only local folders and the Hugging Face hub are read",
        instead="download first and give the local paths",
    )
    dry_run: bool = added(
        False,
        "check whether the run would start, print memory, placement and configuration, and stop",
    )
    strict: bool = added(
        False, "reject options that mean something else here than in OpenRLHF, or nothing"
    )
    dry_run_json: bool = added(
        False, "a dry run for programs: print options, layout and versions as JSON, and stop"
    )

    @property
    def world_size(self) -> int:
        return self.actor.num_nodes * self.actor.num_gpus_per_node

    def as_run(self) -> RunConfig:
        return self

    def layout_on(self, ranks: int) -> ParallelLayout:
        return ParallelLayout.of(self.megatron, ranks)

    @property
    def replays_rollout(self) -> bool:
        """Whether tokens are trained with the experts that the engines' routers took."""
        return self.train.routing_replay == "rollout"

    @property
    def has_critic(self) -> bool:
        return self.algo.advantage.estimator == "gae"

    @property
    def critic_layout(self) -> ParallelLayout:
        return ParallelLayout.of(self.critic_megatron, self.critic_ranks)

    @property
    def critic_megatron(self) -> sections.Megatron:
        """``megatron.*`` as it holds for the critic: with ``critic.megatron.*`` where that is
        set."""
        own = {name: value for name, value in self.critic.megatron if value is not None}
        layout = self.even_megatron.model_copy(update=own)
        without: dict[str, Any] = (
            {"sequence_parallel_enable": False} if layout.tensor_parallel_size == 1 else {}
        )
        without |= {"virtual_pipeline_size": 1} if layout.pipeline_parallel_size == 1 else {}
        return layout.model_copy(
            update={name: value for name, value in without.items() if name not in own}
        )

    @property
    def even_megatron(self) -> sections.Megatron:
        """``megatron.*`` as it holds for a model with a value head: the head weighs nothing, stages
        have equally many layers."""
        return self.megatron.model_copy(update=dict.fromkeys(PIPELINE_ENDS))

    @property
    def reward_layout(self) -> ParallelLayout:
        return ParallelLayout.of(self.even_megatron, self.reward_ranks)

    @property
    def critic_ranks(self) -> int:
        """0 without a critic."""
        return self.critic.num_nodes * self.critic.num_gpus_per_node if self.has_critic else 0

    @property
    def critic_model(self) -> str | None:
        """Folder or hub name of what the critic starts from, as in OpenRLHF: its own, the reward
        model, the policy."""
        reward = self.reward.model_name_or_path if self.has_reward_model else None
        return self.critic.model_name_or_path or reward or self.actor.model_name_or_path

    @property
    def has_reward_model(self) -> bool:
        """As in OpenRLHF, none is built beside another source of rewards."""
        others = (self.reward.remote_url, self.train.agent_func_path)
        return self.reward.model_name_or_path is not None and others == (None, None)

    @property
    def reward_ranks(self) -> int:
        """0 without a reward model."""
        return self.reward.num_nodes * self.reward.num_gpus_per_node if self.has_reward_model else 0

    @property
    def critic_shares_with_reward(self) -> bool:
        """Whether critic and reward model have GPUs of their own that they share."""
        both = self.has_critic and self.has_reward_model
        return both and self.train.colocate_critic_reward and not self.train.colocate_all

    @property
    def has_reference(self) -> bool:
        return self.algo.kl.init_coef > 0 or bool(self.own_options.get("kl_coef"))

    @property
    def reference_ranks(self) -> int:
        """Ranks of the reference's own; 0 where there is none or it is a copy in the policy's host
        memory."""
        colocated = self.train.colocate_actor_ref or self.train.colocate_all or self.ref.offload
        if (
            not self.has_reference
            or colocated
            or not self.ref.model_fields_set & {"num_nodes", "num_gpus_per_node"}
        ):
            return 0
        return self.ref.num_nodes * self.ref.num_gpus_per_node

    @property
    def has_guide(self) -> bool:
        return self.algo.advantage.estimator in GUIDED and self.guide.model_name_or_path is not None

    @property
    def guide_ranks(self) -> int:
        """Ranks of the guide's own; 0 where there is none or it is a copy in the policy's host
        memory."""
        if not self.has_guide or not self.guide.model_fields_set & {
            "num_nodes",
            "num_gpus_per_node",
        }:
            return 0
        return self.guide.num_nodes * self.guide.num_gpus_per_node

    @property
    def guide_samples(self) -> int:
        samples = self.has_guide and self.algo.advantage.estimator == MIXED
        return self.guide.samples_per_prompt if samples else 0

    @property
    def model_options(self) -> list[str]:
        there = {
            "actor": True,
            "critic": self.has_critic,
            "reward": self.has_reward_model,
            "guide": self.has_guide,
        }
        return [f"{section}.model_name_or_path" for section, is_there in there.items() if is_there]

    @property
    def training_ranks(self) -> int:
        return (
            self.world_size
            + self.critic_ranks
            + self.reward_ranks
            + self.reference_ranks
            + self.guide_ranks
        )

    @property
    def training_gpus(self) -> int:
        """What the training ranks take of a cluster: critic and reward model may share GPUs."""
        shared = self.critic_ranks + self.reward_ranks if self.train.colocate_all else 0
        return (
            self.training_ranks
            - shared
            - (self.reward_ranks if self.critic_shares_with_reward else 0)
        )

    @property
    def engine_workers(self) -> int:
        guide_engines = self.guide.num_engines if self.guide_samples else 0
        return (self.vllm.num_engines + guide_engines) * self.vllm.tensor_parallel_size

    @property
    def engines_share_gpus(self) -> bool:
        """Whether engines are on the policy's GPUs: with ``train.colocate_all``, unless they sample
        while it trains."""
        return self.train.colocate_all and self.max_staleness == 0

    @property
    def gpus(self) -> int:
        return self.training_gpus + (0 if self.engines_share_gpus else self.engine_workers)

    @property
    def samples_per_rollout(self) -> int:
        return self.rollout.batch_size * self.rollout.n_samples_per_prompt

    @property
    def gpu_memory_utilization(self) -> float:
        if self.vllm.gpu_memory_utilization is not None:
            return self.vllm.gpu_memory_utilization
        return 0.8 if self.engines_share_gpus else 0.95

    @property
    def rollout_dtype(self) -> Literal["bf16", "fp32"]:
        return self.megatron.param_dtype if self.vllm.dtype == "auto" else self.vllm.dtype

    @property
    def probe_tolerance(self) -> float:
        """Largest difference of log-probs that rounding explains (nats), with its default resolved.

        A mean over the tokens of a text of the model's own (``rollout.probe``). fp32 on both sides
        agrees to 1e-4. SmolLM2-135M in bf16 differs by 0.016 to 0.035 between three
        implementations, with FP8 on one side by 0.13 to 0.18; two exchanged layers make 0.47
        (docs/weight_sync.md).
        """
        if self.weight_sync.probe_tolerance is not None:
            return self.weight_sync.probe_tolerance
        if self.fp8.enable or self.fp8.rollout_enable:
            return _PROBE_TOLERANCE["fp8"]
        coarser = "bf16" if "bf16" in (self.megatron.param_dtype, self.rollout_dtype) else "fp32"
        return _PROBE_TOLERANCE[coarser]

    @property
    def repeat_tolerance(self) -> float:
        """How far the log-probs of unchanged weights may move (nats): under delayed FP8 scaling its
        scales do."""
        moves = self.fp8.enable and self.fp8.recipe == "delayed"
        return min(
            self.probe_tolerance, _PROBE_TOLERANCE["fp8" if moves else self.megatron.param_dtype]
        )

    @property
    def probe_length(self) -> int:
        """Most tokens of the probe's text, with its default resolved; the engine generates one
        token after it."""
        return self.weight_sync.probe_length or max(2, min(_PROBE_LENGTH, self.data.max_len - 1))

    @property
    def max_staleness(self) -> int:
        if self.train.max_staleness is not None:
            return self.train.max_staleness
        return self.train.async_queue_size if self.train.async_enable else 0

    @property
    def partial_rollouts(self) -> bool:
        return self.train.partial_rollout_enable or not self.train.async_enable

    @property
    def own_options(self) -> dict[str, Any]:
        return self.algo.of(self.algo.advantage.estimator)

    @property
    def ratios_to_engines(self) -> bool:
        """Whether old log-probs are the engines', with ``algo.old_logprobs auto`` resolved."""
        if self.algo.old_logprobs != "auto":
            return self.algo.old_logprobs == "engine"
        return self.train.exact_rollout_enable and self.why_policy_pass is None

    @property
    def entropy_source(self) -> str:
        """``algo.entropies`` with its default resolved: those of the engines in exact mode, unless
        the policy computes log-probs, and so entropies, all the same."""
        given, algo = self.algo.entropies, self.algo
        if not self.train.exact_rollout_enable or is_set(self, "algo.entropies"):
            return given
        corrects = algo.advantage.is_correction_level != "off"
        computes = algo.old_logprobs == "policy" or self._why_logprobs is not None or corrects
        return given if computes or self._why_entropies is not None else "engine"

    @property
    def why_policy_pass(self) -> str | None:
        """In exact mode: why the policy scores a batch before the update although the engines'
        log-probs are its own; None: it does not."""
        if (why := self._why_logprobs) is not None:
            return why
        if (why := self._why_entropies) is not None and "entropies" in self._method.needs:
            return f"{self.algo.advantage.estimator} shapes by entropies, and {why}"
        # last, because it also stands for the default of tokens that lag
        if self.algo.advantage.is_correction_level != "off":
            return "the importance correction compares them with the engines'"
        return None

    @property
    def _why_logprobs(self) -> str | None:
        estimator = self.algo.advantage.estimator
        if self.train.drift_check:
            return "train.drift_check compares them with those after the step"
        if self.has_critic:
            return "the policy is not trained in the critic's first steps"
        if estimator == CUSTOM:
            return "the algorithm is not part of the package"
        if self.max_staleness > 0 and self._method.needs_prepare:
            return f"{estimator} chooses tokens by them, and the engines' may lag behind"
        return None

    @property
    def _why_entropies(self) -> str | None:
        """Why entropies of the engines do not take the place of the policy's."""
        if is_set(self, "algo.entropies"):
            return "algo.entropies is policy" if self.algo.entropies == "policy" else None
        if self.train.agent_func_path is not None:
            return "responses of agents have no entropies"
        if self.rollout.top_p < 1:
            return "the engines' are of a truncated distribution"
        return "the engines' may lag behind" if self.max_staleness > 0 else None

    @property
    def _method(self) -> type[Algorithm]:
        """Not of the estimator custom, whose file would be run."""
        from openrlhf_ext.algorithms.registry import algorithm_class  # late: it imports torch

        return algorithm_class(self.algo.advantage.estimator)

    @property
    def correction_level(self) -> str:
        """With its default resolved: off-policy are tokens that lag, and those that FP8 engines
        sampled."""
        off_policy = self.max_staleness > 0 or self.fp8.rollout_enable
        # ratios to the engines' log-probs are to what was sampled from
        off_policy = off_policy and not self.ratios_to_engines
        if off_policy and not is_set(self, "algo.advantage.is_correction_level"):
            return "token"
        return self.algo.advantage.is_correction_level

    @property
    def correction_mode(self) -> str:
        """With its default resolved: truncation beside FP8 engines."""
        can_clip = (
            self.correction_level == "token" and self.algo.advantage.is_correction_gating == "ratio"
        )
        if (
            self.fp8.rollout_enable
            and can_clip
            and not is_set(self, "algo.advantage.is_correction_mode")
        ):
            return "clip"
        return self.algo.advantage.is_correction_mode

    @property
    def correction_threshold(self) -> list[float]:
        """[low, high], with its default resolved; a single value is an upper bound."""
        threshold = self.algo.advantage.is_correction_threshold
        clips = self.fp8.rollout_enable and self.correction_mode == "clip"
        if clips and not is_set(self, "algo.advantage.is_correction_threshold"):
            threshold = _FP8_THRESHOLD
        return [0.0, *threshold] if len(threshold) == 1 else list(threshold)

    def resolved(self) -> Iterable[tuple[str, Any]]:
        if self.algo.advantage.estimator in OPENRLHF and self.own_options.get("kl_coef") is None:
            yield "algo.kl.init_coef", OPENRLHF_KL
        if self.actor.gradient_checkpointing_enable:
            yield "megatron.recompute", "full"
        by_engines = self.train.exact_rollout_enable and self.entropy_source == "engine"
        if by_engines and "entropies" in self._method.needs:
            yield "algo.entropies", "engine"
        if self.correction_level != "off":
            yield "algo.advantage.is_correction_level", self.correction_level
            yield "algo.advantage.is_correction_mode", self.correction_mode
            yield "algo.advantage.is_correction_threshold", self.correction_threshold


def option_table() -> OptionTable:
    """Of ``train_ppo_ray``."""
    return table_of(RunConfig)
