"""Adam whose states (moments, fp32 master weights) wait in host memory, and pass over the device in
blocks at an update (``ds.adam_offload``).

The arithmetic is that of the optimizer that keeps them on the device: the same class, on the same
numbers, with the same gradients. A block is a range of one long row of all states of a parameter
group, cut anywhere, because Adam works entry by entry: every copy is a large one, however small
parameters are. Megatron's own HybridDeviceOptimizer updates on the CPU, whose rounding is another,
and goes on from old master weights after a checkpoint was loaded.
"""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from openrlhf_ext.megatron.step.numa import near_gpu

MOMENTS, MASTER = ("exp_avg", "exp_avg_sq"), "master"
_BLOCK = 1 << 26  # entries
_SLOTS = 2  # a block comes in while the one before it is computed, and leaves while the next one is
BLOCK_BYTES = _SLOTS * _BLOCK * 4 * (len(MOMENTS) + 1)
"""Of the device during an update."""


class HostOptimizer:
    """What Megatron's distributed optimizer needs of its inner optimizer, in the place of ``adam``.
    Its parameters are shards of the model's, in their own precision, with their gradient as
    ``decoupled_grad``. It is no torch optimizer, which would refuse shards of fp32 parameters: they
    are views.

    ``state``: flat host tensors of each shard. Raises MemoryError: the host does not give, or does
    not pin, the memory.
    """

    def __init__(self, adam: torch.optim.Optimizer) -> None:
        self.param_groups: list[dict[str, Any]] = adam.param_groups
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        self._adam = adam
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self._device = parameters[0].device if parameters else torch.device("cpu")
        self._coming, self._going = _Lane.beside(self._device), _Lane.beside(self._device)
        self._rows = [self._row(group["params"]) for group in self.param_groups]
        for group in self.param_groups:
            group.setdefault("step", 0)
        self._passes: list[tuple[Any, Any]] = []

    def _row(self, parameters: list[Tensor]) -> dict[str, Tensor]:
        """Zeros and master weights of all parameters of a group, one behind the other."""
        total = sum(parameter.numel() for parameter in parameters)
        names = (
            (*MOMENTS, MASTER)
            if any(_has_master(parameter) for parameter in parameters)
            else MOMENTS
        )
        row = {name: _host_memory(total, self._device, self) for name in names}
        for piece in _pieces(parameters, 0, total):
            held = {
                name: row[name][piece.of_row]
                for name in names
                if name != MASTER or _has_master(piece.parameter)
            }
            if MASTER in held:
                held[MASTER].copy_(piece.parameter.detach())
            self.state[piece.parameter] = held
        return row

    @property
    def masters(self) -> list[Tensor]:
        return [
            held[MASTER] for parameter in self.state if MASTER in (held := self.tensors(parameter))
        ]

    def tensors(self, parameter: Tensor) -> dict[str, Tensor]:
        """``state`` of a shard once the last update has arrived there: for whoever reads or writes
        it on the host."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self.state[parameter]

    @torch.no_grad()
    def step(self) -> None:
        """One update of all parameters. The device's current stream waits for all of it, the host
        for nothing."""
        computing = _Lane.current(self._device)
        started = computing.clock()
        longest = max((len(row[MOMENTS[0]]) for row in self._rows), default=0)
        names = {name for row in self._rows for name in row}
        slots = [
            _Slot({name: torch.empty(min(_BLOCK, longest), device=self._device) for name in names})
            for _ in range(_SLOTS)
        ]
        self._coming.wait(computing.mark())  # what had the slots' memory before may still be read
        passed = 0
        for group, row in zip(self.param_groups, self._rows, strict=True):
            group["step"] += 1
            total = len(row[MOMENTS[0]])
            for low in range(0, total, _BLOCK):
                self._pass_over(
                    group,
                    row,
                    slice(low, min(low + _BLOCK, total)),
                    slots[passed % _SLOTS],
                    computing,
                )
                passed += 1
        for slot in slots:
            computing.wait(slot.left)
        self._passes.append((started, computing.clock()))

    def _pass_over(
        self,
        group: dict[str, Any],
        row: dict[str, Tensor],
        block: slice,
        slot: _Slot,
        computing: _Lane,
    ) -> None:
        here = {name: slot.rooms[name][: block.stop - block.start] for name in row}
        with self._coming.after(slot.left):
            for name, states in row.items():
                here[name].copy_(states[block], non_blocking=True)
        with computing.after(self._coming.mark()):
            self._update(group, here, block)
        with self._going.after(computing.mark()):
            for name, states in row.items():
                states[block].copy_(here[name], non_blocking=True)
        slot.left = self._going.mark()

    def _update(self, group: dict[str, Any], here: dict[str, Tensor], block: slice) -> None:
        """Adam's step on a block, from and to ``here``; parameters of less precision get their
        masters' new values."""
        mains: list[Tensor] = []
        pieces = [*_pieces(group["params"], block.start, block.stop)]
        self._adam.state = defaultdict(dict)
        for piece in pieces:
            room = slice(piece.of_row.start - block.start, piece.of_row.stop - block.start)
            main = here[MASTER][room] if _has_master(piece.parameter) else piece.values
            main.grad = piece.gradient
            mains.append(main)
            self._adam.state[main] = {name: here[name][room] for name in MOMENTS}
            # TransformerEngine's counts per group
            if isinstance(self._adam, (torch.optim.Adam, torch.optim.AdamW)):
                self._adam.state[main]["step"] = torch.tensor(float(group["step"] - 1))
        self._adam.param_groups = [{**group, "params": mains, "step": group["step"] - 1}]
        self._adam.step()
        self._adam.state, self._adam.param_groups = defaultdict(dict), self.param_groups
        for piece, main in zip(pieces, mains, strict=True):
            main.grad = None
            if _has_master(piece.parameter):
                piece.values.copy_(main)

    def take_seconds(self) -> float:
        """Of the device, in updates since the last call; waits for them."""
        passes, self._passes = self._passes, []
        return sum(_seconds(*ends) for ends in passes)


def _has_master(parameter: Tensor) -> bool:
    return parameter.dtype != torch.float32


@dataclass(frozen=True)
class _Piece:
    """Entries ``part`` of a shard, which are ``of_row`` in the row of its group."""

    parameter: Tensor
    part: slice
    of_row: slice

    @property
    def values(self) -> Tensor:
        return self.parameter.detach()[self.part]

    @property
    def gradient(self) -> Tensor:
        return self.parameter.decoupled_grad[self.part]  # type: ignore[attr-defined]  # Megatron's own


def _pieces(parameters: list[Tensor], low: int, high: int) -> Iterator[_Piece]:
    at = 0
    for parameter in parameters:
        start, stop = max(low, at), min(high, at + parameter.numel())
        if start < stop:
            yield _Piece(parameter, slice(start - at, stop - at), slice(start, stop))
        at += parameter.numel()


@dataclass
class _Slot:
    """Room on the device for a block of every kind of state; ``left``: when the last block has left
    it."""

    rooms: dict[str, Tensor]
    left: Any = None


class _Lane:
    """A stream of a GPU; on a CPU everything is done in the order in which it is asked for, and
    there is none."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream

    @classmethod
    def beside(cls, device: torch.device) -> _Lane:
        return cls(torch.cuda.Stream(device) if device.type == "cuda" else None)

    @classmethod
    def current(cls, device: torch.device) -> _Lane:
        return cls(torch.cuda.current_stream(device) if device.type == "cuda" else None)

    def mark(self) -> Any:
        """What is done when all that was asked of the lane up to here is."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, mark: Any) -> None:
        if self._stream is not None and mark is not None:
            self._stream.wait_event(mark)

    @contextmanager
    def after(self, mark: Any) -> Iterator[None]:
        """The body is asked of the lane, and begins after the mark of another one."""
        self.wait(mark)
        with torch.cuda.stream(self._stream):  # None: changes nothing
            yield

    def clock(self) -> Any:
        """For ``_seconds``."""
        if self._stream is None:
            return time.perf_counter()
        return self._stream.record_event(torch.cuda.Event(enable_timing=True))


def _seconds(first: Any, last: Any) -> float:
    if isinstance(first, float):
        return last - first
    last.synchronize()
    return 1e-3 * first.elapsed_time(last)


def _host_memory(entries: int, device: torch.device, owner: HostOptimizer) -> Tensor:
    """Zeros; for a GPU on its NUMA node, and registered with the driver as long as ``owner`` is
    there: torch's own pinned memory is rounded up to a power of two. Raises MemoryError."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    size = (
        f"rank {rank}: {4 * entries / 2**30:.1f} GiB of host memory for Adam's states "
        "(ds.adam_offload)"
    )
    try:
        if device.type != "cuda":
            return torch.zeros(entries)
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        row = near_gpu(uuid, lambda: torch.zeros(entries))
    except RuntimeError as error:  # of torch's allocator
        raise MemoryError(f"{size} cannot be had: {error}") from error
    if not entries:
        return row
    runtime = torch.cuda.cudart()
    if code := int(runtime.cudaHostRegister(row.data_ptr(), row.nbytes, 0)):
        raise MemoryError(
            f"{size} cannot be pinned (cudaHostRegister: error {code}); use more nodes, or leave "
            "ds.adam_offload out"
        )
    weakref.finalize(owner, runtime.cudaHostUnregister, row.data_ptr()).atexit = False
    return row
