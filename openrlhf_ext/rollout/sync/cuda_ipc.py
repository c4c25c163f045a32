"""Weight sync through GPU memory that policy and engine share: for colocated engines, where NCCL
cannot be used.

Every policy rank keeps two staging buffers on its GPU, which the engines' workers open (CUDA IPC).
The policy's own process group copies rank 0's bucket to the other ranks' buffers; then a key in the
sender's TCPStore says that it is there. Each worker copies the frame out of the buffer on its own
GPU and counts itself in. When all have, the buffer is free again.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from openrlhf_ext.rollout.sync.base import (
    Link,
    Staging,
    Transport,
    WeightSyncError,
    WeightTransferFailed,
    second_connection,
    wait_until,
)
from openrlhf_ext.rollout.sync.plan import Bucket, BucketPlan

_POLL_S = 0.0002
_numbers = itertools.count()
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_PR_SET_PTRACER, _ANY_PROCESS = 0x59616D61, ctypes.c_ulong(-1)  # linux/prctl.h
_READY, _TAKEN, _LEFT = "frame/{}", "taken/{}", "left"


class CudaIpc(Transport):
    """CUDA IPC, of expandable segments too (seen on an H200 between two processes). `key` to
    `synchronize` are all that knows of CUDA: how memory of a device is shared between processes."""

    needs_gpu = True

    def key(self) -> str:
        """The UUID of the current GPU, which CUDA_VISIBLE_DEVICES does not change."""
        return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(
            nbytes, dtype=torch.uint8, device=torch.device("cuda", torch.cuda.current_device())
        )

    def share(self, tensor: Tensor) -> list[Any]:
        """`UntypedStorage._share_cuda_` without the device number, bytes as hexadecimal text."""
        allow_opening()
        _, *handle = tensor.untyped_storage()._share_cuda_()
        return [part.hex() if isinstance(part, bytes) else part for part in handle] + [
            tensor.storage_offset()
        ]

    def open(self, handle: list[Any]) -> Tensor:
        """Map the memory into this process, under this process's number of the GPU."""
        memory, size, offset, counter, counter_offset, event, wait, start = handle
        storage = torch.UntypedStorage._new_shared_cuda(
            torch.cuda.current_device(),
            bytes.fromhex(memory),
            size,
            offset,
            bytes.fromhex(counter),
            counter_offset,
            bytes.fromhex(event),
            wait,
        )
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[start:]

    def synchronize(self) -> None:
        """Wait for the whole device: the worker reads from another process's streams."""
        torch.cuda.synchronize()

    # ---- the transport

    def staging(
        self, plan: BucketPlan, streams: Sequence[Sequence[int]], timeout_s: float
    ) -> Relay:
        return Relay(plan, self, timeout_s)

    def worker_violation(self, handles: dict[str, Any]) -> str | None:
        if self.key() in handles:
            return None
        return (
            "vllm.sync_backend cuda_ipc needs a policy rank on the GPU of every engine worker: "
            f"this worker's is {self.key()}, the policy's are {sorted(handles)}; use nccl for "
            "engines with GPUs of their own"
        )

    def open_sender(self, store: dist.Store, link: Link, staging: Staging) -> IpcSendingEnd:
        return IpcSendingEnd(self, store, link, staging)

    def open_receiver(self, store: dist.Store, link: Link, rank: int) -> IpcReceivingEnd:
        return IpcReceivingEnd(self, store, link)


def ptrace_scope() -> int:
    """Who may open what a process holds, on this machine: 0 every process of the user, 1 its
    parents and those that it names (Ubuntu's default), 2 and 3 root or nobody (linux
    Documentation/admin-guide/LSM/Yama.rst)."""
    return int(_PTRACE_SCOPE.read_text()) if _PTRACE_SCOPE.exists() else 0


def allow_opening() -> None:
    """Let the user's other processes open this one's memory, as CUDA does for IPC
    (``pidfd_getfd``). Raises WeightSyncError."""
    if ptrace_scope() != 1:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PTRACER, _ANY_PROCESS, 0, 0, 0) != 0:
        raise WeightSyncError(
            f"vllm.sync_backend cuda_ipc: {_PTRACE_SCOPE} is 1 and prctl(PR_SET_PTRACER) fails "
            f"({os.strerror(ctypes.get_errno())}), so engines cannot open the policy's buffers: "
            "set kernel.yama.ptrace_scope to 0 (sysctl), or use vllm.sync_backend gloo"
        )


class Relay(Staging):
    """The staging buffers of one policy rank; building one is a collective of the policy's ranks,
    as `complete` is."""

    def __init__(self, plan: BucketPlan, memory: CudaIpc, timeout_s: float) -> None:
        super().__init__((memory.allocate(plan.largest_frame), memory.allocate(plan.largest_frame)))
        self._memory = memory
        self._alone = not dist.is_initialized() or dist.get_world_size() == 1
        self._timeout_s = timeout_s
        self._key, self._completed = f"openrlhf_ext/relay/{next(_numbers)}", 0
        # one of its own: a wait keeps its connection to itself, which the process group's threads
        # use too
        self._store: Any = (
            None if self._alone else second_connection(dist.distributed_c10d._get_default_store())
        )
        self.handles = self._gather_handles()

    def _gather_handles(self) -> dict[str, Any]:
        mine = (self._memory.key(), [self._memory.share(buffer) for buffer in self.buffers or ()])
        if self._alone:
            return dict([mine])
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        return dict(everyone)

    def complete(self, bucket: Bucket) -> None:
        """Copy the frame of `bucket` from rank 0's staging buffer to every rank's; returns when all
        have it."""
        if not self._alone:
            key = f"{self._key}/{self._completed}"
            self._completed += 1
            self._await_rank_0(key, bucket)
            dist.broadcast(self.frame(bucket), src=0)
            self._memory.synchronize()
            dist.barrier()
            if dist.get_rank() == 0:
                self._store.delete_key(key)

    def _await_rank_0(self, key: str, bucket: Bucket) -> None:
        """A rank that waited for rank 0 in the broadcast would take computing time from the engine
        that shares its GPU. The store answers when the key is set: of 64 ranks that asked again and
        again it would get 30,000 questions a second."""
        if dist.get_rank() == 0:
            self._store.set(key, "")
            return
        try:
            self._store.wait([key], timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise WeightTransferFailed(
                f"rank 0 had not filled bucket {bucket.index} after {self._timeout_s:g} s "
                f"(megatron.collective_timeout_s): {error}"
            ) from error


class IpcSendingEnd:
    """Rank 0's end: announces frames and waits until every worker has taken them."""

    def __init__(self, memory: CudaIpc, store: dist.Store, link: Link, staging: Staging) -> None:
        self.watch: Callable[[], None] | None = None
        self._memory, self._store, self._staging = memory, store, staging
        self._workers, self._timeout_s = link.world_size - 1, link.timeout_s
        self._announced = 0

    def send(self, frame: Tensor) -> Callable[[], None]:
        """Announce the frame, which lies in one of the staging buffers, here and on the other
        ranks."""
        first, _ = self._staging.buffers or (frame, frame)
        turn = 0 if frame.data_ptr() == first.data_ptr() else 1
        self._memory.synchronize()
        number = self._announced
        self._announced += 1
        self._store.set(_READY.format(number), str(turn))
        return lambda: self._wait(number)

    def _wait(self, number: int) -> None:
        """Until every worker has copied the frame out; raises WeightTransferFailed."""
        key = _TAKEN.format(number)

        def taken() -> int:
            return self._store.add(key, 0)

        def late() -> str:
            return (
                f"{taken()} of {self._workers} engine workers took a bucket within "
                f"{self._timeout_s:g} s"
            )

        wait_until(
            lambda: taken() >= self._workers,
            self.watch,
            self._timeout_s,
            late,
            longest_pause_s=_POLL_S,
        )
        for used in (key, _READY.format(number)):
            self._store.delete_key(used)

    def close(self) -> None:
        self._store.set(_READY.format(self._announced), _LEFT)


class IpcReceivingEnd:
    def __init__(self, memory: CudaIpc, store: dist.Store, link: Link) -> None:
        self._memory, self._store, self._timeout_s = memory, store, link.timeout_s
        self._buffers = [memory.open(handle) for handle in link.handles[memory.key()]]
        self._next = 0

    def receive(self, nbytes: int) -> Callable[[], Tensor]:
        number = self._next
        self._next += 1
        return lambda: self._take(number, nbytes)

    def _take(self, number: int, nbytes: int) -> Tensor:
        """The worker's own copy of the frame; the sender's buffer is free for the next one."""
        key = _READY.format(number)
        try:
            self._store.wait([key], timedelta(seconds=self._timeout_s))
            turn = self._store.get(key).decode()
        except RuntimeError as error:
            raise WeightTransferFailed(
                f"no bucket came within {self._timeout_s:g} s: {error}"
            ) from error
        if turn == _LEFT:
            raise WeightTransferFailed("the sender has left the weight-sync group")
        frame = self._buffers[int(turn)][:nbytes].clone()
        self._memory.synchronize()
        self._store.add(_TAKEN.format(number), 1)
        return frame

    def close(self) -> None:
        self._buffers.clear()


TRANSPORT = CudaIpc()
