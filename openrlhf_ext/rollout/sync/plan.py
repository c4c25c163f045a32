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

_SMALLER_BUCKETS = 3


@dataclass(frozen=True)
class TensorSpec:
    """One tensor as it travels: Hugging Face name, full (unsharded) shape, and dtype on the wire."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def violation(self, tensor: Tensor) -> str | None:
        """Why `tensor` is not this tensor, None if it is."""
        if tuple(tensor.shape) == self.shape and tensor.dtype == self.dtype:
            return None
        return f"{self.name}: is {tuple(tensor.shape)} {tensor.dtype}, the plan has {self.shape} {self.dtype}"


@dataclass(frozen=True)
class Slot:
    """A tensor's place in its bucket.

    Attributes:
        spec: the tensor.
        offset: first byte, relative to the start of the bucket.
    """

    spec: TensorSpec
    offset: int

    def view(self, bucket_bytes: Tensor) -> Tensor:
        """This tensor's part of a bucket, without a copy.

        Args:
            bucket_bytes: uint8 vector holding at least the whole bucket.
        """
        raw = bucket_bytes[self.offset : self.offset + self.spec.nbytes]
        return raw.view(self.spec.dtype).view(self.spec.shape)


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

    def unpack(self, bucket_bytes: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield `(name, view)` of every tensor; the views keep `bucket_bytes` alive."""
        for slot in self.slots:
            yield slot.spec.name, slot.view(bucket_bytes)


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
    def build(cls, specs: Iterable[TensorSpec], bucket_bytes: int) -> BucketPlan:
        """Pack `specs`, in their order, into buckets of at most `bucket_bytes`.

        The first three are smaller, an eighth, a quarter and half of that: nothing is sent before the first is filled.

        Raises:
            ValueError: there is no tensor, a name occurs twice, or `bucket_bytes` is not positive.
        """
        specs = tuple(specs)
        _check(specs, bucket_bytes)
        groups = _split(specs, bucket_bytes)
        return cls(tuple(_bucket(index, group) for index, group in enumerate(groups)), bucket_bytes)

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> BucketPlan:
        """The plan that `to_wire` described."""
        rows = wire["tensors"]
        specs = [TensorSpec(name, tuple(shape), getattr(torch, dtype)) for name, shape, dtype in rows]
        return cls.build(specs, wire["bucket_bytes"])

    def to_wire(self) -> dict[str, Any]:
        """The plan in strings and numbers, for ways that carry nothing else (vLLM's worker calls)."""
        rows = [(spec.name, list(spec.shape), str(spec.dtype).removeprefix("torch.")) for spec in self.specs]
        return {"tensors": rows, "bucket_bytes": self.bucket_bytes}

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Every tensor in the order in which it has to be sent."""
        return tuple(slot.spec for bucket in self.buckets for slot in bucket.slots)

    @property
    def payload_bytes(self) -> int:
        """Size of all tensors, without alignment gaps."""
        return sum(spec.nbytes for spec in self.specs)

    @property
    def largest_bucket_bytes(self) -> int:
        """Size of the largest bucket, without the header that its frame has besides (`sender.largest_frame`)."""
        return max(bucket.nbytes for bucket in self.buckets)

    @cached_property
    def fingerprint(self) -> int:
        """63-bit number that differs when names, shapes, dtypes, order or packing differ."""
        places = [(bucket.index, slot) for bucket in self.buckets for slot in bucket.slots]
        text = repr([(i, slot.offset, slot.spec.name, slot.spec.shape, str(slot.spec.dtype)) for i, slot in places])
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _check(specs: Sequence[TensorSpec], bucket_bytes: int) -> None:
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
    if not specs:
        raise ValueError("a bucket plan needs at least one tensor, got none")
    if twice := sorted(name for name, count in Counter(spec.name for spec in specs).items() if count > 1):
        raise ValueError(f"tensor names must be unique in a bucket plan; more than once: {twice}")


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _split(specs: Sequence[TensorSpec], bucket_bytes: int) -> Iterator[list[TensorSpec]]:
    group: list[TensorSpec] = []
    used = index = 0
    for spec in specs:
        size = _aligned(spec.nbytes)
        if group and used + size > bucket_bytes >> max(0, _SMALLER_BUCKETS - index):
            yield group
            group, used, index = [], 0, index + 1
        group.append(spec)
        used += size
    yield group


def _bucket(index: int, specs: Sequence[TensorSpec]) -> Bucket:
    slots = []
    offset = 0
    for spec in specs:
        slots.append(Slot(spec, offset))
        offset += _aligned(spec.nbytes)
    return Bucket(index, tuple(slots), offset)
