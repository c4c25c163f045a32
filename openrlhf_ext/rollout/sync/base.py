"""What a weight-sync transport is, and how a sync fails. docs/weight_sync.md shows how to add a transport.

A transport moves frames (byte vectors) in order from policy rank 0 to every worker of every engine. What the frames
hold, who fills them and who loads them is the same for all of them: ``plan``, ``stream``, ``sender``.
"""

from __future__ import annotations

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

from openrlhf_ext.rollout.sync.plan import HEADER_BYTES, Bucket, BucketPlan

_T = TypeVar("_T")

# ---- failures -------------------------------------------------------------------------------------------------------


class WeightSyncError(RuntimeError):
    """Weights did not arrive; what the engines hold is not to be sampled from until a whole update succeeds."""

    explained = True
    """The message says what failed, even if it quotes a collective library: it was not one of the policy's ranks."""


class WeightTransferFailed(WeightSyncError):
    """The group broke; the message is the transport's."""

    MARK = "weight transfer failed"
    """In every message: what is left of the type after a way that carries only text."""

    def __init__(self, message: str) -> None:
        super().__init__(message if self.MARK in message else f"{self.MARK}: {message}")


class EnginesAtFault(WeightSyncError):
    """An error of particular engines, which a restart of these may cure.

    Attributes:
        engines: their positions among the sender's engines.
    """

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


# ---- what a transport is made of ------------------------------------------------------------------------------------


class SendingEnd(Protocol):
    """Policy rank 0's end of a group."""

    watch: Callable[[], None] | None
    """Set for every update, for `wait_until`."""

    def send(self, frame: Tensor) -> Callable[[], object]:
        """Begin to send a uint8 vector to every receiver.

        Returns:
            What waits, at most as long as the transport's timeout, until the frame's memory may be used again; raises
            WeightTransferFailed.
        """

    def close(self) -> None:
        """Leave the group; transfers of the other ranks fail."""


class ReceivingEnd(Protocol):
    """An engine worker's end of a group."""

    def receive(self, nbytes: int) -> Callable[[], Tensor]:
        """Begin to receive the next frame.

        Returns:
            What waits, at most as long as the transport's timeout, for the frame: a uint8 vector that nothing else
            will write to as long as a tensor on it is left; raises WeightTransferFailed.
        """

    def close(self) -> None:
        """Leave the group, so that the sender is not left waiting."""


class Staging:
    """What one policy rank has of the two buffers that frames are sent from: one is filled while the other is sent.

    Here rank 0 has them and the other ranks nothing. Transports with memory that several processes see override this.

    Attributes:
        buffers: two uint8 vectors, each large enough for the largest frame; None on a rank that has none.
        shared: every exporting rank sees rank 0's buffers, and fills its own part of a frame.
        handles: how engine workers open the buffers, if they do: strings and numbers, by the device they are on.
    """

    shared = False

    def __init__(self, buffers: tuple[Tensor, Tensor] | None) -> None:
        self.buffers = buffers
        self.handles: dict[str, Any] = {}

    def frame(self, bucket: Bucket) -> Tensor:
        """Where the frame of ``bucket`` is put together."""
        if self.buffers is None:
            raise WeightSyncError("this rank has no staging buffers: policy rank 0 sends, and no other")
        return self.buffers[bucket.index % 2][: bucket.frame_bytes]

    def content(self, bucket: Bucket) -> Tensor | None:
        """Where a rank other than 0 puts its part of the bucket; None: rank 0 asks for it."""
        return self.frame(bucket)[HEADER_BYTES:] if self.shared else None

    def complete(self, bucket: Bucket) -> None:
        """Called on every policy rank when its part of the bucket is filled; returns when the frame may be sent."""


@dataclass(frozen=True)
class Link:
    """How an engine's workers reach the sender.

    Attributes:
        address, port: of the sender's TCPStore.
        first_rank: rank of the engine's first worker in the group; the others follow.
        world_size: ranks of the group: the sender, which is rank 0, and every worker of every engine.
        timeout_s: limit of joining, and of every transfer.
        handles: see ``Staging``.
    """

    transport: str
    address: str
    port: int
    first_rank: int
    world_size: int
    timeout_s: float
    handles: dict[str, Any]


class Transport(ABC):
    """One way of moving frames. Each has a file of its own, with both ends and an instance named ``TRANSPORT``.

    A group is built when the engines connect, beside the default process group (vLLM and Megatron each own theirs),
    around a TCPStore of the sender; after a failure it is left and built anew.

    Attributes:
        needs_gpu: it cannot work on a machine without GPUs.
        device: where the default staging buffers are.
    """

    needs_gpu = False

    @property
    def device(self) -> torch.device:
        """Where frames are: host memory."""
        return torch.device("cpu")

    def staging(self, plan: BucketPlan, exporting: Sequence[int], timeout_s: float) -> Staging:
        """The rank's staging buffers; a collective of all policy ranks.

        Args:
            exporting: ranks that hold the exported weights, of which rank 0 is the first.
            timeout_s: limit of collectives.
        """
        if dist.is_initialized() and dist.get_rank() != exporting[0]:
            return Staging(None)
        first, second = (torch.empty(plan.largest_frame, dtype=torch.uint8, device=self.device) for _ in range(2))
        return Staging((first, second))

    def worker_violation(self, handles: dict[str, Any]) -> str | None:
        """Why this engine worker cannot receive from a sender with these handles; asked before it joins anything."""
        return None

    @abstractmethod
    def open_sender(self, store: dist.Store, link: Link, staging: Staging) -> SendingEnd:
        """Make rank 0's end of the group. Every worker is about to make its own at the same time."""

    @abstractmethod
    def open_receiver(self, store: dist.Store, link: Link, rank: int) -> ReceivingEnd:
        """Make the end of the worker that has this rank in the group."""


# ---- waiting and meeting --------------------------------------------------------------------------------------------

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
    """Ask again and again whether a transfer is done.

    Args:
        watch: looks after the other side, now and then; raises what explains that it never ends.
        late: what to say when the time has passed.
        longest_pause_s: between two questions.

    Raises:
        WeightTransferFailed: `timeout_s` passed.
    """
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
    """The result of what cannot be interrupted, such as building a communicator: it runs on a thread.

    Where this raises, the thread is left to its own end, which may never come.

    Args:
        watch, timeout_s, late: see `wait_until`.
    """
    device = torch.cuda.current_device() if torch.cuda.is_available() else None  # a property of the thread
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


def announce_leaving(store: dist.Store) -> None:
    """Tell receivers that the sender has left."""
    second_connection(store).set(LEFT, "")


def sender_watch(store: dist.Store) -> Callable[[], None]:
    """What a receiver asks while it waits: that a communicator was aborted does not reach its peers by itself.

    Returns:
        What raises WeightTransferFailed if the sender has left or is gone.
    """
    connection = second_connection(store)

    def watch() -> None:
        try:
            has_left = connection.check([LEFT])
        except RuntimeError as error:  # the sender's process serves the store
            raise WeightTransferFailed(f"the sender of the weights is gone: {error}") from error
        if has_left:
            raise WeightTransferFailed("the sender has left the weight-sync group; see its own error")

    return watch


def join(link: Link, rank: int) -> dist.TCPStore:
    """An engine worker's way into the group: returns when every worker waits to join and the sender says so.

    Raises:
        WeightStreamAborted: the sender gave up building the group.
    """
    store = dist.TCPStore(
        link.address, link.port, is_master=False, timeout=timedelta(seconds=link.timeout_s), wait_for_workers=False
    )
    store.set(PRESENT.format(rank), "")
    if store.get(GO).decode() != YES:
        raise WeightStreamAborted(f"{WeightStreamAborted.MARK} building the weight-sync group; see its own error")
    return store
