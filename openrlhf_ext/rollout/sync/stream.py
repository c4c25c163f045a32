"""One weight update as a sequence of frames: transport-independent.

A frame is a bucket behind a 64-byte header, so that each bucket is one collective and still carries what lets a
receiver refuse it: plan, version, position, and whether the sender has given up. An abort therefore reaches the
receivers in order, and the group stays usable.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from openrlhf_ext.rollout.sync.base import (
    BucketSource,
    WeightStreamAborted,
    WeightStreamMismatch,
    WeightSyncError,
)
from openrlhf_ext.rollout.sync.plan import Bucket, BucketPlan, TensorSpec

HEADER_BYTES = 64
_MAGIC = 0x57454947485453
_CONTENT, _ABORT = 0, 1


class Transfer(Protocol):
    """A frame on its way out."""

    def wait(self) -> None:
        """Block, with the channel's deadline, until the frame may be reused."""


class SendingChannel(Protocol):
    """The sender's end of a group: frames go to all others, in order."""

    def start(self, frame: Tensor) -> Transfer:
        """Begin sending a uint8 vector; it must stay as it is until the transfer's `wait` returns."""


class Arrival(Protocol):
    """A frame on its way in."""

    def wait(self) -> Tensor:
        """Block, with the channel's deadline, until the frame is there: memory that nothing else will write to."""


class ReceivingChannel(Protocol):
    """A receiver's end of a group."""

    def start(self, nbytes: int) -> Arrival:
        """Begin to receive the next frame."""


def frame_bytes(bucket: Bucket) -> int:
    """Size of the frame that carries `bucket`."""
    return HEADER_BYTES + bucket.nbytes


def send_stream(
    channel: SendingChannel, plan: BucketPlan, staging: tuple[Tensor, Tensor], source: BucketSource, version: int
) -> None:
    """Send all buckets of the plan; filling of one overlaps the sending of the one before.

    Args:
        channel: the group.
        plan: what to send.
        staging: two uint8 vectors, each large enough for the largest frame.
        source: who fills the buckets.
        version: number of this set of weights.

    Raises:
        Exception: what `source` raised, for instance `WeightStreamMismatch`. The receivers have then been told to
            refuse the update. Its frame may still be under way: `staging` is free once the receivers have answered.
        WeightTransferFailed: from the channel.
    """
    under_way: Transfer | None = None
    try:
        for bucket in plan.buckets:
            frame = staging[bucket.index % 2][: frame_bytes(bucket)]
            failure = _fill(source, bucket, frame[HEADER_BYTES:])
            _finish(under_way)
            _stamp(frame, plan, version, bucket.index, _CONTENT if failure is None else _ABORT)
            source.complete(bucket)
            under_way = channel.start(frame)
            if failure is not None:
                raise failure
        _finish(under_way)
    finally:
        source.drain()


def _fill(source: BucketSource, bucket: Bucket, content: Tensor) -> Exception | None:
    """What went wrong, if anything: the receivers have to hear of it before it is raised."""
    try:
        source.fill(bucket, content)
    except Exception as error:
        return error
    return None


class WeightStream:
    """The receiving side of updates.

    A frame's memory is not used again as long as a tensor of it is there: vLLM's layerwise reload keeps the tensors of
    a layer until the layer is complete. The next frame is asked for while the tensors of one are being used, so that
    loading overlaps the transfer.

    Attributes:
        waited_s: seconds that the last `receive` waited for frames.
    """

    def __init__(self, channel: ReceivingChannel, plan: BucketPlan) -> None:
        self._channel = channel
        self._plan = plan
        self.waited_s = 0.0

    def receive(self, version: int) -> Iterator[tuple[str, Tensor]]:
        """Yield `(name, tensor)` of a whole update.

        Raises:
            WeightStreamAborted: the sender gave up.
            WeightSyncError: a frame of another plan, version or position arrived.
        """
        self.waited_s = 0.0
        buckets = self._plan.buckets
        arrival = self._channel.start(frame_bytes(buckets[0]))
        for bucket in buckets:
            frame = self._take(arrival)
            _check_header(frame, self._plan, version, bucket.index)
            if bucket is not buckets[-1]:
                arrival = self._channel.start(frame_bytes(buckets[bucket.index + 1]))
            yield from bucket.unpack(frame[HEADER_BYTES:])

    def _take(self, arrival: Arrival) -> Tensor:
        start = time.monotonic()
        frame = arrival.wait()
        self.waited_s += time.monotonic() - start
        return frame


class StreamReceiver:
    """What is the same for an engine worker's end of every transport, see `WeightReceiver`."""

    _stream: WeightStream

    @property
    def waited_s(self) -> float:
        """Seconds that the last `receive` waited for weights."""
        return self._stream.waited_s

    def receive(self, version: int) -> Iterator[tuple[str, Tensor]]:
        """Yield every `(name, tensor)` of the plan, on the transport's device."""
        return self._stream.receive(version)


class TensorSource:
    """Buckets packed from an iterable of tensors, whose producers on other ranks take part in collectives.

    `fill` raises WeightStreamMismatch unless the tensors are exactly those of the plan, in its order; by then they have
    been read to their end.
    """

    def __init__(self, plan: BucketPlan, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._plan = plan
        self._arrivals = _Arrivals(plan, tensors)

    def fill(self, bucket: Bucket, content: Tensor) -> None:
        """Copy the bucket's tensors, from any device."""
        is_whole = _pack(bucket, self._arrivals, content)
        if not is_whole or bucket is self._plan.buckets[-1]:
            self._arrivals.require_exact()

    def complete(self, bucket: Bucket) -> None:
        """Nobody else has a part in it."""

    def drain(self) -> None:
        """Read to the end."""
        self._arrivals.read_to_end()


class _Arrivals:
    """Takes tensors in the order of the plan and remembers every way in which they differ from it."""

    def __init__(self, plan: BucketPlan, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._specs = plan.specs
        self._tensors = iter(tensors)
        self._names: list[str] = []
        self._violations: list[str] = []
        self._failure: Exception | None = None

    def take(self, spec: TensorSpec) -> Tensor | None:
        """The next tensor if it is `spec`, else None."""
        arrived = self._next()
        if arrived is None or arrived[0] != spec.name or self._violations:
            return None
        return arrived[1]

    def read_to_end(self) -> None:
        """Go through what is left."""
        while self._next() is not None:
            pass

    def require_exact(self) -> None:
        """Read to the end; raise unless the tensors were those of the plan, in its order."""
        self.read_to_end()
        if self._failure is not None:
            raise self._failure
        planned = [spec.name for spec in self._specs]
        if self._names != planned or self._violations:
            raise WeightStreamMismatch(_difference(planned, self._names, self._violations))

    def _next(self) -> tuple[str, Tensor] | None:
        try:
            name, tensor = next(self._tensors)
        except StopIteration:
            return None
        except Exception as error:  # kept for require_exact; an iterator that has raised is at its end
            self._failure = error
            return None
        self._compare(name, tensor)
        return name, tensor

    def _compare(self, name: str, tensor: Tensor) -> None:
        position = len(self._names)
        self._names.append(name)
        spec = self._specs[position] if position < len(self._specs) else None
        if spec is not None and spec.name == name and (violation := spec.violation(tensor)) is not None:
            self._violations.append(violation)


def _difference(planned: list[str], arrived: list[str], violations: list[str]) -> str:
    findings = {
        "missing": sorted(set(planned) - set(arrived)),
        "not in the plan": sorted(set(arrived) - set(planned)),
        "more than once": sorted(name for name, count in Counter(arrived).items() if count > 1),
        "wrong shape or dtype": violations,
    }
    lines = [f"- {what}: {names}" for what, names in findings.items() if names]
    if not lines:
        at = next(i for i, (a, b) in enumerate(zip(arrived, planned, strict=True)) if a != b)
        lines = [f"- order: number {at} is {arrived[at]}, the plan has {planned[at]}"]
    title = "the exported tensors are not those of the weight-sync plan; no engine keeps this update:"
    return "\n".join([title, *lines])


def _pack(bucket: Bucket, arrivals: _Arrivals, content: Tensor) -> bool:
    """Copy the bucket's tensors into the buffer; False as soon as one does not fit the plan."""
    for slot in bucket.slots:
        tensor = arrivals.take(slot.spec)
        if tensor is None:
            return False
        slot.view(content).copy_(tensor.detach())
    return True


def _finish(transfer: Transfer | None) -> None:
    if transfer is not None:
        transfer.wait()


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
