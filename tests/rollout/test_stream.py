"""The frames of one update, over a group made of queues: what arrives, and what is refused."""

from __future__ import annotations

import queue
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from openrlhf_ext.rollout.sync.base import (
    Staging,
    WeightStreamAborted,
    WeightSyncError,
    WeightTransferFailed,
)
from openrlhf_ext.rollout.sync.plan import (
    HEADER_BYTES,
    Bucket,
    BucketPlan,
    Spec,
    WeightSyncMismatch,
    bit_sum,
    check_receipts,
    together,
    words,
)
from openrlhf_ext.rollout.sync.stream import (
    Fill,
    WeightReceiver,
    follow_stream,
    let_others_end,
    send_stream,
)
from tests.rollout.test_plan import random_tensor, spec_lists
from tests.rollout.updates import fill_with, plan_of


class QueueGroup:
    """Both ends in one process: frames that were sent, and what is received from them."""

    watch = None

    def __init__(self) -> None:
        self.frames: queue.SimpleQueue = queue.SimpleQueue()

    def send(self, frame: Tensor) -> Callable[[], None]:
        self.frames.put(frame.clone())
        return lambda: None

    def receive(self, nbytes: int) -> Callable[[], Tensor]:
        arrived = self.frames.get_nowait()
        assert len(arrived) == nbytes
        return lambda: arrived

    def close(self) -> None:
        pass


def staging_of(plan: BucketPlan) -> Staging:
    return Staging(tuple(torch.empty(plan.largest_frame, dtype=torch.uint8) for _ in range(2)))


def transfer(
    plan: BucketPlan, fill: Fill, version: int = 1, group: QueueGroup | None = None
) -> QueueGroup:
    group = group or QueueGroup()
    send_stream(group, plan, staging_of(plan), fill, version)
    return group


def receive(group: QueueGroup, plan: BucketPlan, version: int) -> list[tuple[str, Tensor]]:
    return list(WeightReceiver([group], plan).receive(version))


def model(*names: str) -> dict[str, Tensor]:
    return {name: torch.randn(8) for name in names}


@settings(deadline=None, max_examples=40)
@given(specs=spec_lists(), bucket_bytes=st.integers(1, 1000))
def test_all_tensors_arrive_and_stay_intact(specs: list[Spec], bucket_bytes: int) -> None:
    """Also those received first, while later frames arrive: vLLM keeps them until a layer is
    complete."""
    plan = BucketPlan.build(specs, bucket_bytes)
    sent = {spec[0]: random_tensor(spec) for spec in specs}
    received = receive(transfer(plan, fill_with(sent)), plan, version=1)
    assert [name for name, _ in received] == [name for name, _, _ in specs]
    assert all(torch.equal(tensor, sent[name]) for name, tensor in received)


def test_an_error_while_filling_reaches_the_caller_and_the_receiver_refuses() -> None:
    plan, group = plan_of(model("a", "b", "c"), 64), QueueGroup()

    def fill(bucket: Bucket, content: Tensor | None) -> None:
        if bucket.index == 1:
            raise ZeroDivisionError("export failed")

    with pytest.raises(ZeroDivisionError, match="export failed"):
        transfer(plan, fill, 7, group)
    with pytest.raises(WeightStreamAborted, match="gave up update 7 at bucket 1 of 3"):
        receive(group, plan, 7)
    assert group.frames.empty()


def test_another_version_or_plan_is_refused() -> None:
    tensors = model("a", "b")
    plan = plan_of(tensors, 64)
    with pytest.raises(WeightSyncError, match="run different updates"):
        receive(transfer(plan, fill_with(tensors), version=3), plan, version=4)
    renamed = plan_of(dict(zip("xy", tensors.values(), strict=True)), 64)
    with pytest.raises(WeightSyncError, match="run different updates"):
        receive(transfer(plan, fill_with(tensors)), renamed, version=1)


def two_streams(version: int) -> tuple[BucketPlan, list[QueueGroup], list[int]]:
    """An update from two senders, of tensors of one size: what they sent, and its sums."""
    tensors = {name: torch.full((8,), float(version + place)) for place, name in enumerate("abcd")}
    plan = BucketPlan.build([(name, (8,), torch.float32) for name in tensors], 128, [0, 1, 0, 1])
    groups, sums = [QueueGroup(), QueueGroup()], []
    for stream, group in enumerate(groups):
        sums.append(
            send_stream(group, plan, staging_of(plan), fill_with(tensors), version, stream=stream)
        )
    return plan, groups, [sum(each) for each in zip(*sums, strict=True)]


def test_streams_are_received_in_turns() -> None:
    plan, groups, _ = two_streams(1)
    received = WeightReceiver(groups, plan).receive(1)
    assert [(name, tensor.tolist()) for name, tensor in received] == [
        (name, [1.0 + place] * 8) for place, name in enumerate("abcd")
    ]


def test_a_stale_and_a_swapped_stream_are_refused_and_a_half_written_one_is_named() -> None:
    plan, groups, sums = two_streams(2)
    stale = [groups[0], two_streams(1)[1][1]]
    with pytest.raises(WeightSyncError, match=r", 1, 1\) arrived where \(.*, 2, 1\) was expected"):
        list(WeightReceiver(stale, plan).receive(2))
    with pytest.raises(WeightSyncError, match=r", 2, 1\) arrived where \(.*, 2, 0\) was expected"):
        list(WeightReceiver(two_streams(2)[1][::-1], plan).receive(2))
    groups = two_streams(2)[1]
    frames = [groups[1].frames.get() for _ in range(2)]
    frames[1][HEADER_BYTES + 16 : HEADER_BYTES + 32] = 0
    for frame in frames:
        groups[1].frames.put(frame)
    held = dict(WeightReceiver(groups, plan).receive(2))
    found = [(int(bit_sum(words(held[name], (8,), 1))), 8, False) for name in "abcd"]
    with pytest.raises(WeightSyncMismatch, match="engine 0: 1 of 4: d$"):
        check_receipts(plan, sums, [together([0.0], [found])], 2)


class Noted(Staging):
    """Staging, filling and sending that note in which order they are called, and fail when told
    to."""

    watch = None

    def __init__(self, fail_at: str = "", shared: bool = False) -> None:
        self.plan = plan_of(model("a", "b", "c"), 64)
        super().__init__(staging_of(self.plan).buffers)
        self.calls: list[str] = []
        self.fail_at, self.sent, self.shared = fail_at, 0, shared

    def note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.fail_at:
            raise (
                WeightTransferFailed("gone")
                if call.startswith("sent")
                else ZeroDivisionError("cannot fill")
            )

    def fill(self, bucket: Bucket, content: Tensor | None) -> None:
        self.note(f"fill {bucket.index}" if content is not None else f"skip {bucket.index}")

    def complete(self, bucket: Bucket) -> None:
        self.note(f"complete {bucket.index}")

    def send(self, frame: Tensor) -> Callable[[], None]:
        number, self.sent = self.sent, self.sent + 1
        self.note(f"send {number}")
        return lambda: self.note(f"sent {number}")

    def close(self) -> None:
        pass

    def lead(self) -> list[str]:
        send_stream(self, self.plan, self, self.fill, 1)
        return self.calls


def test_a_bucket_is_filled_while_the_one_before_is_under_way_and_completed_when_its_buffer_is_free() -> (
    None
):
    assert Noted().lead() == [
        "fill 0",
        "complete 0",
        "send 0",
        "fill 1",
        "sent 0",
        "complete 1",
        "send 1",
        "fill 2",
        "sent 1",
        "complete 2",
        "send 2",
        "sent 2",
    ]


def test_after_a_failure_the_other_ranks_are_let_go() -> None:
    noted = Noted(fail_at="fill 1")
    with pytest.raises(ZeroDivisionError):
        noted.lead()
    assert noted.calls[3:] == ["fill 1", "sent 0", "complete 1", "send 1", "skip 2", "complete 2"]
    noted = Noted(fail_at="sent 0")
    with pytest.raises(WeightTransferFailed):
        noted.lead()
    assert noted.calls[3:] == ["fill 1", "sent 0", "complete 1", "skip 2", "complete 2"]
    noted = Noted()
    let_others_end(noted.plan.buckets, noted, noted.fill)
    assert noted.calls == ["skip 0", "complete 0", "skip 1", "complete 1", "skip 2", "complete 2"]


def test_ranks_that_do_not_send_go_on_to_the_end() -> None:
    noted = Noted()
    follow_stream(noted.plan.buckets, noted, noted.fill)
    assert noted.calls == ["skip 0", "complete 0", "skip 1", "complete 1", "skip 2", "complete 2"]
    noted = Noted(fail_at="fill 1", shared=True)
    with pytest.raises(ZeroDivisionError):
        follow_stream(noted.plan.buckets, noted, noted.fill)
    assert noted.calls == ["fill 0", "complete 0", "fill 1", "complete 1", "complete 2"]
