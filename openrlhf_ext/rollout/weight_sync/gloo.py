"""Weight sync over gloo: portable, for CPU runs and for tests of the protocol; on GPUs weights pass through the host.

The group stands beside the default process group (vLLM and Megatron each own theirs): a TCPStore held by the sender,
and a ProcessGroupGloo of policy rank 0 and every worker of every engine.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from openrlhf_ext.rollout.weight_sync.base import (
    EngineFailed,
    WeightStreamAborted,
    WeightSyncError,
    WeightSyncTimeout,
    WeightTransferFailed,
)
from openrlhf_ext.rollout.weight_sync.engine_calls import EngineCalls
from openrlhf_ext.rollout.weight_sync.plan import BucketPlan
from openrlhf_ext.rollout.weight_sync.stream import frame_bytes, receive_stream, send_stream

logger = logging.getLogger(__name__)

SENDER_RANK = 0
_LOOK_AT_ENGINES_S = 0.1
_POLL_S = 0.01
_LEAVE_S = 2.0
_PRESENT, _GO, _YES = "present/{}", "go", b"yes"


class GlooChannel:
    """A gloo group of one sender and its receivers. Every wait ends after `timeout_s`."""

    def __init__(self, store: dist.TCPStore, address: str, rank: int, world_size: int, timeout_s: float) -> None:
        """Join the group; returns when every rank has joined.

        Args:
            store: rendezvous, held by the sender.
            address: the sender's address, by which the local network interface is chosen.
            rank: 0 for the sender.
            world_size: 1 + number of workers over all engines.
            timeout_s: limit of joining, and of every transfer.
        """
        options = ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [_gloo_device(address)]
        self._store = store
        group = ProcessGroupGloo(PrefixStore("weight_sync", store), rank, world_size, options)
        self._group: ProcessGroupGloo | None = group
        self.watch: Callable[[], None] | None = None

    def start(self, frame: Tensor) -> GlooTransfer:
        """Begin to send or receive a frame; it must stay alive until the transfer's `wait` returns."""
        if self._group is None:
            raise WeightTransferFailed("this rank has left the weight-sync group")
        options = dist.BroadcastOptions()
        options.rootRank = SENDER_RANK
        options.rootTensor = 0
        return GlooTransfer(self._group.broadcast([frame], options), self.watch)

    def close(self) -> None:
        """Leave: transfers of the other ranks fail with "connection closed".

        A transfer of this rank that hangs keeps its connections until its deadline; that is not waited for.
        """
        holder = [self._group]
        self._group = None
        leaving = threading.Thread(target=holder.clear, name="weight-sync-leave", daemon=True)
        leaving.start()
        leaving.join(_LEAVE_S)


class GlooTransfer:
    """One broadcast; while it is under way, `watch` may raise what explains that it never ends."""

    def __init__(self, work: dist.Work, watch: Callable[[], None] | None) -> None:
        self._work = work
        self._watch = watch

    def wait(self) -> None:
        """Raises WeightTransferFailed with gloo's text: a closed connection, or its timeout."""
        if self._watch is not None:
            self._poll(self._watch)
        try:
            self._work.wait()
        except RuntimeError as error:
            raise WeightTransferFailed(str(error)) from error

    def _poll(self, watch: Callable[[], None]) -> None:
        pause_s = 0.0002
        last_look = time.monotonic()
        while not self._work.is_completed():
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.005)
            if time.monotonic() - last_look > _LOOK_AT_ENGINES_S:
                watch()
                last_look = time.monotonic()


class GlooWeightReceiver:
    """One engine worker's end."""

    def __init__(
        self, plan: BucketPlan, address: str, port: int, rank: int, world_size: int, timeout_s: float
    ) -> None:
        """Join the sender's group when it is complete; see `GlooChannel`."""
        store = dist.TCPStore(
            address, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
        )
        _await_sender(store, rank)
        self._plan = plan
        self._channel = GlooChannel(store, address, rank, world_size, timeout_s)

    def receive(self, version: int) -> Iterator[tuple[str, Tensor]]:
        """Yield every `(name, tensor)` of the plan, on the CPU."""
        return receive_stream(self._channel, self._plan, version)

    def close(self) -> None:
        """Leave the group; a sender in the middle of a stream fails at once instead of waiting."""
        self._channel.close()


class GlooWeightSender:
    """The policy's end: packs, broadcasts, and reports an engine's own error when an engine fails."""

    def __init__(
        self, plan: BucketPlan, engines: Sequence[Any], tensor_parallel_size: int, timeout_s: float
    ) -> None:
        """
        Args:
            plan: what every update consists of.
            engines: Ray handles of `RolloutEngine`.
            tensor_parallel_size: workers per engine.
            timeout_s: limit of connecting, and of one whole update.
        """
        if not engines:
            raise ValueError("a weight sender needs at least one engine, got none")
        self._plan = plan
        self._engines = list(engines)
        self._workers_per_engine = tensor_parallel_size
        self._timeout_s = timeout_s
        self._channel: GlooChannel | None = None
        self._staging: tuple[Tensor, Tensor] | None = None

    @property
    def world_size(self) -> int:
        """Ranks in the group: the sender and every worker."""
        return 1 + len(self._engines) * self._workers_per_engine

    def connect(self) -> None:
        """Build the group with all engine workers. Needed once, and again after any failure but a mismatch.

        Raises:
            WeightSyncError: an engine failed; with its text.
            WeightSyncTimeout: an engine did not join in time.
        """
        self.close()
        address = _own_address()
        store = dist.TCPStore(
            address, 0, is_master=True, timeout=timedelta(seconds=self._timeout_s), wait_for_workers=False
        )
        what = f"joining the weight-sync group at {address}:{store.port}"
        arguments = [
            (self._plan, address, store.port, 1 + i * self._workers_per_engine, self.world_size, self._timeout_s)
            for i in range(len(self._engines))
        ]
        calls = EngineCalls.start(self._engines, "connect_weight_sync", arguments, what, self._timeout_s)
        _await_receivers(store, self.world_size, calls)
        channel = GlooChannel(store, address, SENDER_RANK, self.world_size, self._timeout_s)
        calls.finish()
        self._channel = channel
        largest = max(frame_bytes(bucket) for bucket in self._plan.buckets)
        self._staging = (torch.empty(largest, dtype=torch.uint8), torch.empty(largest, dtype=torch.uint8))
        logger.info("weight sync: %d ranks, %d buckets", self.world_size, len(self._plan.buckets))

    def send(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> float:
        """Replace the weights of every engine.

        Args:
            tensors: `(Hugging Face name, full tensor)`, exactly those of the plan, in its order.
            version: number of this set of weights; engines report it afterwards.

        Returns:
            Seconds until the last engine had loaded them and dropped its prefix cache.

        Raises:
            WeightStreamMismatch: the tensors differ from the plan. Engines refuse to generate until a later `send`
                succeeds, which needs no new `connect`.
            WeightSyncError: an engine failed, with its text, or the transfer did.
            WeightSyncTimeout: `timeout_s` passed.
        """
        if self._channel is None or self._staging is None:
            raise WeightSyncError("the weight sender is not connected: call connect() first, and again after a failure")
        start = time.monotonic()
        what = f"receiving weights of version {version}"
        arguments = [(version,)] * len(self._engines)
        calls = EngineCalls.start(self._engines, "receive_weights", arguments, what, self._timeout_s)
        self._channel.watch = calls.check
        try:
            send_stream(self._channel, self._plan, self._staging, tensors, version)
            calls.finish()
        except (EngineFailed, WeightSyncTimeout):
            self.close()
            raise
        except WeightTransferFailed as error:
            self.close()
            calls.explain(error)
        except Exception:  # the tensors were wrong, or could not be made; the engines were told, the group is intact
            self._let_refuse(calls)
            raise
        return time.monotonic() - start

    def _let_refuse(self, calls: EngineCalls) -> None:
        """Wait until the engines have heard that this update is void; those that have not cannot stay in the group."""
        try:
            settled = calls.settle()
        except EngineFailed as error:
            logger.error("while giving up a weight update: %s", error)
            settled = False
        if not settled:
            self.close()

    def close(self) -> None:
        """Leave the group; a no-op when not connected."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def _await_receivers(store: dist.TCPStore, world_size: int, calls: EngineCalls) -> None:
    """Wait until every receiver is at the door, while looking out for engines that fail on the way.

    Only then is the group built, which every rank has to do at the same time and which cannot be interrupted.
    """
    keys = [_PRESENT.format(rank) for rank in range(world_size) if rank != SENDER_RANK]
    try:
        while not store.check(keys):
            calls.check()
            time.sleep(_POLL_S)
    except WeightSyncError:
        store.set(_GO, b"no")
        raise
    store.set(_GO, _YES)


def _await_sender(store: dist.TCPStore, rank: int) -> None:
    store.set(_PRESENT.format(rank), b"")
    if store.get(_GO) != _YES:
        raise WeightStreamAborted(f"{WeightStreamAborted.MARK} building the weight-sync group; see its own error")


def _own_address() -> str:
    import ray  # not at the top: vLLM's worker processes import this module and have no use for Ray

    return ray.util.get_node_ip_address()


def _gloo_device(peer_address: str) -> Any:
    """The network interface that leads to the peer, or the one named by GLOO_SOCKET_IFNAME."""
    if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
        return ProcessGroupGloo.create_device(interface=interface)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer_address, 9))  # sends nothing: only asks the routing table
        return ProcessGroupGloo.create_device(hostname=probe.getsockname()[0])
