"""Engines that die, hang or fail while they generate, with actors in their place that do nothing else."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import ray

from openrlhf_ext.controller.engine_recovery import (
    EngineGuard,
    EngineLost,
    GroupRequests,
    RecoveryLimits,
    engines_at_fault,
    is_engine_fault,
)
from openrlhf_ext.rollout.errors import EngineDied, InvalidWeights
from openrlhf_ext.rollout.fleet import EngineFleet
from openrlhf_ext.rollout.weight_sync import EngineFailed, WeightStreamMismatch
from openrlhf_ext.rollout.weight_sync.base import EnginesAtFault
from tests.cluster import start_local_ray
from tests.controller.fake_engines import MisbehavingEngine, NotStarting, outcome
from tests.patience import PATIENCE_S, until


@pytest.fixture(scope="module", autouse=True)
def ray_session() -> Iterator[None]:
    start_local_ray()
    yield
    ray.shutdown()


class FakePolicy:
    """An actor group whose ranks note with which engines they were told to go on."""

    def __init__(self, *faults: Exception) -> None:
        self.told: list[tuple[int, list[int]]] = []
        self.faults = list(faults)

    def async_run_method(self, method: str, engines: list, fresh: list[int]) -> list:
        assert method == "replace_engines"
        self.told.append((len(engines), fresh))
        return [outcome.remote(self.faults.pop(0) if self.faults else None)]


def guard(
    policy: Any = None, engines: int = 2, max_restarts: int = 3, hang_timeout_s: float = PATIENCE_S
) -> EngineGuard:
    lives = [0] * engines

    def start(index: int) -> Any:
        lives[index] += 1
        return MisbehavingEngine.remote(index, lives[index] - 1)

    fleet = EngineFleet(start, engines)
    ray.get([engine.ping.remote() for engine in fleet], timeout=PATIENCE_S)
    return EngineGuard(fleet, policy, RecoveryLimits(max_restarts, hang_timeout_s, PATIENCE_S, PATIENCE_S))


def answers(requests: GroupRequests, prompts: list[str], engines: int = 2) -> list[tuple[str, str]]:
    """All responses, in the order in which they came."""
    pending = [requests.send(number % engines, {"prompt": prompt}) for number, prompt in enumerate(prompts)]
    got = []
    while pending:
        responses, pending = requests.next_finished(pending)
        got.append(tuple(responses))
    return got


@pytest.mark.parametrize("trouble", ["die", "lose the engine"])
def test_every_prompt_is_answered_once_although_an_engine_dies(trouble: str) -> None:
    policy = FakePolicy()
    recovering = guard(policy)
    prompts = ["a", "b", trouble, "c", "d", "e"]  # engine 0 has a, the trouble and d
    got = dict(answers(GroupRequests(recovering), prompts))
    assert sorted(got) == sorted(prompts)
    assert got[trouble] == "engine 0.1" and got["b"] == got["c"] == "engine 1.0"
    assert recovering.restarts == 1 and policy.told == [(2, [0])]
    recovering._end(0), recovering._end(1)


def test_an_engine_that_hangs_is_replaced_and_the_batch_gets_a_new_deadline() -> None:
    stood_still = []

    @contextmanager
    def suspended() -> Iterator[None]:
        stood_still.append(True)
        yield

    recovering = guard(FakePolicy(), hang_timeout_s=5.0)
    got = dict(answers(GroupRequests(recovering, suspended), ["stop", "b", "c"]))
    assert got["stop"] == "engine 0.1" and got["b"] == "engine 1.0" and got["c"].startswith("engine 0.")
    assert recovering.restarts == 1 and stood_still == [True]


def test_an_error_of_the_users_code_is_not_cured_by_a_restart() -> None:
    recovering = guard()
    with pytest.raises(ValueError, match="reward_func failed"):
        answers(GroupRequests(recovering), ["a", "cannot grade"])
    assert recovering.restarts == 0


def test_samples_from_a_sync_that_was_void_are_drawn_again_after_the_next_one() -> None:
    recovering = guard(engines=1)
    requests = GroupRequests(recovering)
    with pytest.raises(InvalidWeights):  # no sync since it was asked: the engine should not have been used
        answers(requests, ["void"], engines=1)
    recovering = guard(engines=1)
    requests = GroupRequests(recovering)
    pending = [requests.send(0, {"prompt": "void"})]
    assert recovering.repeated(lambda: "sent") == "sent"
    assert requests.next_finished(pending) == (["void", "engine 0.0"], [])
    assert recovering.restarts == 0


def test_restarts_end_and_the_last_fault_is_told() -> None:
    with pytest.raises(EngineLost, match="all restarts are used up \\(--vllm.max_restarts 1\\)"):
        answers(GroupRequests(guard(max_restarts=1)), ["die", "die"])
    with pytest.raises(ray.exceptions.RayActorError):
        answers(GroupRequests(guard(max_restarts=0, engines=1)), ["die"], engines=1)


def test_a_new_engine_that_fails_while_it_gets_its_weights_is_replaced_too() -> None:
    policy = FakePolicy(EngineFailed("rollout engine 0 failed while receiving weights", [0]))
    recovering = guard(policy, engines=1)
    assert answers(GroupRequests(recovering), ["die"], engines=1) == [("die", "engine 0.2")]
    assert recovering.restarts == 2 and policy.told == [(1, [0]), (1, [0])]


def test_a_new_engine_that_does_not_start_costs_another_restart() -> None:
    policy = FakePolicy()
    starts: dict[int, int] = {0: 0, 1: 0}

    def start(index: int) -> Any:
        starts[index] += 1
        return NotStarting.remote() if (index, starts[index]) == (1, 2) else MisbehavingEngine.remote(index, 0)

    recovering = EngineGuard(EngineFleet(start, 2), policy, RecoveryLimits(3, PATIENCE_S, PATIENCE_S, PATIENCE_S))
    recovering.replace(dict(enumerate(recovering.engines)), EngineDied("both are gone"))
    assert starts == {0: 2, 1: 3}, "the engine that did start is kept"
    assert recovering.restarts == 3 and policy.told == [(2, [0, 1])]
    starts[1] = 1
    with pytest.raises(EngineLost, match="--vllm.max_restarts 4(.|\n)*no memory is left"):
        recovering.limits = replace(recovering.limits, max_restarts=4)
        recovering.replace({1: recovering.engines[1]}, EngineDied("gone"))


def test_questions_are_asked_again_of_the_engine_that_took_the_place() -> None:
    recovering = guard(FakePolicy())
    pids = [process["pid"] for process in recovering.ask("process_info")]
    os.kill(pids[1], signal.SIGKILL)
    again = [process["pid"] for process in recovering.ask("process_info")]
    assert again[0] == pids[0] and again[1] != pids[1] and recovering.restarts == 1


def test_the_deadline_of_a_step_stands_still_while_a_question_waits_for_a_new_engine() -> None:
    stood_still = []

    @contextmanager
    def suspended() -> Iterator[None]:
        stood_still.append(recovering.restarts)
        yield
        stood_still.append(recovering.restarts)

    recovering = guard(FakePolicy(), engines=1)
    os.kill(ray.get(recovering.engines[0].process_info.remote())["pid"], signal.SIGKILL)
    recovering.ask("process_info", suspended)
    assert stood_still == [0, 1]


def test_nobody_asks_a_new_engine_before_it_has_its_weights() -> None:
    answers_then, late = [], []

    @contextmanager
    def suspended() -> Iterator[None]:
        late.append("stands still")
        yield
        late.append("goes on")

    class AskedMeanwhile(FakePolicy):
        """A batch of another thread is about to begin while the new engine gets its weights."""

        def async_run_method(self, *args: Any, **kwargs: Any) -> list:
            self.other = threading.Thread(target=lambda: answers_then.append(recovering.ask("process_info", suspended)))
            self.other.start()
            until(lambda: late, "the other thread waits")
            self.other.join(0.5)
            assert not answers_then and late == ["stands still"]
            return super().async_run_method(*args, **kwargs)

    policy = AskedMeanwhile()
    recovering = guard(policy, engines=1)
    recovering.replace({0: recovering.engines[0]}, EngineDied("gone"))
    policy.other.join(PATIENCE_S)
    assert answers_then == [recovering.ask("process_info")] and late[-1] == "goes on" and recovering.restarts == 1


def test_a_weight_sync_is_repeated_without_the_engines_it_blames() -> None:
    policy, tries = FakePolicy(), []

    def sync() -> str:
        tries.append(True)
        if len(tries) == 1:
            ray.get(outcome.remote(EngineFailed("rollout engine 1 failed", [1])))
        return "sent"

    recovering = guard(policy)
    before = list(recovering.engines)
    assert recovering.repeated(sync) == "sent"
    assert recovering.engines[0] is before[0] and recovering.engines[1] is not before[1]
    assert policy.told == [(2, [])], "the repeated sync brings the weights"
    with pytest.raises(WeightStreamMismatch):
        recovering.repeated(lambda: ray.get(outcome.remote(WeightStreamMismatch("missing: ['norm']"))))


def test_another_thread_that_saw_the_same_fault_replaces_nothing() -> None:
    recovering = guard(FakePolicy(), engines=1)
    old = recovering.engines[0]
    recovering.replace({0: old}, EngineDied("gone"))
    recovering.replace({0: old}, EngineDied("gone"))
    assert recovering.restarts == 1


def test_which_errors_are_an_engines_fault() -> None:
    assert is_engine_fault(EngineDied("x")) and not is_engine_fault(InvalidWeights("x"))
    assert engines_at_fault(EnginesAtFault("x", [1, 2])) == (1, 2)
    assert engines_at_fault(ValueError("x")) == ()
