"""What NCCL does not tell its ranks: a sender that leaves, a rank that never comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from openrlhf_ext.groups.stores import open_store
from openrlhf_ext.rollout.sync.base import (
    GO,
    YES,
    Departure,
    Link,
    WeightTransferFailed,
    reach_store,
)
from openrlhf_ext.rollout.sync.gloo import Gloo
from openrlhf_ext.rollout.sync.nccl import Nccl
from openrlhf_ext.rollout.sync.stream import WeightReceiver
from tests.patience import PATIENCE_S, SOONER_S
from tests.rollout.updates import plan

LOCAL = "127.0.0.1"
kept: list[Any] = []


class QuietGloo(Gloo):
    """Gloo that is as silent as NCCL: building waits for ever, and leaving does not close the
    others' connections."""

    def open_group(
        self, store: dist.Store, address: str, rank: int, world_size: int, timeout_s: float
    ) -> Any:
        return super().open_group(store, address, rank, world_size, 10 * PATIENCE_S)

    def abort(self, group: Any) -> None:
        kept.append(group)


TRANSPORT = QuietGloo()


@pytest.fixture
def store() -> Iterator[dist.TCPStore]:
    yield open_store(LOCAL, timedelta(seconds=10 * PATIENCE_S))
    kept.clear()


def link(store: dist.TCPStore, world_size: int, timeout_s: float = PATIENCE_S) -> Link:
    return Link(__name__, LOCAL, store.port, 1, world_size, timeout_s, {})


def outcome(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """A thread, and what it returned or raised when it has ended."""
    seen: list[Any] = []

    def run() -> None:
        try:
            seen.append(function())
        except Exception as error:
            seen.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, seen


def test_a_receiver_hears_of_a_sender_that_leaves_in_the_middle_of_an_update(
    store: dist.TCPStore,
) -> None:
    store.set(GO, YES)
    both = link(store, 2)
    connecting, receivers = outcome(lambda: WeightReceiver.connect(plan(), both, 0))
    sender = TRANSPORT.open_sender(store, both, TRANSPORT.staging(plan(), [[0]], PATIENCE_S))
    connecting.join(PATIENCE_S)
    waiting, seen = outcome(lambda: list(receivers[0].receive(1)))
    start = time.monotonic()
    sender.close()
    waiting.join(SOONER_S)
    (error,) = seen
    assert isinstance(error, WeightTransferFailed) and "the sender has left" in str(error)
    assert time.monotonic() - start < SOONER_S


def test_a_sender_does_not_wait_for_the_one_that_served_the_store_and_left_first() -> None:
    store = open_store(LOCAL, timedelta(seconds=PATIENCE_S))
    alone = link(store, 1)
    sender = Gloo().open_sender(
        reach_store(alone), alone, TRANSPORT.staging(plan(), [[0]], PATIENCE_S)
    )
    del store
    start = time.monotonic()
    sender.close()
    assert time.monotonic() - start < SOONER_S


def test_who_joins_does_not_wait_for_a_sender_that_gave_up(store: dist.TCPStore) -> None:
    store.set(GO, YES)
    joining, seen = outcome(lambda: WeightReceiver.connect(plan(), link(store, 3), 0))
    Departure(store).announce()
    joining.join(SOONER_S)
    assert isinstance(seen[0], WeightTransferFailed) and "the sender has left" in str(seen[0])


def test_who_joins_waits_for_a_rank_that_never_comes_until_the_deadline(
    store: dist.TCPStore,
) -> None:
    store.set(GO, YES)
    joining, seen = outcome(lambda: WeightReceiver.connect(plan(), link(store, 3, 1.0), 0))
    joining.join(SOONER_S)
    assert isinstance(seen[0], WeightTransferFailed) and "not all 3 ranks had joined" in str(
        seen[0]
    )


@pytest.mark.parametrize(
    ("done", "says"), [(False, "was not through after 0.1 s"), (True, "unhandled system error")]
)
def test_nccl_s_first_collective_has_a_deadline_and_is_aborted(
    monkeypatch: pytest.MonkeyPatch, done: bool, says: str
) -> None:
    aborted: list[bool] = []
    work = SimpleNamespace(
        is_completed=lambda: done, exception=lambda: RuntimeError("unhandled system error")
    )
    group = SimpleNamespace(allreduce=lambda *_: work, abort=lambda: aborted.append(True))

    def process_group(*_: Any) -> Any:
        return group

    process_group.Options = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setattr(dist, "ProcessGroupNCCL", process_group, raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Nccl, "device", torch.device("cpu"))
    with pytest.raises(WeightTransferFailed, match=says):
        Nccl().open_group(dist.HashStore(), LOCAL, 0, 2, 0.1)
    assert aborted == [True]
