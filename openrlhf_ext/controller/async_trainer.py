"""Asynchronous training: a thread samples the next batches while the main thread trains on this one.

Both are in the driver, so that an error of either ends the job at once in its own words. Without partial rollouts the
engines' weights change only between batches of rollouts (a sync waits for the one under way), so a batch is of one
version; with them weights change in the middle of requests, which go on. docs/modes.md has both in pictures.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

from openrlhf_ext.compat import Experience
from openrlhf_ext.controller.interrupt import MainThreadInterrupt, ThreadDeadline
from openrlhf_ext.controller.resume import generator_state
from openrlhf_ext.controller.rollout_queue import EngineTurns, RolloutQueue, Stopped
from openrlhf_ext.controller.trainer import PolicyTrainer

logger = logging.getLogger(__name__)

_END_S = 30.0


@dataclass(frozen=True)
class AsyncSettings:
    """``train.async_queue_size`` and ``train.partial_rollout_enable``."""

    queue_size: int
    partial_rollouts: bool


@dataclass
class RolloutItem:
    """One batch of rollouts.

    Attributes:
        pass_rate: OpenRLHF's, None without dynamic sampling.
        generation_s: seconds of its generation and grading.
        client_states: where the data stood when it was complete: what a checkpoint after its training needs.
    """

    samples: list[Experience]
    pass_rate: float | None
    generation_s: float
    client_states: dict[str, Any]


class RolloutMaker(threading.Thread):
    """Draws prompts, samples, grades, and puts whole batches into the queue, until the data are used up."""

    def __init__(self, trainer: AsyncPolicyTrainer, start: dict[str, Any]) -> None:
        super().__init__(name="rollout-maker", daemon=True)
        self._trainer, self._begin, self._generator = trainer, start, trainer.rollout_generator

    def run(self) -> None:
        """The thread; an error goes to the main thread."""
        try:
            self._make_all()
            self._trainer.queue.finish()
        except Stopped:
            logger.debug("the rollout maker was told to stop")
        except BaseException as error:
            self._trainer.interrupt.raise_in_main(error)

    def _make_all(self) -> None:
        consumed = self._begin["total_consumed_prompts"]
        for episode in range(self._begin["episode"], self._trainer.args.train.num_episodes):
            is_exhausted = False
            while not is_exhausted:
                self._trainer.queue.reserve()
                consumed, is_exhausted = self._make_one(episode, consumed)

    def _make_one(self, episode: int, consumed: int) -> tuple[int, bool]:
        """One batch; returns the prompts consumed since the start and whether the episode has ended."""
        with self._trainer.generation_turn():
            started = time.perf_counter()
            samples, pass_rate, drawn, is_exhausted = self._generator.generate_samples(**self._trainer.generate_kwargs)
            seconds = time.perf_counter() - started
        consumed += drawn
        if not samples:
            self._trainer.queue.give_back()
            return consumed, is_exhausted
        states = {
            "episode": episode,
            "total_consumed_prompts": consumed,
            "data_loader_state_dict": self._trainer.prompts_dataloader.state_dict(),
            "generator": generator_state(self._generator),
        }
        self._trainer.queue.put(RolloutItem(samples, pass_rate, seconds, states))
        return consumed, is_exhausted


class AsyncPolicyTrainer(PolicyTrainer):
    """``PolicyTrainer`` on batches that another thread makes."""

    def __init__(self, *, settings: AsyncSettings, **arguments: Any) -> None:
        self.interrupt = MainThreadInterrupt()
        super().__init__(**arguments)
        self.settings = settings
        self.queue: RolloutQueue[RolloutItem] = RolloutQueue(settings.queue_size)
        self.turns = EngineTurns()
        self.rollout_generator = self.samples_generator  # with what a checkpoint had left over
        self.samples_generator = self.make_generator(None, self.eval_dataloader, self.deadline)
        self._ended_at = 0.0

    def rollout_deadline(self) -> ThreadDeadline:
        """The deadline of the maker's thread."""
        return ThreadDeadline(self.interrupt)

    def generation_turn(self) -> AbstractContextManager:
        """Whole batches of one version keep weight syncs out; partial rollouts do not."""
        return nullcontext() if self.settings.partial_rollouts else self.turns.generating()

    def fit(self, global_step: int = 0) -> None:
        """Trains on every batch that is made, with an evaluation before the first and after the last step."""
        if self.resumed is None:
            self.evaluate_now(global_step)
        states = self.init_checkpoint_states()
        if states["global_step"] > 0:
            global_step = states["global_step"]
            self.broadcast_to_vllm()
            if states["data_loader_state_dict"]:
                self.prompts_dataloader.load_state_dict(states["data_loader_state_dict"])
        maker = RolloutMaker(self, states)
        try:
            with self.interrupt:
                maker.start()
                self._train_on_everything(maker, global_step)
        except BaseException:
            self._abandon(maker)
            raise
        maker.join(_END_S)
        if self.checkpointer is not None:
            self.checkpointer.finish()
        for sink in filter(None, (self.wandb_logger, self.tensorboard_logger)):
            sink.close()
        self.wandb_logger = self.tensorboard_logger = None
        self.evaluate_now(self.recorder.last_step)

    def _train_on_everything(self, maker: RolloutMaker, global_step: int) -> None:
        self._ended_at = time.perf_counter()
        while True:
            waiting = time.perf_counter()
            item = self.queue.take(maker.is_alive)
            if item is None:
                return
            global_step = self._train_on(item, global_step, time.perf_counter() - waiting)

    def _train_on(self, item: RolloutItem, global_step: int, waited_s: float) -> int:
        status, global_step = self.train_step(item.samples, global_step)
        now = time.perf_counter()
        status |= {
            "timing/generation": item.generation_s,
            "time/step": now - self._ended_at,
            "time/wait_rollouts": waited_s,
            "queue/batches": float(len(self.queue)),
        }
        self._ended_at = now
        if item.pass_rate is not None:
            status["dynamic_filtering_pass_rate"] = item.pass_rate
        states = {**item.client_states, "global_step": global_step}
        self.save_logs_and_checkpoints(global_step, status, states)
        if self.eval_dataloader and global_step % self.args.eval.steps == 0:
            self._evaluate(global_step, states)
        return global_step

    def _evaluate(self, global_step: int, states: dict[str, Any]) -> None:
        """On the weights of this step: syncs happen in this thread only. Rollouts may go on beside it."""
        sampling = {
            "temperature": self.args.eval.temperature,
            "n_samples_per_prompt": self.args.eval.n_samples_per_prompt,
        }
        logs = self.evaluate(global_step, **{**self.generate_kwargs, **sampling})
        self.save_best_checkpoint(logs, global_step, states)
        self._ended_at = time.perf_counter()  # an evaluation does not count as a step

    def broadcast_to_vllm(self) -> None:
        """The sync; without partial rollouts it waits for the batch under way."""
        if self.settings.partial_rollouts:
            super().broadcast_to_vllm()
            return
        with ExitStack() as stack:
            waiting = time.perf_counter()
            with self.deadline.suspended():  # the rollouts under way have a deadline of their own
                stack.enter_context(self.turns.syncing())
            waited = time.perf_counter() - waiting
            super().broadcast_to_vllm()
        self._sync_metrics["time/wait_sync"] = waited

    def _abandon(self, maker: RolloutMaker) -> None:
        """After an error: ends the maker before Ray ends under it; it looks up from its waits every second."""
        self.queue.stop()
        self.turns.stop()
        self.guard.give_up()
        maker.join(_END_S)
        if maker.is_alive():
            logger.warning("the rollout maker did not end within %g s", _END_S)
