"""What the senders of all transports share: bringing the engines together, running an update, telling what failed."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from openrlhf_ext.rollout.sync.base import (
    BucketSource,
    EnginesAtFault,
    Link,
    SendReport,
    WeightStreamAborted,
    WeightSyncError,
    WeightTransferFailed,
)
from openrlhf_ext.rollout.sync.engine_calls import EngineCalls
from openrlhf_ext.rollout.sync.plan import BucketPlan
from openrlhf_ext.rollout.sync.stream import SendingChannel, TensorSource, frame_bytes, send_stream

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_POLL_S = 0.01
_LOOK_AT_ENGINES_S = 0.1
_PRESENT, _GO, _YES = "present/{}", "go", b"yes"

Staging = tuple[Tensor, Tensor]
"""Two uint8 vectors, each large enough for the largest frame: one is filled while the other is under way."""


class Channel(SendingChannel):
    """A sender's end of a group with what the sender needs to know about it."""

    watch: Callable[[], None] | None
    """Called now and then while a transfer is under way; may raise what explains that it never ends."""

    def close(self) -> None:
        """Leave the group; transfers of the other ranks fail."""


def largest_frame(plan: BucketPlan) -> int:
    """Bytes that one staging buffer must hold."""
    return max(frame_bytes(bucket) for bucket in plan.buckets)


class EngineSender(ABC):
    """The policy's end of a transport. Subclasses say what the group is made of."""

    transport: ClassVar[str]

    def __init__(
        self,
        plan: BucketPlan,
        engines: Sequence[Any],
        tensor_parallel_size: int,
        timeout_s: float,
        staging: Staging | None = None,
    ) -> None:
        """
        Args:
            plan: what every update consists of.
            engines: Ray handles of `RolloutEngine`.
            tensor_parallel_size: workers per engine.
            timeout_s: limit of connecting, and of one whole update.
            staging: buffers to send from; None: own ones.
        """
        if not engines:
            raise ValueError("a weight sender needs at least one engine, got none")
        self._plan = plan
        self._engines = list(engines)
        self._workers_per_engine = tensor_parallel_size
        self._timeout_s = timeout_s
        self._staging = staging
        self._channel: Channel | None = None

    @property
    def world_size(self) -> int:
        """Ranks in the group: the sender and every worker."""
        return 1 + len(self._engines) * self._workers_per_engine

    @property
    def connected(self) -> bool:
        """Whether the group stands."""
        return self._channel is not None

    @abstractmethod
    def _open(self, store: dist.TCPStore, address: str) -> Channel:
        """Make the sender's end of the group, when every receiver is about to make its own."""

    def _buffers(self) -> dict[str, Any]:
        """`Link.buffers`; shared-memory transports override this."""
        return {}

    def _make_staging(self, nbytes: int) -> Staging:
        return torch.empty(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)

    def connect(self) -> None:
        """Build the group with all engine workers. Needed once, and again after any failure but a mismatch.

        Raises:
            EngineFailed: an engine failed; with its text.
            WeightSyncTimeout: an engine did not join in time.
        """
        self.close()
        if self._staging is None:
            self._staging = self._make_staging(largest_frame(self._plan))
        address = _own_address()
        store = dist.TCPStore(
            address, 0, is_master=True, timeout=timedelta(seconds=self._timeout_s), wait_for_workers=False
        )
        what = f"joining the weight-sync group at {address}:{store.port}"
        arguments = [(self._plan, self._link(i, address, store.port)) for i in range(len(self._engines))]
        calls = EngineCalls.start(self._engines, "connect_weight_sync", arguments, what, self._timeout_s)
        _await_receivers(store, self.world_size, calls)
        channel = _while_watching(lambda: self._open(store, address), calls)
        calls.finish()
        self._channel = channel
        logger.info(
            "weight sync over %s: %d ranks, %d buckets", self.transport, self.world_size, len(self._plan.buckets)
        )

    def _link(self, engine: int, address: str, port: int) -> Link:
        first_rank = 1 + engine * self._workers_per_engine
        return Link(self.transport, address, port, first_rank, self.world_size, self._timeout_s, self._buffers())

    def send(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> SendReport:
        """Replace the weights of every engine.

        Args:
            tensors: `(Hugging Face name, full tensor)`, exactly those of the plan, in its order.
            version: number of this set of weights; engines report it afterwards.

        Raises:
            WeightStreamMismatch: the tensors differ from the plan. Engines refuse to generate until a later `send`
                succeeds, which needs no new `connect`.
            WeightSyncError: see `send_buckets`.
        """
        return self.send_buckets(TensorSource(self._plan, tensors), version)

    def send_buckets(self, source: BucketSource, version: int) -> SendReport:
        """Replace the weights of every engine by what `source` fills into the buckets of the plan.

        Raises:
            EngineFailed: an engine failed, with its text.
            WeightSyncTimeout: `timeout_s` passed.
            WeightTransferFailed: the transfer failed for another reason.
            Exception: what `source` raised. The engines refuse to generate until a later update succeeds.
        """
        if self._channel is None or self._staging is None:
            source.drain()
            raise WeightSyncError("the weight sender is not connected: call connect() first, and again after a failure")
        start = time.monotonic()
        what = f"receiving weights of version {version}"
        arguments = [(version,)] * len(self._engines)
        calls = EngineCalls.start(self._engines, "receive_weights", arguments, what, self._timeout_s)
        self._channel.watch = calls.watch
        try:
            send_stream(self._channel, self._plan, self._staging, source, version)
            load_s = max(calls.finish())
        except EnginesAtFault:
            self.close()
            raise
        except WeightTransferFailed as error:
            self.close()
            calls.explain(error)
        except Exception:  # the tensors were wrong, or could not be made; the engines were told, the group is intact
            self._let_refuse(calls)
            raise
        return SendReport(time.monotonic() - start, self._plan.payload_bytes, load_s)

    def _let_refuse(self, calls: EngineCalls) -> None:
        """Wait until the engines have heard that this update is void; those that have not cannot stay in the group."""
        try:
            settled = calls.settle()
        except EnginesAtFault as error:
            logger.error("while giving up a weight update: %s", error)
            settled = False
        if not settled:
            self.close()

    def close(self) -> None:
        """Leave the group; a no-op when not connected."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def join(link: Link, rank: int) -> dist.TCPStore:
    """An engine worker's way into the group: returns when every worker is at the door and the sender says so.

    Raises:
        WeightStreamAborted: the sender gave up building the group.
    """
    store = dist.TCPStore(
        link.address, link.port, is_master=False, timeout=timedelta(seconds=link.timeout_s), wait_for_workers=False
    )
    store.set(_PRESENT.format(rank), b"")
    if store.get(_GO) != _YES:
        raise WeightStreamAborted(f"{WeightStreamAborted.MARK} building the weight-sync group; see its own error")
    return store


def _await_receivers(store: dist.TCPStore, world_size: int, calls: EngineCalls) -> None:
    """Wait until every receiver is at the door, while looking out for engines that fail on the way.

    Only then is the group built, which every rank has to do at the same time and which cannot be interrupted.
    """
    keys = [_PRESENT.format(rank) for rank in range(1, world_size)]
    try:
        while not store.check(keys):
            calls.check()
            time.sleep(_POLL_S)
    except WeightSyncError:
        store.set(_GO, b"no")
        raise
    store.set(_GO, _YES)


def _while_watching(function: Callable[[], _T], calls: EngineCalls) -> _T:
    """Run what cannot be interrupted on a thread, while looking out for engines that fail meanwhile."""
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
    while True:
        try:
            return outcome.result(timeout=_LOOK_AT_ENGINES_S)
        except FutureTimeout:
            calls.check()


def _own_address() -> str:
    import ray  # not at the top: vLLM's worker processes import this module and have no use for Ray

    return ray.util.get_node_ip_address()
