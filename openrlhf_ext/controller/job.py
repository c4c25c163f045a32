"""The composition root of a training run: which class runs where, from top to bottom."""

from __future__ import annotations

import io
import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch

from openrlhf_ext.algorithms import get_algorithm
from openrlhf_ext.controller.checkpointing import Checkpointer, CheckpointOptions
from openrlhf_ext.controller.companions import Companions, frozen_steps, optimizer_updates, parallel_layout
from openrlhf_ext.controller.deadline import Deadline
from openrlhf_ext.controller.engine_recovery import EngineGuard, RecoveryLimits
from openrlhf_ext.controller.gpu_sharing import Sleepers
from openrlhf_ext.controller.resume import (
    Resumed,
    check_prompts,
    plain_options,
    prepare_folder,
    prompts_fingerprint,
    restore,
    run_with_restarts,
)
from openrlhf_ext.controller.session import RaySession
from openrlhf_ext.megatron.hf_config import read_model_shape

logger = logging.getLogger(__name__)


def run(config: Any) -> int:
    """Trains until the prompts are used up; returns the exit code (0, 1 = failed, 130 = interrupted)."""
    return run_with_restarts(with_local_model(config), run_once)


def run_once(config: Any) -> int:
    """One attempt at the run; exit codes as those of ``run``."""
    engines = config.vllm.num_engines * config.vllm.tensor_parallel_size
    session = RaySession(
        policy_ranks=config.training_ranks, engines=engines, env=worker_env(config), verbose=config.logger.verbose
    )
    try:
        with session:
            try:
                train(config, session)
            except Exception as error:
                logger.debug("the run failed", exc_info=True)
                logger.error("the run failed:\n%s", session.describe_failure(error))
                return 1
    except KeyboardInterrupt:
        logger.error("interrupted; every process of the run has ended, and nothing half-written was left")
        return 130
    return 0


@dataclass(frozen=True)
class Parts:
    """What a running job consists of before it trains."""

    strategy: Any
    tokenizer: Any
    policy: Any
    engines: list
    prompts: Any
    held_out: Any
    steps: int
    companions: Companions = Companions()
    resumed: Resumed | None = None
    guard: EngineGuard | None = None


def train(config: Any, session: RaySession) -> None:
    """Builds every part, trains, and writes the final checkpoint."""
    prepare_folder(config)
    parts = build_parts(config, session)
    trainer = build_trainer(config, parts)
    session.remember_children()
    if config.initial_entropy_prompts:
        set_initial_entropy(config, trainer, parts)
    trainer.fit()
    trainer.recorder.close()
    trainer.sharing.make_room_for_policy()
    logger.info("writing the final checkpoint to %s", config.ckpt.output_dir)
    ray.get(parts.policy.async_run_method("save_model", config.ckpt.output_dir), timeout=config.train.step_timeout_s)
    parts.companions.save(config)


def build_parts(config: Any, session: RaySession) -> Parts:
    """Starts engines and policy ranks, which load while this process imports OpenRLHF and reads the data."""
    start = Deadline()
    doing = "starting the rollout engines and the policy ranks"
    with start.limit(config.vllm.start_timeout_s, doing, "vllm.start_timeout_s"):
        logger.info("starting %d policy ranks and %d rollout engines", config.world_size, config.vllm.num_engines)
        with library_chatter(shown=config.logger.verbose):
            from openrlhf_ext import compat

            if not config.logger.verbose:
                compat.quiet_upstream_logs()
            places = reserve_policy_places(config)
            engines = start_engines(config, session.use_gpu, places)
            policy = start_policy(config, places)
            companions = Companions.start(config, places)
            strategy = compat.get_strategy(config.upstream_args())
            tokenizer = compat.get_tokenizer(
                config.actor.model_name_or_path, None, "left", strategy, use_fast=not config.data.disable_fast_tokenizer
            )
            prompts, held_out = load_data(config, strategy, tokenizer)
        steps = training_steps(config, len(prompts))
        logger.info("%d prompts, %d steps; building the policy", len(prompts), steps)
        start.doing = "building the policy and connecting it to the engines"
        initialize_everything(config, session, policy, engines, steps)
        companions.initialize(config, session, policy_settings(config, steps), steps)
        start.doing = "loading the checkpoint"
        resumed = restore(config, checkpointed_groups(policy, companions))
        check_prompts(resumed, prompts_fingerprint(prompts.dataset))
    guard = EngineGuard(engines, policy, recovery_limits(config), session.remember)
    return Parts(strategy, tokenizer, policy, engines, prompts, held_out, steps, companions, resumed, guard)


def checkpointed_groups(policy: Any, companions: Companions) -> dict[str, Any]:
    """The groups of ranks whose state a checkpoint holds."""
    return {"policy": policy} | ({"critic": companions.critic} if companions.critic is not None else {})


def build_checkpointer(config: Any, parts: Parts) -> Checkpointer:
    """What saves the run's state."""
    from openrlhf_ext.config import format_config

    return Checkpointer(
        CheckpointOptions.of(config),
        checkpointed_groups(parts.policy, parts.companions),
        format_config(config),
        about={"model": config.actor.model_name_or_path, "estimator": config.algo.advantage.estimator},
        constants={"options": plain_options(config), "prompts": prompts_fingerprint(parts.prompts.dataset)},
    )


def build_trainer(config: Any, parts: Parts):
    """OpenRLHF's trainer with our experience maker and records."""
    from openrlhf_ext.controller.experience import ShapingExperienceMaker
    from openrlhf_ext.controller.records import StepRecorder
    from openrlhf_ext.controller.trainer import TrainerLimits

    torch.manual_seed(config.train.seed)  # OpenRLHF's data loader takes its shuffle from the global generator
    workers, held_out = config.data.dataloader_num_workers, parts.held_out
    name, options, correction = config.algorithm_options()
    return trainer_class(config)(
        strategy=parts.strategy,
        tokenizer=parts.tokenizer,
        policy_group=parts.policy,
        guard=parts.guard,
        prompts_dataloader=dataloader(parts.strategy, parts.prompts, shuffle=True, workers=workers),
        eval_dataloader=dataloader(parts.strategy, held_out) if held_out else None,
        generate_kwargs={
            "max_len": config.data.max_len,
            "max_new_tokens": config.rollout.max_new_tokens,
            "temperature": config.rollout.temperature,
            "top_p": config.rollout.top_p,
            # OpenRLHF's default of 1 makes vLLM exclude EOS from the first token's distribution, which is then not the
            # policy's; a response is at least its EOS anyway
            "min_new_tokens": 0,
        },
        make_experience_maker=partial(
            ShapingExperienceMaker,
            algorithm=get_algorithm(name, correction=correction, **options),
            group_size=config.rollout.n_samples_per_prompt,
            mini_batch_size=config.train.batch_size,
            data_parallel_size=config.data_parallel_size,
            attention_length=read_model_shape(config.actor.model_name_or_path).attention_length,
            **parts.companions.experience_parts(config, parts.policy),
        ),
        recorder=StepRecorder(
            Path(config.logger.metrics_path),
            Path(config.logger.figure_path),
            parts.steps,
            parts.prompts.skipped_overlong,
            title=f"{name}, {Path(config.actor.model_name_or_path).name}",
            resume_step=parts.resumed.step if parts.resumed is not None else 0,
        ),
        limits=TrainerLimits(config.train.step_timeout_s, config.rollout.timeout_s, config.rollout.max_filter_batches),
        checkpointer=build_checkpointer(config, parts),
        resumed=parts.resumed,
        gauges=step_gauges(config, parts.policy),
        drift=drift_check(config, parts.policy),
    )


def step_gauges(config: Any, policy: Any):
    """Speed, memory and the slowest rank of every step."""
    from openrlhf_ext.controller.gauges import StepGauges
    from openrlhf_ext.megatron.hf_config import read_model_shape

    return StepGauges(
        policy, read_model_shape(config.actor.model_name_or_path), config.train.max_epochs, config.logger.peak_tflops,
        config.megatron.param_dtype == "bf16", config.train.step_timeout_s,
    )  # fmt: skip


def drift_check(config: Any, policy: Any):
    """The self-test of a run with train.drift_check, None in any other."""
    from openrlhf_ext.controller.drift import DriftCheck

    if not config.train.drift_check:
        return None
    return DriftCheck(policy, config.probe_tolerance, config.train.step_timeout_s)


def trainer_class(config: Any) -> Any:
    """``PolicyTrainer``, or with train.async_enable one whose rollouts are made in another thread."""
    from openrlhf_ext.controller.async_trainer import AsyncPolicyTrainer, AsyncSettings
    from openrlhf_ext.controller.trainer import PolicyTrainer

    if not config.train.async_enable:
        return PolicyTrainer
    settings = AsyncSettings(config.train.async_queue_size, config.train.partial_rollout_enable)
    return partial(AsyncPolicyTrainer, settings=settings)


def set_initial_entropy(config: Any, trainer: Any, parts: Parts) -> None:
    """gtpo_conflict filters by entropy only if the policy started below ln 2: measures that and tells the algorithm."""
    entropy = trainer.initial_entropy  # of the first part of a run that was resumed
    if entropy is None:
        first = parts.prompts.first(config.initial_entropy_prompts)
        entropy = trainer.initial_entropy = trainer.measure_initial_entropy(dataloader(parts.strategy, first))
        logger.info("initial entropy %.4f nats (gtpo_conflict filters if it is below ln 2 = 0.6931)", entropy)
        trainer.recorder.writer.write(0, {"algorithm/initial_entropy": entropy})
    name, options, correction = config.algorithm_options()
    trainer.experience_maker.algorithm = get_algorithm(name, correction=correction, **options, h_ini=entropy)


# ---- processes --------------------------------------------------------------------------------------------------


def worker_env(config: Any) -> dict[str, str]:
    """Environment of every Ray worker."""
    env = {
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "0" if config.logger.verbose else "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(_threads_per_process(config))),
        "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1",
    }
    if Path(config.actor.model_name_or_path).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    return env


def _threads_per_process(config: Any) -> int:
    processes = max(config.training_ranks, config.vllm.num_engines * config.vllm.tensor_parallel_size)
    return max(1, (os.cpu_count() or 1) // processes)


def reserve_policy_places(config: Any):
    """Bundles for the policy's ranks, which engines share in a colocated run."""
    from openrlhf_ext.controller.rank_group import reserve

    return reserve(
        config.world_size, config.vllm.start_timeout_s, "the policy's ranks", shared=config.train.colocate_all
    )


def tensor_block_size(config: Any) -> int:
    """Neighbouring ranks that must be on one node: a tensor-parallel group, and a colocated engine's workers."""
    tensor = config.megatron.tensor_parallel_size
    return math.lcm(tensor, config.vllm.tensor_parallel_size) if config.train.colocate_all else tensor


def engine_places(config: Any, use_gpu: bool, policy_places: Any) -> dict[str, Any]:
    """Where engines go, as arguments of ``create_rollout_engines``: the policy's bundles, or GPUs of their own."""
    from openrlhf_ext.controller.placement import place_ranks
    from openrlhf_ext.controller.rank_group import reserve

    size = config.vllm.tensor_parallel_size
    if config.train.colocate_all:
        places, block = policy_places, tensor_block_size(config)
    elif use_gpu:
        count = config.vllm.num_engines * size
        places, block = reserve(count, config.vllm.start_timeout_s, "the rollout engines", shared=True), size
    else:
        return {}
    bundles = place_ranks(places.nodes, tensor_size=block)
    return {"shared_placement_group": places.group, "shared_bundles": bundles}


def start_engines(config: Any, use_gpu: bool, policy_places: Any) -> list:
    """The vLLM actors; they start in the background."""
    from openrlhf_ext.rollout import create_rollout_engines

    if config.vllm.enable_sleep and not use_gpu:
        logger.warning("vllm.enable_sleep: vLLM cannot give up memory on CPU; the engines only stand still")
    agent = config.train.agent_func_path
    return create_rollout_engines(
        num_engines=config.vllm.num_engines,
        tensor_parallel_size=config.vllm.tensor_parallel_size,
        model_path=config.actor.model_name_or_path,
        seed=config.train.seed,
        dtype={"bf16": "bfloat16", "fp32": "float32"}[config.rollout_dtype],
        max_model_len=config.data.max_len,
        enable_prefix_caching=config.vllm.enable_prefix_caching,
        enforce_eager=config.vllm.enforce_eager or not use_gpu,  # CUDA graphs need CUDA
        gpu_memory_utilization=config.vllm.gpu_memory_utilization,
        kv_cache_mib=None if use_gpu else config.vllm.kv_cache_mib,
        logprobs_mode="processed_logprobs",
        executor_factory=None if agent else executor_factory(config),
        agent_func_path=agent,
        seed_requests=config.train.full_determinism_enable,
        # before the batch's own deadline, so that an engine that is stuck can be replaced
        request_timeout_s=config.rollout.timeout_s * (0.9 if config.vllm.max_restarts else 1.0),
        enable_sleep=config.vllm.enable_sleep and use_gpu,
        use_gpu=use_gpu,
        **engine_places(config, use_gpu, policy_places),
    )


def executor_factory(config: Any):
    """Single-turn rollouts graded in killable worker processes."""
    from openrlhf_ext.rewards import RewardSettings, make_executor

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
    from openrlhf_ext.controller.policy_actor import PolicyActor
    from openrlhf_ext.controller.rank_group import RankGroup

    tensor = tensor_block_size(config)
    return RankGroup(
        ray.remote(num_gpus=1)(PolicyActor),
        places,
        world_size=config.world_size,
        model_parallel_size=config.model_parallel_size,
        tensor_size=tensor,
        block_size=math.lcm(tensor, config.megatron.tensor_parallel_size * config.megatron.context_parallel_size),
    )


def initialize_everything(config: Any, session: RaySession, policy: Any, engines: list, steps: int) -> None:
    """Waits for the engines, loads the policy on every rank, connects both, proves that they agree."""
    from openrlhf_ext.rollout import wait_until_ready

    wait_until_ready(engines, config.vllm.start_timeout_s)
    for i, info in enumerate(ray.get([engine.process_info.remote() for engine in engines])):
        session.remember(f"rollout engine {i}", info["pid"], info["host"])
    if config.vllm.enable_sleep:
        ray.get([engine.sleep.remote() for engine in engines])  # the policy is about to load
    infos = ray.get(
        policy.async_init_model_from_pretrained(
            policy_settings(config, steps),
            sync_settings(config, session.use_gpu),
            config.train.max_epochs,
            engines,
            Sleepers(config.ds.enable_sleep, config.vllm.enable_sleep),
        )
    )
    for info in infos:
        session.remember(f"policy rank {info['rank']}", info["pid"], info["host"])
    session.watch("policy", [info["phases"] for info in infos])
    gauge = ray.get(policy.async_run_method("prove_sync"))[0]["weight_sync/probe_max_abs_diff"]
    logger.info("policy and engines agree on the starting weights: largest log-prob difference %.1e", gauge)


# ---- settings ---------------------------------------------------------------------------------------------------


def policy_settings(config: Any, steps: int):
    """What every policy rank gets."""
    from openrlhf_ext.megatron.optimizer import OptimizerSettings
    from openrlhf_ext.megatron.policy import PolicySettings

    actor, megatron = config.actor, config.megatron
    return PolicySettings(
        model_path=actor.model_name_or_path,
        layout=parallel_layout(config.world_size, megatron),
        param_dtype=megatron.param_dtype,
        temperature=config.rollout.temperature,
        micro_batch_size=config.train.micro_batch_size,
        forward_micro_batch_size=config.rollout.micro_batch_size,
        **token_budgets(config),
        head=megatron.head,
        head_kernels=megatron.head_kernels,
        recompute=megatron.recompute,
        seed=config.train.seed,
        collective_timeout_s=megatron.collective_timeout_s,
        optimizer=OptimizerSettings(
            lr=0.0 if config.train.drift_check else actor.adam.lr,
            betas=tuple(actor.adam.betas), eps=actor.adam.eps, weight_decay=actor.adam.weight_decay,
            max_norm=actor.max_norm, lr_scheduler=actor.lr_scheduler, lr_warmup_ratio=actor.lr_warmup_ratio,
            min_lr_ratio=actor.min_lr_ratio,
            max_steps=optimizer_updates(config, steps - frozen_steps(config)),
            distributed=megatron.distributed_optimizer_enable,
        ),
        keep_reference=config.has_reference and not config.reference_ranks,
    )  # fmt: skip


def token_budgets(config: Any) -> dict[str, int]:
    """Tokens of a micro-batch on one rank, if micro-batches are filled up to a budget."""
    if not config.train.dynamic_batch_enable:
        return {}
    train = config.train.max_tokens_per_gpu
    return {
        "max_tokens_per_gpu": train,
        "forward_max_tokens_per_gpu": config.rollout.max_tokens_per_gpu or train,
    }


def recovery_limits(config: Any) -> RecoveryLimits:
    """When engines are replaced, and how often."""
    vllm = config.vllm
    return RecoveryLimits(
        vllm.max_restarts, vllm.hang_timeout_s, vllm.start_timeout_s, policy_timeout_s=config.train.step_timeout_s
    )


def sync_settings(config: Any, use_gpu: bool):
    """How weights travel."""
    from openrlhf_ext.controller.policy_actor import SyncSettings
    from openrlhf_ext.rollout.weight_sync import choose_transport

    transport = choose_transport(config.vllm.sync_backend, on_gpu=use_gpu, colocated=config.train.colocate_all)
    return SyncSettings(
        transport, config.vllm.tensor_parallel_size, config.weight_sync.bucket_mib << 20, config.weight_sync.timeout_s,
        config.probe_tolerance, config.probe_length,
    )  # fmt: skip


# ---- data -------------------------------------------------------------------------------------------------------


def with_local_model(config: Any) -> Any:
    """The configuration with folders as its models: a hub name is downloaded first, since every rank reads files."""
    models = {"actor": config.actor} | ({"critic": config.critic} if config.has_critic else {})
    for entity, options in models.items():
        name = options.model_name_or_path
        if name is not None and not Path(name).is_dir():
            changed = options.model_copy(update={"model_name_or_path": _download(name)})
            config = config.model_copy(update={entity: changed})
    return config


def _download(name: str) -> str:
    """The folder of a hub model's files."""
    from huggingface_hub import snapshot_download

    logger.info("downloading %s", name)
    return snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"])


@contextmanager
def library_chatter(shown: bool) -> Iterator[None]:
    """Keeps what libraries print (not what they log) from the terminal."""
    if shown:
        yield
        return
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        yield


def load_data(config: Any, strategy: Any, tokenizer: Any) -> tuple[Any, Any]:
    """Training prompts and, if configured, held-out prompts that fit."""
    from openrlhf_ext.controller.data import load_prompts

    limits = {
        "max_prompt_tokens": config.data.max_len - (config.rollout.max_new_tokens or 1),
        "overlong": config.data.overlong_prompts,
    }
    prompts = load_prompts(
        config.data.prompt_dataset,
        config.data.prompt_split,
        strategy,
        tokenizer,
        probabilities=config.data.prompt_probs,
        **limits,
    )
    if config.eval.dataset is None:
        return prompts, None
    return prompts, load_prompts(
        config.eval.dataset, config.eval.split, strategy, tokenizer, probabilities=None, **limits
    )


def dataloader(strategy: Any, data: Any, *, shuffle: bool = False, workers: int = 0) -> Any:
    """OpenRLHF's resumable loader, one prompt at a time."""
    return strategy.setup_dataloader(data.dataset, 1, True, shuffle, data.dataset.collate_fn, num_workers=workers)


def training_steps(config: Any, prompts: int) -> int:
    """Rollout batches of the whole run (fewer prompts make the last batch of an episode smaller)."""
    return math.ceil(prompts / config.rollout.batch_size) * config.train.num_episodes
