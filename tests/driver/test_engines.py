"""Engines that die, hang or fail while they generate, with actors in their place that do nothing else."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import ray

from openrlhf_ext.driver.engines import (
    EngineGuard,
    EngineLost,
    GroupRequests,
    RecoveryLimits,
    engines_at_fault,
    is_engine_fault,
)
from openrlhf_ext.driver.waiting import Deadline
from openrlhf_ext.rollout.errors import EngineDied, InvalidWeights
from openrlhf_ext.rollout.launch import EngineFleet
from openrlhf_ext.rollout.response import GroupRequest, Sampling
from openrlhf_ext.rollout.sync.base import EngineFailed, EnginesAtFault, WeightStreamAborted
from tests.cluster import start_local_ray
from tests.driver.fake_engines import MisbehavingEngine, NotStarting, outcome
from tests.patience import PATIENCE_S

SAMPLING = Sampling(1.0, 1.0, 4, 8)


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
    policy: Any = None, engines: int = 2, max_restarts: int = 3, hang_timeout_s: float = PATIENCE_S,
    deadline: Deadline | None = None,
) -> EngineGuard:  # fmt: skip
    lives = [0] * engines

    def start(index: int) -> Any:
        lives[index] += 1
        return MisbehavingEngine.remote(index, lives[index] - 1)

    fleet = EngineFleet(start, engines)
    ray.get([engine.ping.remote() for engine in fleet], timeout=PATIENCE_S)
    limits = RecoveryLimits(max_restarts, hang_timeout_s, PATIENCE_S, PATIENCE_S)
    return EngineGuard(fleet, policy, limits, deadline=deadline)


def answers(requests: GroupRequests, prompts: list[str]) -> list[tuple[str, str]]:
    """All groups, in the order in which they came."""
    for number, prompt in enumerate(prompts):
        requests.ask(number, GroupRequest(prompt, "", 2, SAMPLING))
    got = []
    while len(requests):
        for number, responses in requests.answers(1.0):
            assert responses[0] == prompts[number]
            got.append(tuple(responses))
    assert set(requests.load) == {0}
    return got


def sequential(guard: EngineGuard) -> GroupRequests:
    """Requests of which an engine gets two at a time."""
    return GroupRequests(guard, max_requests=4)


@pytest.mark.parametrize("trouble", ["die", "lose the engine"])
def test_every_prompt_is_answered_once_although_an_engine_dies(trouble: str) -> None:
    policy = FakePolicy()
    recovering = guard(policy)
    prompts = ["a", "b", trouble, "c", "d", "e"]  # engine 0 has a and the trouble
    got = dict(answers(sequential(recovering), prompts))
    assert sorted(got) == sorted(prompts)
    assert got["b"] == "engine 1.0" and recovering.restarts == 1 and policy.told == [(2, [0])]
    recovering._end(0), recovering._end(1)


def test_an_engine_that_hangs_is_replaced_and_the_phase_gets_its_time_anew() -> None:
    deadline = Deadline()
    recovering = guard(FakePolicy(), hang_timeout_s=20.0, deadline=deadline)
    with deadline.limit(PATIENCE_S, "waiting", "x"):
        got = dict(answers(sequential(recovering), ["stop", "b", "c"]))
        left = deadline.remaining
    assert got["b"] == "engine 1.0" and set(got) == {"stop", "b", "c"} and recovering.restarts == 1
    assert left > PATIENCE_S - 5, "the clock did not start anew after the replacement"


def test_requests_beyond_what_an_engine_can_batch_wait_here_and_go_to_who_is_free() -> None:
    recovering = guard(engines=2)
    requests = GroupRequests(recovering, max_requests=5)
    for number in range(7):
        requests.ask(number, GroupRequest(f"{number}", "", 2, SAMPLING))
        assert max(requests.load) <= 4, "two groups of two fit into five"
    assert requests.load == (4, 4) and len(requests) == 7
    assert len(requests.answers(PATIENCE_S)) >= 1 and max(requests.load) <= 4
    while len(requests):
        requests.answers(1.0)
    requests.ask("large", GroupRequest("large", "", 9, SAMPLING))
    assert sorted(requests.load) == [0, 9], "a group that is too large for the bound goes to an idle engine"
    assert requests.answers(PATIENCE_S)[0][0] == "large"


def test_an_error_of_the_users_code_is_not_cured_by_a_restart() -> None:
    recovering = guard()
    with pytest.raises(ValueError, match="reward_func failed"):
        answers(sequential(recovering), ["a", "cannot grade"])
    assert recovering.restarts == 0


def test_samples_from_a_sync_that_was_void_are_drawn_again_after_the_next_one() -> None:
    with pytest.raises(InvalidWeights):  # no sync since it was asked: the engine should not have been used
        answers(sequential(guard(engines=1)), ["void"])
    recovering = guard(engines=1)
    requests = sequential(recovering)
    requests.ask("a", GroupRequest("void", "", 2, SAMPLING))
    assert recovering.repeated(lambda: "sent") == "sent"
    assert requests.answers(PATIENCE_S) == [] and requests.answers(PATIENCE_S) == [("a", ["void", "engine 0.0"])]
    assert recovering.restarts == 0


def test_restarts_end_and_the_last_fault_is_told() -> None:
    with pytest.raises(EngineLost, match="all restarts are used up \\(--vllm.max_restarts 1\\)"):
        answers(sequential(guard(max_restarts=1)), ["die always"])
    with pytest.raises(ray.exceptions.RayActorError):
        answers(sequential(guard(max_restarts=0, engines=1)), ["die"])


def test_a_new_engine_that_fails_while_it_gets_its_weights_is_replaced_too() -> None:
    policy = FakePolicy(EngineFailed("rollout engine 0 failed while receiving weights", [0]))
    recovering = guard(policy, engines=1)
    assert answers(sequential(recovering), ["die"]) == [("die", "engine 0.2")]
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
    with pytest.raises(WeightStreamAborted):
        recovering.repeated(lambda: ray.get(outcome.remote(WeightStreamAborted("missing: ['norm']"))))


def test_a_second_call_that_saw_the_same_fault_replaces_nothing() -> None:
    recovering = guard(FakePolicy(), engines=1)
    old = recovering.engines[0]
    recovering.replace({0: old}, EngineDied("gone"))
    recovering.replace({0: old}, EngineDied("gone"))
    assert recovering.restarts == 1


def test_which_errors_are_an_engines_fault() -> None:
    assert is_engine_fault(EngineDied("x")) and not is_engine_fault(InvalidWeights("x"))
    assert engines_at_fault(EnginesAtFault("x", [1, 2])) == (1, 2)
    assert engines_at_fault(ValueError("x")) == ()
