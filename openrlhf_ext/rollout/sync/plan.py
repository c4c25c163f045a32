"""Which bytes of which tensor travel in which bucket: the agreement between the sender and every receiver.

A plan is built once, from the static list of tensors that the policy exports (Hugging Face names, full shapes), and is
shipped to the engines when the group is connected. After that no metadata travels: one collective per bucket.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

ALIGNMENT_BYTES = 64
"""Start of every tensor in its bucket: a multiple of every dtype's size, and of a cache line."""

HEADER_BYTES = 64
"""In front of every bucket on its way, see ``stream``."""

_SMALLER_BUCKETS = 3

Spec = tuple[str, tuple[int, ...], torch.dtype]
"""Name, shape and dtype of a tensor."""


@dataclass(frozen=True)
class Slot:
    """A tensor as it travels, and its place in its bucket.

    Attributes:
        name, shape: Hugging Face name, and full (unsharded) shape.
        dtype: on the wire.
        offset: first byte, relative to the start of the bucket.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes."""
        return _nbytes(self.shape, self.dtype)

    def view(self, bucket_bytes: Tensor) -> Tensor:
        """This tensor's part of a bucket, without a copy.

        Args:
            bucket_bytes: uint8 vector holding at least the whole bucket.
        """
        raw = bucket_bytes[self.offset : self.offset + self.nbytes]
        return raw.view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel together, in the order of the plan.

    Attributes:
        index: position in the plan.
        slots: the tensors and where they start.
        nbytes: size including alignment gaps.
    """

    index: int
    slots: tuple[Slot, ...]
    nbytes: int

    @property
    def frame_bytes(self) -> int:
        """Size of the frame that carries the bucket behind its header."""
        return HEADER_BYTES + self.nbytes

    def unpack(self, bucket_bytes: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield `(name, view)` of every tensor; the views keep `bucket_bytes` alive."""
        for slot in self.slots:
            yield slot.name, slot.view(bucket_bytes)


@dataclass(frozen=True)
class BucketPlan:
    """Every tensor of a model, once, packed in order into buckets.

    Attributes:
        buckets: what travels, in this order.
        bucket_bytes: the size asked for; only a tensor that is larger by itself has a larger bucket, of its own.
    """

    buckets: tuple[Bucket, ...]
    bucket_bytes: int

    @classmethod
    def build(cls, tensors: Iterable[Spec], bucket_bytes: int) -> BucketPlan:
        """Pack the tensors, in their order, into buckets of at most `bucket_bytes`.

        The first three are smaller, an eighth, a quarter and half of that: nothing is sent before the first is filled.

        Raises:
            ValueError: there is no tensor, a name occurs twice, or `bucket_bytes` is not positive.
        """
        tensors = tuple(tensors)
        _check(tensors, bucket_bytes)
        groups = _split(tensors, bucket_bytes)
        return cls(tuple(_bucket(index, group) for index, group in enumerate(groups)), bucket_bytes)

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> BucketPlan:
        """The plan that `to_wire` described."""
        tensors = [(name, tuple(shape), getattr(torch, dtype)) for name, shape, dtype in wire["tensors"]]
        return cls.build(tensors, wire["bucket_bytes"])

    def to_wire(self) -> dict[str, Any]:
        """The plan in strings and numbers, for ways that carry nothing else (vLLM's worker calls)."""
        rows = [(slot.name, list(slot.shape), str(slot.dtype).removeprefix("torch.")) for slot in self.slots]
        return {"tensors": rows, "bucket_bytes": self.bucket_bytes}

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """Every tensor in the order in which it has to be sent."""
        return tuple(slot for bucket in self.buckets for slot in bucket.slots)

    @property
    def payload_bytes(self) -> int:
        """Size of all tensors, without alignment gaps."""
        return sum(slot.nbytes for slot in self.slots)

    @property
    def largest_frame(self) -> int:
        """Bytes that one staging buffer must hold."""
        return max(bucket.frame_bytes for bucket in self.buckets)

    @cached_property
    def fingerprint(self) -> int:
        """63-bit number that differs when names, shapes, dtypes, order or packing differ."""
        places = [(bucket.index, slot) for bucket in self.buckets for slot in bucket.slots]
        text = repr([(i, slot.offset, slot.name, slot.shape, str(slot.dtype)) for i, slot in places])
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return prod(shape) * dtype.itemsize


def _aligned_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-_nbytes(shape, dtype) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _check(tensors: Sequence[Spec], bucket_bytes: int) -> None:
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
    if not tensors:
        raise ValueError("a bucket plan needs at least one tensor, got none")
    if twice := sorted(name for name, count in Counter(name for name, _, _ in tensors).items() if count > 1):
        raise ValueError(f"tensor names must be unique in a bucket plan; more than once: {twice}")


def _split(tensors: Sequence[Spec], bucket_bytes: int) -> Iterator[list[Spec]]:
    group: list[Spec] = []
    used = index = 0
    for name, shape, dtype in tensors:
        size = _aligned_bytes(shape, dtype)
        if group and used + size > bucket_bytes >> max(0, _SMALLER_BUCKETS - index):
            yield group
            group, used, index = [], 0, index + 1
        group.append((name, shape, dtype))
        used += size
    yield group


def _bucket(index: int, tensors: Sequence[Spec]) -> Bucket:
    slots = []
    offset = 0
    for name, shape, dtype in tensors:
        slots.append(Slot(name, shape, dtype, offset))
        offset += _aligned_bytes(shape, dtype)
    return Bucket(index, tuple(slots), offset)
