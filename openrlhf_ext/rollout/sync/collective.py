"""Weights by broadcast in a process group of its own: policy rank 0 and every worker of every engine.

The group stands beside the default process group (vLLM and Megatron each own theirs): a TCPStore held by the sender,
and one of torch's process groups on it. Which one is what a ``Collective`` says; gloo and NCCL have a file each.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from openrlhf_ext.rollout.sync.base import Link, WeightTransferFailed
from openrlhf_ext.rollout.sync.frames import FramePool
from openrlhf_ext.rollout.sync.plan import BucketPlan
from openrlhf_ext.rollout.sync.sender import EngineSender, Staging, join
from openrlhf_ext.rollout.sync.stream import StreamReceiver, WeightStream

SENDER_RANK = 0
_LOOK_AT_ENGINES_S = 0.1
_LEAVE_S = 2.0


class Collective(Protocol):
    """A kind of process group.

    Attributes:
        polled: whether waiting means asking again and again: the group's own wait does not block the caller, or not
            with the deadline that it was given.
    """

    polled: bool

    def device(self) -> torch.device:
        """Where frames are."""

    def open(self, store: dist.Store, address: str, rank: int, world_size: int, timeout_s: float) -> Any:
        """Join the group; returns when every rank has joined."""

    def failure(self, work: dist.Work) -> str | None:
        """Why a finished transfer is not a success, as far as its `wait` does not say."""

    def abort(self, group: Any) -> None:
        """End transfers under way on this rank, if the group can."""


class CollectiveChannel:
    """Either end of the group. Every wait ends after `timeout_s`."""

    def __init__(
        self, collective: Collective, store: dist.Store, address: str, rank: int, world_size: int, timeout_s: float
    ) -> None:
        """Join the group; returns when every rank has joined.

        Args:
            collective: which kind of group.
            store: rendezvous, held by the sender.
            address: the sender's address, by which the local network interface is chosen.
            rank: 0 for the sender.
            world_size: 1 + number of workers over all engines.
            timeout_s: limit of joining, and of every transfer.
        """
        self.collective = collective
        self.timeout_s = timeout_s
        self.watch: Callable[[], None] | None = None
        self._store = store
        self._group: Any = collective.open(dist.PrefixStore("weight_sync", store), address, rank, world_size, timeout_s)

    def broadcast(self, frame: Tensor) -> Broadcast:
        """Begin to send or receive a frame; it must stay alive until the transfer's `wait` returns."""
        if self._group is None:
            raise WeightTransferFailed("this rank has left the weight-sync group")
        options = dist.BroadcastOptions()
        options.rootRank = SENDER_RANK
        options.rootTensor = 0
        return Broadcast(self, self._group.broadcast([frame], options), frame)

    def close(self) -> None:
        """Leave: transfers of the other ranks fail with "connection closed", or their deadline.

        A transfer of this rank that hangs keeps its connections until its deadline; that is not waited for.
        """
        holder = [self._group]
        self._group = None

        def leave() -> None:
            self.collective.abort(holder[0])
            holder.clear()

        if holder[0] is not None:
            leaving = threading.Thread(target=leave, name="weight-sync-leave", daemon=True)
            leaving.start()
            leaving.join(_LEAVE_S)


class SendingEnd(CollectiveChannel):
    """The sender's end."""

    def start(self, frame: Tensor) -> Broadcast:
        """See `SendingChannel`."""
        return self.broadcast(frame)


class ReceivingEnd(CollectiveChannel):
    """A receiver's end."""

    _pool: FramePool | None = None

    def start(self, nbytes: int) -> Broadcast:
        """See `ReceivingChannel`."""
        return self.broadcast(self._allocate(nbytes))

    def _allocate(self, nbytes: int) -> Tensor:
        device = self.collective.device()
        if device.type != "cpu":
            return torch.empty(nbytes, dtype=torch.uint8, device=device)  # torch keeps such memory by itself
        self._pool = self._pool or FramePool()
        return self._pool.take(nbytes)


@dataclass
class Broadcast:
    """One broadcast under way; its channel's `watch` may raise what explains that it never ends."""

    channel: CollectiveChannel
    work: dist.Work
    frame: Tensor

    def wait(self) -> Tensor:
        """The frame, when it may be used again (sender) or read (receiver).

        Raises:
            WeightTransferFailed: with the group's text: a closed connection, or its timeout.
        """
        if self.channel.watch is not None or self.channel.collective.polled:
            self._poll()
        try:
            self.work.wait()
        except RuntimeError as error:
            raise WeightTransferFailed(str(error)) from error
        if (failure := self.channel.collective.failure(self.work)) is not None:
            raise WeightTransferFailed(failure)
        return self.frame

    def _poll(self) -> None:
        pause_s = 0.0002
        start = last_look = time.monotonic()
        while not self.work.is_completed():
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.002)
            now = time.monotonic()
            if self.channel.watch is not None and now - last_look > _LOOK_AT_ENGINES_S:
                self.channel.watch()
                last_look = now
            if now - start > self.channel.timeout_s:
                raise WeightTransferFailed(f"a bucket was not through after {self.channel.timeout_s:g} s")


class CollectiveSender(EngineSender):
    """The policy's end of a broadcast transport."""

    collective: ClassVar[Collective]

    def _open(self, store: dist.TCPStore, address: str) -> SendingEnd:
        return SendingEnd(self.collective, store, address, SENDER_RANK, self.world_size, self._timeout_s)

    def _make_staging(self, nbytes: int) -> Staging:
        device = self.collective.device()
        return tuple(torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2))


class CollectiveReceiver(StreamReceiver):
    """One engine worker's end of a broadcast transport."""

    collective: ClassVar[Collective]

    def __init__(self, plan: BucketPlan, link: Link, worker: int) -> None:
        """Join the sender's group when it is complete, as the engine's worker number `worker`."""
        rank = link.first_rank + worker
        store = join(link, rank)
        self._channel = ReceivingEnd(self.collective, store, link.address, rank, link.world_size, link.timeout_s)
        self._stream = WeightStream(self._channel, plan)

    def close(self) -> None:
        """Leave the group; a sender in the middle of a stream fails at once instead of waiting."""
        self._channel.close()
