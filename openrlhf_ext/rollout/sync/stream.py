"""One weight update as a sequence of frames, the same for every transport. A frame is a bucket
behind a 64-byte header, so that each bucket is one transfer and still carries what lets a receiver
refuse it: plan, version, position, and whether the sender has given up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from openrlhf_ext.rollout.sync import find_transport
from openrlhf_ext.rollout.sync.base import (
    Departure,
    Link,
    ReceivingEnd,
    SendingEnd,
    Staging,
    WeightStreamAborted,
    WeightSyncError,
    join,
    while_watching,
)
from openrlhf_ext.rollout.sync.plan import HEADER_BYTES, Bucket, BucketPlan, SentSums

_MAGIC = 0x57454947485453
_CONTENT, _ABORT = 0, 1

Fill = Callable[[Bucket, Tensor | None], None]
"""``fill(bucket, content)`` puts a bucket's tensors, or this rank's part of them, into ``content``:
a uint8 vector of the bucket's size. Without ``content`` it only does what other ranks wait for."""


def send_stream(
    end: SendingEnd,
    plan: BucketPlan,
    staging: Staging,
    fill: Fill,
    version: int,
    workers: int = 1,
    stream: int = 0,
) -> list[int]:
    """Send all buckets of a stream, on its sender; filling of one overlaps the sending of the one
    before. Returns the checksum of every tensor, in the plan's order, 0 for those of other streams.
    When ``fill`` raises, the receivers have been told to refuse the update; its frame may still be
    under way: ``staging`` is free once they have answered."""
    buckets = plan.of_stream(stream)
    filled = completed = 0
    sums = SentSums(plan, workers)
    wait: Callable[[], object] | None = None
    try:
        for bucket in buckets:
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
        let_others_end(buckets, staging, fill, filled, completed)


def let_others_end(
    buckets: Sequence[Bucket], staging: Staging, fill: Fill, filled: int = 0, completed: int = 0
) -> None:
    """The sender's part in the buckets of its stream that it does not send."""
    for bucket in buckets[completed:]:
        if bucket.turn >= filled:
            fill(bucket, None)
        staging.complete(bucket)


def follow_stream(buckets: Sequence[Bucket], staging: Staging, fill: Fill) -> None:
    """The part of a rank that does not send; a failure is raised when no other rank waits for this
    one any more."""
    failure: Exception | None = None
    for bucket in buckets:
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
    """An engine worker's ends of updates, one for each stream of the plan. A frame's memory is not
    used again as long as a tensor of it is there: vLLM's layerwise reload keeps the tensors of a
    layer until the layer is complete."""

    def __init__(self, ends: Sequence[ReceivingEnd], plan: BucketPlan) -> None:
        self.ends = ends
        self._plan = plan
        self.waited_s = 0.0
        self._unfinished: dict[str, Tensor] = {}

    @classmethod
    def connect(cls, plan: BucketPlan, link: Link, worker: int) -> WeightReceiver:
        """Join the groups of all senders as the engine's worker number `worker`. Raises
        WeightSyncError."""
        transport = find_transport(link.transport)
        if (violation := transport.worker_violation(link.handles)) is not None:
            raise WeightSyncError(violation)
        rank = link.first_rank + worker
        store = join(link, rank)
        late = (
            f"not all {link.world_size} ranks had joined the weight-sync group after "
            f"{link.timeout_s:g} s"
        )
        links = [replace(link, stream=stream) for stream in range(plan.stream_count)]

        def open_all() -> list[ReceivingEnd]:
            return [transport.open_receiver(store, each, rank) for each in links]

        ends = while_watching(open_all, Departure(store).check, link.timeout_s, lambda: late)
        return cls(ends, plan)

    def receive(self, version: int) -> Iterator[tuple[str, Tensor]]:
        """Yield `(name, tensor)` of all tensors, in the order of the buckets; one of every stream
        is under way. Raises WeightStreamAborted, WeightSyncError."""
        self.waited_s = 0.0
        self._unfinished.clear()
        following = [iter(self._plan.of_stream(stream)) for stream in range(len(self.ends))]
        waits = {stream: self._begin(next(buckets)) for stream, buckets in enumerate(following)}
        for bucket in self._plan.buckets:
            start = time.monotonic()
            frame = waits.pop(bucket.stream)()
            self.waited_s += time.monotonic() - start
            _check_header(frame, self._plan, version, bucket.index)
            if (later := next(following[bucket.stream], None)) is not None:
                waits[bucket.stream] = self._begin(later)
            content = frame[HEADER_BYTES:]
            del frame
            yield from self._whole_tensors(bucket, content)

    def _begin(self, bucket: Bucket) -> Callable[[], Tensor]:
        return self.ends[bucket.stream].receive(bucket.frame_bytes)

    def _whole_tensors(self, bucket: Bucket, content: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors that end in the bucket; what travels in pieces is put together."""
        for slot in bucket.slots:
            rows = slot.view(content)
            if slot.is_whole:
                yield slot.name, rows
                continue
            if slot.start == 0:
                self._unfinished[slot.name] = rows.new_empty(slot.shape)
            self._unfinished[slot.name][slot.start : slot.stop] = rows
            if slot.stop == slot.shape[0]:
                yield slot.name, self._unfinished.pop(slot.name)

    def close(self) -> None:
        # leaving takes a while where a transfer hangs
        with ThreadPoolExecutor(len(self.ends)) as pool:
            list(pool.map(lambda end: end.close(), self.ends))


def _stamp(frame: Tensor, plan: BucketPlan, version: int, index: int, status: int) -> None:
    header = torch.tensor(
        [_MAGIC, plan.fingerprint, version, index, status, 0, 0, 0], dtype=torch.int64
    )
    frame[:HEADER_BYTES].copy_(header.view(torch.uint8))


def _check_header(frame: Tensor, plan: BucketPlan, version: int, index: int) -> None:
    magic, fingerprint, sent_version, sent_index, status = (
        frame[:HEADER_BYTES].view(torch.int64)[:5].tolist()
    )
    if (magic, fingerprint, status) == (_MAGIC, plan.fingerprint, _ABORT):
        place = f"update {sent_version} at bucket {sent_index} of {len(plan.buckets)}"
        raise WeightStreamAborted(f"{WeightStreamAborted.MARK} {place}; see its own error")
    expected = (_MAGIC, plan.fingerprint, version, index)
    arrived = (magic, fingerprint, sent_version, sent_index)
    if arrived != expected:
        raise WeightSyncError(
            f"frame (magic, plan, version, bucket) {arrived} arrived where {expected} was "
            "expected: sender and engine run different updates; connect them again"
        )
