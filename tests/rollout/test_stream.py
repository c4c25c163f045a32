"""The frames of one update, over a channel made of queues: what arrives, and what is refused."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from openrlhf_ext.rollout.weight_sync.base import WeightStreamAborted, WeightStreamMismatch, WeightSyncError
from openrlhf_ext.rollout.weight_sync.plan import BucketPlan, TensorSpec
from openrlhf_ext.rollout.weight_sync.stream import frame_bytes, receive_stream, send_stream
from tests.rollout.test_plan import random_tensor, spec_lists


class Done:
    def wait(self) -> None:
        pass


@dataclass
class QueueChannel:
    """Both ends in one process: `start` sends on the sender's side and receives on the other."""

    sending: bool
    frames: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)

    def start(self, frame: Tensor) -> Done:
        if self.sending:
            self.frames.put(frame.clone())
        else:
            frame.copy_(self.frames.get_nowait())
        return Done()


def transfer(plan: BucketPlan, tensors: Iterator[tuple[str, Tensor]], version: int = 1) -> QueueChannel:
    sender = QueueChannel(sending=True)
    largest = max(frame_bytes(bucket) for bucket in plan.buckets)
    staging = (torch.empty(largest, dtype=torch.uint8), torch.empty(largest, dtype=torch.uint8))
    try:
        send_stream(sender, plan, staging, tensors, version)
    finally:
        receiver = QueueChannel(sending=False, frames=sender.frames)
    return receiver


def model(*names: str, shape: tuple[int, ...] = (8,)) -> dict[str, Tensor]:
    return {name: torch.randn(shape) for name in names}


def plan_of(tensors: dict[str, Tensor], bucket_bytes: int = 64) -> BucketPlan:
    return BucketPlan.build([TensorSpec(n, tuple(t.shape), t.dtype) for n, t in tensors.items()], bucket_bytes)


@settings(deadline=None, max_examples=40)
@given(specs=spec_lists(), bucket_bytes=st.integers(1, 1000))
def test_all_tensors_arrive_and_stay_intact(specs: list[TensorSpec], bucket_bytes: int) -> None:
    """Also those received first, while later frames arrive: vLLM keeps them until a layer is complete."""
    plan = BucketPlan.build(specs, bucket_bytes)
    sent = {spec.name: random_tensor(spec) for spec in specs}
    received = list(receive_stream(transfer(plan, iter(sent.items())), plan, version=1))
    assert [name for name, _ in received] == [spec.name for spec in specs]
    assert all(torch.equal(tensor, sent[name]) for name, tensor in received)


def test_non_contiguous_tensors_that_require_gradients_can_be_sent() -> None:
    weight = torch.nn.Parameter(torch.randn(6, 4)).t()
    received = dict(receive_stream(transfer(plan_of({"w": weight}), iter([("w", weight)])), plan_of({"w": weight}), 1))
    assert torch.equal(received["w"], weight)


@pytest.mark.parametrize(
    ("names", "finding"),
    [
        (["a", "b", "d"], "missing: ['c']"),
        (["a", "b", "c"], "missing: ['d']"),
        (["a", "b", "c", "d", "e"], "not in the plan: ['e']"),
        (["a", "b", "c", "d", "b"], "more than once: ['b']"),
        (["a", "c", "b", "d"], "order: number 1 is c, the plan has b"),
    ],
)
def test_wrong_names_are_listed_and_the_receiver_refuses(names: list[str], finding: str) -> None:
    tensors = model("a", "b", "c", "d", "e")
    plan = plan_of({name: tensors[name] for name in "abcd"})
    channel = QueueChannel(sending=True)
    staging = (torch.empty(128, dtype=torch.uint8), torch.empty(128, dtype=torch.uint8))
    with pytest.raises(WeightStreamMismatch) as error:
        send_stream(channel, plan, staging, ((name, tensors[name]) for name in names), 7)
    assert finding in str(error.value)
    with pytest.raises(WeightStreamAborted, match="gave up update 7"):
        list(receive_stream(QueueChannel(sending=False, frames=channel.frames), plan, 7))
    assert channel.frames.empty()


@pytest.mark.parametrize("wrong", [torch.randn(9), torch.randn(8).double()])
def test_wrong_shape_or_dtype_is_named_with_both_values(wrong: Tensor) -> None:
    tensors = model("a", "b")
    with pytest.raises(WeightStreamMismatch, match=r"b: is \(\d,\) torch.float\d\d, the plan has \(8,\) torch.float32"):
        transfer(plan_of(tensors), iter([("a", tensors["a"]), ("b", wrong)]))


def test_the_rest_of_the_tensors_is_read_after_a_mismatch() -> None:
    """Other ranks take part in producing them, and would wait for ever."""
    tensors = model("a", "b", "c")
    produced = []

    def produce() -> Iterator[tuple[str, Tensor]]:
        for name in ("b", "c", "a"):
            produced.append(name)
            yield name, tensors[name]

    with pytest.raises(WeightStreamMismatch):
        transfer(plan_of(tensors), produce())
    assert produced == ["b", "c", "a"]


def test_an_error_while_producing_tensors_reaches_the_caller_and_aborts_the_stream() -> None:
    tensors = model("a", "b")
    channel = QueueChannel(sending=True)
    staging = (torch.empty(128, dtype=torch.uint8), torch.empty(128, dtype=torch.uint8))

    def produce() -> Iterator[tuple[str, Tensor]]:
        yield "a", tensors["a"]
        raise ZeroDivisionError("export failed")

    with pytest.raises(ZeroDivisionError, match="export failed"):
        send_stream(channel, plan_of(tensors), staging, produce(), 1)
    with pytest.raises(WeightStreamAborted):
        list(receive_stream(QueueChannel(sending=False, frames=channel.frames), plan_of(tensors), 1))


def test_another_version_or_plan_is_refused() -> None:
    tensors = model("a", "b")
    with pytest.raises(WeightSyncError, match="run different updates"):
        list(receive_stream(transfer(plan_of(tensors), iter(tensors.items()), version=3), plan_of(tensors), version=4))
    renamed = plan_of(dict(zip("xy", tensors.values(), strict=True)))
    with pytest.raises(WeightSyncError, match="run different updates"):
        list(receive_stream(transfer(plan_of(tensors), iter(tensors.items())), renamed, version=1))
