"""Weights by broadcast in one of torch's process groups: what gloo and NCCL have in common."""

from __future__ import annotations

import mmap
import threading
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from openrlhf_ext.rollout.sync.base import (
    Link,
    Staging,
    Transport,
    WeightTransferFailed,
    announce_leaving,
    sender_watch,
    wait_until,
)

_LEAVE_S = 2.0


class BroadcastTransport(Transport):
    """A kind of process group.

    Attributes:
        polled: whether waiting means asking again and again: the group's own wait does not block the caller, or not
            with the deadline that it was given.
    """

    polled = False

    @abstractmethod
    def open_group(self, store: dist.Store, address: str, rank: int, world_size: int, timeout_s: float) -> Any:
        """Join the process group; returns when every rank has joined.

        Args:
            store: rendezvous, held by the sender.
            address: the sender's address, by which the local network interface is chosen.
            rank: 0 for the sender.
            world_size: 1 + number of workers over all engines.
            timeout_s: limit of joining, and of every transfer.
        """

    def failure(self, work: dist.Work) -> str | None:
        """Why a finished transfer is not a success, as far as its `wait` does not say."""
        return None

    def abort(self, group: Any) -> None:
        """End transfers under way on this rank, if the group can."""

    def open_sender(self, store: dist.Store, link: Link, staging: Staging) -> BroadcastEnd:
        return BroadcastEnd(self, store, link, 0)

    def open_receiver(self, store: dist.Store, link: Link, rank: int) -> BroadcastEnd:
        return BroadcastEnd(self, store, link, rank)


class BroadcastEnd:
    """Either end of the group. Every wait ends after the link's timeout."""

    def __init__(self, transport: BroadcastTransport, store: dist.Store, link: Link, rank: int) -> None:
        """Join the group; returns when every rank has joined."""
        self.watch: Callable[[], None] | None = None
        self._transport, self._timeout_s = transport, link.timeout_s
        self._pool = FramePool()
        self._store, self._sends = store, rank == 0
        if transport.polled and not self._sends:
            self.watch = sender_watch(store)
        store = dist.PrefixStore("weight_sync", store)
        self._group: Any = transport.open_group(store, link.address, rank, link.world_size, link.timeout_s)

    def send(self, frame: Tensor) -> Callable[[], Tensor]:
        return self.broadcast(frame)

    def receive(self, nbytes: int) -> Callable[[], Tensor]:
        device = self._transport.device
        if device.type == "cpu":
            return self.broadcast(self._pool.take(nbytes))
        return self.broadcast(torch.empty(nbytes, dtype=torch.uint8, device=device))  # torch keeps such memory itself

    def broadcast(self, frame: Tensor) -> Callable[[], Tensor]:
        """Begin to send or receive; the result waits for it and returns the frame."""
        if self._group is None:
            raise WeightTransferFailed("this rank has left the weight-sync group")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        work = self._group.broadcast([frame], options)
        return lambda: self._wait(work, frame)

    def _wait(self, work: dist.Work, frame: Tensor) -> Tensor:
        """The frame, when it may be used again (sender) or read (receiver).

        Raises:
            WeightTransferFailed: with the group's text: a closed connection, or its timeout.
        """
        if self.watch is not None or self._transport.polled:
            late = f"a bucket was not through after {self._timeout_s:g} s"
            wait_until(work.is_completed, self.watch, self._timeout_s, lambda: late)
        try:
            work.wait()
        except RuntimeError as error:
            raise WeightTransferFailed(str(error)) from error
        if (failure := self._transport.failure(work)) is not None:
            raise WeightTransferFailed(failure)
        return frame

    def close(self) -> None:
        """Leave: transfers of the other ranks fail with "connection closed", or as soon as they see the sender's word.

        A transfer of this rank that hangs keeps its connections until its deadline; that is not waited for.
        """
        holder = [self._group]
        self._group = None

        def leave() -> None:
            self._transport.abort(holder[0])
            holder.clear()

        if holder[0] is not None:
            if self._sends:
                announce_leaving(self._store)
            leaving = threading.Thread(target=leave, name="weight-sync-leave", daemon=True)
            leaving.start()
            leaving.join(_LEAVE_S)


class FramePool:
    """Lends memory to received frames, the same again when the tensors of an earlier frame are gone.

    Memory that is new to a process is slow: the kernel hands it out page by page and fills it with zeros. Receiving
    into new memory takes twice as long as into memory that has been used before (docs/weight_sync.md). The pool keeps
    as many blocks as frames were ever alive at the same time, usually two.
    """

    def __init__(self) -> None:
        self._blocks: list[tuple[mmap.mmap, StorageWeakRef]] = []
        """Anonymous memory, and the tensor storage that uses or last used it."""

    def take(self, nbytes: int) -> Tensor:
        """A uint8 vector, contents undefined. Its memory is lent again when no tensor on it is left."""
        for number, (memory, user) in enumerate(self._blocks):
            if len(memory) >= nbytes and user.expired():
                del self._blocks[number]
                return self._lend(memory, nbytes)
        self._blocks = [block for block in self._blocks if not block[1].expired()]  # those left over are too small
        return self._lend(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), nbytes)

    def _lend(self, memory: mmap.mmap, nbytes: int) -> Tensor:
        frame = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)
        self._blocks.append((memory, StorageWeakRef(frame.untyped_storage())))
        return frame
