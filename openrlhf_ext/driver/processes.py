"""The processes of a run: where engines and policy ranks go, their start, and the proof that they agree."""

from __future__ import annotations

import logging
import math
from typing import Any

import ray

from openrlhf_ext.driver.gpu_sharing import Sleepers
from openrlhf_ext.driver.session import RaySession
from openrlhf_ext.driver.settings import policy_settings, sync_settings
from openrlhf_ext.driver.waiting import Deadline

logger = logging.getLogger(__name__)

GUIDE_ENGINE = "guide engine"
"""What messages call an engine of the guide."""


def reserve_policy_places(config: Any):
    """Bundles for the policy's ranks, which engines share in a colocated run."""
    from openrlhf_ext.driver.rank_group import reserve

    return reserve(
        config.world_size, config.vllm.start_timeout_s, "the policy's ranks", shared=config.train.colocate_all
    )


def tensor_block_size(config: Any) -> int:
    """Neighbouring ranks that must be on one node: a tensor-parallel group, and a colocated engine's workers."""
    tensor = config.megatron.tensor_parallel_size
    return math.lcm(tensor, config.vllm.tensor_parallel_size) if config.train.colocate_all else tensor


def engine_places(config: Any, use_gpu: bool, policy_places: Any, engines: int, what: str) -> dict[str, Any]:
    """Where engines go, as arguments of ``create_rollout_engines``: the policy's bundles, or GPUs of their own.

    Args:
        engines: how many.
        what: they are, for messages.
    """
    from openrlhf_ext.driver.placement import place_ranks
    from openrlhf_ext.driver.rank_group import reserve

    size = config.vllm.tensor_parallel_size
    if config.train.colocate_all:
        places, block = policy_places, tensor_block_size(config)
    elif use_gpu:
        places, block = reserve(engines * size, config.vllm.start_timeout_s, what, shared=True), size
    else:
        return {}
    bundles = place_ranks(places.nodes, tensor_size=block)
    return {"shared_placement_group": places.group, "shared_bundles": bundles}


def start_engines(config: Any, use_gpu: bool, policy_places: Any) -> list:
    """The vLLM actors of the policy; they start in the background."""
    if config.vllm.enable_sleep and not use_gpu:
        logger.warning("vllm.enable_sleep: vLLM cannot give up memory on CPU; the engines only stand still")
    places = engine_places(config, use_gpu, policy_places, config.vllm.num_engines, "the rollout engines")
    return _create_engines(
        config, use_gpu, places, num_engines=config.vllm.num_engines, model_path=config.actor.model_name_or_path,
        seed=config.train.seed,
    )  # fmt: skip


def start_guide_engines(config: Any, use_gpu: bool) -> list | None:
    """The vLLM actors of the guide, None without one; their seeds go on where those of the policy's engines end."""
    if not config.has_guide:
        return None
    places = engine_places(config, use_gpu, None, config.guide.num_engines, "the guide's engines")
    return _create_engines(
        config, use_gpu, places, num_engines=config.guide.num_engines, model_path=config.guide.model_name_or_path,
        seed=config.train.seed + config.vllm.num_engines,
    )  # fmt: skip


def _create_engines(config: Any, use_gpu: bool, places: dict[str, Any], **model: Any) -> list:
    """Engines with the options of ``vllm.*``.

    Args:
        places: see ``engine_places``.
        model: ``num_engines``, ``model_path`` and ``seed``.
    """
    from openrlhf_ext.rollout.launch import create_rollout_engines

    return create_rollout_engines(
        **model,
        tensor_parallel_size=config.vllm.tensor_parallel_size,
        dtype={"bf16": "bfloat16", "fp32": "float32"}[config.rollout_dtype],
        max_model_len=config.data.max_len,
        enable_prefix_caching=config.vllm.enable_prefix_caching,
        enforce_eager=config.vllm.enforce_eager or not use_gpu,  # CUDA graphs need CUDA
        gpu_memory_utilization=config.vllm.gpu_memory_utilization,
        kv_cache_mib=None if use_gpu else config.vllm.kv_cache_mib,
        max_num_seqs=config.vllm.max_num_seqs,
        max_num_batched_tokens=config.vllm.max_num_batched_tokens,
        executor_factory=executor_factory(config),
        fast_tokenizer=not config.data.disable_fast_tokenizer,
        # before the batch's own deadline, so that an engine that is stuck can be replaced
        request_timeout_s=config.rollout.timeout_s * (0.9 if config.vllm.max_restarts else 1.0),
        enable_sleep=config.vllm.enable_sleep and use_gpu,
        use_gpu=use_gpu,
        **places,
    )


def executor_factory(config: Any):
    """The user's agent, or single-turn rollouts graded in killable worker processes."""
    from openrlhf_ext.rewards import RewardSettings, make_agent_executor, make_executor

    reward = config.reward
    if (agent := config.train.agent_func_path) is not None:
        return make_agent_executor(agent, reward.timeout_s, reward.max_failures, reward.failure_value)
    return make_executor(
        RewardSettings(
            remote_url=config.reward.remote_url,
            num_workers=config.reward.num_workers,
            timeout_s=config.reward.timeout_s,
            max_failures=config.reward.max_failures,
            failure_value=config.reward.failure_value,
        )
    )


def start_policy(config: Any, places: Any):
    """The group of policy ranks: contiguous blocks of tp * cp * pp ranks are one data-parallel rank."""
    from openrlhf_ext.driver.rank_group import RankGroup
    from openrlhf_ext.ranks.policy import PolicyActor

    tensor = tensor_block_size(config)
    group = RankGroup(
        ray.remote(num_gpus=1)(PolicyActor),
        places,
        world_size=config.world_size,
        model_parallel_size=config.model_parallel_size,
        tensor_size=tensor,
        block_size=math.lcm(tensor, config.megatron.tensor_parallel_size * config.megatron.context_parallel_size),
    )
    group.async_run_method("load_libraries")
    return group


def initialize_everything(
    config: Any, session: RaySession, policy: Any, engines: list, steps: int, deadline: Deadline
) -> None:
    """Waits for the engines, loads the policy on every rank, connects both, proves that they agree.

    Afterwards whoever gives up memory has done so: a critic and a checkpoint are about to be loaded.
    """
    _await_engines(config, session, engines, deadline, "rollout engine")
    if config.vllm.enable_sleep:
        deadline.get([engine.sleep.remote() for engine in engines])
    infos = deadline.get(
        policy.async_init_model_from_pretrained(
            policy_settings(config, steps),
            sync_settings(config, session.use_gpu),
            config.train.max_epochs,
            engines,
            Sleepers(config.ds.enable_sleep, config.vllm.enable_sleep),
        )
    )
    for info in infos:
        session.remember(f"policy rank {info['rank']}", info)
    session.watch("policy", [info["phases"] for info in infos])
    gauge = deadline.get(policy.async_run_method("prove_sync"))[0]["weight_sync/probe_max_abs_diff"]
    logger.info("policy and engines agree on the starting weights: largest log-prob difference %.1e", gauge)
    if config.vllm.enable_sleep:
        deadline.get([engine.sleep.remote() for engine in engines])


def await_guide_engines(config: Any, session: RaySession, engines: list | None, deadline: Deadline) -> None:
    """Waits for the guide's engines, if there are any; their weights stay those of the disk."""
    if engines is not None:
        _await_engines(config, session, engines, deadline, GUIDE_ENGINE)


def _await_engines(config: Any, session: RaySession, engines: list, deadline: Deadline, name: str) -> None:
    from openrlhf_ext.rollout.launch import wait_until_ready

    wait_until_ready(engines, config.vllm.start_timeout_s, name)
    for i, info in enumerate(deadline.get([engine.process_info.remote() for engine in engines])):
        session.remember(f"{name} {i}", info)
