"""The whole configuration of a run: one frozen model whose paths are the option names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

from pydantic import PrivateAttr

from openrlhf_ext.config.algorithm_options import merged_algorithm_options
from openrlhf_ext.config.entities.algo import Algo
from openrlhf_ext.config.entities.base import Entity, no_meaning, not_yet, option
from openrlhf_ext.config.entities.deepspeed import DeepSpeed
from openrlhf_ext.config.entities.policy import Actor, Critic, Megatron, Ref
from openrlhf_ext.config.entities.rollout import Reward, Rollout, Vllm, WeightSync
from openrlhf_ext.config.entities.run import Ckpt, Data, Eval, Logger, Train
from openrlhf_ext.config.upstream import upstream_namespace

_PROBE_LENGTH = 160
_MEASURED = ("gtpo_conflict", "initial_entropy_prompts")  # an option of the trainer, not of the algorithm
_INITIAL_ENTROPY_PROMPTS = 100
_PROBE_TOLERANCE = {"fp32": 1e-4, "bf16": 0.2}


class RunConfig(Entity):
    """Options of ``openrlhf_ext.cli.train_ppo_ray``, typed; built and checked by :func:`load_config`.

    Which device the run uses cannot be read from a configuration. Options that only mean something on a GPU
    (``vllm.gpu_memory_utilization``, ``vllm.sync_backend nccl``) or only on a CPU (``vllm.kv_cache_mib``) are therefore
    checked where the device is known: by the rollout engines and the policy actors at their start.
    """

    actor: Actor = Actor()
    megatron: Megatron = Megatron()
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
    ref: Ref = Ref()
    critic: Critic = Critic()
    ds: DeepSpeed = DeepSpeed()
    local_rank: int = no_meaning(
        -1, "rank on the node, set by DeepSpeed's launcher", why="Ray places every rank", instead="leave it out"
    )
    use_ms: bool = not_yet(
        False,
        "load models and data from ModelScope",
        why="only local folders and the Hugging Face hub are read",
        instead="download first and give the local paths",
    )
    dry_run: bool = option(False, "print the resolved configuration and the placement of every rank, and stop")

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
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the policy: tensor * pipeline * context."""
        layout = self.megatron
        return layout.tensor_parallel_size * layout.pipeline_parallel_size * layout.context_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Copies of the policy."""
        return self.world_size // self.model_parallel_size

    @property
    def has_critic(self) -> bool:
        """Whether the estimator needs values."""
        return self.algo.advantage.estimator == "gae"

    @property
    def critic_layout(self) -> Megatron:
        """``megatron.*`` as it holds for the critic: with ``critic.megatron.*`` where that is set."""
        own = {name: value for name, value in self.critic.megatron if value is not None}
        layout = self.megatron.model_copy(update=own)
        without = {"sequence_parallel_enable": False} if layout.tensor_parallel_size == 1 else {}
        without |= {"virtual_pipeline_size": 1} if layout.pipeline_parallel_size == 1 else {}
        return layout.model_copy(update={name: value for name, value in without.items() if name not in own})

    @property
    def critic_ranks(self) -> int:
        """Ranks of the critic; 0 without one."""
        return self.critic.num_nodes * self.critic.num_gpus_per_node if self.has_critic else 0

    @property
    def has_reference(self) -> bool:
        """Whether a KL penalty needs a reference policy."""
        own = getattr(self.algo, self.algo.advantage.estimator)
        return self.algo.kl.init_coef > 0 or bool(own.get("kl_coef"))

    @property
    def reference_ranks(self) -> int:
        """Ranks of the reference's own; 0 where there is none or it is a copy in the policy's host memory."""
        colocated = self.train.colocate_actor_ref or self.train.colocate_all or self.ref.offload
        if not self.has_reference or colocated or not self.ref.model_fields_set & {"num_nodes", "num_gpus_per_node"}:
            return 0
        return self.ref.num_nodes * self.ref.num_gpus_per_node

    @property
    def training_ranks(self) -> int:
        """Ranks of policy, critic and reference."""
        return self.world_size + self.critic_ranks + self.reference_ranks

    @property
    def samples_per_rollout(self) -> int:
        """Responses in one batch of rollouts."""
        return self.rollout.batch_size * self.rollout.n_samples_per_prompt

    @property
    def rollout_dtype(self) -> Literal["bf16", "fp32"]:
        """Data type of the engines, with ``vllm.dtype auto`` resolved."""
        return self.megatron.param_dtype if self.vllm.dtype == "auto" else self.vllm.dtype

    @property
    def probe_tolerance(self) -> float:
        """Largest allowed log-prob difference after a weight sync (nats), with its default resolved.

        fp32 on both sides agrees to 1e-4. Two bf16 engines differ by up to 4.4e-2 on the same weights (measured), so
        the default with bf16 on either side is 0.2: it sees stale or wrong weights and tolerates rounding.
        """
        if self.weight_sync.probe_tolerance is not None:
            return self.weight_sync.probe_tolerance
        coarser = "bf16" if "bf16" in (self.megatron.param_dtype, self.rollout_dtype) else "fp32"
        return _PROBE_TOLERANCE[coarser]

    @property
    def probe_length(self) -> int:
        """Tokens of the probe prompt, with its default resolved; the engine generates one token after it."""
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

    def algorithm_options(self) -> tuple[str, dict[str, Any], dict[str, Any] | None]:
        """Arguments of ``get_algorithm``: (name, options, importance correction or None)."""
        name, options, correction = merged_algorithm_options(self)
        return name, {k: v for k, v in options.items() if (name, k) != _MEASURED}, correction

    @property
    def initial_entropy_prompts(self) -> int:
        """Prompts over which the trainer measures the initial entropy of gtpo_conflict (``h_ini``); 0 = it does not.

        Not where ``h_ini`` is given, the filter is off, or the preset is ``official``, which knows no initial entropy.
        """
        options = self.algo.gtpo_conflict
        given = "h_ini" in options or options.get("filter") == "off" or options.get("preset") == "official"
        if self.algo.advantage.estimator != _MEASURED[0] or given:
            return 0
        return options.get(_MEASURED[1], _INITIAL_ENTROPY_PROMPTS)

    def upstream_args(self) -> SimpleNamespace:
        """The nested namespace that OpenRLHF 0.11.2's classes read; every option of its parser is present."""
        return upstream_namespace(self)
