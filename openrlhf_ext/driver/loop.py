"""The training loop: take finished groups, score, shape, train, publish, record, evaluate, save.

Synchronous and asynchronous training share this loop: ``train.max_staleness`` 0 makes it
synchronous. Everything runs in this thread. While the policy works, the loop polls the policy and
handles rollouts between polls (``Rollouts.pump``).
"""

from __future__ import annotations

import copy
import logging
import random
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from openrlhf_ext.algorithms import mean_entropies
from openrlhf_ext.config import RunConfig
from openrlhf_ext.driver.bits import BitJudge, said_difference
from openrlhf_ext.driver.cluster import RaySession
from openrlhf_ext.driver.description import held_out_samples, recounted
from openrlhf_ext.driver.drift import DriftCheck
from openrlhf_ext.driver.engines import EngineSupervisor, GpuSharing
from openrlhf_ext.driver.evaluation import Evaluation, HeldOut, evaluation_metrics, weight_versions
from openrlhf_ext.driver.experience import Described, Experience, ExperienceMaker
from openrlhf_ext.driver.gauges import DraftWatch, StepGauges, why_no_gradient
from openrlhf_ext.driver.guard import Guard
from openrlhf_ext.driver.placement import RankGroup
from openrlhf_ext.driver.processes import AuxiliaryModels
from openrlhf_ext.driver.profiler import StepProfiler
from openrlhf_ext.driver.progress import Progress
from openrlhf_ext.driver.rollouts import Group, Prompt, Rollouts, groups_from_plain, plain_groups
from openrlhf_ext.driver.scoring import sequences_of
from openrlhf_ext.driver.settings import frozen_steps
from openrlhf_ext.driver.waits import Deadline
from openrlhf_ext.ranks.movement import check_gauges
from openrlhf_ext.ranks.policy import TrainingShard
from openrlhf_ext.reporting import EventLog
from openrlhf_ext.reporting.lines import JsonLines, step_of
from openrlhf_ext.rollout.response import Response
from openrlhf_ext.run.checkpoints import Arrays, Checkpointer, Resumed, State
from openrlhf_ext.run.judge import StepJudge
from openrlhf_ext.run.ledger import Repeats
from openrlhf_ext.run.records import StepRecorder

if TYPE_CHECKING:
    from openrlhf_ext.driver.data import PromptData

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Parts:
    """The parts of a run before training starts: its processes, which wait for calls, and its data.

    ``trained``: the groups of ranks whose state a checkpoint holds, the policy's first;
    ``resumed``: the checkpoint that this run continues from.
    """

    config: RunConfig
    session: RaySession
    events: EventLog
    deadline: Deadline
    tokenizer: Any
    policy: RankGroup
    auxiliary: AuxiliaryModels
    supervisor: EngineSupervisor
    guide_supervisor: EngineSupervisor | None = None
    prompts: PromptData
    held_out_data: list[PromptData]
    steps: int
    trained: dict[str, RankGroup]
    resumed: Resumed | None

    @property
    def guard(self) -> Guard:
        """The guard that holds back SIGTERM while a step changes the weights."""
        return self.session.guard


@dataclass(kw_only=True)
class TrainingLoop(Parts):
    """The training of one run. ``step`` counts the finished steps; the engines have the policy's
    weights ``version``. ``sinks`` are OpenRLHF's loggers (W&B, TensorBoard)."""

    rollouts: Rollouts
    experience: ExperienceMaker
    sharing: GpuSharing
    recorder: StepRecorder
    gauges: StepGauges
    judge: StepJudge
    progress: Progress
    held_out: Sequence[HeldOut]
    checkpointer: Checkpointer
    profiler: StepProfiler
    sinks: Sequence[Any] = ()
    drift: DriftCheck | None = None
    ledger: JsonLines = field(init=False)
    repeats: Repeats = field(init=False)
    step: int = 0
    version: int = 0
    initial_entropy: float | None = None
    bit_judge: BitJudge | None = field(default=None, init=False)  # of exact mode
    _began: float = field(default=0.0, init=False)
    _ended: float = field(default=0.0, init=False)
    _waited_s: float = field(default=0.0, init=False)
    _record: Mapping[str, float] = field(default_factory=dict, init=False)  # of the last step
    _drafts: DraftWatch = field(default_factory=DraftWatch, init=False)
    _no_gradient_said: bool = field(default=False, init=False)
    _evaluation: Evaluation | None = field(default=None, init=False)  # beside training
    # state after the last step that this process finished
    _finished: tuple[dict[str, Any], list[Group]] | None = field(default=None, init=False)

    def run(self) -> None:
        """Trains until the prompts are used up or ``train.max_minutes`` have passed. Evaluates
        before the first step and after the last one."""
        self.begin()
        while not self._time_is_up and (groups := self.take()):
            with self.profiler.step(self.step + 1):
                made = self.score_and_shape(groups)
                self.guard.hold(self.config.ckpt.grace_s)
                self._finished = None  # from here on the ranks' state is between two steps
                trained = self.judge.accepted(partial(self.train, made.shards))
                if trained is not None:
                    trained |= self.publish()
                    described = self.describe(made)  # the engines already sample again
                    del made  # its shards are as large as the batch
            if trained is None:
                self.go_back(groups, self.judge.why)
                continue
            self.record(described, trained)
            if self.bit_judge is not None:
                self.bit_judge.judge(self.step, described.bits)
            self._note_state()
            self.guard.release()
            self.evaluate_and_save()
        self.end()

    def begin(self) -> None:
        """Sends the engines the weights of the checkpoint, or evaluates the untrained policy."""
        if self.step or self.config.ds.lora.path is not None:  # engines loaded only the base model
            self.publish()
        if self.step:
            if self._evaluation_due and self.recorder.last_evaluation != self.step:
                self.evaluate()  # SIGTERM interrupted it
        else:
            self.version = self.supervisor.ask("weight_version")[0]
            self.evaluate()
        self.progress.start()
        self._began = self._ended = time.perf_counter()

    @property
    def _time_is_up(self) -> bool:
        minutes = self.config.train.max_minutes
        return minutes is not None and time.perf_counter() - self._began > 60 * minutes

    def take(self) -> list[Group]:
        """Returns the groups of the next step, oldest first; an empty list when the prompts are
        used up."""
        started = time.perf_counter()
        self.events.step = self.step + 1
        groups = self.rollouts.take(self.version)
        if groups:
            seconds = time.perf_counter() - self._began
            trains = self.step >= frozen_steps(self.config)
            self.progress.take(self.rollouts.used_up, seconds, trains)
        self.checkpointer.poll()
        self._waited_s = time.perf_counter() - started
        return groups

    def score_and_shape(self, groups: Sequence[Group]) -> Experience:
        """Computes old log-probs, values, rewards, and reference log-probs, then advantages of
        whole groups and every rank's shard."""
        with self._limit(f"training step {self.step + 1}"):
            shown = self.recorder.samples.groups_due(self.step + 1)
            return self.experience.make(groups, self.version, self._get, shown=shown)

    def train(self, shards: list[TrainingShard]) -> dict[str, float]:
        """Runs the optimizer steps of policy and critic. All ranks of each model return the same
        reduced metrics."""
        started = time.perf_counter()
        with self._limit(f"training step {self.step + 1}"):
            if self.drift is not None:
                self.drift.before_training()
            critic = self.experience.critic
            metrics: dict[str, float] = {}
            values = critic.start_fit(*self.progress.of_run) if critic is not None else []
            if self.config.ds.enable_sleep:
                self._get(values)  # only one of the two keeps its states on the device at a time
            if self.step >= frozen_steps(self.config):
                taken = self.policy.ask_replicas("take_shard", shards)
                # Do not wait here: the ranks that `fit` synchronizes with detect a rank that hangs.
                trained = self.policy.ask("fit", *self.progress.of_policy)
                metrics |= self._get([*taken, *trained])[len(taken)]
            if values:
                metrics |= self._get(values)[0]
        self.step += 1
        self.checkpointer.poll()
        return metrics | {"time/train": time.perf_counter() - started}

    def go_back(self, groups: Sequence[Group], why: str) -> None:
        """Rolls back to the last checkpoint and skips the prompts of the rejected step."""
        logger.error("step %d is not accepted: %s", self.events.step, why)
        self.rollouts.drain()
        self._finish_evaluation()
        with self._limit("going back to the last checkpoint"):
            self.sharing.make_room_for_policy()
            resumed = self.checkpointer.go_back(why)
        self.judge.count(resumed.step)
        prompts = sorted(group.prompt.number for group in groups)
        count = self.judge.rollbacks
        self.events.note("rollback", why=why, to=resumed.step, prompts=prompts, rollbacks=count)
        self.rollouts.skip(prompts)
        self.restore(resumed.state, resumed.arrays)
        self.recorder.repeat_from(self.step, self.rollouts.dropped)
        self.ledger.keep(lambda line: step_of(line) <= self.step)
        self.repeats.read()
        self.publish()
        self._engine_stats()  # discard them: they do not belong to the next step
        self._note_state()
        self._ended = time.perf_counter()
        self.guard.release()

    def walk(self, token_ids: Sequence[int]) -> str:
        """Says which module of policy and engines computes something else for a text, with the
        present weights of both."""
        self.rollouts.drain()
        with self._limit("looking for the module that differs"):
            self.sharing.make_room_for_policy()
            ranks = self._get(self.policy.ask("walk", token_ids))
            with self.sharing.generation(lambda: False):
                there = self.supervisor.there
                calls = [engine.walk.remote(token_ids) for engine in there.values()]
                engines = dict(zip(there, self._get(calls), strict=True))
        return said_difference(self.config.layout, ranks, engines)

    def describe(self, made: Experience) -> Described:
        """Returns metrics and samples of the step's batch."""
        with self._limit(f"log-probs of training step {self.step}"):
            return self.experience.described(made, self._get)

    def publish(self) -> dict[str, float]:
        """Sends the weights to the engines and checks that they sample from them; returns rank 0's
        measurements."""
        started = time.perf_counter()
        if not self.config.partial_rollouts:
            self.rollouts.drain()
        drained = time.perf_counter()
        waited = self._finish_evaluation() if self._evaluation is not None else {}
        with self._limit(f"sending the weights of step {self.step}"):
            metrics = self.supervisor.repeat_until_sent(self._send)
        self.version = int(metrics["weight_sync/version"])
        seconds = time.perf_counter() - started - waited.get("time/wait_eval", 0.0)
        return metrics | waited | {"time/wait_sync": drained - started, "time/sync": seconds}

    def _send(self) -> dict[str, float]:
        self.sharing.wake_weights()
        return self.deadline.get(self.policy.ask("send_weights"))[0]

    def record(self, made: Described, measured: Mapping[str, float]) -> None:
        """Collects the metrics of the step and writes them to the logs."""
        metrics = recounted({**made.metrics, **measured})
        metrics |= self._measured(made, metrics) | self.rollouts.gauges()
        now = time.perf_counter()
        metrics |= {"time/step": now - self._ended, "time/wait_rollouts": self._waited_s}
        restarts = sum(supervisor.restarts for supervisor in self._supervisors)
        alive = sum(len(supervisor.there) for supervisor in self._supervisors)
        metrics |= {"engines/restarts": restarts, "engines/alive": alive}
        metrics["prompts/consumed"] = self.rollouts.prompts.drawn
        trained = [group.prompt.entry for group in made.groups]
        metrics["prompts/repeated"] = repeated = self.repeats.add(trained)
        if repeated:
            logger.error(
                "step %d trained %d prompts that the episode had before: the data began anew "
                "(openrlhf-ext ledger)",
                self.step,
                repeated,
            )
        check_gauges(self.step, metrics, self.config.actor)
        self._record = record = self.recorder.step(self.step, metrics, self._engine_stats())
        self.ledger.append({"step": self.step, "trained": trained, **self.rollouts.account()})
        if metrics.get("grad_norm") == 0.0 and not self._no_gradient_said:
            self._no_gradient_said = True
            groups = [group.responses for group in made.groups]
            estimator = self.config.algo.advantage.estimator
            logger.warning(
                "step %d has no gradient: %s",
                self.step,
                why_no_gradient(groups, self.experience.algorithm, estimator),
            )
        self._drafts.watch(self.step, record, self.config.vllm.speculative.num_tokens)
        self.guard.step_ended(self.recorder.progress.total_steps, metrics["time/step"])
        if made.samples:
            self.recorder.samples.write(self.step, made.samples)
        if self.sinks and self.step % self.config.logger.logging_steps == 0:
            sample = made.groups[0].responses[0]
            text = self.tokenizer.decode(sample.tokens_S.tolist())
            shown = {"generated_samples": [text, sample.reward]}
            for sink in self.sinks:
                sink.log_train(self.step, record | shown)
        self._ended = now

    def _measured(self, made: Described, metrics: Mapping[str, float]) -> dict[str, float]:
        """Returns the gauges of the step that has just ended. With ``train.drift_check``, also
        checks that the step changed nothing."""
        measured: dict[str, float] = {}
        if self.drift is not None:
            with self._limit(f"the drift check of step {self.step}"):
                self.sharing.make_room_for_policy()
                again = self.experience.scoring.old_logprobs(made.batch, self._get)
                measured |= self.drift.after_training(
                    made.old, again, metrics.get("mismatch/mean_abs")
                )
        return measured | self.gauges.collect(made.batch, metrics)

    def evaluate_and_save(self) -> None:
        """Runs the evaluation and the checkpoint that are due after the step. Their time does not
        count as step time."""
        evaluation = None
        if self._evaluation_due and self.config.eval.async_enable:
            self._start_evaluation()
        elif self._evaluation_due:
            evaluation = self.evaluate()
        if evaluation is not None:
            self._note_state()
        with self._limit(f"saving after step {self.step}"):
            self.checkpointer.after_step(self.step, evaluation, self._state_to_save, self._record)
        self._ended = time.perf_counter()

    @property
    def _evaluation_due(self) -> bool:
        every = self.config.eval.steps
        return every != -1 and self.step % every == 0

    def _state_to_save(self) -> State:
        self.sharing.make_room_for_policy()
        return self.state()

    def end(self) -> None:
        """Completes pending checkpoints and evaluates the last weights if no evaluation has yet."""
        self.events.step = self.step
        with self._limit("completing the last checkpoint"):
            self.checkpointer.finish()
        if self._evaluation is not None:
            self._finish_evaluation()
        if self.recorder.last_evaluation != self.step:
            self.evaluate()
        self.ledger.append({"end": self.step, **self.rollouts.account(ended=True)})
        if table := self.profiler.table():
            logger.info(
                "seconds of the profiled steps by kind of work (traces: profile/):\n%s", table
            )

    def save_before_the_end(self) -> None:
        """Saves a checkpoint of the last finished step after SIGTERM or SIGHUP, within
        ``ckpt.grace_s``. Saves nothing if a step is half done, and nothing after Ctrl-C: an
        interactive user can choose when to stop."""
        self.guard.ignore_signals()
        grace_s = self.config.ckpt.grace_s
        number = self.guard.received
        if number in (None, signal.SIGINT) or not grace_s:
            return
        if self._finished is None:
            logger.error(
                "no checkpoint was saved after %s: no step has ended, or not within ckpt.grace_s",
                number.name,
            )
            return
        seconds = grace_s - (time.monotonic() - self.guard.received_at)
        try:
            with self.deadline.limit(
                max(seconds, 0.0), f"saving step {self.step} after {number.name}", "ckpt.grace_s"
            ):
                if self.config.engines_share_gpus:
                    # the engines may still be sampling in memory that the policy needs
                    self.supervisor.end_engines()
                self.checkpointer.save_before_the_end(
                    _with_groups(*self._finished), self.deadline.remaining
                )
        except Exception as error:
            logger.error("no checkpoint was saved after %s: %s", number.name, error)

    def _note_state(self) -> None:
        """Keeps the driver's part of a checkpoint of this step, in case SIGTERM arrives in the next
        one."""
        state, waiting = self._state()
        self._finished = copy.deepcopy(state), waiting

    def close_logs(self) -> None:
        """Closes the run's logs before its processes end."""
        for log in (*self.sinks, self.recorder, self.ledger):
            try:
                log.close()
            # the reason the run ends is more important, and may have caused this error too
            except Exception as error:
                logger.error("a log could not be closed: %s", error)

    # ---- evaluation

    def evaluate(self) -> dict[str, float] | None:
        """Samples every held-out prompt and returns the metrics; accuracy is the mean of the reward
        function's ``scores``."""
        if not self.held_out:
            return None
        evaluation = self._begun_evaluation()
        answers = self.rollouts.sample_others(evaluation.all_requests, "evaluating")
        self._engine_stats()  # discard them: they do not belong to a step's rollouts
        return self._count(evaluation, answers)

    def _begun_evaluation(self) -> Evaluation:
        requests = [each.requests(self.config) for each in self.held_out]
        return Evaluation(self.step, self.version, self.supervisor.restarts, requests)

    def _start_evaluation(self) -> None:
        """Starts an evaluation of the engines' current weights, which runs beside the next step."""
        if self.held_out:
            self._evaluation = self._begun_evaluation()
            self.rollouts.ask_others(self._evaluation.all_requests)

    def _finish_evaluation(self) -> dict[str, float]:
        """Waits for the evaluation beside training before the engines get new weights. This wait
        does not count as step time."""
        evaluation, self._evaluation = self._evaluation, None
        if evaluation is None:
            return {}
        started = time.perf_counter()
        doing = f"waiting for the evaluation of step {evaluation.step}"
        answers = self.rollouts.await_others(
            evaluation.all_requests, doing, lambda: bool(self.guard.received)
        )
        if answers is None:  # the rest of the step must end within ckpt.grace_s
            logger.warning(
                "the evaluation of step %d is given up: the run was told to end", evaluation.step
            )
            return {}
        versions = set[int]().union(*map(weight_versions, answers.values()))
        if versions <= {evaluation.version}:
            self._count(evaluation, answers)
        elif self.supervisor.restarts == evaluation.restarts:
            raise AssertionError(
                f"the evaluation of step {evaluation.step} is of weights {evaluation.version}, "
                f"and has tokens of {sorted(versions)}"
            )
        else:  # a replacement engine loads the policy's current weights
            logger.error(
                "the evaluation of step %d is left out: an engine was replaced meanwhile",
                evaluation.step,
            )
        waited = time.perf_counter() - started
        self._ended += waited
        return {"time/wait_eval": waited}

    def _count(
        self, evaluation: Evaluation, answers: Mapping[Any, list[Response]]
    ) -> dict[str, float]:
        sets = [each.options for each in self.held_out]
        groups = evaluation.groups(self.held_out, answers)
        logs = evaluation_metrics(sets, groups, self._texts)
        logs["time/eval"] = time.perf_counter() - evaluation.started
        self.recorder.evaluation(evaluation.step, logs)
        kept = self.recorder.held_out
        if (most := kept.groups_due(evaluation.step)) is not None:
            kept.write(evaluation.step, held_out_samples(sets, groups, most))
        for sink in self.sinks:
            sink.log_eval(evaluation.step, logs)
        return logs

    def _texts(self, responses: Sequence[Response]) -> list[str]:
        """Returns the decoded text of each completion, without its prompt."""
        tokens = []
        for response in responses:
            start = len(response.tokens_S) - response.written
            tokens.append(response.tokens_S[start:].tolist())
        return self.tokenizer.batch_decode(tokens)

    def measure_initial_entropy(self, prompts: Sequence[Prompt]) -> float:
        """Returns the mean over completions of their mean token entropy in nats, before training
        (``<H>_ini`` of gtpo_conflict)."""
        samples = self.config.rollout.n_samples_per_prompt
        doing = "measuring the initial entropy"
        groups = self.rollouts.sample(prompts, samples, self.rollouts.sampling, doing)
        self._engine_stats()
        batch = sequences_of([response for group in groups for response in group.responses])
        with self._limit(doing):
            entropies_N = self.experience.scoring.old_logprobs(batch, self._get).entropies_N
        return float(mean_entropies(entropies_N, batch.responses).mean())

    def _engine_stats(self) -> list[dict[str, Any]]:
        """Returns the engines' statistics since the last call, those of a guide's engines
        included."""
        results = []
        for supervisor in self._supervisors:
            results += supervisor.ask("rollout_stats")
        for result in results:
            for message in result["reward_failures"]:
                # the engine's own log does not reach the user's terminal
                logger.error("grading failed: %s", message)
        return results

    @property
    def _supervisors(self) -> list[EngineSupervisor]:
        return [each for each in (self.supervisor, self.guide_supervisor) if each is not None]

    # ---- checkpoints

    def state(self) -> State:
        """Returns the driver's state for a checkpoint: plain values, and the arrays of the groups
        that wait for training."""
        return _with_groups(*self._state())

    def _state(self) -> tuple[dict[str, Any], list[Group]]:
        """Returns the state without the groups that wait for training, and these groups."""
        rollouts, waiting, in_flight = self.rollouts.snapshot()
        state = {
            "step": self.step,
            "rollouts": rollouts,
            "in_flight": [vars(prompt) for prompt in in_flight],
            "experience": self.experience.state_dict(),
            "initial_entropy": self.initial_entropy,
            "grad_norms": self.judge.norms,
            "progress": self.progress.state_dict(),
            "last_evaluation": self.recorder.last_evaluation,
            "random_states": {
                "python": random.getstate(),
                "numpy": np.random.get_state(),
                "torch": torch.get_rng_state(),
            },
        }
        return state, waiting

    def restore(self, state: Mapping[str, Any], arrays: Arrays) -> None:
        """Restores a state from :meth:`state`, before or during ``run``. Nothing is in flight."""
        in_flight = [Prompt(**prompt) for prompt in state["in_flight"]]
        finished = groups_from_plain(state["finished"], arrays)
        # algo.entropies may have been `policy` when the other groups were sampled
        if self.experience.scoring.engine_entropies:
            told = []
            again = []
            for group in finished:
                if all(each.entropies_T is not None for each in group.responses):
                    told.append(group)
                else:
                    again.append(group.prompt)
            finished = told
            in_flight = [*again, *in_flight]
            if again:
                logger.warning(
                    "%d groups of the checkpoint were sampled without entropies, which "
                    "algo.entropies engine needs: they are asked for again",
                    len(again),
                )
        self.rollouts.restore(state["rollouts"], finished, in_flight)
        self.step = state["step"]
        self.initial_entropy = state["initial_entropy"]
        self.experience.load_state_dict(state["experience"])
        self._restore_progress(state)
        self.judge.norms = [*state.get("grad_norms", ())]  # earlier releases did not save it
        # an evaluation that ended beside the next step is in the record but not in the checkpoint
        self.recorder.last_evaluation = max(self.recorder.last_evaluation, state["last_evaluation"])
        random.setstate(state["random_states"]["python"])
        np.random.set_state(state["random_states"]["numpy"])
        torch.set_rng_state(state["random_states"]["torch"])

    def _restore_progress(self, state: Mapping[str, Any]) -> None:
        # earlier releases did not save it: each step trained one batch
        batch = self.config.rollout.batch_size
        earlier = {
            "used": self.step * batch,
            "policy_from": min(self.step, frozen_steps(self.config)) * batch,
        }
        self.progress.load_state_dict(state.get("progress", earlier))

    # ---- waiting

    def _limit(self, doing: str) -> AbstractContextManager:
        return self.deadline.limit(self.config.train.step_timeout_s, doing, "train.step_timeout_s")

    def _get(self, refs: list) -> list:
        """Waits for ranks and handles rollouts meanwhile."""
        return self.deadline.get(refs, meanwhile=self.rollouts.pump)


def _with_groups(state: dict[str, Any], waiting: list[Group]) -> State:
    """Converts the groups to plain values and arrays for a checkpoint. Fetches their experts if the
    run replays routing."""
    finished, arrays = plain_groups(waiting)
    return state | {"finished": finished}, arrays
