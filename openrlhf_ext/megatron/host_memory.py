"""Moves a trained model's states to host memory while other processes need the device, and back,
bit for bit.

The bytes of storages move, not tensors: a storage is emptied and later filled again, so every
tensor and view on it (parameters, DDP buffers, ``main_grad``, the optimizer's shards) stays the
same object. Raw pointers change; nothing here keeps any. The ``KINDS`` of states move
independently. For ``gradients``, DDP's buffers, only the memory is freed: a train step starts by
clearing them, so they come back as zeros, and they must stay between the backward pass and the
optimizer step.

On CPU a storage that numpy has seen cannot be emptied (torch locks its size): its bytes make the
round trip, and it is zero meanwhile. One storage at a time is copied and emptied, so device memory
never exceeds its previous amount. Host memory is allocated once, pinned, and kept, because pinning
is slow.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from openrlhf_ext.megatron.layers import LayerConverter
from openrlhf_ext.megatron.step.host_optimizer import HostOptimizer
from openrlhf_ext.megatron.step.optimizer import buffers_of, single_optimizers

logger = logging.getLogger(__name__)

KINDS = ("parameters", "gradients", "optimizer")
# torch rounds pinned blocks up to a power of two, so whole chunks waste nothing.
_CHUNK_BYTES = 1 << 30
_ALIGNMENT = 512


@dataclass(frozen=True)
class Swap:
    """The result of one ``offload`` or ``reload`` call."""

    moved_bytes: int  # copied from or to the device
    # Bytes of the storages that were emptied or filled; gradients are freed without a copy.
    room_bytes: int
    # Change of torch's reserved device memory; on CPU the bytes that were really emptied or filled.
    measured_bytes: int
    seconds: float  # until the transfers have completed


class ModelStates:
    """The states of one rank's model and optimizer, each kind on the device or in host memory. Not
    a collective."""

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        optimizer: MegatronOptimizer | None,
        device: torch.device,
        converters: Sequence[LayerConverter] = (),
    ) -> None:
        """``device`` is where the states live; states elsewhere (Adam's step counters) do not move.
        The data that layers of ``converters`` keep goes with the parameters."""
        self._models, self._optimizer, self._device = list(models), optimizer, device
        self._converters = converters
        self._away: dict[str, list[_Absent]] = {}
        self._arenas = {
            kind: HostArena(pinned=device.type == "cuda") for kind in ("parameters", "optimizer")
        }

    @property
    def resident(self) -> frozenset[str]:
        return frozenset(KINDS) - self._away.keys()

    def offload(self, *kinds: str) -> Swap:
        """Moves these kinds (default: all) to host memory."""
        todo = [kind for kind in _known(kinds) if kind in self.resident]
        with _Measured(self._device) as measured:
            if "parameters" in todo:
                for converter, model in itertools.product(self._converters, self._models):
                    converter.drop_kept(model)
            if "gradients" in todo and self._optimizer is not None:
                # Drops the fp32 gradient copies that the last step left on the master weights.
                self._optimizer.zero_grad()
            for kind in todo:
                self._away[kind] = self._empty(kind)
                measured.count(self._away[kind])
            if todo and self._device.type == "cuda":
                torch.cuda.empty_cache()  # back to the driver: the engines are other processes
        swap = measured.swap
        if todo:
            room, moved, freed = (
                n / 2**20 for n in (swap.room_bytes, swap.moved_bytes, swap.measured_bytes)
            )
            text = "offloaded %s: %.1f MiB, %.1f of them copied, in %.2f s; %.1f MiB are free now"
            logger.debug(text, todo, room, moved, swap.seconds, freed)
        return swap

    def reload(self, *kinds: str) -> Swap:
        """Moves these kinds (default: all) back to the device."""
        todo = [kind for kind in _known(kinds) if kind in self._away]
        with _Measured(self._device) as measured:
            for kind in todo:
                absent = self._away.pop(kind)
                for storage in absent:
                    storage.fill()
                measured.count(absent)
        return measured.swap

    def nbytes(self, kind: str) -> int:
        if kind in self._away:
            return sum(absent.nbytes for absent in self._away[kind])
        return sum(storage.nbytes() for storage in self._storages(kind))

    def _empty(self, kind: str) -> list[_Absent]:
        storages = self._storages(kind)
        if kind == "gradients":
            return [_Absent.emptied(storage, self._device) for storage in storages]
        places = self._arenas[kind].places([storage.nbytes() for storage in storages])
        return [
            _Absent.emptied(s, self._device, place)
            for s, place in zip(storages, places, strict=True)
        ]

    def _storages(self, kind: str) -> list[torch.UntypedStorage]:
        """Returns the device storages of this kind that belong to no earlier kind: fp32 master
        weights are parameters."""
        seen: set[int] = set()
        for earlier in KINDS[: KINDS.index(kind)]:
            if earlier not in self._away:
                seen |= {storage._cdata for storage in self._unique(self._tensors(earlier), set())}
            else:
                seen |= {absent.storage._cdata for absent in self._away[earlier]}
        return self._unique(self._tensors(kind), seen)

    def _unique(self, tensors: Iterable[Tensor], seen: set[int]) -> list[torch.UntypedStorage]:
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            if tensor.device.type == self._device.type:
                storage = tensor.untyped_storage()
                if storage.nbytes() and storage._cdata not in seen:
                    found.setdefault(storage._cdata, storage)
        return list(found.values())

    def _tensors(self, kind: str) -> Iterator[Tensor]:
        wrapped = [model for model in self._models if isinstance(model, DistributedDataParallel)]
        buffers = [buffer for model in wrapped for buffer in buffers_of(model)]
        if kind == "parameters":
            yield from (buffer.param_data for buffer in buffers if buffer.param_data is not None)
            yield from (
                parameter.data for model in self._models for parameter in model.parameters()
            )
        elif kind == "gradients":
            yield from (buffer.grad_data for buffer in buffers)
        elif self._optimizer is not None:
            for part in single_optimizers(self._optimizer):
                if isinstance(part.optimizer, HostOptimizer):
                    continue  # already in host memory
                for group in part.param_groups:
                    yield from (parameter.data for parameter in group["params"])
                for state in part.optimizer.state.values():
                    yield from (value for value in state.values() if isinstance(value, Tensor))


class HostArena:
    """Host memory in chunks, allocated once; a range may span several chunks."""

    def __init__(self, pinned: bool, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._pinned, self._chunk_bytes = pinned, chunk_bytes
        self._chunks: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        return sum(chunk.numel() for chunk in self._chunks)

    def reserve(self, nbytes: int) -> None:
        """Allocates at least ``nbytes``; only the last chunk may be smaller than the others."""
        if nbytes <= self.nbytes:
            return
        whole, rest = divmod(nbytes, self._chunk_bytes)
        sizes = [self._chunk_bytes] * whole + [rest] * (rest > 0)
        kept = [chunk for chunk in self._chunks if chunk.numel() == self._chunk_bytes]
        self._chunks = kept + [
            torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
            for size in sizes[len(kept) :]
        ]

    def places(self, sizes: Sequence[int]) -> list[list[Tensor]]:
        """Returns, for blocks of these sizes in bytes, the views of their pieces; always the same
        views for the same sizes."""
        starts = list(itertools.accumulate(map(_aligned, sizes), initial=0))
        self.reserve(starts.pop())
        return [
            list(self.pieces(start, nbytes)) for start, nbytes in zip(starts, sizes, strict=True)
        ]

    def pieces(self, offset: int, nbytes: int) -> Iterator[Tensor]:
        """Yields views that together are the bytes ``offset`` to ``offset + nbytes``."""
        while nbytes:
            chunk, start = divmod(offset, self._chunk_bytes)
            size = min(nbytes, self._chunk_bytes - start)
            yield self._chunks[chunk][start : start + size]
            offset, nbytes = offset + size, nbytes - size


@dataclass
class _Absent:
    """An emptied storage and its content: ``pieces`` of host memory, or zeros."""

    storage: torch.UntypedStorage
    device: torch.device
    nbytes: int
    pieces: list[Tensor] | None = field(repr=False)
    is_freed: bool

    @classmethod
    def emptied(
        cls, storage: torch.UntypedStorage, device: torch.device, pieces: list[Tensor] | None = None
    ) -> _Absent:
        absent = cls(
            storage, device, storage.nbytes(), pieces, storage.resizable() or device.type != "cpu"
        )
        if pieces is not None:
            for here, there in absent._pairs(pieces):
                there.copy_(here, non_blocking=True)
            synchronize(device)  # the copy must be complete before its source is freed
        if absent.is_freed:
            storage.resize_(0)
        else:
            _bytes_of(storage, device).zero_()
        return absent

    def fill(self) -> None:
        if self.is_freed:
            self.storage.resize_(self.nbytes)
        if self.pieces is None:
            _bytes_of(self.storage, self.device).zero_()
            return
        for here, there in self._pairs(self.pieces):
            here.copy_(there, non_blocking=True)

    def _pairs(self, pieces: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        sizes = [piece.numel() for piece in pieces]
        return zip(_bytes_of(self.storage, self.device).split(sizes), pieces, strict=True)


class _Measured:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moved_bytes = self._room_bytes = self._freed_bytes = 0

    def count(self, storages: Iterable[_Absent]) -> None:
        for storage in storages:
            self._moved_bytes += storage.nbytes * (storage.pieces is not None)
            self._room_bytes += storage.nbytes
            self._freed_bytes += storage.nbytes * storage.is_freed

    def __enter__(self) -> _Measured:
        self._started, self._reserved = time.perf_counter(), self._reserved_bytes()
        return self

    def __exit__(self, *error) -> None:
        synchronize(self._device)
        change = abs(self._reserved_bytes() - self._reserved)
        measured = change if self._device.type == "cuda" else self._freed_bytes
        self.swap = Swap(
            self._moved_bytes, self._room_bytes, measured, time.perf_counter() - self._started
        )

    def _reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved(self._device) if self._device.type == "cuda" else 0


def _known(kinds: Sequence[str]) -> Sequence[str]:
    if unknown := set(kinds) - set(KINDS):
        raise ValueError(f"kinds of model states are {KINDS}, got {sorted(unknown)}")
    return [kind for kind in KINDS if not kinds or kind in kinds]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(
        storage, 0, (storage.nbytes(),), (1,)
    )


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bytes_as(tensor: Tensor, pieces: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns views of a contiguous tensor's bytes, cut like the pieces of its copy."""
    return tensor.detach().view(-1).view(torch.uint8).split([piece.numel() for piece in pieces])
