"""Weight sync over gloo: on every device, through host memory, from several policy ranks at a time.
Where the ranks of a stream run on one host, its sender's staging buffers are shared memory, and
every rank puts its own part of a bucket into them."""

from __future__ import annotations

import logging
import mmap
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroupGloo

from openrlhf_ext.rollout.process import machine_id
from openrlhf_ext.rollout.sync.base import BroadcastTransport, Staging
from openrlhf_ext.rollout.sync.plan import Bucket, BucketPlan

logger = logging.getLogger(__name__)


class Gloo(BroadcastTransport):
    most_streams = 8
    """A worker has a connection to every other and a buffer for each stream."""

    def staging(
        self, plan: BucketPlan, streams: Sequence[Sequence[int]], timeout_s: float
    ) -> Staging:
        """Memory that all ranks of a stream see if they are on one host, its sender's own
        otherwise."""
        shared: Staging | None = None
        for ranks in streams:
            if len(ranks) > 1:  # every rank has to take part in making a group
                group = dist.new_group(
                    list(ranks), timeout=timedelta(seconds=timeout_s), backend="gloo"
                )
                if (
                    dist.get_rank() in ranks
                    and (buffers := _share_buffers(plan, group, ranks[0])) is not None
                ):
                    shared = SharedStaging(buffers, group)
        return shared or super().staging(plan, streams, timeout_s)

    def open_group(
        self, store: dist.Store, address: str, rank: int, world_size: int, timeout_s: float
    ) -> Any:
        kind: Any = ProcessGroupGloo  # its options are in no type stub
        options = kind._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [_gloo_device(address)]
        return kind(store, rank, world_size, options)


class SharedStaging(Staging):
    """Buffers that every rank of a stream sees. A rank writes to a buffer after the barrier of the
    bucket before; the sender enters that one when the buffer is free."""

    shared = True

    def __init__(self, buffers: tuple[Tensor, Tensor], group: dist.ProcessGroup) -> None:
        super().__init__(buffers)
        self._group = group

    def complete(self, bucket: Bucket) -> None:
        dist.barrier(group=self._group)


def _share_buffers(
    plan: BucketPlan, group: dist.ProcessGroup, sender: int
) -> tuple[Tensor, Tensor] | None:
    """The sender's buffers on every rank of the group; None if they are not all on one host, or
    cannot share memory."""
    made = (
        [HostMemory.create(plan.largest_frame) for _ in range(2)]
        if dist.get_rank() == sender
        else []
    )
    handles = [[memory.handle for memory in made]]
    dist.broadcast_object_list(handles, src=sender, group=group)
    opened, problem = made, None
    if dist.get_rank() != sender:
        try:
            opened = [HostMemory.open(handle) for handle in handles[0]]
        except OSError as error:
            problem = f"rank {dist.get_rank()}: {error}"
    problems: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(problems, problem, group=group)
    for memory in made:
        memory.close()
    if any(problems):
        if dist.get_rank() == sender:
            logger.info(
                "weights are gathered by messages, not in shared memory: %s",
                list(filter(None, problems)),
            )
        return None
    return opened[0].tensor, opened[1].tensor


def _gloo_device(peer_address: str) -> Any:
    """The network interface that leads to the peer, or the one named by GLOO_SOCKET_IFNAME."""
    if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
        return ProcessGroupGloo.create_device(interface=interface)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer_address, 9))  # sends nothing: only asks the routing table
        return ProcessGroupGloo.create_device(hostname=probe.getsockname()[0])


class HostMemory:
    """A block of anonymous shared memory as a uint8 tensor, without a name that could be left
    behind. Another process of the same user opens it by `handle`, through /proc, while the process
    that made it has it open; the kernel frees it with the last one. /dev/shm, unlike it, is often
    limited to 64 MiB in containers."""

    def __init__(self, tensor: Tensor, handle: str, descriptor: int | None) -> None:
        self.tensor = tensor
        self.handle = handle
        self._descriptor = descriptor

    @classmethod
    def create(cls, nbytes: int) -> HostMemory:
        descriptor = os.memfd_create("weight-sync")
        os.ftruncate(descriptor, nbytes)
        handle = f"{machine_id()}:{os.getpid()}:{descriptor}"
        return cls(_mapped(descriptor, nbytes), handle, descriptor)

    @classmethod
    def open(cls, handle: str) -> HostMemory:
        """What another process created; raises OSError on another host, in another container, or
        under another user."""
        machine, pid, number = handle.rsplit(":", 2)
        if machine != machine_id():
            raise OSError(
                f"the shared memory {handle} is on another machine, or in another container"
            )
        descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        try:
            return cls(_mapped(descriptor, os.fstat(descriptor).st_size), handle, None)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Nobody can open it any more; the tensor stays usable where it is."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _mapped(descriptor: int, nbytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)


TRANSPORT = Gloo()
