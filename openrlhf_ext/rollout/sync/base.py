"""What a weight-sync transport is, and how a sync fails. docs/weight_sync.md shows how to add a
transport. A transport moves frames (byte vectors) in order from a policy rank to every worker of
every engine, from several ranks at a time if it can; ``plan``, ``stream`` and ``sender`` are the
same for all of them."""

from __future__ import annotations

import logging
import mmap
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from openrlhf_ext.rollout.sync.plan import HEADER_BYTES, Bucket, BucketPlan

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_LEAVE_S = 2.0

# ---- failures


class WeightSyncError(RuntimeError):
    """Weights did not arrive; what the engines hold is not to be sampled from until a whole update
    succeeds."""

    explained = True
    """The message says what failed, even if it quotes a collective library: it was not one of the
    policy's ranks."""


class WeightTransferFailed(WeightSyncError):
    """The group broke; the message is the transport's."""

    MARK = "weight transfer failed"
    """In every message: what is left of the type after a way that carries only text."""

    def __init__(self, message: str) -> None:
        super().__init__(message if self.MARK in message else f"{self.MARK}: {message}")


class EnginesAtFault(WeightSyncError):
    """An error of the engines at these positions among the sender's, which a restart of these may
    cure."""

    def __init__(self, message: str, engines: Iterable[int]) -> None:
        super().__init__(message)
        self.engines = tuple(engines)

    def __reduce__(self) -> tuple:
        return type(self), (str(self), self.engines)


class WeightSyncTimeout(EnginesAtFault):
    """A deadline passed; the message says which engines had not answered, and in which phase."""


class EngineFailed(EnginesAtFault):
    """An engine failed to do its part; the message holds its own error."""


class WeightStreamAborted(WeightSyncError):
    """The sender gave up in the middle of a stream; the reason is in the sender's own error."""

    MARK = "the sender gave up"


# ---- what a transport is made of


class SendingEnd(Protocol):
    watch: Callable[[], None] | None
    """Set for every update, for `wait_until`."""

    def send(self, frame: Tensor) -> Callable[[], object]:
        """Begin to send a uint8 vector. What waits until the frame's memory may be used again;
        raises WeightTransferFailed."""

    def close(self) -> None: ...


class ReceivingEnd(Protocol):
    def receive(self, nbytes: int) -> Callable[[], Tensor]:
        """Begin to receive the next frame. What waits for it, a uint8 vector that nothing else will
        write to as long as a tensor on it is left; raises WeightTransferFailed."""

    def close(self) -> None: ...


class Staging:
    """What one policy rank has of the two buffers that frames are sent from: one is filled while
    the other is sent.

    Here those that send have them, uint8 vectors for the largest frame, and the other ranks nothing
    (None).

    Attributes:
        shared: every rank of the stream sees its sender's buffers, and fills its own part of a
        frame.
        handles: how engine workers open the buffers, if they do: strings and numbers, by the device
        they are on.
    """

    shared = False

    def __init__(self, buffers: tuple[Tensor, Tensor] | None) -> None:
        self.buffers = buffers
        self.handles: dict[str, Any] = {}

    def frame(self, bucket: Bucket) -> Tensor:
        if self.buffers is None:
            raise WeightSyncError("this rank has no staging buffers: another sends what it has")
        return self.buffers[bucket.turn % 2][: bucket.frame_bytes]

    def content(self, bucket: Bucket) -> Tensor | None:
        """Where a rank that does not send puts its part of the bucket; None: the sender asks for
        it."""
        return self.frame(bucket)[HEADER_BYTES:] if self.shared else None

    def complete(self, bucket: Bucket) -> None:
        """Called on every rank of the stream when its part of the bucket is filled; returns when
        the frame may be sent."""


@dataclass(frozen=True)
class Link:
    """How an engine's workers reach the senders: the TCPStore of policy rank 0, the rank of the
    engine's first worker in the group of every ``stream`` (the others follow; the sender is rank
    0), the limit of joining and of every transfer."""

    transport: str
    address: str
    port: int
    first_rank: int
    world_size: int
    timeout_s: float
    handles: dict[str, Any]
    stream: int = 0


class Transport(ABC):
    """One way of moving frames. Each has a file of its own, with both ends and an instance named
    ``TRANSPORT``. A group of every stream is built when the engines connect, beside the default
    process group (vLLM and Megatron each own theirs), around a TCPStore of policy rank 0; after a
    failure all are left and built anew."""

    needs_gpu = False
    most_streams = 1
    """How many policy ranks send at a time, if as many hold different weights or copies."""

    @property
    def device(self) -> torch.device:
        """Where frames, and the default staging buffers, are."""
        return torch.device("cpu")

    def staging(
        self, plan: BucketPlan, streams: Sequence[Sequence[int]], timeout_s: float
    ) -> Staging:
        """A collective of all policy ranks. ``streams``: the ranks that hold the weights of each,
        its sender first."""
        if dist.is_initialized() and dist.get_rank() not in [ranks[0] for ranks in streams]:
            return Staging(None)
        first, second = (
            torch.empty(plan.largest_frame, dtype=torch.uint8, device=self.device) for _ in range(2)
        )
        return Staging((first, second))

    def worker_violation(self, handles: dict[str, Any]) -> str | None:
        """Why this engine worker cannot receive from a sender with these handles; asked before it
        joins anything."""
        return None

    @abstractmethod
    def open_sender(self, store: dist.Store, link: Link, staging: Staging) -> SendingEnd:
        """Make the sender's end of the group of ``link.stream``. Every worker is about to make its
        own, stream by stream."""

    @abstractmethod
    def open_receiver(self, store: dist.Store, link: Link, rank: int) -> ReceivingEnd:
        """Make the end of the worker that has this rank in the group of ``link.stream``."""


# ---- waiting and meeting

LOOK_AT_ENGINES_S = 0.1
"""How often engines are looked after while a call cannot be interrupted."""

PRESENT, GO, YES, NO, LEFT = "present/{}", "go", "yes", "no", "left"
"""Keys and values in the sender's TCPStore."""


def wait_until(
    is_done: Callable[[], bool],
    watch: Callable[[], None] | None,
    timeout_s: float,
    late: Callable[[], str],
    longest_pause_s: float = 0.002,
) -> None:
    """Ask again and again whether a transfer is done; ``watch`` raises what explains that it never
    ends. Raises
    WeightTransferFailed: `timeout_s` passed."""
    pause_s = 0.0002
    start = last_look = time.monotonic()
    while not is_done():
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_pause_s)
        now = time.monotonic()
        if watch is not None and now - last_look > LOOK_AT_ENGINES_S:
            watch()
            last_look = now
        if now - start > timeout_s:
            raise WeightTransferFailed(late())


def while_watching(
    function: Callable[[], _T], watch: Callable[[], None], timeout_s: float, late: Callable[[], str]
) -> _T:
    """The result of what cannot be interrupted, such as building a communicator: it runs on a
    thread (see `wait_until`). Where this raises, the thread is left to its own end, which may never
    come."""
    # a property of the thread
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    outcome: Future[_T] = Future()

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            outcome.set_result(function())
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="weight-sync-open", daemon=True).start()
    wait_until(outcome.done, watch, timeout_s, late)
    return outcome.result()


def second_connection(store: Any) -> dist.Store:
    """To the same store: one that waits for a key on another thread answers nobody meanwhile."""
    return store.clone()  # in no type stub


class Departure:
    """Whether a sender has left: an aborted communicator does not tell its peers. It is told and
    asked on a connection that is opened early, because the sender whose process serves the store
    may be the first to leave."""

    def __init__(self, store: dist.Store) -> None:
        self._connection = second_connection(store)

    def announce(self) -> None:
        try:
            self._connection.set(LEFT, "")
        except RuntimeError as error:  # `check` finds the same and says so
            logger.info(
                "the weight-sync group's store is gone before this rank has left: %s", error
            )

    def check(self) -> None:
        """Raises WeightTransferFailed if a sender has left, or the one that serves the store is
        gone."""
        try:
            has_left = self._connection.check([LEFT])
        except RuntimeError as error:
            raise WeightTransferFailed(f"the sender of the weights is gone: {error}") from error
        if has_left:
            raise WeightTransferFailed(
                "the sender has left the weight-sync group; see its own error"
            )


def reach_store(link: Link) -> dist.TCPStore:
    timeout = timedelta(seconds=link.timeout_s)
    return dist.TCPStore(
        link.address, link.port, is_master=False, timeout=timeout, wait_for_workers=False
    )


def join(link: Link, rank: int) -> dist.TCPStore:
    """Returns when every worker waits to join and the sender says so. Raises WeightStreamAborted:
    it gave up."""
    store = reach_store(link)
    store.set(PRESENT.format(rank), "")
    if store.get(GO).decode() != YES:
        raise WeightStreamAborted(
            f"{WeightStreamAborted.MARK} building the weight-sync group; see its own error"
        )
    return store


class BroadcastTransport(Transport):
    """What gloo and NCCL have in common."""

    @abstractmethod
    def open_group(
        self, store: dist.Store, address: str, rank: int, world_size: int, timeout_s: float
    ) -> Any:
        """Join the process group; returns when every rank has joined. The sender's ``address``
        chooses the local network interface; ``timeout_s`` limits joining, and every transfer."""

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

    def __init__(
        self, transport: BroadcastTransport, store: dist.Store, link: Link, rank: int
    ) -> None:
        self._transport, self._timeout_s = transport, link.timeout_s
        self._pool = FramePool()
        self._departure, self._sends = Departure(store), rank == 0
        self.watch: Callable[[], None] | None = None if self._sends else self._departure.check
        store = dist.PrefixStore(f"weight_sync/{link.stream}", store)
        self._group: Any = transport.open_group(
            store, link.address, rank, link.world_size, link.timeout_s
        )

    def send(self, frame: Tensor) -> Callable[[], Tensor]:
        return self.broadcast(frame)

    def receive(self, nbytes: int) -> Callable[[], Tensor]:
        device = self._transport.device
        if device.type == "cpu":
            return self.broadcast(self._pool.take(nbytes))
        # torch keeps such memory itself
        return self.broadcast(torch.empty(nbytes, dtype=torch.uint8, device=device))

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
        """The frame, when it may be used again (sender) or read (receiver). Raises
        WeightTransferFailed."""
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
        """Leave. A transfer of this rank that hangs keeps its connections until its deadline; that
        is not waited for."""
        holder = [self._group]
        self._group = None

        def leave() -> None:
            self._transport.abort(holder[0])
            holder.clear()

        if holder[0] is not None:
            if self._sends:
                self._departure.announce()
            leaving = threading.Thread(target=leave, name="weight-sync-leave", daemon=True)
            leaving.start()
            leaving.join(_LEAVE_S)


class FramePool:
    """Lends memory to received frames, the same again when the tensors of an earlier frame are
    gone. The kernel fills new memory with zeros, page by page: receiving into it takes twice as
    long as into used memory (docs/weight_sync.md). The pool keeps as many blocks as frames were
    ever alive at the same time, usually two."""

    def __init__(self) -> None:
        self._blocks: list[tuple[mmap.mmap, StorageWeakRef]] = []
        """Anonymous memory, and the tensor storage that uses or last used it."""

    def take(self, nbytes: int) -> Tensor:
        """A uint8 vector, contents undefined. Its memory is lent again when no tensor on it is
        left."""
        for number, (memory, user) in enumerate(self._blocks):
            if len(memory) >= nbytes and user.expired():
                del self._blocks[number]
                return self._lend(memory, nbytes)
        # those left over are too small
        self._blocks = [block for block in self._blocks if not block[1].expired()]
        return self._lend(
            mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), nbytes
        )

    def _lend(self, memory: mmap.mmap, nbytes: int) -> Tensor:
        frame = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)
        self._blocks.append((memory, StorageWeakRef(frame.untyped_storage())))
        return frame
