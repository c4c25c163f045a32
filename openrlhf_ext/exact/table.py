"""Which table of operations a process uses."""

from __future__ import annotations

from functools import cache

import torch

from openrlhf_ext.exact.cpu import CpuOperations
from openrlhf_ext.exact.gpu import GpuOperations
from openrlhf_ext.exact.operations import Operations


@cache
def device_operations() -> Operations:
    """The table of this process's device. Raises NotExact if this process cannot use it."""
    return GpuOperations() if torch.cuda.is_available() else CpuOperations()
