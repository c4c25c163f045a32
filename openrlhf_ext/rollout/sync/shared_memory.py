"""Host memory that several processes of one machine see, without a name that could be left behind."""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor

from openrlhf_ext.rollout.identity import machine_id


class HostMemory:
    """A block of anonymous shared memory as a uint8 tensor.

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
