"""Engines that die, hang or fail, with actors in their place that do nothing else; who sleeps
when."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from openrlhf_ext.config import RunConfig
from openrlhf_ext.driver import engines as driver_engines
from openrlhf_ext.driver.engines import (
    EngineLost,
    EngineSupervisor,
    GpuSharing,
    _one_line,
    engines_at_fault,
    is_engine_fault,
)
from openrlhf_ext.driver.rollouts import (
    Group,
    GroupRequests,
    Prompt,
    groups_from_plain,
    plain_groups,
)
from openrlhf_ext.driver.scoring import routed_by_engines, sequences_of
from openrlhf_ext.driver.waits import Deadline
from openrlhf_ext.reporting import EventLog
from openrlhf_ext.reporting.lines import read_lines
from openrlhf_ext.rollout.launch import EngineFleet
from openrlhf_ext.rollout.process import ray_frames
from openrlhf_ext.rollout.response import EngineDied, GroupRequest, InvalidWeights, Sampling
from openrlhf_ext.rollout.sync.base import EngineFailed, EnginesAtFault, WeightStreamAborted
from tests.cluster import start_local_ray
from tests.driver.fake_engines import (
    MisbehavingEngine,
    NotStarting,
    RoutingEngine,
    SleepyEngine,
    outcome,
)
from tests.driver.simulated import run_config
from tests.patience import PATIENCE_S, until

SAMPLING = Sampling(1.0, 1.0, 4, 8)


def limits(
    max_restarts: int,
    hang_timeout_s: float = PATIENCE_S,
    min_engines: int | None = None,
    **ds_and_vllm: bool,
) -> RunConfig:
    """How often and when engines are replaced, and who sleeps."""
    vllm = {
        "max_restarts": max_restarts,
        "hang_timeout_s": hang_timeout_s,
        "start_timeout_s": PATIENCE_S,
    }
    vllm["min_engines"] = min_engines
    vllm["enable_sleep"], ds = (
        ds_and_vllm.get("vllm", False),
        {"enable_sleep": ds_and_vllm.get("ds", False)},
    )
    return run_config(vllm=vllm, ds=ds, train={"step_timeout_s": PATIENCE_S})


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

    def ask(self, method: str, engines: list, fresh: list[int]) -> list:
        assert method == "replace_engines"
        self.told.append((len(engines), fresh))
        return [outcome.remote(self.faults.pop(0) if self.faults else None)]


def supervisor(
    policy: Any = None,
    engines: int = 2,
    max_restarts: int = 3,
    hang_timeout_s: float = PATIENCE_S,
    deadline: Deadline | None = None,
    events: EventLog | None = None,
) -> EngineSupervisor:
    lives = [0] * engines

    def start(index: int) -> Any:
        lives[index] += 1
        return MisbehavingEngine.remote(index, lives[index] - 1)

    fleet = EngineFleet(start, engines)
    ray.get([engine.ping.remote() for engine in fleet], timeout=PATIENCE_S)
    return EngineSupervisor(
        fleet, policy, limits(max_restarts, hang_timeout_s), deadline=deadline, events=events
    )


def answers(requests: GroupRequests, prompts: list[str]) -> list[tuple[str, str]]:
    """All groups, in the order in which they came."""
    for number, prompt in enumerate(prompts):
        requests.ask(number, GroupRequest(prompt, "", 2, SAMPLING))
    got = []
    while len(got) < len(prompts):
        for number, responses in requests.answers(1.0):
            assert responses[0] == prompts[number]
            got.append(tuple(responses))
    assert requests.pending == []
    return got


def sequential(of: EngineSupervisor) -> GroupRequests:
    """Requests of which an engine gets two at a time."""
    return GroupRequests(of, max_requests=4)


@pytest.mark.parametrize("trouble", ["die", "lose the engine"])
def test_every_prompt_is_answered_once_although_an_engine_dies(
    trouble: str, tmp_path: Path
) -> None:
    policy, events = FakePolicy(), EventLog(tmp_path / "events.jsonl")
    events.step = 7
    recovering = supervisor(policy, events=events)
    prompts = ["a", "b", trouble, "c", "d", "e"]  # engine 0 has a and the trouble
    got = dict(answers(sequential(recovering), prompts))
    assert sorted(got) == sorted(prompts)
    assert got["b"] == "engine 1.0" and recovering.restarts == 1 and policy.told == [(2, [0])]
    ((_, told),) = read_lines(tmp_path / "events.jsonl")
    assert (told["event"], told["step"], told["engines"], told["restarts"]) == (
        "engine_replaced",
        7,
        [0],
        1,
    )
    recovering._end(0), recovering._end(1)


def test_experts_stay_where_they_are_outlive_their_engine_and_go_through_a_checkpoint() -> None:
    fleet = EngineFleet(lambda _: RoutingEngine.remote(), 1)
    requests = GroupRequests(
        EngineSupervisor(fleet, FakePolicy(), limits(0)), max_requests=8, routed=True
    )
    for number in (3, 4):
        requests.ask(number, GroupRequest(str(number), "", 2, SAMPLING))
    groups: list[Group] = []
    while len(groups) < 2:
        groups += [
            Group(Prompt(number, "", None), answer)
            for number, answer in requests.answers(PATIENCE_S)
        ]
    ray.kill(fleet[0])
    plain, arrays = plain_groups(groups)
    assert arrays["experts"].nbytes == 2 * 2 * 1 * 3 * 2 * 2
    for group in [*groups, *groups_from_plain(json.loads(json.dumps(plain)), arrays)]:
        assert [response.tokens_S[0] for response in group.responses] == [group.prompt.number] * 2
        for sample, response in enumerate(group.responses):
            assert response.experts_RLK is None and response.experts_at is not None
            reference, place = response.experts_at
            told = ray.get(reference, timeout=PATIENCE_S)[place]
            assert (
                told.dtype == np.uint16 and told.shape == (1, 3, 2) and (told == 300 + sample).all()
            )
    batch = routed_by_engines(sequences_of(groups[0].responses), groups[0].responses)
    assert batch.routed_B is not None and [place for _, place in batch.routed_B] == [0, 1]
    with pytest.raises(ValueError, match="came without experts of its engine"):
        routed_by_engines(
            batch, [dataclasses.replace(r, experts_at=None) for r in groups[0].responses]
        )


HELD = "import re\n\nre.match('(a+)+$', 'a' * 99 + 'b')"


@pytest.mark.parametrize(
    "code", ["import time\n\ntime.sleep(10**9)", "while True:\n\n    pass", HELD]
)
def test_code_that_blocks_an_engine_is_named_with_its_line(tmp_path: Path, code: str) -> None:
    """Also where it keeps the interpreter to itself."""
    agent = tmp_path / "agent.py"
    agent.write_text(code)
    of = supervisor(engines=1)
    of.call(0, "generate_group", GroupRequest(str(agent), "", 1, SAMPLING))
    until(lambda: f'File "{agent}", line' in str(of.silence([0])), "the frames")
    told = str(of.silence([0]))
    assert re.search(
        rf'they hang, in code that blocks the engine .*:\n\s+File "{agent}", line [123] in '
        rf"<module>\n",
        told,
    )
    assert f'File "{agent}"' in _one_line(of.silence([0])), "the line of the log, too"
    of._end(0)


def test_an_engine_that_does_not_say_where_it_is_is_not_ended_by_the_question() -> None:
    sleeper = subprocess.Popen(["sleep", "3600"])
    assert ray_frames(sleeper.pid) == "" and sleeper.poll() is None
    sleeper.kill()
    sleeper.wait()


def test_an_engine_that_hangs_is_replaced_and_the_phase_gets_its_time_anew() -> None:
    deadline, hang_s = Deadline(), 4.0
    recovering = supervisor(FakePolicy(), hang_timeout_s=hang_s, deadline=deadline)
    with deadline.limit(PATIENCE_S, "waiting", "x"):
        begun = time.monotonic()
        got = dict(answers(sequential(recovering), ["stop", "b", "c"]))
        used, passed = PATIENCE_S - deadline.remaining, time.monotonic() - begun
    assert got["b"] == "engine 1.0" and set(got) == {"stop", "b", "c"} and recovering.restarts == 1
    assert used < passed - hang_s, "the clock did not start anew after the replacement"


def test_requests_beyond_what_an_engine_can_batch_wait_here_and_go_to_who_is_free() -> None:
    recovering = supervisor(engines=2)
    requests = GroupRequests(recovering, max_requests=5)
    for number in range(7):
        requests.ask(number, GroupRequest(f"{number}", "", 2, SAMPLING))
    assert len(requests.pending) == 4, "two groups of two fit into the five of each engine"
    answered = 0
    while answered < 7:
        answered += len(requests.answers(PATIENCE_S))
        assert len(requests.pending) == min(4, 7 - answered)
    requests.ask("large", GroupRequest("large", "", 9, SAMPLING))
    assert len(requests.pending) == 1, (
        "a group that is too large for the bound goes to an idle engine"
    )
    assert requests.answers(PATIENCE_S)[0][0] == "large"


def test_an_error_of_the_users_code_is_not_cured_by_a_restart() -> None:
    recovering = supervisor()
    with pytest.raises(ValueError, match="reward_func failed"):
        answers(sequential(recovering), ["a", "cannot grade"])
    assert recovering.restarts == 0


def test_samples_from_a_sync_that_was_void_are_drawn_again_after_the_next_one() -> None:
    # no sync since it was asked: the engine should not have been used
    with pytest.raises(InvalidWeights):
        answers(sequential(supervisor(engines=1)), ["void"])
    recovering = supervisor(engines=1)
    requests = sequential(recovering)
    requests.ask("a", GroupRequest("void", "", 2, SAMPLING))
    assert recovering.repeat_until_sent(lambda: "sent") == "sent"
    assert requests.answers(PATIENCE_S) == [] and requests.answers(PATIENCE_S) == [
        ("a", ["void", "engine 0.0"])
    ]
    assert recovering.restarts == 0


def test_restarts_end_and_the_last_fault_is_told() -> None:
    with pytest.raises(EngineLost, match="all restarts are used up \\(--vllm.max_restarts 1\\)"):
        answers(sequential(supervisor(max_restarts=1)), ["die always"])
    with pytest.raises(ray.exceptions.RayActorError):
        answers(sequential(supervisor(max_restarts=0, engines=1)), ["die"])


def test_a_new_engine_that_fails_while_it_gets_its_weights_is_replaced_too() -> None:
    policy = FakePolicy(EngineFailed("rollout engine 0 failed while receiving weights", [0]))
    recovering = supervisor(policy, engines=1)
    assert answers(sequential(recovering), ["die"]) == [("die", "engine 0.2")]
    assert recovering.restarts == 2 and policy.told == [(1, [0]), (1, [0])]


def test_a_new_engine_that_does_not_start_costs_another_restart() -> None:
    policy = FakePolicy()
    starts: dict[int, int] = {0: 0, 1: 0}

    def start(index: int) -> Any:
        starts[index] += 1
        return (
            NotStarting.remote()
            if (index, starts[index]) == (1, 2)
            else MisbehavingEngine.remote(index, 0)
        )

    recovering = EngineSupervisor(EngineFleet(start, 2), policy, limits(3))
    recovering.replace(dict(enumerate(recovering.engines)), EngineDied("both are gone"))
    assert starts == {0: 2, 1: 3}, "the engine that did start is kept"
    assert recovering.restarts == 3 and policy.told == [(2, [0, 1])]
    starts[1] = 1
    with pytest.raises(EngineLost, match="--vllm.max_restarts 4(.|\n)*no memory is left"):
        recovering.config = limits(4)
        recovering.replace({1: recovering.engines[1]}, EngineDied("gone"))


def test_questions_are_asked_again_of_the_engine_that_took_the_place() -> None:
    recovering = supervisor(FakePolicy())
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

    recovering = supervisor(policy)
    before = list(recovering.engines)
    assert recovering.repeat_until_sent(sync) == "sent"
    assert recovering.engines[0] is before[0] and recovering.engines[1] is not before[1]
    assert policy.told == [(2, [])], "the repeated sync brings the weights"
    with pytest.raises(WeightStreamAborted):
        recovering.repeat_until_sent(
            lambda: ray.get(outcome.remote(WeightStreamAborted("missing: ['norm']")))
        )


def test_a_second_call_that_saw_the_same_fault_replaces_nothing() -> None:
    recovering = supervisor(FakePolicy(), engines=1)
    old = recovering.engines[0]
    recovering.replace({0: old}, EngineDied("gone"))
    recovering.replace({0: old}, EngineDied("gone"))
    assert recovering.restarts == 1


def test_which_errors_are_an_engines_fault() -> None:
    assert is_engine_fault(EngineDied("x")) and not is_engine_fault(InvalidWeights("x"))
    assert engines_at_fault(EnginesAtFault("x", [1, 2])) == (1, 2)
    assert engines_at_fault(ValueError("x")) == ()


# ---- fewer engines, and more again
# -------------------------------------------------------------------------------


class Elastic:
    """Engines of which ``fewest`` are enough; the starts after the first of every engine are
    ``later`` ones."""

    def __init__(
        self, tmp_path: Path, engines: int = 2, fewest: int = 1, max_restarts: int = 0
    ) -> None:
        self.policy, self.later = FakePolicy(), MisbehavingEngine
        self.starts = [0] * engines
        self._events = tmp_path / "events.jsonl"
        fleet = EngineFleet(self._start, engines)
        ray.get([engine.ping.remote() for engine in fleet], timeout=PATIENCE_S)
        config = limits(max_restarts, min_engines=fewest)
        self.supervisor = EngineSupervisor(
            fleet, self.policy, config, events=EventLog(self._events)
        )

    def _start(self, index: int) -> Any:
        self.starts[index] += 1
        if self.starts[index] == 1 or self.later is MisbehavingEngine:
            return MisbehavingEngine.remote(index, self.starts[index] - 1)
        return self.later.remote()

    def lose(self, *indexes: int) -> None:
        self.supervisor.replace(
            {index: self.supervisor.engines[index] for index in indexes}, EngineDied("gone")
        )

    def sync(self, *faults: tuple[int, ...]) -> list[int]:
        """A weight sync that blames these, one set after the other; the engines of the one that
        succeeds."""
        left = list(faults)

        def send() -> list[int]:
            if left:
                ray.get(outcome.remote(EngineFailed("an engine failed", left.pop(0))))
            return list(self.supervisor.there)

        return self.supervisor.repeat_until_sent(send)

    def until_back(self) -> None:
        until(lambda: len(self.sync()) == len(self.starts), "all engines")

    @property
    def told(self) -> list[tuple[str, Any, Any]]:
        events = [record for _, record in read_lines(self._events)] if self._events.exists() else []
        return [
            (e["event"], e["engine"] if "engine" in e else e["engines"], e.get("alive"))
            for e in events
        ]


@pytest.mark.parametrize("trouble", ["die", "stop"])
def test_a_run_goes_on_with_fewer_engines_and_takes_a_new_one_in_at_a_weight_sync(
    trouble: str, tmp_path: Path
) -> None:
    run = Elastic(tmp_path)
    if trouble == "stop":
        run.supervisor.config = limits(0, 4.0, 1)
    requests = sequential(run.supervisor)
    got = answers(requests, ["a", "b", trouble, "c", "d"])  # engine 0 has a and the trouble
    assert sorted(prompt for prompt, _ in got) == sorted(["a", "b", "c", "d", trouble]), "each once"
    assert dict(got)[trouble] == "engine 1.0" and list(run.supervisor.there) == [1]
    assert run.told == [("engine_lost", 0, 1)] and run.policy.told == [], "no rank is waited for"
    assert len(run.supervisor.ask("process_info")) == 1
    run.until_back()
    assert run.policy.told[-1] == (2, []), "the sync brings the weights"
    assert {engine for _, engine in answers(requests, ["e", "f", "g", "h"])} == {
        "engine 0.1",
        "engine 1.0",
    }
    assert run.told[1:] == [("engine_joined", 0, 2)] and run.supervisor.restarts == 1


def test_engines_that_a_sync_blames_are_named_by_their_positions_although_one_is_lost(
    tmp_path: Path,
) -> None:
    run = Elastic(tmp_path, engines=3)
    run.later = NotStarting
    run.lose(0)
    assert run.sync((1,)) == [1], "of the two that are left the second is engine 2"
    assert run.policy.told == [(2, []), (1, [])]
    assert run.told == [("engine_lost", 0, 2), ("engine_lost", 2, 1)]
    assert run.sync() == [1] and len(run.policy.told) == 2, "nothing has changed"


def test_a_new_engine_that_fails_at_its_first_sync_has_not_joined(tmp_path: Path) -> None:
    run = Elastic(tmp_path)
    run.lose(1)
    until(lambda: ray.wait([run.supervisor._starts[1][0]], timeout=0)[0], "the new engine")
    assert run.sync((1,)) == [0]
    assert (
        run.told == [("engine_lost", 1, 1), ("engine_lost", 1, 1)] and run.supervisor.restarts == 0
    )
    assert run.starts == [1, 2], "the next start comes a minute after the last one"


def test_what_does_not_start_is_tried_again_and_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_engines, "_START_AGAIN_S", 0.5)
    run = Elastic(tmp_path)
    run.later = NotStarting
    run.lose(0)
    until(lambda: run.sync() and run.starts[0] >= 4, "more tries")
    assert run.told == [("engine_lost", 0, 1)]
    # nor what Ray has no room for
    run.later = MisbehavingEngine.options(num_cpus=10**6)
    run._start = lambda index: run.later.remote(index, 1)
    run.supervisor.engines._start = run._start
    until(
        lambda: ray.wait([run.supervisor._starts[0][0]], timeout=0)[0] == [] and run.sync() == [1],
        "one that waits",
    )
    run.supervisor.config = run.supervisor.config.model_copy(
        update={"vllm": run.supervisor.config.vllm.model_copy(update={"start_timeout_s": 0.1})}
    )
    run.later = MisbehavingEngine
    run.until_back()


def test_below_the_fewest_engines_are_waited_for_and_restarts_are_counted(tmp_path: Path) -> None:
    run = Elastic(tmp_path, engines=2, fewest=1, max_restarts=1)
    run.lose(0, 1)
    assert run.told == [("engine_lost", 0, 1), ("engine_replaced", [1], None)]
    assert run.policy.told == [(1, [0])] and run.starts[1] == 2, (
        "of one engine it is the first that gets weights"
    )
    run.until_back()
    assert run.supervisor.restarts == 2
    run.lose(0)
    with pytest.raises(EngineLost, match="all restarts are used up"):
        run.lose(1)


# ---- who sleeps when
# ----------------------------------------------------------------------------------------------


class FakeGroup:
    """Actor group that notes what its ranks are told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def ask(self, method: str, **_: Any) -> list:
        self.told.append(method)
        return [outcome.remote(None)]


def shared_gpus(
    policy: FakeGroup,
    trouble: str = "",
    how: int = signal.SIGKILL,
    sleep: bool = True,
    max_restarts: int = 1,
) -> tuple[GpuSharing, EngineSupervisor]:
    """Two engines on the policy's GPUs, of which the second one fails as ``SleepyEngine`` says."""
    lives = [0, 0]

    def start(index: int) -> Any:
        lives[index] += 1
        return SleepyEngine.remote(lives[index] - 1, trouble if index else "", how)

    fleet = EngineFleet(start, 2)
    ray.get([engine.ping.remote() for engine in fleet], timeout=PATIENCE_S)
    hang_timeout_s = 5.0 if how == signal.SIGSTOP else PATIENCE_S
    config = limits(max_restarts, hang_timeout_s, ds=sleep, vllm=sleep)
    engines = EngineSupervisor(fleet, policy, config)
    return GpuSharing(config, {"policy": policy}, engines), engines


def told(engines: EngineSupervisor) -> list[list[str]]:
    return engines.ask("what_it_was_told")


def test_engines_have_the_gpus_while_they_generate_and_sleep_afterwards() -> None:
    policy = FakeGroup()
    sharing, engines = shared_gpus(policy)
    with sharing.generation(lambda: False):
        assert policy.told == ["offload_states"]
        assert told(engines) == [["wake_up"]] * 2
    assert told(engines) == [["wake_up", "sleep"]] * 2
    sharing.wake_weights()
    assert told(engines) == [["wake_up", "sleep", "wake_weights"]] * 2
    assert policy.told == ["offload_states"]


def test_engines_keep_no_weights_that_are_replaced_before_they_sample_again() -> None:
    sharing, engines = shared_gpus(FakeGroup())
    with sharing.generation(lambda: True):
        pass
    sharing.wake_weights()
    sharing.make_room_for_policy()
    assert told(engines) == [["wake_up", "discard_weights", "wake_weights", "sleep"]] * 2


def test_who_does_not_sleep_is_left_alone() -> None:
    policy = FakeGroup()
    sharing, engines = shared_gpus(policy, sleep=False)
    with sharing.generation(lambda: False):
        sharing.wake_weights()
    assert told(engines) == [[], []] and policy.told == []


# both are asked for in one way: of one the engine dies, of the other it hangs
@pytest.mark.parametrize(
    ("trouble", "how"), [("wake_up", signal.SIGKILL), ("sleep", signal.SIGSTOP)]
)
def test_an_engine_that_does_not_wake_up_or_fall_asleep_is_replaced_and_told_again(
    trouble: str, how: int
) -> None:
    policy = FakeGroup()
    sharing, engines = shared_gpus(policy, trouble, how)
    with sharing.generation(lambda: False):
        pass
    assert told(engines) == [
        ["wake_up", "sleep"],
        ["wake_up", "sleep"] if trouble == "wake_up" else ["sleep"],
    ]
    assert engines.restarts == 1 and policy.told == ["offload_states", "replace_engines"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_sync_is_repeated_without_an_engine_that_died_or_hung_while_it_slept(how: int) -> None:
    policy = FakeGroup()
    sharing, engines = shared_gpus(policy, "wake_weights", how)
    engines.repeat_until_sent(lambda: (sharing.wake_weights(), policy.ask("send_weights")))
    assert told(engines) == [["wake_weights"] * 2, ["wake_weights"]]
    assert engines.restarts == 1 and policy.told == ["replace_engines", "send_weights"]


def test_without_restarts_the_fault_is_told() -> None:
    sharing, engines = shared_gpus(FakeGroup(), "wake_weights", max_restarts=0)
    with pytest.raises(
        EngineFailed, match="rollout engine 1 failed while waking up for new weights"
    ):
        engines.repeat_until_sent(sharing.wake_weights)
    sharing, engines = shared_gpus(FakeGroup(), "sleep")
    engines.restarts = 1
    with pytest.raises(EngineLost), sharing.generation(lambda: False):
        pass
