"""Which table of operations a process uses."""

from __future__ import annotations

from functools import cache

from openrlhf_ext.exact.cpu import CpuOperations
from openrlhf_ext.exact.operations import Operations


@cache
def device_operations() -> Operations:
    """The table of this process's device. Raises NotExact if this process cannot use it."""
    return CpuOperations()
