"""The composition root of a training run: which class runs where, from top to bottom."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from openrlhf_ext.config.algorithm_options import algorithm_name
from openrlhf_ext.controller import preflight
from openrlhf_ext.controller.checkpointing import Checkpointer, CheckpointOptions, save_hf
from openrlhf_ext.controller.companions import Companions
from openrlhf_ext.controller.deadline import Deadline
from openrlhf_ext.controller.engine_recovery import EngineGuard
from openrlhf_ext.controller.processes import initialize_everything, reserve_policy_places, start_engines, start_policy
from openrlhf_ext.controller.resume import (
    Resumed,
    check_prompts,
    check_shared_folders,
    clean_up,
    plain_options,
    prepare_folder,
    prompts_fingerprint,
    restore,
    run_with_restarts,
)
from openrlhf_ext.controller.session import RaySession
from openrlhf_ext.controller.settings import (
    build_algorithm,
    check_frozen_steps,
    policy_settings,
    recovery_limits,
    training_steps,
    worker_env,
)
from openrlhf_ext.imports import without_collection
from openrlhf_ext.megatron.hf_config import read_model_shape

logger = logging.getLogger(__name__)


def run(config: Any) -> int:
    """Trains until the prompts are used up; returns the exit code (0, 1 = failed, 130 = interrupted).

    Raises:
        ConfigError: a model that was downloaded does not fit the options, or the reward file cannot be imported.
    """
    config = with_local_model(config)
    preflight.check_reward(config)
    return run_with_restarts(config, run_once)


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
        logger.error("interrupted; every process of the run has ended")
        return 130
    finally:
        clean_up(config)
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
    check_shared_folders(config, parts.policy)
    trainer = build_trainer(config, parts)
    session.remember_children()
    if config.initial_entropy_prompts:
        set_initial_entropy(config, trainer, parts)
    trainer.fit()
    trainer.recorder.close()
    trainer.sharing.make_room_for_policy()
    logger.info("writing the final checkpoint to %s", config.ckpt.output_dir)
    save_hf(parts.policy, "policy", config.ckpt.output_dir, "ckpt.output_dir", config.train.step_timeout_s)
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
            with without_collection():
                from openrlhf_ext.controller.data import load_data  # takes long: the others start meanwhile
            strategy = compat.DriverStrategy(config.upstream_args())
            tokenizer = compat.get_tokenizer(
                config.actor.model_name_or_path, None, "left", strategy, use_fast=not config.data.disable_fast_tokenizer
            )
            prompts, held_out = load_data(config, strategy, tokenizer)
        steps = training_steps(config, len(prompts))
        check_frozen_steps(config, steps)
        logger.info("%d prompts, %d steps; building the policy", len(prompts), steps)
        start.doing = "building the policy and connecting it to the engines"
        initialize_everything(config, session, policy, engines, steps)
        companions.initialize(config, session, policy_settings(config, steps), steps)
    with start.limit(config.train.step_timeout_s, "loading the checkpoint", "train.step_timeout_s"):
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
    from openrlhf_ext.controller.data import dataloader
    from openrlhf_ext.controller.experience import ShapingExperienceMaker
    from openrlhf_ext.controller.records import StepRecorder
    from openrlhf_ext.controller.trainer import TrainerLimits

    torch.manual_seed(config.train.seed)  # OpenRLHF's data loader takes its shuffle from the global generator
    workers, held_out = config.data.dataloader_num_workers, parts.held_out
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
            algorithm=build_algorithm(config),
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
            title=f"{algorithm_name(config)}, {Path(config.actor.model_name_or_path).name}",
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
    from openrlhf_ext.controller.data import dataloader

    entropy = trainer.initial_entropy  # of the first part of a run that was resumed
    if entropy is None:
        first = parts.prompts.first(config.initial_entropy_prompts)
        entropy = trainer.initial_entropy = trainer.measure_initial_entropy(dataloader(parts.strategy, first))
        logger.info("initial entropy %.4f nats (gtpo_conflict filters if it is below ln 2 = 0.6931)", entropy)
        trainer.recorder.writer.write(0, {"algorithm/initial_entropy": entropy})
    trainer.experience_maker.algorithm = build_algorithm(config, h_ini=entropy)


def with_local_model(config: Any) -> Any:
    """The configuration with folders as its models: a hub name is downloaded first, since every rank reads files.

    Raises:
        ConfigError: a downloaded model does not fit the options.
    """
    given = config
    models = {"actor": config.actor} | ({"critic": config.critic} if config.has_critic else {})
    for entity, options in models.items():
        name = options.model_name_or_path
        if name is not None and not Path(name).is_dir():
            changed = options.model_copy(update={"model_name_or_path": _download(name)})
            config = config.model_copy(update={entity: changed})
    if config is not given:
        preflight.check_downloaded(config)
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
