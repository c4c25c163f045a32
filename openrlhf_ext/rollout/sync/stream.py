"""One weight update as a sequence of frames, the same for every transport. A frame is a bucket behind a 64-byte header,
so that each bucket is one transfer and still carries what lets a receiver refuse it: plan, version, position, and
whether the sender has given up, so that the group stays usable."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from openrlhf_ext.rollout.sync import find_transport
from openrlhf_ext.rollout.sync.base import (
    Link,
    ReceivingEnd,
    SendingEnd,
    Staging,
    WeightStreamAborted,
    WeightSyncError,
    join,
    sender_watch,
    while_watching,
)
from openrlhf_ext.rollout.sync.delta import Received
from openrlhf_ext.rollout.sync.plan import HEADER_BYTES, Bucket, BucketPlan, SentSums

_MAGIC = 0x57454947485453
_CONTENT, _ABORT = 0, 1

Fill = Callable[[Bucket, Tensor | None], None]
"""``fill(bucket, content)`` puts a bucket's tensors, or this rank's part of them, into ``content``: a uint8 vector of
the bucket's size. Without ``content`` it only does what other ranks wait for."""


def send_stream(
    end: SendingEnd, plan: BucketPlan, staging: Staging, fill: Fill, version: int, workers: int = 1
) -> list[int]:
    """Send all buckets of the plan, on rank 0; filling of one overlaps the sending of the one before. Returns the
    checksum of every tensor, in the plan's order. When ``fill`` raises, the receivers have been told to refuse the
    update; its frame may still be under way: ``staging`` is free once they have answered."""
    filled = completed = 0
    sums = SentSums(plan, workers)
    wait: Callable[[], object] | None = None
    try:
        for bucket in plan.buckets:
            frame = staging.frame(bucket)
            filled += 1
            failure = _failure(fill, bucket, frame[HEADER_BYTES:])
            if wait is not None:
                wait()
            _stamp(frame, plan, version, bucket.index, _CONTENT if failure is None else _ABORT)
            completed += 1
            staging.complete(bucket)
            wait = end.send(frame)
            if failure is not None:
                raise failure
            sums.add(bucket, frame[HEADER_BYTES:])
        if wait is not None:
            wait()
        return sums.take()
    finally:
        let_others_end(plan, staging, fill, filled, completed)


def let_others_end(plan: BucketPlan, staging: Staging, fill: Fill, filled: int = 0, completed: int = 0) -> None:
    """Rank 0's part in the buckets that it does not send."""
    for bucket in plan.buckets[completed:]:
        if bucket.index >= filled:
            fill(bucket, None)
        staging.complete(bucket)


def follow_stream(plan: BucketPlan, staging: Staging, fill: Fill) -> None:
    """The part of a rank that does not send; a failure is raised when no other rank waits for this one any more."""
    failure: Exception | None = None
    for bucket in plan.buckets:
        failure = failure or _failure(fill, bucket, staging.content(bucket))
        staging.complete(bucket)
    if failure is not None:
        raise failure


def _failure(fill: Fill, bucket: Bucket, content: Tensor | None) -> Exception | None:
    """What went wrong, if anything: others have to hear of it before it is raised."""
    try:
        fill(bucket, content)
    except Exception as error:
        return error
    return None


class WeightReceiver:
    """An engine worker's end of updates. A frame's memory is not used again as long as a tensor of it is there: vLLM's
    layerwise reload keeps the tensors of a layer until the layer is complete."""

    def __init__(self, end: ReceivingEnd, plan: BucketPlan, keeps: bool = False) -> None:
        """``keeps``: a copy of all buckets, for updates of what has changed."""
        self.end = end
        self._received = Received() if keeps else None
        self._plan = plan
        self.waited_s = 0.0
        self._unfinished = torch.empty(0)

    @classmethod
    def connect(cls, plan: BucketPlan, link: Link, worker: int) -> WeightReceiver:
        """Join the sender's group as the engine's worker number `worker`. Raises WeightSyncError."""
        transport = find_transport(link.transport)
        if (violation := transport.worker_violation(link.handles)) is not None:
            raise WeightSyncError(violation)
        rank = link.first_rank + worker
        store = join(link, rank)
        late = f"not all {link.world_size} ranks had joined the weight-sync group after {link.timeout_s:g} s"
        end = while_watching(
            lambda: transport.open_receiver(store, link, rank), sender_watch(store), link.timeout_s, lambda: late
        )
        return cls(end, plan, link.keeps)

    def receive(self, version: int, sizes: Sequence[int] = ()) -> Iterator[tuple[str, Tensor]]:
        """Yield `(name, tensor)` of all tensors. ``sizes``: bytes of the frames, if they may be of changes. Raises
        WeightStreamAborted, WeightSyncError."""
        self.waited_s = 0.0
        buckets, received = self._plan.buckets, self._received
        if received is not None:
            received.begin()
        sizes = sizes or [bucket.frame_bytes for bucket in buckets]
        wait = self.end.receive(sizes[0])
        for bucket in buckets:
            start = time.monotonic()
            frame = wait()
            self.waited_s += time.monotonic() - start
            _check_header(frame, self._plan, version, bucket.index)
            if bucket is not buckets[-1]:
                wait = self.end.receive(sizes[bucket.index + 1])
            content = frame[HEADER_BYTES:] if received is None else received.update(bucket.index, frame)
            del frame
            yield from self._whole_tensors(bucket, content)
        if received is not None:
            received.version = version

    def _whole_tensors(self, bucket: Bucket, content: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors that end in the bucket; what travels in pieces is put together."""
        for slot in bucket.slots:
            rows = slot.view(content)
            if slot.is_whole:
                yield slot.name, rows
                continue
            if slot.start == 0:
                self._unfinished = rows.new_empty(slot.shape)
            self._unfinished[slot.start : slot.stop] = rows
            if slot.stop == slot.shape[0]:
                whole, self._unfinished = self._unfinished, rows.new_empty(0)
                yield slot.name, whole

    def close(self) -> None:
        self.end.close()


def _stamp(frame: Tensor, plan: BucketPlan, version: int, index: int, status: int) -> None:
    header = torch.tensor([_MAGIC, plan.fingerprint, version, index, status, 0, 0, 0], dtype=torch.int64)
    frame[:HEADER_BYTES].copy_(header.view(torch.uint8))


def _check_header(frame: Tensor, plan: BucketPlan, version: int, index: int) -> None:
    magic, fingerprint, sent_version, sent_index, status = frame[:HEADER_BYTES].view(torch.int64)[:5].tolist()
    if (magic, fingerprint, status) == (_MAGIC, plan.fingerprint, _ABORT):
        place = f"update {sent_version} at bucket {sent_index} of {len(plan.buckets)}"
        raise WeightStreamAborted(f"{WeightStreamAborted.MARK} {place}; see its own error")
    expected = (_MAGIC, plan.fingerprint, version, index)
    arrived = (magic, fingerprint, sent_version, sent_index)
    if arrived != expected:
        raise WeightSyncError(
            f"frame (magic, plan, version, bucket) {arrived} arrived where {expected} was expected: sender and engine "
            "run different updates; connect them again"
        )
