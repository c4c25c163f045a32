"""One weight update as a sequence of frames: transport-independent.

A frame is a bucket behind a 64-byte header, so that each bucket is one collective and still carries what lets a
receiver refuse it: plan, version, position, and whether the sender has given up. An abort therefore reaches the
receivers in order, and the group stays usable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from openrlhf_ext.rollout.weight_sync.base import WeightStreamAborted, WeightStreamMismatch, WeightSyncError
from openrlhf_ext.rollout.weight_sync.plan import Bucket, BucketPlan, TensorSpec

HEADER_BYTES = 64
_MAGIC = 0x57454947485453
_CONTENT, _ABORT = 0, 1


class Transfer(Protocol):
    """One collective under way."""

    def wait(self) -> None:
        """Block, with the channel's deadline, until the frame may be reused (sender) or read (receiver)."""


class Channel(Protocol):
    """A group in which rank 0 sends frames to all others, in order."""

    def start(self, frame: Tensor) -> Transfer:
        """Begin sending (rank 0) or receiving (others) a frame: a uint8 vector of the same size on every rank."""


def frame_bytes(bucket: Bucket) -> int:
    """Size of the frame that carries `bucket`."""
    return HEADER_BYTES + bucket.nbytes


def send_stream(
    channel: Channel,
    plan: BucketPlan,
    staging: tuple[Tensor, Tensor],
    tensors: Iterable[tuple[str, Tensor]],
    version: int,
) -> None:
    """Send all tensors of the plan; packing of one bucket overlaps the sending of the one before.

    Args:
        channel: the group, this process being rank 0.
        plan: what to send.
        staging: two uint8 vectors, each large enough for the largest frame.
        tensors: `(name, tensor)` in the order of the plan, on any device.
        version: number of this set of weights.

    Raises:
        WeightStreamMismatch: `tensors` is not exactly the plan. The receivers have then been told to refuse the
            update, and `tensors` has been read to its end (its producers on other ranks take part in collectives).
            Frames may still be under way: `staging` is free once the receivers have answered.
    """
    arrivals = _Arrivals(plan, tensors)
    transfers: list[Transfer | None] = [None, None]
    for bucket in plan.buckets:
        turn = bucket.index % 2
        _finish(transfers[turn])
        frame = staging[turn][: frame_bytes(bucket)]
        complete = _pack(bucket, arrivals, frame)
        if bucket is plan.buckets[-1]:
            complete = complete and arrivals.exhausted()
        _stamp(frame, plan, version, bucket.index, _CONTENT if complete else _ABORT)
        transfers[turn] = channel.start(frame)
        if not complete:
            break
    arrivals.require_exact()
    for transfer in transfers:
        _finish(transfer)


def receive_stream(channel: Channel, plan: BucketPlan, version: int) -> Iterator[tuple[str, Tensor]]:
    """Yield `(name, tensor)` of a whole update.

    Every frame is a new allocation: vLLM's layerwise reload keeps the tensors of a layer until the layer is complete,
    so that a reused buffer would be overwritten under it. No frame is asked for before the one before it was used: a
    receiver that fails to load a tensor must be able to leave the group at once, which one with a transfer under way
    cannot.

    Raises:
        WeightStreamAborted: the sender gave up.
        WeightSyncError: a frame of another plan, version or position arrived.
    """
    for bucket in plan.buckets:
        frame = torch.empty(frame_bytes(bucket), dtype=torch.uint8)
        channel.start(frame).wait()
        _check_header(frame, plan, version, bucket.index)
        yield from bucket.unpack(frame[HEADER_BYTES:])


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

    def exhausted(self) -> bool:
        """Whether nothing follows what was taken."""
        return self._next() is None and self._failure is None

    def require_exact(self) -> None:
        """Read to the end; raise unless the tensors were those of the plan, in its order."""
        while self._next() is not None:
            pass
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
        except Exception as error:  # kept for require_exact: the receivers have to hear of the abort first
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


def _pack(bucket: Bucket, arrivals: _Arrivals, frame: Tensor) -> bool:
    """Copy the bucket's tensors into the frame; False as soon as one does not fit the plan."""
    content = frame[HEADER_BYTES:]
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
