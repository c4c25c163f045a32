"""Which bytes of which tensor travel in which bucket, from which sender, and sums of the bits that
prove that they arrived. A plan is built once, from the static list of tensors that the policy
exports, and is shipped to the engines when the groups are connected. After that no metadata
travels: one collective per bucket."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
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
_AT_A_TIME = {"cpu": 1 << 15, "cuda": 1 << 22}
"""Numbers mixed at a time: what stays in a core's cache; on a GPU 32 MiB, of which two copies are
made."""
_FACTOR = -7046029254386353131
"""Odd, with its bits well mixed: 2^64 / golden ratio, as a signed number."""
_BLOCK = 16
"""Words of 8 bytes that are added up before they are mixed: one pass over the memory instead of
five."""
_NAMED = 10
_MODULUS = 1 << 64


@dataclass(frozen=True)
class Slot:
    """Rows [start, stop) of a tensor (entries of a vector) as they travel, and their first byte in
    their bucket; ``shape`` is that of the whole tensor, unsharded."""

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
        """These rows' part of a uint8 vector that holds at least the whole bucket, without a
        copy."""
        raw = bucket_bytes[self.offset : self.offset + self.nbytes]
        return raw.view(self.dtype).view(self.rows_shape)


@dataclass(frozen=True)
class Bucket:
    """Rows that travel together, in the order of the plan; ``nbytes`` includes alignment gaps. It
    is number ``turn`` of those of its ``stream``, and number ``index`` of all."""

    index: int
    slots: tuple[Slot, ...]
    nbytes: int
    stream: int = 0
    turn: int = 0

    @property
    def frame_bytes(self) -> int:
        return HEADER_BYTES + self.nbytes


@dataclass(frozen=True)
class BucketPlan:
    """Every tensor of a model, once, packed in order into the buckets of its stream, which one
    sender sends. A tensor larger than a bucket travels in pieces of whole rows; only a row that is
    larger by itself has a larger bucket, of its own. ``streams``: the stream of every tensor,
    counted from 0."""

    tensors: tuple[Spec, ...]
    buckets: tuple[Bucket, ...]
    bucket_bytes: int
    streams: tuple[int, ...]

    @classmethod
    def build(
        cls, tensors: Iterable[Spec], bucket_bytes: int, streams: Sequence[int] | None = None
    ) -> BucketPlan:
        """Pack the tensors, in their order, into buckets of at most `bucket_bytes`, which the
        streams share: an engine worker receives from all of them at a time, and takes their buckets
        in turns. Only a tensor that is larger than such a share, by itself in its bucket, takes up
        to all: in pieces the worker would have to copy it. The first three of a stream are smaller,
        an eighth, a quarter and half: nothing is sent before the first is filled."""
        tensors = tuple(tensors)
        streams = (0,) * len(tensors) if streams is None else tuple(streams)
        _check(tensors, bucket_bytes)
        numbers = range(max(streams) + 1)
        size = max(1, bucket_bytes // len(numbers))
        packed = []
        for stream in numbers:
            own = [spec for spec, number in zip(tensors, streams, strict=True) if number == stream]
            packed += [
                (turn, stream, pieces)
                for turn, pieces in enumerate(_split(own, bucket_bytes, size))
            ]
        packed.sort(key=lambda group: group[:2])
        buckets = tuple(_bucket(index, *group) for index, group in enumerate(packed))
        return cls(tensors, buckets, bucket_bytes, streams)

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> BucketPlan:
        tensors = [
            (name, tuple(shape), getattr(torch, dtype)) for name, shape, dtype in wire["tensors"]
        ]
        return cls.build(tensors, wire["bucket_bytes"], wire["streams"])

    def to_wire(self) -> dict[str, Any]:
        """Strings and numbers, for ways that carry nothing else (vLLM's worker calls)."""
        rows = [
            (name, list(shape), str(dtype).removeprefix("torch."))
            for name, shape, dtype in self.tensors
        ]
        return {"tensors": rows, "bucket_bytes": self.bucket_bytes, "streams": list(self.streams)}

    def of_stream(self, stream: int | None) -> tuple[Bucket, ...]:
        """The buckets of one sender, in order; of None: none."""
        return tuple(bucket for bucket in self.buckets if bucket.stream == stream)

    @property
    def payload_bytes(self) -> int:
        return sum(_nbytes(shape, dtype) for _, shape, dtype in self.tensors)

    @property
    def stream_count(self) -> int:
        return max(self.streams) + 1

    @property
    def largest_frame(self) -> int:
        return max(bucket.frame_bytes for bucket in self.buckets)

    @cached_property
    def fingerprint(self) -> int:
        """63-bit number that differs when names, shapes, dtypes, order, streams or packing
        differ."""
        places = []
        for bucket in self.buckets:
            where = bucket.index, bucket.stream
            for slot in bucket.slots:
                rows = slot.name, slot.shape, slot.start, slot.stop, str(slot.dtype)
                places.append((where, slot.offset, *rows))
        digest = hashlib.blake2b(repr(places).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return prod(shape) * dtype.itemsize


def _aligned_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-_nbytes(shape, dtype) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _check(tensors: Sequence[Spec], bucket_bytes: int) -> None:
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
    if not tensors:
        raise ValueError("a bucket plan needs at least one tensor, got none")
    counts = Counter(name for name, _, _ in tensors)
    if twice := sorted(name for name, count in counts.items() if count > 1):
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
    at_once = rows = _rows(shape)
    if _aligned_bytes(shape, dtype) > bucket_bytes:
        room = bucket_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        at_once = max(1, room // _nbytes(shape[1:], dtype))
    for start in range(0, max(1, rows), max(1, at_once)):
        yield _Piece(spec, start, min(start + at_once, rows))


def _split(tensors: Sequence[Spec], bucket_bytes: int, share: int) -> Iterator[list[_Piece]]:
    group: list[_Piece] = []
    used = index = 0
    for spec in tensors:
        for piece in _pieces(spec, bucket_bytes):
            if group and used + piece.aligned_bytes > share >> max(0, _SMALLER_BUCKETS - index):
                yield group
                group = []
                used = 0
                index += 1
            group.append(piece)
            used += piece.aligned_bytes
    yield group


def _bucket(index: int, turn: int, stream: int, pieces: Sequence[_Piece]) -> Bucket:
    slots = []
    offset = 0
    for piece in pieces:
        slots.append(Slot(*piece.spec, piece.start, piece.stop, offset))
        offset += piece.aligned_bytes
    return Bucket(index, tuple(slots), offset, stream, turn)


class WeightSyncMismatch(RuntimeError):
    """An engine does not sample from the weights the policy has."""


class Receipt(NamedTuple):
    """What an engine holds after an update: sums modulo 2^64 and how many entries these are, over
    all workers, of every tensor of the plan; seconds that the slowest worker spent loading and
    summing; how many tensors were summed as they arrived, because a worker holds them in another
    form (quantized, or packed for a CPU's matrix products)."""

    load_s: float
    sums: list[int]
    entries: list[int]
    as_received: int


def words(tensor: Tensor, shape: Sequence[int], workers: int) -> Tensor | None:
    """The bits of a tensor, or of a shard of one of this shape, as integers, without a copy: (N,
    16) words of 8 bytes, where rows can be cut so among the workers of an engine; else (N,) the
        entries. None if the shard is not
    contiguous, or cut otherwise."""
    if not tensor.is_contiguous():
        return None
    flat = tensor.detach().view(-1)
    size = tensor.element_size()
    block = 8 * _BLOCK
    if len(shape) < 2 or shape[-1] * size % (block * workers):
        return flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
    if tensor.shape[-1] * size % block or tensor.data_ptr() % 8:
        return None
    return flat.view(torch.int64).view(-1, _BLOCK)


def bit_sum(words: Tensor) -> Tensor:
    """(): the sum of the words modulo 2^64, mixed so that changes of several do not cancel (+1 and
    -1 in two words of one block do). Zeros count nothing. Nothing is read back from the device."""
    if words.is_cuda and _has_triton():
        from openrlhf_ext.rollout import triton_sums  # needs the package triton

        return triton_sums.bit_sum(words, _FACTOR)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for piece in words.split(_AT_A_TIME[words.device.type]):
        total += _mixed(piece).sum()
    return total


def bit_sums(parts: Sequence[Tensor]) -> Tensor:
    """(len(parts),): `bit_sum` of each. Parts of whole blocks that lie one behind the other in
    memory, such as a bucket of experts or the parameter that has them all, are read in one pass, of
    which the sums are cut."""
    found = []
    order = sorted(range(len(parts)), key=lambda number: parts[number].data_ptr())
    for run in _neighbors([parts[number] for number in order]):
        if len(run) == 1:
            found.append(bit_sum(run[0])[None])
            continue
        lengths = [len(part) for part in run]
        rows_NW = run[0].as_strided((sum(lengths), _BLOCK), (_BLOCK, 1))
        ends = torch.tensor(lengths).cumsum(0).to(rows_NW.device) - 1
        found.append(_mixed(rows_NW).cumsum(0)[ends].diff(prepend=ends.new_zeros(1)))
    totals = torch.cat(found)
    return totals[torch.tensor(order).argsort().to(totals.device)]


def _neighbors(parts: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The parts in their order, those together that lie one behind the other in one storage."""
    run: list[Tensor] = []
    for part in parts:
        last = run[-1] if run else None
        beside = (
            last is not None
            and last.dim() == part.dim() == 2
            and len(last)
            and len(part)
            and last.data_ptr() + last.nbytes == part.data_ptr()
            and last.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
        )
        if run and not beside:
            yield run
            run = []
        run.append(part)
    if run:
        yield run


def _mixed(words: Tensor) -> Tensor:
    """(N,): each entry, or the sum of each row of words, mixed."""
    if words.is_cuda and _has_triton():
        from openrlhf_ext.rollout import triton_sums  # needs the package triton

        return triton_sums.mixed(words, _FACTOR)
    mixed_N = (words.long() if words.dim() == 1 else words.sum(1)) * _FACTOR
    mixed_N ^= mixed_N >> 32
    return mixed_N


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


class SentSums:
    """Sums of the tensors of one update, made while their buckets are under way. They do not depend
    on the order of
    entries: the sums of shards in an engine's workers add up to as many times the sent one as there
    are copies. Entries that changed places within a tensor are left to the probe."""

    def __init__(self, plan: BucketPlan, workers: int) -> None:
        self._sums: dict[str, Tensor] = {}
        self._workers = workers
        self._names = [name for name, _, _ in plan.tensors]

    def add(self, bucket: Bucket, content: Tensor) -> None:
        """``content``: uint8 vector holding at least the whole bucket."""
        found = [words(slot.view(content), slot.shape, self._workers) for slot in bucket.slots]
        parts = [part for part in found if part is not None]
        assert len(parts) == len(found), "rows of a tensor are contiguous and begin at a word"
        for slot, total in zip(bucket.slots, bit_sums(parts).unbind(), strict=True):
            if slot.name in self._sums:
                total = self._sums[slot.name] + total
            self._sums[slot.name] = total

    def take(self) -> list[int]:
        """The sum of every tensor, in the plan's order; 0 of those that other senders have sent."""
        nothing = torch.zeros_like(next(iter(self._sums.values())))
        return torch.stack([self._sums.get(name, nothing) for name in self._names]).tolist()


def together(
    load_s: Iterable[float], workers: Sequence[Sequence[tuple[int, int, bool]]]
) -> Receipt:
    """An engine's receipt from its workers' (sum, entries, whether as received) of every tensor."""
    sums = []
    entries = []
    as_received = 0
    for tensor in zip(*workers, strict=True):
        parts, held, received = zip(*tensor, strict=True)
        sums.append(sum(parts) % _MODULUS)
        entries.append(sum(held))
        as_received += any(received)
    return Receipt(max(load_s), sums, entries, as_received)


def check_receipts(
    plan: BucketPlan, sent: Sequence[int], receipts: Sequence[Receipt], version: int
) -> None:
    """Compare what the engines hold with what was sent; raises WeightSyncMismatch, naming engines
    and tensors."""
    found = []
    for engine, receipt in enumerate(receipts):
        wrong = list(_wrong(plan, sent, receipt))
        if wrong:
            more = f", and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
            found.append(
                f"- engine {engine}: {len(wrong)} of {len(sent)}: {', '.join(wrong[:_NAMED])}{more}"
            )
    if found:
        raise WeightSyncMismatch(
            f"after weight sync {version} engines do not hold the weights that were sent; "
            "checksums differ of these tensors:\n" + "\n".join(found)
        )


def _wrong(plan: BucketPlan, sent: Sequence[int], receipt: Receipt) -> Iterable[str]:
    for (name, shape, _), ours, theirs, entries in zip(
        plan.tensors, sent, receipt.sums, receipt.entries, strict=True
    ):
        size = torch.Size(shape).numel()
        copies, rest = divmod(entries, size) if size else (1, entries)
        if rest or (copies * ours - theirs) % _MODULUS:
            yield f"{name} ({entries} of {size} entries held)" if rest or not copies else name
