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

from openrlhf_ext.rollout.sync.base import (
    WeightStreamAborted,
    WeightStreamMismatch,
    WeightSyncError,
    WeightTransferFailed,
)
from openrlhf_ext.rollout.sync.plan import Bucket, BucketPlan, TensorSpec
from openrlhf_ext.rollout.sync.stream import TensorSource, WeightStream, frame_bytes, send_stream
from tests.rollout.test_plan import random_tensor, spec_lists


@dataclass
class Frame:
    """A frame that arrives at once."""

    content: Tensor

    def wait(self) -> Tensor:
        return self.content


@dataclass
class QueueChannel:
    """Both ends in one process: frames that were sent, and what is received from them."""

    frames: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)

    def start(self, frame: Tensor | int) -> Frame:
        if isinstance(frame, Tensor):
            self.frames.put(frame.clone())
            return Frame(frame)
        arrived = self.frames.get_nowait()
        assert len(arrived) == frame
        return Frame(arrived)


def send(channel: QueueChannel, plan: BucketPlan, tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
    largest = max(frame_bytes(bucket) for bucket in plan.buckets)
    staging = (torch.empty(largest, dtype=torch.uint8), torch.empty(largest, dtype=torch.uint8))
    send_stream(channel, plan, staging, TensorSource(plan, tensors), version)


def transfer(plan: BucketPlan, tensors: Iterator[tuple[str, Tensor]], version: int = 1) -> QueueChannel:
    channel = QueueChannel()
    send(channel, plan, tensors, version)
    return channel


def receive(channel: QueueChannel, plan: BucketPlan, version: int) -> list[tuple[str, Tensor]]:
    return list(WeightStream(channel, plan).receive(version))


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
    received = receive(transfer(plan, iter(sent.items())), plan, version=1)
    assert [name for name, _ in received] == [spec.name for spec in specs]
    assert all(torch.equal(tensor, sent[name]) for name, tensor in received)


def test_non_contiguous_tensors_that_require_gradients_can_be_sent() -> None:
    weight = torch.nn.Parameter(torch.randn(6, 4)).t()
    received = dict(receive(transfer(plan_of({"w": weight}), iter([("w", weight)])), plan_of({"w": weight}), 1))
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
    channel = QueueChannel()
    with pytest.raises(WeightStreamMismatch) as error:
        send(channel, plan, ((name, tensors[name]) for name in names), 7)
    assert finding in str(error.value)
    with pytest.raises(WeightStreamAborted, match="gave up update 7"):
        receive(channel, plan, 7)
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
    channel = QueueChannel()

    def produce() -> Iterator[tuple[str, Tensor]]:
        yield "a", tensors["a"]
        raise ZeroDivisionError("export failed")

    with pytest.raises(ZeroDivisionError, match="export failed"):
        send(channel, plan_of(tensors), produce(), 1)
    with pytest.raises(WeightStreamAborted):
        receive(channel, plan_of(tensors), 1)


def test_another_version_or_plan_is_refused() -> None:
    tensors = model("a", "b")
    with pytest.raises(WeightSyncError, match="run different updates"):
        receive(transfer(plan_of(tensors), iter(tensors.items()), version=3), plan_of(tensors), version=4)
    renamed = plan_of(dict(zip("xy", tensors.values(), strict=True)))
    with pytest.raises(WeightSyncError, match="run different updates"):
        receive(transfer(plan_of(tensors), iter(tensors.items())), renamed, version=1)


class JointSource:
    """A source that notes in which order its parts are called, and fails when told to."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.calls: list[str] = []
        self.fail_at = fail_at

    def fill(self, bucket: Bucket, content: Tensor) -> None:
        self.calls.append(f"fill {bucket.index}")
        if bucket.index == self.fail_at:
            raise ZeroDivisionError("cannot fill")

    def complete(self, bucket: Bucket) -> None:
        self.calls.append(f"complete {bucket.index}")

    def drain(self) -> None:
        self.calls.append("drain")


class NotedChannel:
    """Notes when frames are sent and waited for, in the source's list."""

    def __init__(self, source: JointSource, fail_at: int | None = None) -> None:
        self.source, self.fail_at, self.sent = source, fail_at, 0

    def start(self, frame: Tensor) -> NotedChannel:
        self.source.calls.append(f"send {self.sent}")
        self.sent += 1
        return self

    def wait(self) -> None:
        self.source.calls.append(f"sent {self.sent - 1}")
        if self.sent - 1 == self.fail_at:
            raise WeightTransferFailed("gone")


def joint(source: JointSource, channel: NotedChannel) -> list[str]:
    plan = plan_of(model("a", "b", "c"))
    staging = (torch.empty(128, dtype=torch.uint8), torch.empty(128, dtype=torch.uint8))
    send_stream(channel, plan, staging, source, 1)
    return source.calls


def test_a_bucket_is_filled_while_the_one_before_is_under_way_and_completed_when_its_buffer_is_free() -> None:
    source = JointSource()
    assert joint(source, NotedChannel(source)) == [
        "fill 0", "complete 0", "send 0",
        "fill 1", "sent 0", "complete 1", "send 1",
        "fill 2", "sent 1", "complete 2", "send 2", "sent 2", "drain",
    ]  # fmt: skip


def test_after_a_failure_the_other_ranks_are_let_go() -> None:
    source = JointSource(fail_at=1)
    with pytest.raises(ZeroDivisionError):
        joint(source, NotedChannel(source))
    assert source.calls[-4:] == ["sent 0", "complete 1", "send 1", "drain"]
    source = JointSource()
    with pytest.raises(WeightTransferFailed):
        joint(source, NotedChannel(source, fail_at=0))
    assert source.calls[-2:] == ["sent 0", "drain"]
