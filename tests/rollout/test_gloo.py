"""Broadcast over gloo: between real processes, and what senders of every transport do about engines
that misbehave."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import ray
import torch.distributed as dist

from openrlhf_ext.rollout.sync.base import (
    GO,
    YES,
    EngineFailed,
    Link,
    WeightStreamAborted,
    WeightSyncError,
    WeightSyncTimeout,
)
from openrlhf_ext.rollout.sync.gloo import TRANSPORT
from openrlhf_ext.rollout.sync.sender import WeightSender
from openrlhf_ext.rollout.sync.stream import Fill, WeightReceiver, send_stream
from tests.launch import launch
from tests.patience import PATIENCE_S, SOONER_S
from tests.rollout.updates import (
    FakeEngine,
    all_hold,
    fill_with,
    plan,
    ready,
    same,
    sender_to,
    state,
    without,
)

PATIENCE = timedelta(seconds=PATIENCE_S)
GLOO_AND_FILES = pytest.mark.parametrize("transport", ["gloo", "tests.rollout.file_transport"])


# ---- processes


def transport_cases() -> dict[str, Any]:
    """Runs on rank 0 (sender) and the receivers; every rank returns what it saw, by case."""
    rank, world_size, port = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")
    )
    link = Link("gloo", "127.0.0.1", port, 1, world_size, PATIENCE_S, {})
    return _send_cases(link) if rank == 0 else _receive_cases(link, rank)


def _send_cases(link: Link) -> dict[str, Any]:
    store = dist.TCPStore(link.address, link.port, is_master=False, timeout=PATIENCE)
    store.set(GO, YES)
    staging = TRANSPORT.staging(plan(), [[0]], PATIENCE_S)
    end = TRANSPORT.open_sender(store, link, staging)

    def send(fill: Fill, version: int) -> None:
        send_stream(end, plan(), staging, fill, version)

    send(fill_with(state(1)), 1)
    with pytest.raises(KeyError):
        send(without("layer4.weight", 2), 2)
    # staging is free now
    store.wait([f"answered {rank}" for rank in range(1, link.world_size)], PATIENCE)
    send(fill_with(state(3)), 3)
    start = time.monotonic()
    with pytest.raises(WeightSyncError, match="(?i)connection|closed|reset") as error:
        # small frames fit into socket buffers: the loss shows after a few
        for version in range(4, 200):
            send(fill_with(state(version)), version)
    return {"lost peer": str(error.value), "seconds to notice": time.monotonic() - start}


def _receive_cases(link: Link, rank: int) -> dict[str, Any]:
    receiver = WeightReceiver.connect(plan(), link, rank - 1)
    seen: dict[str, Any] = {"whole": same(dict(receiver.receive(1)), 1)}
    with pytest.raises(WeightStreamAborted):
        list(receiver.receive(2))
    dist.TCPStore(link.address, link.port, is_master=False, timeout=PATIENCE).set(
        f"answered {rank}", "yes"
    )
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


@pytest.fixture(scope="module")
def engines(ray_session: None) -> list[Any]:
    """Of two workers each."""
    return ready(FakeEngine.remote(workers=2), FakeEngine.remote(workers=2))


@GLOO_AND_FILES
def test_every_engine_gets_every_version(engines: list[Any], transport: str) -> None:
    """Also through a transport from outside of the package."""
    sender = sender_to(engines, transport, workers=2)
    for version in (1, 2, 3):
        report = sender.send(fill_with(state(version)), version)
        assert report.load_s == 0.25 and report.nbytes == plan().payload_bytes
        assert all_hold(engines, version)
    sender.close()


@GLOO_AND_FILES
def test_an_export_that_fails_is_an_error_and_engines_hear_of_it(
    engines: list[Any], transport: str
) -> None:
    sender = sender_to(engines, transport, workers=2)
    start = time.monotonic()
    with pytest.raises(KeyError, match="norm"):
        sender.send(without("norm", 4), 4)
    assert time.monotonic() - start < SOONER_S, "it waited for the timeout"
    sender.connect()
    sender.send(fill_with(state(5)), 5)
    assert all_hold(engines, 5)
    sender.close()


@GLOO_AND_FILES
def test_an_engine_that_fails_gives_its_own_error_and_disconnects(
    engines: list[Any], transport: str
) -> None:
    sender = sender_to(engines, transport, workers=2)
    ray.get(engines[1].behave.remote("fail"))
    start = time.monotonic()
    with pytest.raises(EngineFailed, match="does not fit into this model") as error:
        sender.send(fill_with(state(6)), 6)
    assert "rollout engine 1 failed while receiving weights of version 6" in str(error.value)
    assert error.value.engines == (1,)
    assert time.monotonic() - start < SOONER_S, "it waited for the timeout"
    with pytest.raises(WeightSyncError, match="call connect"):
        sender.send(fill_with(state(6)), 6)
    ray.get(engines[1].behave.remote("good"))
    sender.connect()
    sender.send(fill_with(state(7)), 7)
    assert all_hold(engines, 7)
    sender.close()


def test_an_engine_that_cannot_connect_is_named(engines: list[Any]) -> None:
    ray.get(engines[0].behave.remote("cannot connect"))
    with pytest.raises(
        EngineFailed, match="rollout engine 0 failed while joining(.|\n)*no route to the policy"
    ):
        sender_to(engines, "gloo", workers=2)
    ray.get(engines[0].behave.remote("good"))
    sender = sender_to(engines, "gloo", workers=2)  # the other engine was not left waiting
    sender.send(fill_with(state(8)), 8)
    sender.close()


def test_a_hanging_engine_is_named_when_the_deadline_passes(ray_session: None) -> None:
    engines = ready(FakeEngine.remote(), FakeEngine.remote("hang"))
    sender = sender_to(engines, "gloo", timeout_s=4.0)
    with pytest.raises(
        WeightSyncTimeout, match="engines \\[1\\] did not answer within 4 s while receiving"
    ) as error:
        sender.send(fill_with(state(1)), 1)
    assert error.value.engines == (1,)


def test_a_dying_engine_is_reported_at_once(ray_session: None) -> None:
    engines = ready(FakeEngine.remote(), FakeEngine.remote("die"))
    sender = sender_to(engines, "gloo")
    start = time.monotonic()
    with pytest.raises(EngineFailed, match="rollout engine 1 failed(.|\n)*(died|unavailable)"):
        sender.send(fill_with(state(1)), 1)
    assert time.monotonic() - start < SOONER_S, "it waited for the timeout"


def test_a_sender_without_engines_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one engine"):
        WeightSender("gloo", plan(), TRANSPORT.staging(plan(), [[0]], 10.0), [], 1, 10.0)
