"""The order of a run's steps, with stand-ins for ranks and engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from openrlhf_ext.driver import data, job
from openrlhf_ext.driver.loop import LoopOptions, TrainingLoop, evaluation_metrics
from openrlhf_ext.driver.prompts import Prompt, PromptStream
from openrlhf_ext.driver.rollouts import Group, Rollouts
from openrlhf_ext.driver.waiting import Deadline
from openrlhf_ext.megatron.policy import LogprobEntropy
from tests.driver.simulated import SAMPLING, Loader, Requests, options, response


class Ready(Deadline):
    """Calls of the stand-ins are their results."""

    def get(self, refs: list, meanwhile: Any = None) -> list:
        assert self.remaining > 0
        if meanwhile is not None:
            meanwhile()
        return refs


class World:
    """Everything around the loop; ``told`` lists what happened in order."""

    def __init__(self, *, critic: bool = False, **loop_options: Any) -> None:
        self.told: list[Any] = []
        self.version = 0
        given = {
            "step_timeout_s": 60.0, "eval_steps": 2, "eval_samples": 3, "eval_sampling": SAMPLING,
            "partial_rollouts": True, "critic_steps": 0, "take_turns": False, "logging_steps": 1,
        }  # fmt: skip
        deadline = Ready()
        self.requests = Requests(at_once=True)
        experience = SimpleNamespace(
            make=self.make, metrics={"tokens/generated": 8.0}, batch=None, old=None, algorithm=None,
            old_logprobs=self.old_logprobs, critic=SimpleNamespace(start_fit=self.fit_critic) if critic else None,
        )  # fmt: skip
        self.loop = TrainingLoop(
            options=LoopOptions(**{**given, **loop_options}),
            policy=self,
            rollouts=Rollouts(PromptStream(Loader(6), 1), self.requests, options(), deadline),
            experience=experience,
            guard=SimpleNamespace(repeated=lambda sync: sync(), ask=self.ask, restarts=0, engines=[0]),
            sharing=SimpleNamespace(wake_weights=lambda: None, make_room_for_policy=lambda: self.told.append("room")),
            deadline=deadline,
            recorder=SimpleNamespace(
                last_evaluation=-1, step=self.record, evaluation=self.evaluated,
                writer=SimpleNamespace(write=lambda *record: self.told.append(record)),
            ),
            gauges=SimpleNamespace(collect=lambda batch, metrics: {}),
            held_out=Loader(2, first=100),
            checkpointer=SimpleNamespace(after_step=self.save, finish=lambda: self.told.append("finish"), best_value=0),
        )  # fmt: skip

    def make(self, groups: list[Group], version: int, get: Any) -> list[str]:
        self.told.append(f"score {[group.prompt.number for group in groups]} at {version}")
        return ["shard"]

    def old_logprobs(self, batch: Any, get: Any) -> LogprobEntropy:
        """A token's entropy is a tenth of its id."""
        values = batch.targets_N / 10
        return LogprobEntropy(torch.zeros_like(values), values)

    def fit_critic(self) -> list:
        self.told.append("fit critic")
        return [[{"loss/value": 1.0}]]

    def async_run_method_batch(self, method: str, **arguments: Any) -> list:
        assert method == "append"
        return [None]

    def async_run_method(self, method: str) -> list:
        self.told.append(method)
        self.version += method == "broadcast_to_vllm"
        return [{"weight_sync/version": self.version} if method == "broadcast_to_vllm" else {"loss/policy": 0.1}]

    def ask(self, method: str) -> list:
        if method == "weight_version":
            return [self.version]
        return [{"generation_s": 0.1, "exposed_grading_s": 0.0, "reward_failures": []}]

    def record(self, step: int, metrics: dict, engines: list) -> dict:
        assert metrics["time/step"] > 0 and metrics["groups/in_flight"] == 0
        self.told.append(f"record {step}")
        return metrics

    def evaluated(self, step: int, logs: dict) -> None:
        self.loop.recorder.last_evaluation = step
        self.told.append(f"evaluate {step}")

    def save(self, step: int, evaluation: dict | None, state: Any) -> None:
        self.told.append(f"save {step} {'after its evaluation' if evaluation else 'alone'}")


def test_a_run_from_the_first_to_the_last_step() -> None:
    world = World()
    world.loop.run()
    step = ["fit", "broadcast_to_vllm"]
    assert world.told == [
        "evaluate 0",
        "score [0, 1] at 0", *step, "record 1", "save 1 alone",
        "score [2, 3] at 1", *step, "record 2", "evaluate 2", "save 2 after its evaluation",
        "score [4, 5] at 2", *step, "record 3", "save 3 alone",
        "finish", "evaluate 3",
    ]  # fmt: skip


def test_a_resumed_run_publishes_what_it_has_loaded_and_does_not_evaluate_it_again() -> None:
    world = World()
    world.loop.step, world.version = 4, 3
    world.loop.run()
    assert world.told[:2] == ["broadcast_to_vllm", "score [0, 1] at 4"] and world.loop.version == 7


def test_the_critic_has_a_head_start_and_trains_first_where_it_shares_gpus() -> None:
    world = World(critic=True, critic_steps=1, take_turns=True, eval_steps=None)
    world.loop.run()
    assert [what for what in world.told if "fit" in what] == ["fit critic", *["fit critic", "fit"] * 2]


@pytest.mark.parametrize("partial", [True, False])
def test_a_sync_waits_for_groups_in_flight_unless_rollouts_are_partial(partial: bool) -> None:
    world, drained = World(partial_rollouts=partial), []
    world.loop.rollouts.drain = lambda: drained.append(True)
    world.loop.publish()
    assert bool(drained) != partial


def test_held_out_accuracy_is_over_prompts() -> None:
    groups = [
        Group(Prompt(i, "p", ""), [response("p", 0, 0, score) for score in scores])
        for i, scores in enumerate([(1.0, 0.0), (1.0, 1.0)])
    ]
    metrics = evaluation_metrics(groups)
    assert metrics["eval/accuracy"] == 0.75 and metrics["eval/samples"] == 4
    assert metrics["eval/accuracy_stderr"] == pytest.approx(0.25) and metrics["eval/response_length_mean"] == 2


def test_the_algorithm_gets_the_initial_entropy_and_a_resumed_run_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(
        algo=SimpleNamespace(advantage=SimpleNamespace(estimator="gtpo_conflict")),
        initial_entropy_prompts=7,
        algorithm_options=lambda: ("gtpo_conflict", {"gamma": 0.3}, {"level": "token"}),
    )
    taken, world = [], World()
    first = SimpleNamespace(first=lambda count: taken.append(count) or Loader(2))
    parts = SimpleNamespace(strategy=None, prompts=first)
    monkeypatch.setattr(data, "dataloader", lambda strategy, prompts: prompts)
    job.set_initial_entropy(config, world.loop, parts)
    algorithm = world.loop.experience.algorithm
    # completions are the tokens 1 (length of the prompt's text) and 4
    assert algorithm.options.h_ini == world.loop.initial_entropy == pytest.approx((0.1 + 0.4) / 2)
    assert algorithm.options.gamma == 0.3 and algorithm.correction.level == "token" and taken == [7]
    assert world.told == [(0, {"algorithm/initial_entropy": world.loop.initial_entropy})]

    world.loop.initial_entropy = 0.123
    job.set_initial_entropy(config, world.loop, parts)
    assert world.loop.experience.algorithm.options.h_ini == 0.123 and taken == [7]
