"""The policy's end of every transport: bringing the engines together, running an update, telling what failed."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor

from openrlhf_ext.rollout.sync import find_transport
from openrlhf_ext.rollout.sync.base import (
    GO,
    NO,
    PRESENT,
    YES,
    EngineFailed,
    EnginesAtFault,
    Link,
    SendingEnd,
    Staging,
    WeightStreamAborted,
    WeightSyncError,
    WeightSyncTimeout,
    WeightTransferFailed,
    announce_leaving,
    while_watching,
)
from openrlhf_ext.rollout.sync.delta import Sent
from openrlhf_ext.rollout.sync.plan import BucketPlan, Receipt, check_receipts
from openrlhf_ext.rollout.sync.stream import Fill, let_others_end, send_stream
from openrlhf_ext.stores import open_store

logger = logging.getLogger(__name__)

_CONSEQUENCES = (WeightTransferFailed, WeightStreamAborted)
_GRACE_S = 5.0
_POLL_S = 0.01


class EngineCalls:
    """Remote calls under way, one per engine, with one deadline. A collective with a dead peer fails with "connection
    closed" on every rank, or not at all before its timeout; what happened is in the remote call of the engine that
    it happened to."""

    def __init__(self, what: str, references: Sequence[Any], timeout_s: float) -> None:
        self._what = what
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._pending = {reference: index for index, reference in enumerate(references)}
        self._consequences: dict[int, Exception] = {}
        self._results: dict[int, Any] = {}

    @classmethod
    def start(
        cls, engines: Sequence[Any], method: str, arguments: Sequence[tuple], what: str, timeout_s: float
    ) -> EngineCalls:
        calls = zip(engines, arguments, strict=True)
        return cls(what, [getattr(engine, method).remote(*args) for engine, args in calls], timeout_s)

    def check(self) -> None:
        """Raise `EngineFailed` if an engine has failed by itself, `WeightSyncTimeout` once the deadline has passed."""
        self._collect(0.0)
        if self._pending and time.monotonic() > self._deadline:
            raise self._late()

    def watch(self) -> None:
        """As `check`, while a transfer is under way, in which engines that are well wait too: WeightTransferFailed lets
        the caller break the connection, after which `explain` can tell who does not answer."""
        self._collect(0.0)
        if self._pending and time.monotonic() > self._deadline:
            raise WeightTransferFailed(f"{self._what} took longer than {self._timeout_s:g} s")

    def finish(self) -> list[Any]:
        """The results of all engines, in order. Raises as `check`, or what broke the connection."""
        while self._pending and not self._consequences:
            self._collect(min(1.0, max(0.0, self._deadline - time.monotonic())))
            self.check()
        if self._consequences:
            index, error = next(iter(self._consequences.items()))
            self.explain(WeightTransferFailed(f"rollout engine {index} failed while {self._what}:\n{error}"))
        return [result for _, result in sorted(self._results.items())]

    def explain(self, error: WeightTransferFailed) -> NoReturn:
        """Raise what lies behind a broken connection: an engine's own failure, engines that hang, else `error`."""
        if not self.settle():
            raise self._late() from error
        raise error

    def settle(self) -> bool:
        """Give the calls a little time to end; whether all of them did. Raises if an engine fails by itself."""
        end = time.monotonic() + _GRACE_S
        while self._pending and time.monotonic() < end:
            self._collect(max(0.0, end - time.monotonic()))
        return not self._pending

    def _late(self) -> WeightSyncTimeout:
        silent = sorted(self._pending.values())
        return WeightSyncTimeout(
            f"rollout engines {silent} did not answer within {self._timeout_s:g} s while {self._what}: they hang, or "
            "the timeout is too small for this model",
            silent,
        )

    def _collect(self, timeout_s: float) -> None:
        import ray  # not at the top: vLLM's worker processes import this package too and have no use for Ray

        if not self._pending:
            return
        ready, _ = ray.wait(list(self._pending), num_returns=1, timeout=timeout_s)
        for reference in ready:
            index = self._pending.pop(reference)
            try:
                self._results[index] = ray.get(reference)
            except Exception as error:
                if not _is_consequence(error):
                    message = f"rollout engine {index} failed while {self._what}:\n{error}"
                    raise EngineFailed(message, [index]) from error
                self._consequences[index] = error


def _is_consequence(error: Exception) -> bool:
    """Whether an engine only saw the connection break, or the sender give up. The text counts as well as the type: from
    an engine in a process of its own, vLLM passes on nothing else."""
    return isinstance(error, _CONSEQUENCES) or any(kind.MARK in str(error) for kind in _CONSEQUENCES)


@dataclass(frozen=True)
class SendReport:
    """One finished update: seconds until the last engine had dropped its prefix cache; bytes that every worker
    received; checksums of all tensors, in the plan's order; seconds of the slowest worker's loading and summing."""

    seconds: float
    nbytes: int
    load_s: float
    sums: list[int]


class WeightSender:
    """Sends one policy's weights to all engines, from policy rank 0; connecting, and one whole update, are limited."""

    def __init__(
        self,
        transport: str,
        plan: BucketPlan,
        staging: Staging,
        engines: Sequence[Any],
        tensor_parallel_size: int,
        timeout_s: float,
        delta: bool = False,
    ) -> None:
        """``delta``: after a first whole update, only what has changed in 16-bit weights travels."""
        if not engines:
            raise ValueError("a weight sender needs at least one engine, got none")
        self._name, self._transport = transport, find_transport(transport)
        self._plan, self._staging = plan, staging
        self._engines = list(engines)
        self._workers_per_engine = tensor_parallel_size
        self._timeout_s = timeout_s
        self._told = False
        self._sent = Sent(plan) if delta else None
        self.end: SendingEnd | None = None

    @property
    def connected(self) -> bool:
        return self.end is not None

    def connect(self) -> None:
        """Needed once, and again after any failure but one of the export. Raises EnginesAtFault."""
        self.close()
        address = _own_address()
        store = open_store(address, timedelta(seconds=self._timeout_s))
        links = [self._link(index, address, store.port) for index in range(len(self._engines))]
        what = f"joining the weight-sync group at {address}:{store.port}"
        arguments = [(self._plan, link) for link in links]
        calls = EngineCalls.start(self._engines, "connect_weight_sync", arguments, what, self._timeout_s)
        _await_receivers(store, links[0].world_size, calls)
        try:
            end = while_watching(
                lambda: self._transport.open_sender(store, links[0], self._staging), calls.check,
                self._timeout_s, lambda: f"{what} took longer than {self._timeout_s:g} s",
            )  # fmt: skip
            calls.finish()
        except Exception:
            announce_leaving(store)  # else the engines that are well wait for the others until their deadline
            raise
        self.end = end
        logger.info(
            "weight sync over %s: %d ranks, %d buckets", self._name, links[0].world_size, len(self._plan.buckets)
        )

    def _link(self, engine: int, address: str, port: int) -> Link:
        world_size = 1 + len(self._engines) * self._workers_per_engine
        first_rank = 1 + engine * self._workers_per_engine
        return Link(self._name, address, port, first_rank, world_size, self._timeout_s, self._staging.handles,
            self._sent is not None)  # fmt: skip

    def send(self, fill: Fill, version: int) -> SendReport:
        """Replace the weights of every engine by what `fill` puts into the buckets, while the other policy ranks run
        `follow_stream`. Raises EnginesAtFault; WeightTransferFailed; WeightSyncMismatch; what `fill` raised: the
        engines then refuse to generate until a later update succeeds, which needs no new `connect`."""
        if self.end is None:
            let_others_end(self._plan, self._staging, fill)
            raise WeightSyncError("the weight sender is not connected: call connect() first, and again after a failure")
        start = time.monotonic()
        what = f"receiving weights of version {version}"
        stream = partial(send_stream, self.end, self._plan, self._staging, fill, version, self._workers_per_engine)
        arguments: tuple = (version,)
        nbytes = self._plan.payload_bytes
        if self._sent is not None:  # a failure of the export is raised here: no engine has begun
            frames, sums_of_frames = self._take(self._sent, fill, version)
            stream = partial(_send_frames, self.end, frames, sums_of_frames)
            arguments = (version, [len(frame) for frame in frames])
            nbytes = sum(map(len, frames))
        calls = EngineCalls.start(
            self._engines, "receive_weights", [arguments] * len(self._engines), what, self._timeout_s
        )
        self.end.watch = calls.watch
        try:
            sums = stream()
            receipts: list[Receipt] = calls.finish()
        except EnginesAtFault:
            self.close()
            raise
        except WeightTransferFailed as error:
            self.close()
            calls.explain(error)
        except Exception:  # the tensors could not be made; the engines were told, the group is intact
            self._let_refuse(calls)
            raise
        check_receipts(self._plan, sums, receipts, version)
        self._tell_once(receipts)
        if self._sent is not None:
            self._sent.version = version
        load_s = max(receipt.load_s for receipt in receipts)
        return SendReport(time.monotonic() - start, nbytes, load_s, sums)

    def _take(self, sent: Sent, fill: Fill, version: int) -> tuple[list[Tensor], list[int]]:
        """The frames of an update against what the engines hold, and the sums of the whole tensors."""
        sent.begin()
        sums = send_stream(sent, self._plan, self._staging, fill, version, self._workers_per_engine)
        return sent.frames, sums

    def _tell_once(self, receipts: Sequence[Receipt]) -> None:
        if not self._told:
            other = max(receipt.as_received for receipt in receipts)
            logger.info(
                "checksums of %d tensors agree as the engines hold them, of %d as the engines received them (they hold "
                "these quantized or packed)", len(self._plan.tensors) - other, other,
            )  # fmt: skip
            self._told = True

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
        if self.end is not None:
            self.end.close()
            self.end = None
        if self._sent is not None:
            self._sent.close()


def _send_frames(end: SendingEnd, frames: Sequence[Tensor], sums: list[int]) -> list[int]:
    for frame in frames:
        end.send(frame)()
    return sums


def _await_receivers(store: dist.TCPStore, world_size: int, calls: EngineCalls) -> None:
    """Only when every receiver waits to join is the group built: every rank has to do so at the same time,
    uninterrupted."""
    keys = [PRESENT.format(rank) for rank in range(1, world_size)]
    try:
        while not store.check(keys):
            calls.check()
            time.sleep(_POLL_S)
    except WeightSyncError:
        store.set(GO, NO)
        raise
    store.set(GO, YES)


def _own_address() -> str:
    import ray  # not at the top: vLLM's worker processes import this module and have no use for Ray

    return ray.util.get_node_ip_address()
