"""Broadcast over gloo: between real processes, and with engines (without vLLM) that misbehave in every way."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist
from torch import Tensor

from openrlhf_ext.rollout.sync import (
    BucketPlan,
    EngineFailed,
    Link,
    TensorSpec,
    WeightSender,
    WeightStreamAborted,
    WeightStreamMismatch,
    WeightSyncError,
    WeightSyncTimeout,
    largest_frame,
    make_receiver,
    make_sender,
)
from openrlhf_ext.rollout.sync.collective import SendingEnd
from openrlhf_ext.rollout.sync.gloo import Gloo, GlooWeightReceiver
from openrlhf_ext.rollout.sync.stream import TensorSource, send_stream
from tests.launch import launch
from tests.patience import PATIENCE_S, SOONER_S

PATIENCE = timedelta(seconds=PATIENCE_S)


def state(version: int) -> dict[str, Tensor]:
    """What version `version` of a model looks like, the same in every process."""
    generator = torch.Generator().manual_seed(version)
    layers = {f"layer{i}.weight": torch.randn(300, 100, generator=generator) for i in range(6)}
    return {**layers, "norm": torch.randn(100, generator=generator).bfloat16(), "scale": torch.tensor(float(version))}


def plan() -> BucketPlan:
    return BucketPlan.build([TensorSpec(n, tuple(t.shape), t.dtype) for n, t in state(0).items()], 200_000)


def same(received: dict[str, Tensor], version: int) -> bool:
    sent = state(version)
    return received.keys() == sent.keys() and all(torch.equal(received[name], sent[name]) for name in sent)


# ---- processes


class PolledGloo(Gloo):
    """Waits as NCCL does: by asking, under a deadline of our own."""

    polled = True


def transport_cases() -> dict[str, Any]:
    """Runs on rank 0 (sender) and the receivers; every rank returns what it saw, by case."""
    rank, world_size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    return _send_cases(world_size, port) if rank == 0 else _receive_cases(rank, world_size, port)


def _send_cases(world_size: int, port: int) -> dict[str, Any]:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=PATIENCE)
    store.set("go", b"yes")
    channel = SendingEnd(Gloo(), store, "127.0.0.1", 0, world_size, PATIENCE_S)
    staging = tuple(torch.empty(largest_frame(plan()), dtype=torch.uint8) for _ in range(2))

    def send(version: int, without: str = "") -> None:
        tensors = [item for item in state(version).items() if item[0] != without]
        send_stream(channel, plan(), staging, TensorSource(plan(), tensors), version)

    send(1)
    with pytest.raises(WeightStreamMismatch):
        send(2, without="layer4.weight")
    store.wait([f"answered {rank}" for rank in range(1, world_size)], PATIENCE)  # staging is free now
    send(3)
    start = time.monotonic()
    with pytest.raises(WeightSyncError, match="(?i)connection|closed|reset") as error:
        for version in range(4, 200):  # small frames fit into socket buffers: the loss shows after a few
            send(version)
    return {"lost peer": str(error.value), "seconds to notice": time.monotonic() - start}


def _receive_cases(rank: int, world_size: int, port: int) -> dict[str, Any]:
    GlooWeightReceiver.collective = PolledGloo() if rank == 2 else Gloo()
    receiver = make_receiver(plan(), Link("gloo", "127.0.0.1", port, 1, world_size, PATIENCE_S), rank - 1)
    seen: dict[str, Any] = {"whole": same(dict(receiver.receive(1)), 1)}
    with pytest.raises(WeightStreamAborted):
        list(receiver.receive(2))
    dist.TCPStore("127.0.0.1", port, is_master=False, timeout=PATIENCE).set(f"answered {rank}", "yes")
    seen["after an abort"] = same(dict(receiver.receive(3)), 3)
    stream = receiver.receive(4)
    next(stream)
    receiver.close()
    return seen


def test_updates_arrive_in_every_process_and_failures_show_at_the_other_end() -> None:
    sender, *receivers = launch("tests.rollout.test_gloo", "transport_cases", 3)
    assert receivers == [{"whole": True, "after an abort": True}] * 2
    assert sender["seconds to notice"] < SOONER_S, "it waited for the timeout"


# ---- the sender and its engines


@ray.remote(num_cpus=0.1, max_concurrency=2)
class FakeEngine:
    """The weight-sync surface of a rollout engine, without a model."""

    def __init__(self, behaviour: str = "good") -> None:
        self.behaviour = behaviour

    def behave(self, behaviour: str) -> None:
        self.behaviour = behaviour

    def connect_weight_sync(self, plan: BucketPlan, link: Link) -> None:
        if self.behaviour == "cannot connect":
            raise OSError("no route to the policy")
        self.receiver = make_receiver(BucketPlan.from_wire(plan.to_wire()), Link.from_wire(link.to_wire()), 0)

    def receive_weights(self, version: int) -> float:
        if self.behaviour == "die":
            os._exit(3)
        if self.behaviour == "hang":
            time.sleep(3600)
        stream = self.receiver.receive(version)
        if self.behaviour == "fail":
            next(stream)
            self.receiver.close()
            raise RuntimeError("layer0.weight does not fit into this model")
        self.received = dict(stream)
        return 0.25

    def holds(self, version: int) -> bool:
        return same(self.received, version)


@pytest.fixture(scope="module")
def engines(ray_session: None) -> list[Any]:
    return ready(FakeEngine.remote(), FakeEngine.remote())


def ready(*engines: Any) -> list[Any]:
    """The actors, started: importing torch does not count against a deadline."""
    ray.get([engine.__ray_ready__.remote() for engine in engines], timeout=PATIENCE_S)
    return [*engines]


def connected(engines: list[Any], timeout_s: float = PATIENCE_S) -> WeightSender:
    sender = make_sender("gloo", plan(), engines, 1, timeout_s)
    sender.connect()
    return sender


def test_every_engine_gets_every_version(engines: list[Any]) -> None:
    sender = connected(engines)
    for version in (1, 2, 3):
        report = sender.send(state(version).items(), version)
        assert report.load_s == 0.25 and report.nbytes == plan().payload_bytes
        assert ray.get([engine.holds.remote(version) for engine in engines]) == [True, True]
    sender.close()


def test_a_missing_tensor_is_an_error_and_the_next_update_needs_no_new_connection(engines: list[Any]) -> None:
    sender = connected(engines)
    with pytest.raises(WeightStreamMismatch, match="missing: \\['norm'\\]"):
        sender.send(((name, tensor) for name, tensor in state(4).items() if name != "norm"), 4)
    sender.send(state(5).items(), 5)
    assert all(ray.get([engine.holds.remote(5) for engine in engines]))
    sender.close()


def test_an_engine_that_fails_gives_its_own_error_and_disconnects(engines: list[Any]) -> None:
    sender = connected(engines)
    ray.get(engines[1].behave.remote("fail"))
    start = time.monotonic()
    with pytest.raises(EngineFailed, match="does not fit into this model") as error:
        sender.send(state(6).items(), 6)
    assert "rollout engine 1 failed while receiving weights of version 6" in str(error.value)
    assert error.value.engines == (1,)
    assert time.monotonic() - start < SOONER_S, "it waited for the timeout"
    with pytest.raises(WeightSyncError, match="call connect"):
        sender.send(state(6).items(), 6)
    ray.get(engines[1].behave.remote("good"))
    sender.connect()
    sender.send(state(7).items(), 7)
    assert all(ray.get([engine.holds.remote(7) for engine in engines]))
    sender.close()


def test_an_engine_that_cannot_connect_is_named(engines: list[Any]) -> None:
    ray.get(engines[0].behave.remote("cannot connect"))
    with pytest.raises(EngineFailed, match="rollout engine 0 failed while joining(.|\n)*no route to the policy"):
        connected(engines)
    ray.get(engines[0].behave.remote("good"))
    sender = connected(engines)  # the other engine was not left waiting
    sender.send(state(8).items(), 8)
    sender.close()


def test_a_hanging_engine_is_named_when_the_deadline_passes(ray_session: None) -> None:
    engines = ready(FakeEngine.remote(), FakeEngine.remote("hang"))
    sender = connected(engines, timeout_s=10.0)
    with pytest.raises(WeightSyncTimeout, match="engines \\[1\\] did not answer within 10 s while receiving") as error:
        sender.send(state(1).items(), 1)
    assert error.value.engines == (1,)


def test_a_dying_engine_is_reported_at_once(ray_session: None) -> None:
    engines = ready(FakeEngine.remote(), FakeEngine.remote("die"))
    sender = connected(engines)
    start = time.monotonic()
    with pytest.raises(EngineFailed, match="rollout engine 1 failed(.|\n)*(died|unavailable)"):
        sender.send(state(1).items(), 1)
    assert time.monotonic() - start < SOONER_S, "it waited for the timeout"


def test_unknown_transports_and_missing_engines_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown weight-sync transport 'mpi'; there are"):
        make_sender("mpi", plan(), [object()], 1, 10.0)
    with pytest.raises(ValueError, match="at least one engine"):
        make_sender("gloo", plan(), [], 1, 10.0)
