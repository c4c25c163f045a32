"""Host memory for received frames, used again when the tensors of an earlier frame are gone.

Memory that is new to a process is slow: the kernel hands it out page by page and fills it with zeros. Receiving into
new memory takes twice as long as receiving into memory that has been used before (docs/weight_sync.md).
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class FramePool:
    """Lends memory to frames. It keeps as many blocks as frames were ever alive at the same time, usually two."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []

    def take(self, nbytes: int) -> Tensor:
        """A uint8 vector, contents undefined. Its memory is lent again when no tensor on it is left."""
        for block in self._blocks:
            if block.size >= nbytes and block.is_free:
                return block.lend(nbytes)
        self._blocks = [block for block in self._blocks if not block.is_free]  # too small ones
        self._blocks.append(_Block(nbytes))
        return self._blocks[-1].lend(nbytes)


class _Block:
    """Anonymous memory, and the tensor storage that uses it now."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._user: StorageWeakRef | None = None

    @property
    def is_free(self) -> bool:
        return self._user is None or self._user.expired()

    def lend(self, nbytes: int) -> Tensor:
        frame = torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes)
        self._user = StorageWeakRef(frame.untyped_storage())
        return frame
