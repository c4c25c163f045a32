"""The two threads of an asynchronous run, with everything around them replaced by records of what was asked."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from openrlhf_ext.controller.async_trainer import AsyncPolicyTrainer, AsyncSettings
from openrlhf_ext.controller.deadline import Deadline
from openrlhf_ext.controller.interrupt import MainThreadInterrupt
from openrlhf_ext.controller.rollout_queue import EngineTurns, RolloutQueue
from tests.patience import PATIENCE_S, SOONER_S

EPISODES, BATCHES = 2, 4


class Generator:
    """Episodes of numbered batches, one of which may be empty or fail."""

    def __init__(self, trainer: Trainer, empty: int | None = None, fails: int | None = None) -> None:
        self.trainer, self.empty, self.fails, self.made = trainer, empty, fails, 0

    def generate_samples(self, **kwargs: Any) -> tuple[list[Any], float | None, int, bool]:
        assert threading.current_thread() is not threading.main_thread()
        number, self.made = self.made, self.made + 1
        if number == self.fails:
            raise ZeroDivisionError("the reward function failed")
        version = self.trainer.version
        self.trainer.log.append(f"generating {number}")
        time.sleep(0.02)
        if not self.trainer.settings.partial_rollouts:
            assert self.trainer.version == version, "weights changed in the middle of a batch"
        exhausted = self.made % BATCHES == 0
        self._dataloader_iter = None if exhausted else iter(())
        samples = [] if number == self.empty else [(number, version)]
        return samples, None, 1, exhausted


class Trainer(AsyncPolicyTrainer):
    """Trains by remembering."""

    def __init__(self, queue_size: int = 1, partial: bool = False, train_s: float = 0.03, **generator: Any) -> None:
        self.settings = AsyncSettings(queue_size, partial)
        self.queue, self.turns = RolloutQueue(queue_size), EngineTurns()
        self.interrupt, self.deadline, self.resumed, self.checkpointer = MainThreadInterrupt(), Deadline(), None, None
        self.args = SimpleNamespace(
            train=SimpleNamespace(num_episodes=EPISODES),
            eval=SimpleNamespace(steps=3, temperature=0, n_samples_per_prompt=1),
        )
        self.generate_kwargs: dict[str, Any] = {}
        self.prompts_dataloader = SimpleNamespace(state_dict=lambda: {"drawn": self.rollout_generator.made})
        self.eval_dataloader, self.vllm_engines = ["held out"], []
        self.guard = SimpleNamespace(give_up=lambda: self.log.append("gave up"))
        self.wandb_logger = self.tensorboard_logger = None
        self.recorder = SimpleNamespace(last_step=0)
        self.rollout_generator = Generator(self, **generator)
        self.version, self.train_s = 0, train_s
        self.log: list[str] = []
        self.trained: list[tuple[int, int]] = []
        self.saved: list[dict[str, Any]] = []
        self._sync_metrics: dict[str, float] = {}

    def init_checkpoint_states(self) -> dict[str, Any]:
        return {"episode": 0, "global_step": 0, "total_consumed_prompts": 0, "data_loader_state_dict": {}}

    def train_step(self, samples: list[Any], global_step: int) -> tuple[dict[str, float], int]:
        self.trained += [(number, self.version - version) for number, version in samples]
        time.sleep(self.train_s)
        with self.turns.syncing() if not self.settings.partial_rollouts else threading.Lock():
            self.version += 1
        return {}, global_step + 1

    def save_logs_and_checkpoints(self, global_step: int, logs_dict: Any = None, client_states: Any = None) -> None:
        self.recorder.last_step = global_step
        self.saved.append({**client_states, **logs_dict})

    def save_best_checkpoint(self, logs: Any, global_step: int, client_states: Any = None) -> None:
        self.log.append(f"judged {global_step}")

    def evaluate(self, global_step: int, **kwargs: Any) -> dict[str, float]:
        self.log.append(f"evaluated {global_step} at version {self.version}")
        return {}

    def evaluate_now(self, global_step: int) -> None:
        self.log.append(f"evaluated {global_step} outside")


@pytest.mark.parametrize("queue_size", [1, 3])
@pytest.mark.parametrize("partial", [False, True])
def test_every_batch_is_trained_on_once_in_order_and_none_is_too_old(queue_size, partial):
    trainer = Trainer(queue_size, partial)
    trainer.fit()
    assert [number for number, _ in trainer.trained] == list(range(EPISODES * BATCHES))
    assert max(age for _, age in trainer.trained) <= queue_size
    assert max(age for _, age in trainer.trained[1:]) >= 1, "nothing was made ahead"
    assert [state["total_consumed_prompts"] for state in trainer.saved] == list(range(1, EPISODES * BATCHES + 1))


def test_a_checkpoint_holds_the_place_in_the_data_after_its_own_batch():
    trainer = Trainer(queue_size=3)
    trainer.fit()
    assert [state["data_loader_state_dict"]["drawn"] for state in trainer.saved] == list(range(1, 9))
    assert [state["episode"] for state in trainer.saved] == [0] * BATCHES + [1] * BATCHES
    assert [state["global_step"] for state in trainer.saved] == list(range(1, 9))
    ended = [state["generator"]["loader_ended"] for state in trainer.saved]
    assert ended == [False, False, False, True] * EPISODES, "the generator is ahead, the checkpoint is not"


def test_evaluations_are_of_the_weights_of_their_step():
    trainer = Trainer()
    trainer.fit()
    evaluations = [line for line in trainer.log if line.startswith(("evaluated", "judged"))]
    assert evaluations == [
        "evaluated 0 outside", "evaluated 3 at version 3", "judged 3", "evaluated 6 at version 6", "judged 6",
        "evaluated 8 outside",
    ]  # fmt: skip


def test_a_batch_without_samples_is_passed_over():
    trainer = Trainer(empty=2)
    trainer.fit()
    assert [number for number, _ in trainer.trained] == [0, 1, 3, 4, 5, 6, 7]


def test_an_error_of_the_maker_ends_a_training_step_at_once():
    trainer = Trainer(train_s=PATIENCE_S, fails=1)
    started = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="the reward function failed"):
        trainer.fit()
    assert time.monotonic() - started < SOONER_S, "it waited for the step"
    assert trainer.log[-1] == "gave up"
    assert "rollout-maker" not in {thread.name for thread in threading.enumerate() if thread.is_alive()}


def test_an_error_of_training_ends_the_maker():
    class Failing(Trainer):
        def train_step(self, samples: list[Any], global_step: int) -> tuple[dict[str, float], int]:
            if global_step == 2:
                raise FloatingPointError("NaN")
            return super().train_step(samples, global_step)

    trainer = Failing(queue_size=2)
    with pytest.raises(FloatingPointError, match="NaN"):
        trainer.fit()
    assert [number for number, _ in trainer.trained] == [0, 1]
    assert "rollout-maker" not in {thread.name for thread in threading.enumerate() if thread.is_alive()}


def test_the_record_of_a_step_says_how_long_it_took_and_waited():
    trainer = Trainer(train_s=0.05)
    trainer.fit()
    for record in trainer.saved:
        assert record["time/step"] >= 0.05
        assert 0 <= record["time/wait_rollouts"] <= record["time/step"]
        assert record["timing/generation"] >= 0.02
