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

from openrlhf_ext.compat import BasePPOTrainer, Experience, PPOTrainer, SamplesGenerator
from openrlhf_ext.controller.deadline import Deadline
from openrlhf_ext.controller.experience import ShapingExperienceMaker
from openrlhf_ext.controller.records import StepRecorder
from openrlhf_ext.megatron.batch import sequence_batch

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


class BoundedSamplesGenerator(SamplesGenerator):
    """OpenRLHF's generator; dynamic sampling gives up after a number of batches' worth of prompts."""

    def __init__(self, *args: Any, limits: TrainerLimits, deadline: Deadline, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.limits, self.deadline = limits, deadline
        self._dispatched = 0

    def generate_samples(self, **kwargs: Any):
        self._dispatched = 0
        with self.deadline.limit(self.limits.rollout_timeout_s, "generating a batch of rollouts", "rollout.timeout_s"):
            return super().generate_samples(**kwargs)

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
        engines: list,
        prompts_dataloader: Any,
        eval_dataloader: Any,
        generate_kwargs: dict[str, Any],
        make_experience_maker: Callable[..., ShapingExperienceMaker],
        recorder: StepRecorder,
        limits: TrainerLimits,
    ) -> None:
        self.deadline = Deadline()
        self.recorder, self.limits = recorder, limits
        self.prompts_dataloader, self.eval_dataloader = prompts_dataloader, eval_dataloader
        self.generate_kwargs = generate_kwargs
        self.samples_generator = BoundedSamplesGenerator(
            strategy, prompts_dataloader, eval_dataloader, tokenizer, engines, limits=limits, deadline=self.deadline
        )
        # OpenRLHF counts in steps; -1 is its "never"
        for section, name in (("eval", "steps"), ("ckpt", "save_steps")):
            if getattr(getattr(strategy.args, section), name) == -1:
                setattr(getattr(strategy.args, section), name, float("inf"))
        BasePPOTrainer.__init__(self, strategy, policy_group, None, None, None, engines, tokenizer)
        upstream = self.experience_maker
        self.experience_maker = make_experience_maker(
            upstream.actor_model_group, None, None, None, upstream.kl_ctl, strategy, tokenizer
        )
        self._sync_metrics: dict[str, float] = {}

    def train_step(self, rollout_samples: list[Experience], global_step: int) -> tuple[dict, int]:
        """One step of OpenRLHF's trainer, its metrics renamed to those of docs/metrics.md."""
        with self.deadline.limit(
            self.limits.step_timeout_s, f"training step {global_step + 1}", "train.step_timeout_s"
        ):
            status, step = super().train_step(rollout_samples, global_step)
        kept = {k: v for k, v in status.items() if not k.startswith(("timing/", "rollout/"))}
        phases = {ours: status[upstream] for upstream, ours in _PHASES.items()}
        # fit() sums the keys that begin with timing/: they stay
        timing = {k: v for k, v in status.items() if k.startswith("timing/")}
        return {**kept, **self.experience_maker.metrics, **self._sync_metrics, **phases, **timing}, step

    def ppo_train(self, global_steps: int) -> dict:
        """All ranks return the same reduced metrics; one dictionary is enough."""
        return ray.get(self.actor_model_group.async_run_method("fit", kl_ctl=self.kl_ctl.value))[0]

    def broadcast_to_vllm(self) -> None:
        """Sends the weights; the measurements of rank 0, which holds the connection, go into the records."""
        self._sync_metrics = ray.get(self.actor_model_group.async_run_method("broadcast_to_vllm"))[0]

    def save_logs_and_checkpoints(self, global_step: int, logs_dict=None, client_states=None) -> None:
        """Our records, then OpenRLHF's loggers and checkpoints under the same names."""
        logs = dict(logs_dict or {})
        # OpenRLHF's pass rate is 100 * samples / prompts, and is missing without dynamic filtering
        kept = logs.get("dynamic_filtering_pass_rate", 100.0 * self.args.rollout.n_samples_per_prompt)
        more = {
            "groups/kept_fraction": kept / (100.0 * self.args.rollout.n_samples_per_prompt),
            "prompts/consumed": (client_states or {}).get("total_consumed_prompts", 0),
        }
        record = self.recorder.step(global_step, logs, self._rollout_stats(), **more)
        doing = f"logging and saving after step {global_step}"
        with self.deadline.limit(self.limits.step_timeout_s, doing, "train.step_timeout_s"):
            super().save_logs_and_checkpoints(global_step, record, client_states)

    def _rollout_stats(self) -> list[dict[str, float]]:
        """What the engines measured since the last call."""
        stats = [engine.rollout_stats.remote() for engine in self.vllm_engines]
        results = ray.get(stats, timeout=self.limits.step_timeout_s)
        for message in (m for result in results for m in result.get("reward_failures", ())):
            logger.error("grading failed: %s", message)  # the engine's own log is not on the user's terminal
        return results

    def evaluate(self, global_step: int, **generate_kwargs: Any) -> dict[str, float]:
        """Samples every held-out prompt; accuracy is the mean of the reward function's ``scores``."""
        started = time.perf_counter()
        with self.deadline.limit(self.limits.rollout_timeout_s, "evaluating", "rollout.timeout_s"):
            samples = self.samples_generator.generate_eval_samples(**generate_kwargs)
        self._rollout_stats()  # an evaluation does not count as a step's rollout
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
        generator = BoundedSamplesGenerator(
            self.strategy,
            None,
            dataloader,
            self.tokenizer,
            self.vllm_engines,
            limits=self.limits,
            deadline=self.deadline,
        )
        with self.deadline.limit(self.limits.rollout_timeout_s, "measuring the initial entropy", "rollout.timeout_s"):
            samples = generator.generate_eval_samples(**self.generate_kwargs)
            batch = sequence_batch([s.sequences[0] for s in samples], [s.action_mask[0] for s in samples])
            entropies_BT = self.experience_maker.old_logprobs(batch).entropies_BT
        self._rollout_stats()
        return float((entropies_BT.sum(1) / batch.mask_BT.sum(1)).mean())

    def fit(self, global_step: int = 0) -> None:
        """OpenRLHF's loop, with an evaluation before the first and after the last step."""
        self.evaluate_now(global_step)
        super().fit(global_step)
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
