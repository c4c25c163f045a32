"""Weight sync through GPU memory that policy and engine share: for colocated engines, where NCCL cannot be used.

Every policy rank keeps two staging buffers on its GPU and tells the engines' workers once how to open them (CUDA IPC).
Rank 0 has the bucket; the policy's own process group copies it to the other ranks' buffers; then a key in the sender's
TCPStore says that it is there. Each worker reads the buffer of the policy rank on its own GPU, copies the frame out,
which takes a thousandth of a second for a bucket, and counts itself in. When all have, the buffer is free again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from openrlhf_ext.rollout.sync.base import Link, WeightSyncError, WeightTransferFailed
from openrlhf_ext.rollout.sync.plan import Bucket, BucketPlan
from openrlhf_ext.rollout.sync.sender import EngineSender, Staging, join, largest_frame
from openrlhf_ext.rollout.sync.stream import StreamReceiver, WeightStream, frame_bytes

_POLL_S = 0.0002
_LOOK_AT_ENGINES_S = 0.1
_READY, _TAKEN, _LEFT = "frame/{}", "taken/{}", b"left"


class DeviceMemory(Protocol):
    """How memory of a device is shared between processes."""

    def key(self) -> str:
        """The device of this process, the same text in every process that shares it."""

    def allocate(self, nbytes: int) -> Tensor:
        """A uint8 vector that can be shared."""

    def share(self, tensor: Tensor) -> list[Any]:
        """What another process needs to open it: numbers and texts."""

    def open(self, handle: list[Any]) -> Tensor:
        """The same memory in another process on the same device."""

    def synchronize(self) -> None:
        """Wait until what this process has asked of the device is done."""


class CudaMemory:
    """CUDA IPC. Needs PyTorch's ordinary allocator (not expandable segments), as colocated engines do anyway."""

    def key(self) -> str:
        """UUID of the current GPU, which CUDA_VISIBLE_DEVICES does not change."""
        return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)

    def allocate(self, nbytes: int) -> Tensor:
        """On the current GPU."""
        return torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", torch.cuda.current_device()))

    def share(self, tensor: Tensor) -> list[Any]:
        """`UntypedStorage._share_cuda_` without the device number, bytes as hexadecimal text."""
        _, *handle = tensor.untyped_storage()._share_cuda_()
        return [part.hex() if isinstance(part, bytes) else part for part in handle] + [tensor.storage_offset()]

    def open(self, handle: list[Any]) -> Tensor:
        """Map the memory into this process, under this process's number of the GPU."""
        memory, size, offset, counter, counter_offset, event, wait, start = handle
        storage = torch.UntypedStorage._new_shared_cuda(
            torch.cuda.current_device(), bytes.fromhex(memory), size, offset, bytes.fromhex(counter), counter_offset,
            bytes.fromhex(event), wait,
        )  # fmt: skip
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[start:]

    def synchronize(self) -> None:
        """The whole device: the worker reads from another process's streams."""
        torch.cuda.synchronize()


class Relay:
    """The staging buffers of one policy rank, and the copying of rank 0's frames into those of the others.

    Building one is a collective of the policy's ranks, as `spread` is.
    """

    def __init__(self, plan: BucketPlan, memory: DeviceMemory, group: dist.ProcessGroup | None = None) -> None:
        """
        Args:
            plan: what is sent.
            memory: of this rank's device.
            group: the policy's ranks; None: the default group, or this process alone if there is none.
        """
        self._plan = plan
        self._memory = memory
        self._group = group
        self._alone = not dist.is_initialized() or dist.get_world_size(group) == 1
        nbytes = largest_frame(plan)
        self.staging: Staging = (memory.allocate(nbytes), memory.allocate(nbytes))
        self.buffers = self._gather_handles()

    def _gather_handles(self) -> dict[str, list[Any]]:
        mine = (self._memory.key(), [self._memory.share(buffer) for buffer in self.staging])
        if self._alone:
            return dict([mine])
        everyone: list = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, mine, group=self._group)
        return dict(everyone)

    def spread(self, bucket: Bucket) -> None:
        """Copy the frame of `bucket` from rank 0's staging buffer to every rank's; returns when all have it."""
        if not self._alone:
            frame = self.staging[bucket.index % 2][: frame_bytes(bucket)]
            dist.broadcast(frame, src=0, group=self._group)
            self.synchronize()
            dist.barrier(group=self._group)

    def synchronize(self) -> None:
        """Wait for this rank's device; not a collective."""
        self._memory.synchronize()


class IpcSendingEnd:
    """Rank 0's end: announces frames and waits until every worker has taken them."""

    def __init__(self, store: dist.Store, relay: Relay, workers: int, timeout_s: float) -> None:
        self.watch: Callable[[], None] | None = None
        self.timeout_s = timeout_s
        self._store = store
        self._relay = relay
        self._workers = workers
        self._announced = 0

    def start(self, frame: Tensor) -> IpcTransfer:
        """Announce the frame, which lies in one of the staging buffers, here and on the other ranks."""
        turn = 0 if frame.data_ptr() == self._relay.staging[0].data_ptr() else 1
        self._relay.synchronize()
        number = self._announced
        self._announced += 1
        self._store.set(_READY.format(number), str(turn).encode())
        return IpcTransfer(self, self._store, number, self._workers)

    def close(self) -> None:
        """Tell the workers that nothing more will come."""
        self._store.set(_READY.format(self._announced), _LEFT)


@dataclass
class IpcTransfer:
    """An announced frame."""

    end: IpcSendingEnd
    store: dist.Store
    number: int
    workers: int

    def wait(self) -> None:
        """Until every worker has copied the frame out.

        Raises:
            WeightTransferFailed: a worker has left, or the deadline passed.
        """
        key = _TAKEN.format(self.number)
        start = last_look = time.monotonic()
        while (taken := self.store.add(key, 0)) < self.workers:
            time.sleep(_POLL_S)
            now = time.monotonic()
            if self.end.watch is not None and now - last_look > _LOOK_AT_ENGINES_S:
                self.end.watch()
                last_look = now
            if now - start > self.end.timeout_s:
                raise WeightTransferFailed(
                    f"{taken} of {self.workers} engine workers took a bucket within {self.end.timeout_s:g} s"
                )
        for used in (key, _READY.format(self.number)):
            self.store.delete_key(used)


class IpcReceivingEnd:
    """A worker's end."""

    def __init__(self, store: dist.Store, buffers: Sequence[Tensor], memory: DeviceMemory, timeout_s: float) -> None:
        self.buffers = buffers
        self.memory = memory
        self.store = store
        self.timeout_s = timeout_s
        self._next = 0

    def start(self, nbytes: int) -> IpcArrival:
        """The next frame."""
        self._next += 1
        return IpcArrival(self, self._next - 1, nbytes)


@dataclass
class IpcArrival:
    """A frame that has been or will be announced."""

    end: IpcReceivingEnd
    number: int
    nbytes: int

    def wait(self) -> Tensor:
        """The worker's own copy of the frame; the sender's buffer is free for the next one."""
        key = _READY.format(self.number)
        try:
            self.end.store.wait([key], timedelta(seconds=self.end.timeout_s))
            turn = self.end.store.get(key)
        except RuntimeError as error:
            raise WeightTransferFailed(f"no bucket came within {self.end.timeout_s:g} s: {error}") from error
        if turn == _LEFT:
            raise WeightTransferFailed("the sender has left the weight-sync group")
        frame = self.end.buffers[int(turn)][: self.nbytes].clone()
        self.end.memory.synchronize()
        self.end.store.add(_TAKEN.format(self.number), 1)
        return frame


class IpcWeightSender(EngineSender):
    """The policy's end, on rank 0."""

    transport = "cuda_ipc"

    def __init__(
        self, plan: BucketPlan, engines: Sequence[Any], tensor_parallel_size: int, timeout_s: float, relay: Relay
    ) -> None:
        """`relay`: this rank's; see `EngineSender` for the others."""
        super().__init__(plan, engines, tensor_parallel_size, timeout_s, relay.staging)
        self._relay = relay

    def _open(self, store: dist.TCPStore, address: str) -> IpcSendingEnd:
        return IpcSendingEnd(store, self._relay, self.world_size - 1, self._timeout_s)

    def _buffers(self) -> dict[str, Any]:
        return self._relay.buffers


class IpcWeightReceiver(StreamReceiver):
    """An engine worker's end."""

    def __init__(self, plan: BucketPlan, link: Link, worker: int, memory: DeviceMemory | None = None) -> None:
        """
        Args:
            plan: what is sent.
            link: the sender.
            worker: number of this worker within its engine.
            memory: of this worker's device; None: CUDA.

        Raises:
            WeightSyncError: no policy rank is on this worker's device.
        """
        memory = memory or CudaMemory()
        if memory.key() not in link.buffers:
            raise WeightSyncError(
                f"vllm.sync_backend cuda_ipc needs a policy rank on the GPU of every engine worker: this worker's is "
                f"{memory.key()}, the policy's are {sorted(link.buffers)}; use nccl for engines with GPUs of their own"
            )
        store = join(link, link.first_rank + worker)
        self._buffers = [memory.open(handle) for handle in link.buffers[memory.key()]]
        self._stream = WeightStream(IpcReceivingEnd(store, self._buffers, memory, link.timeout_s), plan)

    def close(self) -> None:
        """Close the sender's buffers. A sender in the middle of a stream learns it from the engine's error."""
        self._buffers.clear()
