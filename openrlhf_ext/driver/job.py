"""Composition root of a training run: starts every process and wires the parts together."""

from __future__ import annotations

import logging
import math
import signal
import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from openrlhf_ext.algorithms.kl import KLCoefficient
from openrlhf_ext.config import RunConfig
from openrlhf_ext.config.estimator import (
    algorithm_name,
    engine_entropies,
    initial_entropy_prompts,
    old_logprobs,
)
from openrlhf_ext.config.files import downloaded
from openrlhf_ext.config.upstream import upstream_args
from openrlhf_ext.driver import preflight
from openrlhf_ext.driver.about import about_run, results, write_card
from openrlhf_ext.driver.bits import BitJudge
from openrlhf_ext.driver.cluster import RaySession
from openrlhf_ext.driver.drift import DriftCheck
from openrlhf_ext.driver.engines import EngineSupervisor, GpuSharing
from openrlhf_ext.driver.evaluation import HeldOut
from openrlhf_ext.driver.experience import ExperienceMaker
from openrlhf_ext.driver.gauges import StepGauges
from openrlhf_ext.driver.guard import Guard
from openrlhf_ext.driver.loop import Parts, TrainingLoop
from openrlhf_ext.driver.placement import RankGroup
from openrlhf_ext.driver.processes import (
    GUIDE_ENGINE,
    AuxiliaryModels,
    await_engines,
    await_guide_engines,
    initialize_policy,
    max_requests,
    prove_start,
    reserve_policy_places,
    start_engines,
    start_guide_engines,
    start_policy,
)
from openrlhf_ext.driver.profiler import StepProfiler
from openrlhf_ext.driver.progress import Progress
from openrlhf_ext.driver.rollouts import (
    GroupRequests,
    GuidedRequests,
    PromptStream,
    Requests,
    Rollouts,
    all_prompts,
)
from openrlhf_ext.driver.scoring import Scoring
from openrlhf_ext.driver.settings import (
    build_algorithm,
    check_frozen_steps,
    policy_path,
    probe_tolerance,
    sync_settings,
    training_steps,
    worker_env,
)
from openrlhf_ext.driver.trials import library_chatter, try_user_code
from openrlhf_ext.driver.waits import Deadline, call_ranks
from openrlhf_ext.imports import without_collection
from openrlhf_ext.megatron.model.hf_files import end_tokens, saved_generation_config
from openrlhf_ext.megatron.model.positions import chosen_factors
from openrlhf_ext.megatron.model.shape import read_model_shape
from openrlhf_ext.megatron.settings import row_costs
from openrlhf_ext.megatron.step.dealing import RowCosts
from openrlhf_ext.planning.fit import laid_out
from openrlhf_ext.reporting import EventLog, HeldOutWriter, SampleWriter
from openrlhf_ext.run.checkpoints import (
    Call,
    Checkpointer,
    check_shared_folders,
    clean_up,
    restore,
    write_hf,
)
from openrlhf_ext.run.ending import note_end, report_interruption
from openrlhf_ext.run.judge import StepJudge
from openrlhf_ext.run.ledger import LEDGER, Repeats, digest, hash_of, open_ledger
from openrlhf_ext.run.records import StepRecorder

logger = logging.getLogger(__name__)

_DESCRIBE_S = 120.0  # queries ranks and reads logs on other nodes (30 s each)


def run(config: RunConfig, guard: Guard, restart: int = 0) -> int:
    """Runs one attempt to train until the prompts are used up; ``restart`` counts the earlier
    attempts. Returns 0, 1 = failed, 130 = Ctrl-C, 143 = SIGTERM, 129 = SIGHUP. Raises ConfigError
    if a downloaded model does not fit the options or a user file cannot be used."""
    guard.expect(math.inf, "downloading models")
    config = with_local_model(config)
    guard.expect(
        config.vllm.start_timeout_s,
        "looking for the data, then starting Ray (vllm.start_timeout_s)",
    )
    preflight.check_hub_data(config)
    # a restart skips the preflight of the checkpoint: this run wrote it
    for tried in try_user_code(config) if restart else preflight.tried(config)[0]:
        logger.log(logging.WARNING if tried.raised else logging.INFO, "%s", tried)
    with EventLog(
        config.logger.beside("events.jsonl"), goes_on=config.ckpt.load_enable or restart > 0
    ) as log:
        guard.events = log
        if restart:
            log.note("restart", number=restart, most=config.train.max_restarts)
        else:
            log.note("start", **about_run(config))
        return run_once(config, log, guard)


def run_once(config: RunConfig, events: EventLog, guard: Guard) -> int:
    """Starts Ray, trains, and ends both; returns the exit codes of ``run``."""
    session = RaySession(
        policy_ranks=config.training_ranks,
        engines=config.engine_workers,
        env=worker_env(config),
        verbose=config.logger.verbose,
        guard=guard,
    )
    code = 0
    with ExitStack() as processes:
        try:
            processes.enter_context(session)
            train(config, session, events)
        except Exception as error:
            guard.ignore_signals()
            guard.expect(_DESCRIBE_S, "finding out why the run failed")
            failure = session.describe_failure(error)
            logger.error(
                "the run failed:\n%s\n(every frame: events.jsonl beside logger.metrics_path)",
                failure,
            )
            note_end(
                events,
                "failure",
                error=failure,
                traceback="".join(traceback.format_exception(error)),
            )
            code = 1
        except KeyboardInterrupt:
            guard.ignore_signals()
            code = report_interruption(config, events, guard.received or signal.SIGINT)
        guard.ended(code)
    guard.expect(config.train.step_timeout_s, "removing what is half-written")
    clean_up(config)
    return code


def train(config: RunConfig, session: RaySession, events: EventLog) -> None:
    """Builds every part, trains, and writes the final checkpoint."""
    clean_up(config)  # after an attempt that was killed
    parts = build_parts(config, session, events)
    check_shared_folders(
        config, partial(call_ranks, parts.policy, "policy"), config.train.step_timeout_s
    )
    loop = build_loop(parts)
    session.remember_children()
    processes = {
        name: {key: about[key] for key in ("host", "pid")}
        for name, about in session.processes.items()
    }
    events.note("ready", steps=parts.steps, processes=processes)
    try:
        if initial_entropy_prompts(config):
            set_initial_entropy(loop)
        loop.run()
        write_final(loop)
    except KeyboardInterrupt:
        loop.save_before_the_end()
        raise
    finally:
        loop.close_logs()
    events.note("end", path=config.ckpt.output_dir, results=results(config))


def write_final(loop: TrainingLoop) -> None:
    """Writes the last weights in Hugging Face form."""
    config = loop.config
    limit_s = config.train.step_timeout_s
    with loop.deadline.limit(limit_s, "writing the final checkpoint", "train.step_timeout_s"):
        loop.sharing.make_room_for_policy()
        logger.info("writing the final checkpoint to %s", config.ckpt.output_dir)
        write_hf(
            callers(loop.trained)["policy"],
            "policy",
            config.ckpt.output_dir,
            "ckpt.output_dir",
            limit_s,
        )
        write_card(config)
    if config.has_critic:
        with loop.deadline.limit(limit_s, "writing the critic", "train.step_timeout_s"):
            loop.auxiliary.save(config)


def build_parts(config: RunConfig, session: RaySession, events: EventLog) -> Parts:
    """Starts engines and policy ranks, which load while this process imports OpenRLHF and reads the
    data."""
    start = Deadline(session.guard, config.train.step_timeout_s, config.vllm.hang_timeout_s)
    start.of_ranks = session.rank_progress
    doing = "starting the rollout engines and the policy ranks"
    with start.limit(config.vllm.start_timeout_s, doing, "vllm.start_timeout_s"):
        _say_what_starts(config)
        with library_chatter(shown=config.logger.verbose):
            from openrlhf_ext import compat

            if not config.logger.verbose:
                compat.quiet_upstream_logs()
            places = reserve_policy_places(config, start)
            session.find_gpus(start.remaining)
            # reject a transport that needs GPUs before the engines start
            sync_settings(config, session.use_gpu, ())
            engines = start_engines(config, session.use_gpu, places, start)
            guide_engines = start_guide_engines(config, session.use_gpu, start)
            policy = start_policy(config, places)
            auxiliary = AuxiliaryModels.start(config, start, places)
            with without_collection():
                # this import is slow: the processes start meanwhile
                from openrlhf_ext.driver.data import load_data, open_tokenizer
            tokenizer = open_tokenizer(config)
            prompts, held_out = load_data(config, tokenizer)
        steps = training_steps(config, len(prompts))
        check_frozen_steps(config, steps)
        start.doing = "starting the rollout engines"
        first = tokenizer(prompts.prompts[0], add_special_tokens=False)["input_ids"]
        probe = await_engines(config, session, engines, first, start)
    _say_what_is_built(config, len(prompts), steps)
    ranks_s, option = config.megatron.start_timeout_s, "megatron.start_timeout_s"
    with start.limit(ranks_s, "building the policy and connecting it to the engines", option):
        initialize_policy(config, session, policy, engines, probe, steps, start)
    with start.limit(
        config.weight_sync.timeout_s, "comparing policy and engines", "weight_sync.timeout_s"
    ):
        prove_start(config, policy, engines, start)
    with start.limit(
        config.vllm.start_timeout_s, "starting the guide's engines", "vllm.start_timeout_s"
    ):
        await_guide_engines(session, guide_engines, start)
    with start.limit(ranks_s, "building the models beside the policy", option):
        auxiliary.initialize(config, session, steps, start)
    with start.limit(config.train.step_timeout_s, "loading the checkpoint", "train.step_timeout_s"):
        trained = {"policy": policy}
        if auxiliary.critic is not None:
            trained["critic"] = auxiliary.critic
        data, timeout_s = {"prompts": prompts.fingerprint}, config.train.step_timeout_s
        resumed = restore(config, callers(trained), data, timeout_s, events)
    supervisor = EngineSupervisor(engines, policy, config, session.remember, start, events=events)
    guide_supervisor = None
    if guide_engines is not None:
        guide_supervisor = EngineSupervisor(
            guide_engines, None, config, session.remember, start, GUIDE_ENGINE, events
        )
    return Parts(
        config=config,
        session=session,
        events=events,
        deadline=start,
        tokenizer=tokenizer,
        policy=policy,
        auxiliary=auxiliary,
        supervisor=supervisor,
        guide_supervisor=guide_supervisor,
        prompts=prompts,
        held_out_data=held_out,
        steps=steps,
        trained=trained,
        resumed=resumed,
    )


def _say_what_starts(config: RunConfig) -> None:
    counts = config.world_size, config.vllm.num_engines
    logger.info("starting %d policy ranks and %d rollout engines", *counts)
    if config.guide_samples:
        logger.info("and %d engines of the guide", config.guide.num_engines)


def _say_what_is_built(config: RunConfig, prompts: int, steps: int) -> None:
    logger.info("%d prompts, %d steps; building the policy", prompts, steps)
    if label := config.training_label:
        logger.info("the policy's linear layers: %s", label)
    if factors := chosen_factors(read_model_shape(policy_path(config)).rotary, config.data.max_len):
        logger.info(factors)


def build_loop(parts: Parts) -> TrainingLoop:
    """Builds the training loop and restores it from the checkpoint, if there is one."""
    from openrlhf_ext.compat import build_sinks
    from openrlhf_ext.driver.data import dataloader

    config = parts.config
    shape = read_model_shape(policy_path(config))
    # the data loader shuffles with the global generator
    torch.manual_seed(config.train.seed)
    sharing = GpuSharing(config, parts.trained, parts.supervisor)
    loader = dataloader(parts.prompts, shuffle=True, workers=config.data.dataloader_num_workers)
    stream = PromptStream(loader, config.train.num_episodes)
    drift = None
    if config.train.drift_check:
        tolerances = config.repeat_tolerance, probe_tolerance(config)
        drift = DriftCheck(parts.policy, *tolerances, config.train.step_timeout_s)
    loop = TrainingLoop(
        **vars(parts),
        rollouts=Rollouts(stream, requests_of(parts), config, parts.deadline, sharing.generation),
        experience=build_experience(parts, row_costs(shape, config.megatron, config.layout)),
        sharing=sharing,
        recorder=build_recorder(parts),
        gauges=StepGauges(parts.policy, shape, config, parts.events),
        judge=StepJudge(config),
        progress=Progress(
            len(parts.prompts) * config.train.num_episodes,
            config.rollout.batch_size,
            config.train.max_minutes,
        ),
        held_out=[
            HeldOut(options, all_prompts(dataloader(own), own.places))
            for options, own in zip(config.eval.sets, parts.held_out_data, strict=True)
        ],
        sinks=build_sinks(upstream_args(config)),
        drift=drift,
        profiler=StepProfiler(parts.policy, config, parts.steps, parts.events),
        checkpointer=build_checkpointer(
            config, callers(parts.trained), parts.prompts.fingerprint, parts.events
        ),
    )
    if config.train.exact_rollout_enable:
        loop.bit_judge = BitJudge(parts.events, loop.walk)
    if parts.resumed is not None:
        loop.restore(parts.resumed.state, parts.resumed.arrays)
    begin_ledger(loop)
    return loop


def build_experience(parts: Parts, costs: RowCosts) -> ExperienceMaker:
    """Builds the maker that turns groups into experience; ``costs`` are those of rows in the
    policy's model."""
    config, kl = parts.config, parts.config.algo.kl
    source, why = old_logprobs(config)
    logger.info("old log-probs: of the %s (%s)", source, why)
    critic = parts.auxiliary.value_trainer(config)
    scoring = Scoring(
        parts.policy,
        group_size=config.rollout.n_samples_per_prompt,
        mini_batch_size=config.train.batch_size,
        values=None if critic is None else critic.values,
        costs=costs,
        source=source,
        engine_entropies=engine_entropies(config),
        replays=config.replays_rollout,
        seed=config.train.seed,
        **parts.auxiliary.scorers(config, parts.policy),
    )
    steered = KLCoefficient(kl.init_coef, kl.target, kl.horizon) if kl.init_coef > 0 else None
    generation = saved_generation_config(Path(policy_path(config)))
    return ExperienceMaker(
        scoring,
        build_algorithm(config),
        critic=critic,
        kl=steered,
        tokenizer=parts.tokenizer,
        end_tokens=end_tokens(generation, parts.tokenizer),
        exact=config.train.exact_rollout_enable,
    )


def callers(groups: Mapping[str, RankGroup]) -> dict[str, Call]:
    """Returns a function for each group that calls its ranks, by the group's name."""
    return {name: partial(call_ranks, group, name) for name, group in groups.items()}


def build_checkpointer(
    config: RunConfig, groups: Mapping[str, Call], prompts: str, events: EventLog
) -> Checkpointer:
    """Builds the run's checkpointer; ``prompts`` is the fingerprint of the prompts."""
    ckpt, timeout_s = config.ckpt, config.train.step_timeout_s
    best = (ckpt.best_metric_key, ckpt.keep_best)
    return Checkpointer(
        config, groups, {"prompts": prompts}, timeout_s, events, best, ckpt.async_enable
    )


def build_recorder(parts: Parts) -> StepRecorder:
    """Builds the recorder of the run folder: metrics, events, completions, the figure."""
    config = parts.config
    resume_step = parts.resumed.step if parts.resumed is not None else 0

    def texts(token_ids: list[int]) -> list[str]:
        return parts.tokenizer.batch_decode(
            [[token] for token in token_ids], clean_up_tokenization_spaces=False
        )

    logger = config.logger
    kept = (logger.samples_every, parts.steps, texts, logger.samples_groups, resume_step)
    return StepRecorder(
        config,
        # with a time limit, the number of steps is unknown
        parts.steps if config.train.max_minutes is None else None,
        resume_step,
        parts.events,
        f"{algorithm_name(config)}, {Path(policy_path(config)).name}",
        parts.prompts.skipped_overlong,
        SampleWriter(logger.beside("samples.jsonl"), *kept),
        HeldOutWriter(logger.beside("eval_samples.jsonl"), *kept),
    )


def begin_ledger(loop: TrainingLoop) -> None:
    """Opens the ledger of the prompts that the loop trains; its first line describes the data."""
    data, path = loop.prompts, loop.config.logger.beside(LEDGER)
    digests = [*map(digest, data.prompts, data.labels)]
    loop.ledger = open_ledger(path, loop.step)
    loop.repeats = Repeats(digests, path)
    loop.ledger.append(
        {
            "step": loop.step,
            "prompts": len(data),
            "episodes": loop.config.train.num_episodes,
            "skipped_overlong": data.skipped_overlong,
            "episode": hash_of(digests),
            **loop.rollouts.place,
        }
    )


def requests_of(parts: Parts) -> Requests:
    """Builds the requests to the engines; with a guide, to two sets of engines."""
    most = max_requests(parts.config, parts.session.use_gpu)
    policy = GroupRequests(parts.supervisor, most, routed=parts.config.replays_rollout)
    if parts.guide_supervisor is None:
        return policy
    return GuidedRequests(policy, GroupRequests(parts.guide_supervisor, most))


def set_initial_entropy(loop: TrainingLoop) -> None:
    """Measures the initial entropy and passes it to the algorithm: gtpo_conflict filters by entropy
    only if the policy started below ln 2."""
    from openrlhf_ext.driver.data import dataloader

    config = loop.config
    entropy = loop.initial_entropy  # a resumed run keeps the value of its first part
    if entropy is None:
        first = dataloader(loop.prompts.first(initial_entropy_prompts(config)))
        entropy = loop.initial_entropy = loop.measure_initial_entropy(all_prompts(first))
        logger.info(
            "initial entropy %.4f nats (gtpo_conflict filters if it is below ln 2 = 0.6931)",
            entropy,
        )
        loop.recorder.writer.write(0, {"algorithm/initial_entropy": entropy})
    said = set(build_algorithm(config).options.cautions())  # load_config has logged these
    loop.experience.algorithm = build_algorithm(config, h_ini=entropy)
    for caution in loop.experience.algorithm.options.cautions():
        if caution not in said:
            logger.warning("algo.%s.%s", config.algo.advantage.estimator, caution)


def with_local_model(config: RunConfig) -> RunConfig:
    """Returns the configuration with local folders as its models. Downloads a model that has a hub
    name, since every rank reads files. Raises ConfigError if a model cannot be downloaded or does
    not fit the options."""
    given = config
    for section in (option.partition(".")[0] for option in config.model_options):
        options = getattr(config, section)
        name = options.model_name_or_path
        if name is not None and not Path(name).is_dir():
            folder = downloaded(f"{section}.model_name_or_path", name)
            changed = options.model_copy(update={"model_name_or_path": folder})
            config = config.model_copy(update={section: changed})
    if config is not given:
        config = laid_out(config)
        preflight.check_downloaded(config)
    return config
