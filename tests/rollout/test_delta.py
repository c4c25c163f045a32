"""Updates of what has changed: lossless, refused where they do not fit, whole again after a fault."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import pytest
import ray
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from openrlhf_ext.rollout.sync import find_transport
from openrlhf_ext.rollout.sync.base import EngineFailed, WeightSyncError
from openrlhf_ext.rollout.sync.delta import Sent, apply, changes
from openrlhf_ext.rollout.sync.plan import HEADER_BYTES, BucketPlan, Receipt, WeightSyncMismatch
from openrlhf_ext.rollout.sync.sender import WeightSender
from openrlhf_ext.rollout.sync.stream import Fill, WeightReceiver, send_stream
from tests.patience import PATIENCE_S
from tests.rollout.test_stream import QueueGroup, staging_of
from tests.rollout.updates import FakeEngine, fill_with, plan_of, ready


def weights(version: int) -> dict[str, Tensor]:
    """One entry in a hundred of the matrices changes with every version, all of the last one."""
    generator = torch.Generator().manual_seed(1)
    tensors = {f"layer{i}": torch.randn(300, 100, generator=generator).bfloat16() for i in range(6)}
    for number in range(1, version + 1):
        generator.manual_seed(number)
        for tensor in tensors.values():
            tensor[torch.rand(tensor.shape, generator=generator) < 0.01] *= 1.5
    return {**tensors, "dense": torch.full((90, 100), float(version)).bfloat16()}


def plan() -> BucketPlan:
    return plan_of(weights(0), 100_000)


def bucket(entries: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (2 * entries,), generator=generator, dtype=torch.uint8)


@settings(deadline=None, max_examples=60)
@given(
    entries=st.sampled_from([32, 4096, 65_536, 65_568, 200_000]),
    share=st.sampled_from([0.0, 1e-4, 0.01, 0.05, 0.07, 1.0]),
    seed=st.integers(0, 1000),
)
def test_changes_make_the_new_bits_of_the_old_ones_or_are_too_many(entries: int, share: float, seed: int) -> None:
    old = bucket(entries, seed)
    places = torch.rand(entries, generator=torch.Generator().manual_seed(seed)) < share
    new = torch.where(places, old.view(torch.int16) ^ 1, old.view(torch.int16)).view(torch.uint8)
    found = changes(new, old)
    assert (found is None) == (16 * int(places.sum()) > entries)
    if found is not None:
        assert len(found) <= len(new) // 8 + 4 * -(-entries // 65_536)
        apply(found, old)
        assert torch.equal(new, old)


def test_changes_of_which_some_are_missing_are_refused() -> None:
    old, new = bucket(4096), bucket(4096)
    new[:200:2] += 1
    found = changes(new, old)
    assert found is not None
    with pytest.raises(WeightSyncError, match="99 changed weights arrived where 100 were expected"):
        apply(found[:-4], old)


# ---- frames


class Link:
    """A sender and an engine worker in one process."""

    def __init__(self) -> None:
        self.plan, self.sent, self.group = plan(), Sent(plan().buckets), QueueGroup()
        self.receiver = WeightReceiver([self.group], self.plan, keeps=True)

    def frames(self, version: int) -> list[Tensor]:
        self.sent.begin()
        send_stream(self.sent, self.plan, staging_of(self.plan), fill_with(weights(version)), version)
        self.sent.version = version
        return self.sent.frames

    def receive(self, frames: Sequence[Tensor], version: int) -> dict[str, Tensor]:
        for frame in frames:
            self.group.send(frame)
        return {n: t.clone() for n, t in self.receiver.receive(version, [len(frame) for frame in frames])}


def holds(received: dict[str, Tensor], version: int) -> bool:
    expected = weights(version)
    return received.keys() == expected.keys() and all(torch.equal(received[n], t) for n, t in expected.items())


def test_every_version_arrives_by_its_changes_and_what_changed_altogether_as_a_whole() -> None:
    link = Link()
    sizes = []
    for version in (1, 2, 3):
        frames = link.frames(version)
        assert holds(link.receive(frames, version), version)
        sizes.append(sum(len(frame) for frame in frames))
    assert sizes[0] > link.plan.payload_bytes > 2 * sizes[1] > 36_000 and sizes[1] == pytest.approx(sizes[2], rel=0.1)


def test_changes_of_other_weights_than_those_that_are_held_are_refused() -> None:
    link = Link()
    link.receive(link.frames(1), 1)
    link.frames(2)
    with pytest.raises(WeightSyncError, match="since version 2 arrived at an engine worker that holds version 1"):
        link.receive(link.frames(3), 3)


def test_after_an_update_that_broke_off_changes_are_refused_and_a_whole_one_is_taken() -> None:
    link = Link()
    link.receive(link.frames(1), 1)
    frames = link.frames(2)
    spoiled = [*frames[:2], torch.cat([frames[2][:HEADER_BYTES], frames[2][HEADER_BYTES:-4]])]
    with pytest.raises(WeightSyncError, match="changed weights arrived where"):
        link.receive([*spoiled, *frames[3:]], 2)
    link.group = QueueGroup()
    link.receiver.ends = [link.group]
    with pytest.raises(WeightSyncError, match="since version 2 arrived at an engine worker that holds version None"):
        link.receive(link.frames(3), 3)
    link.group = QueueGroup()
    link.receiver.ends = [link.group]
    link.sent.close()
    assert holds(link.receive(link.frames(4), 4), 4)


def test_frames_that_changed_places_are_refused() -> None:
    link = Link()
    link.receive(link.frames(1), 1)
    first, second, *others = link.frames(2)
    with pytest.raises(WeightSyncError, match="run different updates"):
        link.receive([second, first, *others], 2)


# ---- the sender and its engines


@ray.remote(num_cpus=0.1, max_concurrency=2)
class Engine(FakeEngine.__ray_metadata__.modified_class):  # type: ignore[misc]
    """Dies by SIGKILL in the middle of an update, or misapplies one."""

    def receive_weights(self, version: int, sizes: Sequence[int] = ()) -> Receipt:
        if self.behavior == "be killed":
            next(self.receivers[0].receive(version, sizes))
            os.kill(os.getpid(), signal.SIGKILL)
        held = self.receivers[0]._received._contents
        now = held[0].clone() if held else None
        if self.behavior == "stale":
            held[0].copy_(self.before)
        receipt = super().receive_weights(version, sizes)
        self.before = now
        if self.behavior == "swap":
            one, other = (self.received[0][name] for name in ("layer0", "layer1"))
            self.received[0] |= {"layer0": other, "layer1": one}
            receipt = self.receipt()
        return receipt

    def spoil(self) -> None:
        """One entry that this worker holds, and the next version does not change, is no longer what it got."""
        self.receivers[0]._received._contents[0][2:4] ^= 1

    def holds(self, version: int) -> bool:
        return all(holds(own, version) for own in self.received)


def sender_to(engines: list[Any]) -> WeightSender:
    staging = find_transport("gloo").staging(plan(), [[0]], PATIENCE_S)
    sender = WeightSender("gloo", plan(), staging, engines, 1, PATIENCE_S, delta=True)
    sender.connect()
    return sender


def filled(version: int) -> Fill:
    return fill_with(weights(version))


def hold(engines: list[Any], version: int) -> list[bool]:
    return ray.get([engine.holds.remote(version) for engine in engines])


def test_an_engine_that_is_killed_in_an_update_is_replaced_by_one_that_gets_all(ray_session: None) -> None:
    engines = ready(Engine.remote(), Engine.remote())
    sender = sender_to(engines)
    whole = sender.send(filled(1), 1).nbytes
    assert sender.send(filled(2), 2).nbytes < whole / 2 and hold(engines, 2) == [True, True]
    ray.get(engines[1].behave.remote("be killed"))
    with pytest.raises(EngineFailed, match="rollout engine 1 failed") as error:
        sender.send(filled(3), 3)
    assert error.value.engines == (1,)
    engines[1:] = ready(Engine.remote())
    sender = sender_to(engines)
    assert sender.send(filled(3), 3).nbytes == whole and hold(engines, 3) == [True, True]
    assert sender.send(filled(4), 4).nbytes < whole / 2 and hold(engines, 4) == [True, True]
    sender.close()


def test_engines_are_untouched_by_an_export_that_fails(ray_session: None) -> None:
    engines = ready(Engine.remote())
    sender = sender_to(engines)
    whole = sender.send(filled(1), 1).nbytes
    with pytest.raises(KeyError, match="layer3"):
        sender.send(fill_with({n: t for n, t in weights(2).items() if n != "layer3"}), 2)
    assert hold(engines, 1) == [True]
    sender.connect()
    assert sender.send(filled(3), 3).nbytes == whole and hold(engines, 3) == [True]
    sender.close()


@pytest.mark.parametrize(("kind", "named"), [("stale", "layer0"), ("swap", "layer0, layer1"), ("spoil", "layer0")])
def test_an_engine_that_holds_something_else_after_the_changes_is_named(
    ray_session: None, kind: str, named: str
) -> None:
    """Bits of an update before, of another tensor, or one bit."""
    (engine,) = ready(Engine.remote())
    sender = sender_to([engine])
    sender.send(filled(1), 1)
    sender.send(filled(2), 2)
    ray.get(engine.spoil.remote() if kind == "spoil" else engine.behave.remote(kind))
    with pytest.raises(WeightSyncMismatch, match=rf"engine 0: \d of 7: {named}$"):
        sender.send(filled(3), 3)
    sender.close()
