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
from typing import Any, NamedTuple

import torch
from torch import Tensor

ALIGNMENT_BYTES = 64
"""Start of what lies in a bucket: a multiple of every dtype's size, and of a cache line."""

HEADER_BYTES = 64
"""In front of every bucket on its way, see ``stream``."""

_SMALLER_BUCKETS = 3

Spec = tuple[str, tuple[int, ...], torch.dtype]
"""Name, shape and dtype of a tensor."""


@dataclass(frozen=True)
class Slot:
    """Rows of a tensor as they travel, and their place in their bucket.

    Attributes:
        name, shape: of the tensor: Hugging Face name, and full (unsharded) shape.
        dtype: on the wire.
        start, stop: the rows, entries of a vector; a tensor that fits into a bucket travels whole.
        offset: first byte, relative to the start of the bucket.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    stop: int
    offset: int

    @property
    def is_whole(self) -> bool:
        return self.stop - self.start == _rows(self.shape)

    @property
    def rows_shape(self) -> tuple[int, ...]:
        return self.shape if self.is_whole else (self.stop - self.start, *self.shape[1:])

    @property
    def nbytes(self) -> int:
        return _nbytes(self.rows_shape, self.dtype)

    def view(self, bucket_bytes: Tensor) -> Tensor:
        """These rows' part of a bucket, without a copy.

        Args:
            bucket_bytes: uint8 vector holding at least the whole bucket.
        """
        raw = bucket_bytes[self.offset : self.offset + self.nbytes]
        return raw.view(self.dtype).view(self.rows_shape)


@dataclass(frozen=True)
class Bucket:
    """Rows that travel together, in the order of the plan.

    Attributes:
        index: position in the plan.
        slots: which rows of which tensors, and where they start.
        nbytes: size including alignment gaps.
    """

    index: int
    slots: tuple[Slot, ...]
    nbytes: int

    @property
    def frame_bytes(self) -> int:
        """Size of the frame that carries the bucket behind its header."""
        return HEADER_BYTES + self.nbytes


@dataclass(frozen=True)
class BucketPlan:
    """Every tensor of a model, once, packed in order into buckets.

    Attributes:
        tensors: all of them, in the order in which they travel.
        buckets: what travels, in this order.
        bucket_bytes: the size asked for. A larger tensor travels in pieces of whole rows; only a row that is larger by
            itself has a larger bucket, of its own.
    """

    tensors: tuple[Spec, ...]
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
        return cls(tensors, tuple(_bucket(index, group) for index, group in enumerate(groups)), bucket_bytes)

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> BucketPlan:
        tensors = [(name, tuple(shape), getattr(torch, dtype)) for name, shape, dtype in wire["tensors"]]
        return cls.build(tensors, wire["bucket_bytes"])

    def to_wire(self) -> dict[str, Any]:
        """The plan in strings and numbers, for ways that carry nothing else (vLLM's worker calls)."""
        rows = [(name, list(shape), str(dtype).removeprefix("torch.")) for name, shape, dtype in self.tensors]
        return {"tensors": rows, "bucket_bytes": self.bucket_bytes}

    @property
    def payload_bytes(self) -> int:
        """Size of all tensors, without alignment gaps."""
        return sum(_nbytes(shape, dtype) for _, shape, dtype in self.tensors)

    @property
    def largest_frame(self) -> int:
        """Bytes that one staging buffer must hold."""
        return max(bucket.frame_bytes for bucket in self.buckets)

    @cached_property
    def fingerprint(self) -> int:
        """63-bit number that differs when names, shapes, dtypes, order or packing differ."""
        places = [(bucket.index, slot) for bucket in self.buckets for slot in bucket.slots]
        text = repr([(i, s.offset, s.name, s.shape, s.start, s.stop, str(s.dtype)) for i, s in places])
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


def _rows(shape: tuple[int, ...]) -> int:
    """What a tensor is cut into; a number is one row."""
    return shape[0] if shape else 1


class _Piece(NamedTuple):
    spec: Spec
    start: int
    stop: int

    @property
    def aligned_bytes(self) -> int:
        _, shape, dtype = self.spec
        return _aligned_bytes((self.stop - self.start, *shape[1:]), dtype)


def _pieces(spec: Spec, bucket_bytes: int) -> Iterator[_Piece]:
    _, shape, dtype = spec
    rows, size = _rows(shape), _aligned_bytes(shape, dtype)
    at_once = rows
    if size > bucket_bytes:
        at_once = max(1, bucket_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES // _nbytes(shape[1:], dtype))
    for start in range(0, max(1, rows), max(1, at_once)):
        yield _Piece(spec, start, min(start + at_once, rows))


def _split(tensors: Sequence[Spec], bucket_bytes: int) -> Iterator[list[_Piece]]:
    group: list[_Piece] = []
    used = index = 0
    for piece in (piece for spec in tensors for piece in _pieces(spec, bucket_bytes)):
        if group and used + piece.aligned_bytes > bucket_bytes >> max(0, _SMALLER_BUCKETS - index):
            yield group
            group, used, index = [], 0, index + 1
        group.append(piece)
        used += piece.aligned_bytes
    yield group


def _bucket(index: int, pieces: Sequence[_Piece]) -> Bucket:
    slots = []
    offset = 0
    for piece in pieces:
        slots.append(Slot(*piece.spec, piece.start, piece.stop, offset))
        offset += piece.aligned_bytes
    return Bucket(index, tuple(slots), offset)
