"""The policy's end of every transport: bringing the engines together, running an update, telling
what failed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from openrlhf_ext.groups.stores import open_store
from openrlhf_ext.rollout.sync import find_transport
from openrlhf_ext.rollout.sync.base import (
    GO,
    NO,
    PRESENT,
    YES,
    Departure,
    EngineFailed,
    EnginesAtFault,
    Link,
    SendingEnd,
    Staging,
    WeightStreamAborted,
    WeightSyncError,
    WeightSyncTimeout,
    WeightTransferFailed,
    reach_store,
    while_watching,
)
from openrlhf_ext.rollout.sync.plan import BucketPlan, Receipt, WeightSyncMismatch, check_receipts
from openrlhf_ext.rollout.sync.stream import Fill, follow_stream, let_others_end, send_stream

logger = logging.getLogger(__name__)

_CONSEQUENCES = (WeightTransferFailed, WeightStreamAborted)
_GRACE_S = 5.0
_POLL_S = 0.01


class EngineCalls:
    """Remote calls under way, one per engine, with one deadline. A collective with a dead peer
    fails with "connection closed" on every rank, or not at all before its timeout; what happened is
    in the remote call of the engine that it happened to."""

    def __init__(self, what: str, references: Sequence[Any], timeout_s: float) -> None:
        self._what = what
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._pending = {reference: index for index, reference in enumerate(references)}
        self._consequences: dict[int, Exception] = {}
        self._results: dict[int, Any] = {}

    @classmethod
    def start(
        cls,
        engines: Sequence[Any],
        method: str,
        arguments: Sequence[tuple],
        what: str,
        timeout_s: float,
    ) -> EngineCalls:
        calls = zip(engines, arguments, strict=True)
        return cls(
            what, [getattr(engine, method).remote(*args) for engine, args in calls], timeout_s
        )

    def check(self) -> None:
        """Raise `EngineFailed` if an engine has failed by itself, `WeightSyncTimeout` once the
        deadline has passed."""
        self._collect(0.0)
        if self._pending and time.monotonic() > self._deadline:
            raise self._late()

    def watch(self) -> None:
        """As `check`, while a transfer is under way, in which engines that are well wait too:
        WeightTransferFailed lets the caller break the connection, after which `explain` can tell
        who does not answer."""
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
            self.explain(
                WeightTransferFailed(f"rollout engine {index} failed while {self._what}:\n{error}")
            )
        return [result for _, result in sorted(self._results.items())]

    def explain(self, error: WeightTransferFailed) -> NoReturn:
        """Raise what lies behind a broken connection: an engine's own failure, engines that hang,
        else `error`."""
        if not self.settle():
            raise self._late() from error
        raise error

    def settle(self) -> bool:
        """Give the calls a little time to end; whether all of them did. Raises if an engine fails
        by itself."""
        end = time.monotonic() + _GRACE_S
        while self._pending and time.monotonic() < end:
            self._collect(max(0.0, end - time.monotonic()))
        return not self._pending

    def _late(self) -> WeightSyncTimeout:
        silent = sorted(self._pending.values())
        return WeightSyncTimeout(
            f"rollout engines {silent} did not answer within {self._timeout_s:g} s while "
            f"{self._what}: they hang, or the timeout is too small for this model",
            silent,
        )

    def _collect(self, timeout_s: float) -> None:
        # not at the top: vLLM's worker processes import this package too and have no use for Ray
        import ray

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
    """Whether an engine only saw the connection break, or the sender give up. The text counts as
    well as the type: from an engine in a process of its own, vLLM passes on nothing else."""
    return isinstance(error, _CONSEQUENCES) or any(
        kind.MARK in str(error) for kind in _CONSEQUENCES
    )


@dataclass(frozen=True)
class SendReport:
    """One finished update: seconds until the last engine had dropped its prefix cache; bytes that
    every worker received; checksums of all tensors, in the plan's order; seconds of the slowest
    worker's loading and summing."""

    seconds: float
    nbytes: int
    load_s: float
    sums: list[int]


class WeightSender:
    """One policy rank's part in sending the weights to all engines: rank 0 calls these and hears
    what they hold, the first rank of every stream sends it, the others of a stream give that one
    their parts. Connecting, and one whole update, are limited."""

    def __init__(
        self,
        transport: str,
        plan: BucketPlan,
        staging: Staging,
        engines: Sequence[Any],
        tensor_parallel_size: int,
        timeout_s: float,
        stream: int | None = 0,
        sends: bool = True,
    ) -> None:
        """``stream``: in which this rank takes part, None: in none; ``sends``: it is the first of
        it."""
        if not engines:
            raise ValueError("a weight sender needs at least one engine, got none")
        self._name, self._transport = transport, find_transport(transport)
        self._plan, self._staging = plan, staging
        self._engines = list(engines)
        self._workers_per_engine = tensor_parallel_size
        self._timeout_s = timeout_s
        self._told = False
        self._stream, self._sends = stream, sends
        self._buckets = plan.of_stream(stream)
        self._calls: EngineCalls | None = None
        self._departure: Departure | None = None
        self.connected = False
        self.end: SendingEnd | None = None

    # ---- connecting

    def connect(self) -> None:
        """Of a policy of one rank: `meet` and `join`."""
        self.join(self.meet())

    def meet(self) -> Link:
        """On rank 0: returns when every engine worker waits to join. Raises EnginesAtFault."""
        self.close()
        address = _own_address()
        self._store = open_store(address, timedelta(seconds=self._timeout_s))
        links = [
            self._link(index, address, self._store.port) for index in range(len(self._engines))
        ]
        what = f"joining the weight-sync group at {address}:{self._store.port}"
        arguments = [(self._plan, link) for link in links]
        self._calls = EngineCalls.start(
            self._engines, "connect_weight_sync", arguments, what, self._timeout_s
        )
        _await_receivers(self._store, links[0].world_size, self._calls)
        return links[0]

    def join(self, link: Link) -> None:
        """On every rank at the same time. Raises EnginesAtFault, WeightTransferFailed."""
        self.connected = True
        if not self._sends:
            return
        own = replace(link, stream=self._stream or 0)
        if self._calls is None:
            self._store = reach_store(link)
        self._departure = departure = Departure(self._store)
        try:
            self.end = while_watching(
                lambda: self._transport.open_sender(self._store, own, self._staging),
                departure.check if self._calls is None else self._calls.check,
                self._timeout_s,
                lambda: (
                    f"joining the weight-sync group at {link.address}:{link.port} took longer than "
                    f"{self._timeout_s:g} s"
                ),
            )
            if self._calls is not None:
                self._calls.finish()
                logger.info(
                    "weight sync over %s: %d ranks in each of %d groups, %d buckets",
                    self._name,
                    link.world_size,
                    self._plan.stream_count,
                    len(self._plan.buckets),
                )
        except Exception:
            # else the engines that are well wait for the others until their deadline
            departure.announce()
            self.close()
            raise

    def _link(self, engine: int, address: str, port: int) -> Link:
        world_size = 1 + len(self._engines) * self._workers_per_engine
        first_rank = 1 + engine * self._workers_per_engine
        return Link(
            self._name,
            address,
            port,
            first_rank,
            world_size,
            self._timeout_s,
            self._staging.handles,
        )

    def _watch(self, what: str) -> Callable[[], None]:
        """Raises what explains that a transfer never ends."""
        start = time.monotonic()

        def watch() -> None:
            if self._calls is not None:
                self._calls.watch()
            if self._departure is not None:
                self._departure.check()
            if time.monotonic() - start > self._timeout_s:
                raise WeightTransferFailed(f"{what} took longer than {self._timeout_s:g} s")

        return watch

    # ---- one update

    def send(self, fill: Fill, version: int) -> SendReport:
        """Of a policy of one rank: replace the weights of every engine by what `fill` puts into the
        buckets. Raises EnginesAtFault; WeightTransferFailed; WeightSyncMismatch; what `fill`
        raised. The engines then refuse to generate until a later update succeeds, which needs a new
        `connect`."""
        try:
            try:
                self.begin(version)
                return self.finish(version, self.stream(fill, version))
            except Exception as error:
                self.explain(error)
        except Exception:
            self.close()
            raise

    def begin(self, version: int) -> None:
        """On rank 0: have the engines receive."""
        self._calls = None
        if not self.connected:
            return
        self._start = time.monotonic()
        self._calls = EngineCalls.start(
            self._engines,
            "receive_weights",
            [(version,)] * len(self._engines),
            f"receiving weights of version {version}",
            self._timeout_s,
        )

    def stream(self, fill: Fill, version: int) -> list[int]:
        """This rank's stream: sums of what it has sent, in the plan's order. Whoever fails lets the
        others know."""
        if not self._sends:
            follow_stream(self._buckets, self._staging, fill)
            return [0] * len(self._plan.tensors)
        if self.end is None:
            let_others_end(self._buckets, self._staging, fill)
            raise WeightSyncError(
                "the weight sender is not connected: call connect() first, and again after a "
                "failure"
            )
        self.end.watch = self._watch(f"sending weights of version {version}")
        try:
            return send_stream(
                self.end,
                self._plan,
                self._staging,
                fill,
                version,
                self._workers_per_engine,
                self._stream or 0,
            )
        except (EnginesAtFault, WeightTransferFailed):
            self.close()
            raise
        except Exception:  # the tensors could not be made; engines that read this stream were told
            if self._departure is not None:
                self._departure.announce()
            raise

    def finish(self, version: int, sums: list[int]) -> SendReport:
        """On rank 0, with the sums of all: when all engines hold what was sent. Raises
        EnginesAtFault; WeightSyncMismatch."""
        assert self._calls is not None, "an update has begun"
        receipts: list[Receipt] = self._calls.finish()
        check_receipts(self._plan, sums, receipts, version)
        self._tell_once(receipts)
        load_s = max(receipt.load_s for receipt in receipts)
        return SendReport(time.monotonic() - self._start, self._plan.payload_bytes, load_s, sums)

    def explain(self, error: Exception) -> NoReturn:
        """On rank 0: raise what lies behind a sender's error, when the engines have heard that the
        update is void."""
        if self._calls is not None and isinstance(error, WeightTransferFailed):
            self.close()
            self._calls.explain(error)
        if self._calls is not None and not isinstance(error, EnginesAtFault | WeightSyncMismatch):
            try:
                self._calls.settle()
            except EnginesAtFault as other:
                logger.error("while giving up a weight update: %s", other)
        raise error

    def _tell_once(self, receipts: Sequence[Receipt]) -> None:
        if not self._told:
            other = max(receipt.as_received for receipt in receipts)
            logger.info(
                "checksums of %d tensors agree as the engines hold them, of %d as the engines "
                "received them (they hold these quantized or packed)",
                len(self._plan.tensors) - other,
                other,
            )
            self._told = True

    def close(self) -> None:
        # a connection: it would hold up those to the next store
        self.connected, self._departure = False, None
        if self.end is not None:
            self.end.close()
            self.end = None


def _await_receivers(store: dist.TCPStore, world_size: int, calls: EngineCalls) -> None:
    """Only when every receiver waits to join is the group built: every rank has to do so at the
    same time, uninterrupted."""
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
