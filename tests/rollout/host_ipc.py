"""`cuda_ipc` with host memory in the place of a GPU's: what is shared is anonymous memory.

As on a GPU, what a process asks for is done at the latest when it waits for its device, and here
never sooner.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openrlhf_ext.rollout.sync.cuda_ipc import CudaIpc
from openrlhf_ext.rollout.sync.gloo import HostMemory


class HostIpc(CudaIpc):
    """`name` stands for the device of this process."""

    def __init__(self) -> None:
        self.name = "host"
        self.made: dict[int, tuple[HostMemory, Tensor]] = {}
        self.asked: list[tuple[Tensor, Tensor]] = []

    def key(self) -> str:
        return self.name

    def allocate(self, nbytes: int) -> Tensor:
        """What is written to it reaches the shared memory when this process waits for its
        device."""
        tensor = torch.zeros(nbytes, dtype=torch.uint8)
        self.made[tensor.data_ptr()] = HostMemory.create(nbytes), tensor
        return tensor

    def share(self, tensor: Tensor) -> list[Any]:
        return [self.made[tensor.data_ptr()][0].handle]

    def open(self, handle: list[Any]) -> Shared:
        return Shared(HostMemory.open(handle[0]).tensor, self.asked)

    def synchronize(self) -> None:
        for memory, tensor in self.made.values():
            memory.tensor.copy_(tensor)
        while self.asked:
            copy, source = self.asked.pop()
            copy.copy_(source)


class Shared:
    """Memory of another process, with what is done to it: a copy has its content when the device
    was waited for."""

    def __init__(self, tensor: Tensor, asked: list[tuple[Tensor, Tensor]]) -> None:
        self.tensor, self.asked = tensor, asked

    def __getitem__(self, where: slice) -> Shared:
        return Shared(self.tensor[where], self.asked)

    def clone(self) -> Tensor:
        copy = torch.zeros_like(self.tensor)
        self.asked.append((copy, self.tensor))
        return copy


TRANSPORT = HostIpc()
