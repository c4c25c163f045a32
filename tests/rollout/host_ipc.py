"""`cuda_ipc` with host memory in the place of a GPU's: what is shared is anonymous memory."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from openrlhf_ext.rollout.sync.cuda_ipc import CudaIpc
from openrlhf_ext.rollout.sync.memory import HostMemory


class HostIpc(CudaIpc):
    """`name` stands for the device of this process."""

    def __init__(self) -> None:
        self.name = "host"
        self.made: dict[int, HostMemory] = {}

    def key(self) -> str:
        return self.name

    def allocate(self, nbytes: int) -> Tensor:
        memory = HostMemory.create(nbytes)
        self.made[memory.tensor.data_ptr()] = memory
        return memory.tensor

    def share(self, tensor: Tensor) -> list[Any]:
        return [self.made[tensor.data_ptr()].handle]

    def open(self, handle: list[Any]) -> Tensor:
        return HostMemory.open(handle[0]).tensor

    def synchronize(self) -> None:
        pass


TRANSPORT = HostIpc()
