"""OpenRLHF's PPOTrainer with our experience maker, deadlines and records.

The loop (`fit`), the order of one step (`train_step`), sample generation and evaluation stay upstream's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
import torch

from openrlhf_ext.algorithms import mean_entropies
from openrlhf_ext.compat import BasePPOTrainer, Experience, PPOTrainer
from openrlhf_ext.controller.checkpointing import Checkpointer
from openrlhf_ext.controller.deadline import Deadline
from openrlhf_ext.controller.drift import DriftCheck
from openrlhf_ext.controller.engine_recovery import EngineGuard
from openrlhf_ext.controller.experience import ShapingExperienceMaker
from openrlhf_ext.controller.gauges import StepGauges
from openrlhf_ext.controller.gpu_sharing import GpuSharing, Sleepers
from openrlhf_ext.controller.records import StepRecorder
from openrlhf_ext.controller.resume import Resumed, loop_states, restore_trainer, trainer_state
from openrlhf_ext.controller.rollout_sample import RolloutSample
from openrlhf_ext.controller.samples import RecoveringSamplesGenerator
from openrlhf_ext.megatron.batch import sequence_batch
from openrlhf_ext.rollout.shared import Shared
from openrlhf_ext.rollout.token_versions import SPANS_KEY

logger = logging.getLogger(__name__)

# what OpenRLHF's trainer calls a phase -> what our records call it
_PHASES = {"timing/ppo_train": "time/train", "timing/broadcast": "time/sync"}


class FilterExhaustedError(RuntimeError):
    """Dynamic sampling went through its budget of prompts without filling a batch."""


@dataclass(frozen=True)
class TrainerLimits:
    """Deadlines and budgets of one step, in seconds and in rollout batches."""

    step_timeout_s: float
    rollout_timeout_s: float
    max_filter_batches: int


class BoundedSamplesGenerator(RecoveringSamplesGenerator):
    """OpenRLHF's generator; dynamic sampling gives up after a number of batches' worth of prompts."""

    def __init__(
        self, *args: Any, limits: TrainerLimits, deadline: Deadline, sharing: GpuSharing, **kwargs: Any
    ) -> None:
        super().__init__(*args, suspended=deadline.suspended, **kwargs)
        self.limits, self.deadline, self.sharing = limits, deadline, sharing
        self._dispatched = 0

    def generate_samples(self, **kwargs: Any):
        self._dispatched = 0
        with (
            self.deadline.limit(self.limits.rollout_timeout_s, "generating a batch of rollouts", "rollout.timeout_s"),
            self.sharing.generation(),
        ):
            return super().generate_samples(**kwargs)

    def generate_eval_samples(self, **kwargs: Any) -> list[Experience]:
        with self.sharing.generation():
            return super().generate_eval_samples(**kwargs)

    def _process_response_into_experience(self, response: dict[str, Any], **kwargs: Any) -> RolloutSample:
        return RolloutSample.of(super()._process_response_into_experience(response, **kwargs), response.get(SPANS_KEY))

    def _dispatch_prompts_to_vllm(self, prompts: list[str], labels: list[str], **kwargs: Any) -> list:
        self._dispatched += len(prompts)
        budget = self.limits.max_filter_batches * self.args.rollout.batch_size
        if self.args.algo.dynamic_filtering_enable and self._dispatched > budget:
            raise FilterExhaustedError(
                f"dynamic sampling used {self._dispatched} prompts for one batch of {self.args.rollout.batch_size}: "
                "almost all groups are all right or all wrong. Use easier or harder prompts, a wider "
                "--algo.dynamic_filtering_range, or raise --rollout.max_filter_batches "
                f"(now {self.limits.max_filter_batches})."
            )
        return super()._dispatch_prompts_to_vllm(prompts, labels, **kwargs)


class PolicyTrainer(PPOTrainer):
    """The controller of a run; lives in the driver process."""

    def __init__(
        self,
        *,
        strategy: Any,
        tokenizer: Any,
        policy_group: Any,
        guard: EngineGuard,
        prompts_dataloader: Any,
        eval_dataloader: Any,
        generate_kwargs: dict[str, Any],
        make_experience_maker: Callable[..., ShapingExperienceMaker],
        recorder: StepRecorder,
        limits: TrainerLimits,
        checkpointer: Checkpointer | None = None,
        resumed: Resumed | None = None,
        gauges: StepGauges | None = None,
        drift: DriftCheck | None = None,
    ) -> None:
        self.deadline, self.guard, engines = Deadline(), guard, guard.engines
        self.gauges, self.drift = gauges, drift
        self.checkpointer, self.resumed = checkpointer, resumed
        self.initial_entropy: float | None = None
        self.recorder, self.limits = recorder, limits
        self.prompts_dataloader, self.eval_dataloader = prompts_dataloader, eval_dataloader
        self.generate_kwargs = generate_kwargs
        sleepers = Sleepers(strategy.args.ds.enable_sleep, strategy.args.vllm.enable_sleep)
        strategy.args.vllm.enable_sleep = False  # for OpenRLHF, whose calls are not repeated on a new engine
        self.sharing = GpuSharing(sleepers, [policy_group], guard, limits.step_timeout_s, self.deadline.suspended)
        if strategy.args.eval.steps == -1:
            strategy.args.eval.steps = float("inf")  # OpenRLHF counts in steps; -1 is its "never"
        strategy.args.ckpt.save_steps = float("inf")  # checkpoints are ours: see save_logs_and_checkpoints
        BasePPOTrainer.__init__(self, strategy, policy_group, None, None, None, engines, tokenizer)
        self._sent_tokenizer = Shared.of(tokenizer)
        self.samples_generator = self.make_generator(prompts_dataloader, eval_dataloader, self.rollout_deadline())
        upstream = self.experience_maker
        self.experience_maker = make_experience_maker(
            upstream.actor_model_group, None, None, None, upstream.kl_ctl, strategy, tokenizer
        )
        if self.experience_maker.critic is not None:
            self.sharing.add(self.experience_maker.critic.group)
        self._sync_metrics: dict[str, float] = {}
        if resumed is not None:
            restore_trainer(self, resumed.state)

    def rollout_deadline(self) -> Any:
        """The deadline of the thread that makes rollouts: this one."""
        return self.deadline

    def make_generator(self, prompts: Any, held_out: Any, deadline: Any) -> BoundedSamplesGenerator:
        """A samples generator over these loaders, for the thread that ``deadline`` is for."""
        return BoundedSamplesGenerator(
            self.strategy, prompts, held_out, self._sent_tokenizer, self.vllm_engines,
            guard=self.guard, limits=self.limits, deadline=deadline, sharing=self.sharing,
        )  # fmt: skip

    @property
    def policy_version(self) -> int:
        """Version of the weights that the policy has, and the engines since the last sync."""
        if "weight_sync/version" in self._sync_metrics:
            return int(self._sync_metrics["weight_sync/version"])
        return self.guard.ask("weight_version")[0]

    def train_step(self, rollout_samples: list[Experience], global_step: int) -> tuple[dict, int]:
        """One step of OpenRLHF's trainer, its metrics renamed to those of docs/metrics.md."""
        self.experience_maker.policy_version = self.policy_version
        with self.deadline.limit(
            self.limits.step_timeout_s, f"training step {global_step + 1}", "train.step_timeout_s"
        ):
            if self.drift is not None:
                self.drift.before_training()
            status, step = super().train_step(rollout_samples, global_step)
            measured = self._measure(status)
        kept = {k: v for k, v in status.items() if not k.startswith(("timing/", "rollout/"))}
        phases = {ours: status[upstream] for upstream, ours in _PHASES.items()}
        # fit() sums the keys that begin with timing/: they stay
        timing = {k: v for k, v in status.items() if k.startswith("timing/")}
        return {**kept, **self.experience_maker.metrics, **self._sync_metrics, **phases, **timing, **measured}, step

    def _measure(self, status: dict[str, float]) -> dict[str, float]:
        """Gauges of the step that has just ended; with ``train.drift_check`` the proof that it changed nothing."""
        maker, measured = self.experience_maker, {}
        if self.drift is not None:
            self.sharing.make_room_for_policy()
            again = maker.old_logprobs(maker.batch)
            mismatch = maker.metrics.get("mismatch/mean_abs")
            measured |= self.drift.after_training(maker.batch, maker.old, again, mismatch)
        if self.gauges is not None:
            seconds = {ours: status[upstream] for upstream, ours in _PHASES.items()}
            measured |= self.gauges.collect(maker.batch, maker.metrics | seconds)
        return measured

    def ppo_train(self, global_steps: int) -> dict:
        """Trains policy and critic at the same time; all ranks of each return the same reduced metrics."""
        critic = self.experience_maker.critic
        values = critic.start_fit() if critic is not None else []
        if self.args.ds.enable_sleep:
            ray.get(values)  # on shared GPUs only one of the two has its states there at a time
        frozen = critic is not None and global_steps <= self.args.critic.freezing_steps
        policy = [] if frozen else self.actor_model_group.async_run_method("fit", kl_ctl=self.kl_ctl.value)
        metrics = ray.get(policy)[0] if policy else {}
        return metrics | (ray.get(values)[0][0] if values else {})

    def broadcast_to_vllm(self) -> None:
        """Sends the weights; the measurements of rank 0, which holds the connection, go into the records."""
        self._sync_metrics = self.guard.repeated(self._sync, self.deadline.suspended)

    def _sync(self) -> dict[str, float]:
        self.sharing.wake_weights()
        return ray.get(self.actor_model_group.async_run_method("broadcast_to_vllm"))[0]

    def init_checkpoint_states(self) -> dict[str, Any]:
        """Where the loop begins."""
        return loop_states(self.resumed.state if self.resumed is not None else None)

    def save_best_checkpoint(self, eval_metrics: dict[str, float], global_step: int, client_states=None) -> None:
        """Called after an evaluation: saves the step's checkpoint if it is due, or the best so far."""
        self._save_checkpoint(global_step, client_states, eval_metrics)

    def _save_checkpoint(self, global_step: int, progress: dict[str, Any], evaluation: dict | None = None) -> None:
        if self.checkpointer is not None:
            doing = f"saving after step {global_step}"
            with self.deadline.limit(self.limits.step_timeout_s, doing, "train.step_timeout_s"):
                self.checkpointer.after_step(global_step, evaluation, lambda: self._state_to_save(progress))

    def _state_to_save(self, progress: dict[str, Any]) -> dict[str, Any]:
        self.sharing.make_room_for_policy()
        return trainer_state(self, progress)

    def save_logs_and_checkpoints(self, global_step: int, logs_dict=None, client_states=None) -> None:
        """Our records, OpenRLHF's loggers, and the step's checkpoint, which waits for its evaluation if one is due."""
        logs = dict(logs_dict or {})
        # OpenRLHF's pass rate is 100 * samples / prompts, and is missing without dynamic filtering
        kept = logs.get("dynamic_filtering_pass_rate", 100.0 * self.args.rollout.n_samples_per_prompt)
        more = {
            "groups/kept_fraction": kept / (100.0 * self.args.rollout.n_samples_per_prompt),
            "prompts/consumed": (client_states or {}).get("total_consumed_prompts", 0),
            "engines/restarts": self.guard.restarts,
        }
        record = self.recorder.step(global_step, logs, self._rollout_stats(), **more)
        super().save_logs_and_checkpoints(global_step, record, client_states)
        if not self.eval_dataloader or global_step % self.args.eval.steps:
            self._save_checkpoint(global_step, client_states)

    def _rollout_stats(self) -> list[dict[str, float]]:
        """What the engines measured since the last call."""
        results = self.guard.ask("rollout_stats")
        for message in (m for result in results for m in result.get("reward_failures", ())):
            logger.error("grading failed: %s", message)  # the engine's own log is not on the user's terminal
        return results

    def _forget_evaluation(self) -> None:
        """An evaluation does not count as a step's rollout, nor does it change the seeds of the next one."""
        self._rollout_stats()
        self.guard.ask("forget_requests")

    def evaluate(self, global_step: int, **generate_kwargs: Any) -> dict[str, float]:
        """Samples every held-out prompt; accuracy is the mean of the reward function's ``scores``."""
        started = time.perf_counter()
        with self.deadline.limit(self.limits.rollout_timeout_s, "evaluating", "rollout.timeout_s"):
            samples = self.samples_generator.generate_eval_samples(**generate_kwargs)
        self._forget_evaluation()
        logs = evaluation_metrics(samples, generate_kwargs["n_samples_per_prompt"]) | {
            "time/eval": time.perf_counter() - started
        }
        self.recorder.evaluation(global_step, logs)
        for sink in filter(None, (self.wandb_logger, self.tensorboard_logger)):
            sink.log_eval(global_step, logs)
        return logs

    def evaluate_now(self, global_step: int) -> None:
        """Evaluates outside of the loop: the starting point of the curve, and the end if the loop did not."""
        if self.eval_dataloader and self.recorder.last_evaluation != global_step:
            sampling = {
                "temperature": self.args.eval.temperature,
                "n_samples_per_prompt": self.args.eval.n_samples_per_prompt,
            }
            self.evaluate(global_step, **{**self.generate_kwargs, **sampling})

    def measure_initial_entropy(self, dataloader: Any) -> float:
        """Mean over completions of their mean token entropy, before training (``<H>_ini`` of gtpo_conflict), nats."""
        generator = self.make_generator(None, dataloader, self.deadline)
        with self.deadline.limit(self.limits.rollout_timeout_s, "measuring the initial entropy", "rollout.timeout_s"):
            samples = generator.generate_eval_samples(**self.generate_kwargs)
            batch = sequence_batch([s.sequences[0] for s in samples], [s.action_mask[0] for s in samples])
            entropies_BT = self.experience_maker.old_logprobs(batch).entropies_BT
        self._forget_evaluation()
        return float(mean_entropies(entropies_BT, batch.mask_BT).mean())

    def fit(self, global_step: int = 0) -> None:
        """OpenRLHF's loop, with an evaluation before the first and after the last step."""
        if self.resumed is None:
            self.evaluate_now(global_step)
        super().fit(global_step)
        if self.checkpointer is not None:
            self.checkpointer.finish()
        self.wandb_logger = self.tensorboard_logger = None  # the loop has closed them
        self.evaluate_now(self.recorder.last_step)


def evaluation_metrics(samples: list[Experience], samples_per_prompt: int) -> dict[str, float]:
    """Accuracy (mean of ``scores``) and its standard error over prompts, mean reward and length."""
    scores_PN = torch.cat([s.scores for s in samples]).double().view(-1, samples_per_prompt)
    accuracy_P = scores_PN.mean(1)
    return {
        "eval/accuracy": float(accuracy_P.mean()),
        "eval/accuracy_stderr": float(accuracy_P.std(correction=1) / len(accuracy_P) ** 0.5)
        if len(accuracy_P) > 1
        else 0.0,
        "eval/reward_mean": float(torch.cat([s.rewards for s in samples]).double().mean()),
        "eval/response_length_mean": float(torch.cat([s.response_length for s in samples]).double().mean()),
        "eval/samples": float(len(samples)),
    }
