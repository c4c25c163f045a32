"""The composition root of a training run: which class runs where, from top to bottom."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from openrlhf_ext.driver import preflight
from openrlhf_ext.driver.auxiliary import Companions
from openrlhf_ext.driver.checkpointing import Checkpointer, CheckpointOptions, save_hf
from openrlhf_ext.driver.engines import EngineGuard, GroupRequests
from openrlhf_ext.driver.experience import ExperienceMaker
from openrlhf_ext.driver.gpu_sharing import GpuSharing, Sleepers
from openrlhf_ext.driver.guided import GuidedRequests
from openrlhf_ext.driver.loop import TrainingLoop
from openrlhf_ext.driver.processes import (
    GUIDE_ENGINE,
    await_guide_engines,
    initialize_everything,
    reserve_policy_places,
    start_engines,
    start_guide_engines,
    start_policy,
)
from openrlhf_ext.driver.prompts import PromptStream, all_prompts
from openrlhf_ext.driver.records import StepRecorder
from openrlhf_ext.driver.resume import (
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
from openrlhf_ext.driver.rollouts import Rollouts
from openrlhf_ext.driver.session import RaySession
from openrlhf_ext.driver.settings import (
    build_algorithm,
    check_frozen_steps,
    loop_options,
    policy_settings,
    recovery_limits,
    rollout_options,
    training_steps,
    worker_env,
)
from openrlhf_ext.driver.state import restore_loop
from openrlhf_ext.driver.waiting import Deadline
from openrlhf_ext.imports import without_collection
from openrlhf_ext.megatron.model.shape import read_model_shape

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
    session = RaySession(
        policy_ranks=config.training_ranks, engines=config.engine_workers, env=worker_env(config),
        verbose=config.logger.verbose,
    )  # fmt: skip
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
    deadline: Deadline
    use_gpu: bool
    guard: EngineGuard
    guide_guard: EngineGuard | None = None
    companions: Companions = Companions()
    resumed: Resumed | None = None


def train(config: Any, session: RaySession) -> None:
    """Builds every part, trains, and writes the final checkpoint."""
    prepare_folder(config)
    parts = build_parts(config, session)
    check_shared_folders(config, parts.policy)
    loop = build_loop(config, parts)
    session.remember_children()
    if config.initial_entropy_prompts:
        set_initial_entropy(config, loop, parts)
    loop.run()
    loop.recorder.close()
    loop.sharing.make_room_for_policy()
    logger.info("writing the final checkpoint to %s", config.ckpt.output_dir)
    save_hf(parts.policy, "policy", config.ckpt.output_dir, "ckpt.output_dir", config.train.step_timeout_s)
    parts.companions.save(config)


def build_parts(config: Any, session: RaySession) -> Parts:
    """Starts engines and policy ranks, which load while this process imports OpenRLHF and reads the data."""
    start = Deadline()
    doing = "starting the rollout engines and the policy ranks"
    with start.limit(config.vllm.start_timeout_s, doing, "vllm.start_timeout_s"):
        logger.info("starting %d policy ranks and %d rollout engines", config.world_size, config.vllm.num_engines)
        if config.has_guide:
            logger.info("and %d engines of the guide", config.guide.num_engines)
        with library_chatter(shown=config.logger.verbose):
            from openrlhf_ext import compat

            if not config.logger.verbose:
                compat.quiet_upstream_logs()
            places = reserve_policy_places(config)
            engines = start_engines(config, session.use_gpu, places)
            guide_engines = start_guide_engines(config, session.use_gpu)
            policy = start_policy(config, places)
            companions = Companions.start(config, places)
            with without_collection():
                from openrlhf_ext.driver.data import load_data  # takes long: the others start meanwhile
            strategy = compat.DriverStrategy(config.upstream_args())
            tokenizer = compat.get_tokenizer(
                config.actor.model_name_or_path, None, "left", strategy, use_fast=not config.data.disable_fast_tokenizer
            )
            prompts, held_out = load_data(config, strategy, tokenizer)
        steps = training_steps(config, len(prompts))
        check_frozen_steps(config, steps)
        logger.info("%d prompts, %d steps; building the policy", len(prompts), steps)
        start.doing = "building the policy and connecting it to the engines"
        initialize_everything(config, session, policy, engines, steps, start)
        await_guide_engines(config, session, guide_engines, start)
        companions.initialize(config, session, policy_settings(config, steps), steps, start)
    with start.limit(config.train.step_timeout_s, "loading the checkpoint", "train.step_timeout_s"):
        resumed = restore(config, checkpointed_groups(policy, companions))
        check_prompts(resumed, prompts_fingerprint(prompts.dataset))
    guard = EngineGuard(engines, policy, recovery_limits(config), session.remember, start)
    guide_guard = None
    if guide_engines is not None:
        limits = recovery_limits(config)
        guide_guard = EngineGuard(guide_engines, None, limits, session.remember, start, GUIDE_ENGINE)
    return Parts(
        strategy, tokenizer, policy, engines, prompts, held_out, steps, start, session.use_gpu, guard, guide_guard,
        companions, resumed,
    )  # fmt: skip


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


def build_loop(config: Any, parts: Parts) -> TrainingLoop:
    """The training loop with everything that it drives, at the place where the run begins or goes on."""
    from openrlhf_ext.driver.data import dataloader

    torch.manual_seed(config.train.seed)  # the data loader takes its shuffle from the global generator
    deadline, groups = parts.deadline, checkpointed_groups(parts.policy, parts.companions)
    sharing = GpuSharing(
        Sleepers(config.ds.enable_sleep, config.vllm.enable_sleep), list(groups.values()), parts.guard,
        config.train.step_timeout_s,
    )  # fmt: skip
    loader = dataloader(parts.strategy, parts.prompts, shuffle=True, workers=config.data.dataloader_num_workers)
    loop = TrainingLoop(
        options=loop_options(config),
        policy=parts.policy,
        rollouts=Rollouts(
            PromptStream(loader, config.train.num_episodes), requests_of(config, parts), rollout_options(config),
            deadline, sharing.generation,
        ),
        experience=ExperienceMaker(
            parts.policy,
            algorithm=build_algorithm(config),
            group_size=config.rollout.n_samples_per_prompt,
            mini_batch_size=config.train.batch_size,
            data_parallel_size=config.data_parallel_size,
            attention_length=read_model_shape(config.actor.model_name_or_path).attention_length,
            **parts.companions.experience_parts(config, parts.policy),
        ),
        guard=parts.guard,
        guide_guard=parts.guide_guard,
        sharing=sharing,
        deadline=deadline,
        recorder=StepRecorder(
            Path(config.logger.metrics_path),
            Path(config.logger.figure_path),
            parts.steps,
            parts.prompts.skipped_overlong,
            title=f"{config.algorithm_name()}, {Path(config.actor.model_name_or_path).name}",
            resume_step=parts.resumed.step if parts.resumed is not None else 0,
        ),
        gauges=step_gauges(config, parts.policy),
        held_out=dataloader(parts.strategy, parts.held_out) if parts.held_out else None,
        sinks=build_sinks(parts.strategy.args),
        tokenizer=parts.tokenizer,
        drift=drift_check(config, parts.policy),
        checkpointer=build_checkpointer(config, parts),
    )  # fmt: skip
    if parts.resumed is not None:
        restore_loop(loop, parts.resumed.state, dict(parts.resumed.arrays))
    return loop


def requests_of(config: Any, parts: Parts) -> GroupRequests | GuidedRequests:
    """What asks the engines for groups; with a guide they come from two sets of engines."""
    most = max_requests(config, parts)
    policy = GroupRequests(parts.guard, most)
    return policy if parts.guide_guard is None else GuidedRequests(policy, GroupRequests(parts.guide_guard, most))


def max_requests(config: Any, parts: Parts) -> int:
    """Responses that an engine is asked for at a time: by default as many as it can batch."""
    from openrlhf_ext.rollout.launch import batch_limits

    vllm = config.vllm
    limits = batch_limits(parts.use_gpu, vllm.max_num_seqs, vllm.max_num_batched_tokens, config.data.max_len)
    return vllm.max_requests or max(limits["max_num_seqs"], config.rollout.n_samples_per_prompt)


def build_sinks(args: Any) -> list:
    """OpenRLHF's loggers that the options ask for."""
    from openrlhf_ext.compat import TensorboardLogger, WandbLogger

    wanted = ((WandbLogger, args.logger.wandb.key), (TensorboardLogger, args.logger.tensorboard_dir))
    return [logger(args) for logger, is_wanted in wanted if is_wanted]


def step_gauges(config: Any, policy: Any):
    """Speed, memory and the slowest rank of every step."""
    from openrlhf_ext.driver.gauges import StepGauges

    return StepGauges(
        policy, read_model_shape(config.actor.model_name_or_path), config.train.max_epochs, config.logger.peak_tflops,
        config.megatron.param_dtype == "bf16", config.train.step_timeout_s,
    )  # fmt: skip


def drift_check(config: Any, policy: Any):
    """The self-test of a run with train.drift_check, None in any other."""
    from openrlhf_ext.driver.drift import DriftCheck

    if not config.train.drift_check:
        return None
    return DriftCheck(policy, config.probe_tolerance, config.train.step_timeout_s)


def set_initial_entropy(config: Any, loop: TrainingLoop, parts: Parts) -> None:
    """gtpo_conflict filters by entropy only if the policy started below ln 2: measures that and tells the algorithm."""
    from openrlhf_ext.driver.data import dataloader

    entropy = loop.initial_entropy  # of the first part of a run that was resumed
    if entropy is None:
        first = dataloader(parts.strategy, parts.prompts.first(config.initial_entropy_prompts))
        entropy = loop.initial_entropy = loop.measure_initial_entropy(all_prompts(first))
        logger.info("initial entropy %.4f nats (gtpo_conflict filters if it is below ln 2 = 0.6931)", entropy)
        loop.recorder.writer.write(0, {"algorithm/initial_entropy": entropy})
    loop.experience.algorithm = build_algorithm(config, h_ini=entropy)


def with_local_model(config: Any) -> Any:
    """The configuration with folders as its models: a hub name is downloaded first, since every rank reads files.

    Raises:
        ConfigError: a downloaded model does not fit the options.
    """
    given = config
    models = {"actor": config.actor} | ({"critic": config.critic} if config.has_critic else {})
    models |= {"guide": config.guide} if config.has_guide else {}
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
