"""Host memory for frames: what one process uses again and again, and what several processes of a machine see."""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from openrlhf_ext.rollout.process import machine_id


class FramePool:
    """Lends memory to received frames, the same again when the tensors of an earlier frame are gone.

    Memory that is new to a process is slow: the kernel hands it out page by page and fills it with zeros. Receiving
    into new memory takes twice as long as into memory that has been used before (docs/weight_sync.md). The pool keeps
    as many blocks as frames were ever alive at the same time, usually two.
    """

    def __init__(self) -> None:
        self._blocks: list[tuple[mmap.mmap, StorageWeakRef]] = []
        """Anonymous memory, and the tensor storage that uses or last used it."""

    def take(self, nbytes: int) -> Tensor:
        """A uint8 vector, contents undefined. Its memory is lent again when no tensor on it is left."""
        for number, (memory, user) in enumerate(self._blocks):
            if len(memory) >= nbytes and user.expired():
                del self._blocks[number]
                return self._lend(memory, nbytes)
        self._blocks = [block for block in self._blocks if not block[1].expired()]  # those left over are too small
        return self._lend(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), nbytes)

    def _lend(self, memory: mmap.mmap, nbytes: int) -> Tensor:
        frame = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)
        self._blocks.append((memory, StorageWeakRef(frame.untyped_storage())))
        return frame


class HostMemory:
    """A block of anonymous shared memory as a uint8 tensor, without a name that could be left behind.

    Another process of the same user opens it by `handle`, through /proc, as long as the process that made it lives and
    has not closed it. The kernel frees it when the last process that has it open ends, however that happens. Unlike
    /dev/shm, which containers often limit to 64 MiB, it is limited only by the memory itself.
    """

    def __init__(self, tensor: Tensor, handle: str, descriptor: int | None) -> None:
        self.tensor = tensor
        self.handle = handle
        self._descriptor = descriptor

    @classmethod
    def create(cls, nbytes: int) -> HostMemory:
        """New memory, zero-filled; a page takes memory when it is first written to."""
        descriptor = os.memfd_create("weight-sync")
        os.ftruncate(descriptor, nbytes)
        handle = f"{machine_id()}:{os.getpid()}:{descriptor}"
        return cls(_mapped(descriptor, nbytes), handle, descriptor)

    @classmethod
    def open(cls, handle: str) -> HostMemory:
        """What another process created.

        Raises:
            OSError: it runs on another host or in another container, or under another user.
        """
        machine, pid, number = handle.rsplit(":", 2)
        if machine != machine_id():
            raise OSError(f"the shared memory {handle} is on another machine, or in another container")
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
