"""Who is asleep when, and engines that do not fall asleep or wake up."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from openrlhf_ext.driver import processes
from openrlhf_ext.driver.engines import EngineGuard, EngineLost, RecoveryLimits
from openrlhf_ext.driver.gpu_sharing import GpuSharing, Sleepers
from openrlhf_ext.rollout.launch import EngineFleet
from openrlhf_ext.rollout.sync.base import EngineFailed
from tests.cluster import start_local_ray
from tests.driver.fake_engines import SleepyEngine, outcome
from tests.patience import PATIENCE_S

BOTH = Sleepers(policy=True, engines=True)


@pytest.fixture(scope="module", autouse=True)
def ray_session() -> Iterator[None]:
    start_local_ray()
    yield
    ray.shutdown()


class FakeGroup:
    """Actor group that notes what its ranks are told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def async_run_method(self, method: str, **_: Any) -> list:
        self.told.append(method)
        return [outcome.remote(None)]


def shared_gpus(
    policy: FakeGroup, trouble: str = "", how: int = signal.SIGKILL, sleepers: Sleepers = BOTH,
    max_restarts: int = 1,
) -> tuple[GpuSharing, EngineGuard]:  # fmt: skip
    """Two engines on the policy's GPUs, of which the second one fails as ``SleepyEngine`` says."""
    lives = [0, 0]

    def start(index: int) -> Any:
        lives[index] += 1
        return SleepyEngine.remote(lives[index] - 1, trouble if index else "", how)

    fleet = EngineFleet(start, 2)
    ray.get([engine.ping.remote() for engine in fleet], timeout=PATIENCE_S)
    hang_timeout_s = 5.0 if how == signal.SIGSTOP else PATIENCE_S
    guard = EngineGuard(fleet, policy, RecoveryLimits(max_restarts, hang_timeout_s, PATIENCE_S, PATIENCE_S))
    return GpuSharing(sleepers, [policy], guard, PATIENCE_S), guard


def told(guard: EngineGuard) -> list[list[str]]:
    return guard.ask("what_it_was_told")


def test_engines_have_the_gpus_while_they_generate_and_sleep_afterwards() -> None:
    policy = FakeGroup()
    sharing, guard = shared_gpus(policy)
    with sharing.generation():
        assert policy.told == ["offload_states"]
        assert told(guard) == [["wake_up"]] * 2
    assert told(guard) == [["wake_up", "sleep"]] * 2
    sharing.wake_weights()
    assert told(guard) == [["wake_up", "sleep", "wake_weights"]] * 2
    assert policy.told == ["offload_states"]


def test_who_does_not_sleep_is_left_alone() -> None:
    policy = FakeGroup()
    sharing, guard = shared_gpus(policy, sleepers=Sleepers())
    with sharing.generation():
        sharing.wake_weights()
    assert told(guard) == [[], []] and policy.told == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("trouble", ["wake_up", "sleep"])
def test_an_engine_that_does_not_wake_up_or_fall_asleep_is_replaced_and_told_again(trouble: str, how: int) -> None:
    policy = FakeGroup()
    sharing, guard = shared_gpus(policy, trouble, how)
    with sharing.generation():
        pass
    assert told(guard) == [["wake_up", "sleep"], ["wake_up", "sleep"] if trouble == "wake_up" else ["sleep"]]
    assert guard.restarts == 1 and policy.told == ["offload_states", "replace_engines"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_sync_is_repeated_without_an_engine_that_died_or_hung_while_it_slept(how: int) -> None:
    policy = FakeGroup()
    sharing, guard = shared_gpus(policy, "wake_weights", how)
    guard.repeated(lambda: (sharing.wake_weights(), policy.async_run_method("broadcast_to_vllm")))
    assert told(guard) == [["wake_weights"] * 2, ["wake_weights"]]
    assert guard.restarts == 1 and policy.told == ["replace_engines", "broadcast_to_vllm"]


def test_without_restarts_the_fault_is_told() -> None:
    sharing, guard = shared_gpus(FakeGroup(), "wake_weights", max_restarts=0)
    with pytest.raises(EngineFailed, match="rollout engine 1 failed while waking up for new weights"):
        guard.repeated(sharing.wake_weights)
    sharing, guard = shared_gpus(FakeGroup(), "sleep")
    guard.restarts = 1
    with pytest.raises(EngineLost), sharing.generation():
        pass


def test_everybody_has_given_up_its_memory_before_a_critic_or_a_checkpoint_is_loaded(monkeypatch) -> None:
    order: list[str] = []

    class Recorder:
        def __init__(self, name: str, result: Any = None) -> None:
            self.remote = lambda *_: order.append(name) or result

    engine = SimpleNamespace(
        ping=Recorder("ping"),
        sleep=Recorder("engine sleeps"),
        process_info=Recorder("info", {"pid": 1, "host": "here"}),
    )
    policy = SimpleNamespace(
        async_init_model_from_pretrained=lambda *_: (
            order.append("policy is built") or [{"rank": 0, "pid": 2, "host": "here", "phases": None}]
        ),
        async_run_method=lambda name: order.append(name) or [{"weight_sync/probe_max_abs_diff": 0.0}],
    )
    config = SimpleNamespace(
        vllm=SimpleNamespace(start_timeout_s=1.0, enable_sleep=True), ds=SimpleNamespace(enable_sleep=True),
        train=SimpleNamespace(max_epochs=1),
    )  # fmt: skip
    session = SimpleNamespace(remember=lambda *_: None, watch=lambda *_: None, use_gpu=False)
    monkeypatch.setattr("openrlhf_ext.rollout.wait_until_ready", lambda *_: None, raising=False)
    monkeypatch.setattr(processes, "policy_settings", lambda *_: None)
    monkeypatch.setattr(processes, "sync_settings", lambda *_: None)
    deadline = SimpleNamespace(get=lambda references: references)
    processes.initialize_everything(config, session, policy, [engine], steps=1, deadline=deadline)
    assert order == ["info", "engine sleeps", "policy is built", "prove_sync", "engine sleeps"]
