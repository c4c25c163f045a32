"""Host memory on the NUMA node of a GPU. A page lies where the thread ran that touched it first,
and copies between a GPU and memory of the other socket pass the link between the sockets, in both
directions of ``ds.adam_offload``."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

logger = logging.getLogger(__name__)
SYSFS = Path("/sys")
_ASK_S = 60.0
T = TypeVar("T")


def gpu_addresses() -> dict[str, str]:
    """PCI addresses of GPUs in sysfs's form (``0000:1b:00.0``) by UUID; none without nvidia-smi,
    or, with a warning, if it fails or does not answer."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", "--query-gpu=uuid,pci.bus_id", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=True)
    except subprocess.SubprocessError as error:
        logger.warning("NUMA nodes of GPUs are not known: %s", error)
        return {}
    rows = (line.split(", ") for line in answer.stdout.splitlines())
    return {
        uuid.removeprefix("GPU-"): address[-len("0000:00:00.0") :].lower() for uuid, address in rows
    }


def node_of(address: str) -> tuple[int, set[int]] | None:
    """Number and cores of the NUMA node of a PCI device; None: sysfs does not say, as on machines
    with one node."""
    try:
        node = int((SYSFS / "bus/pci/devices" / address / "numa_node").read_text())
        listed = (
            (SYSFS / f"devices/system/node/node{node}/cpulist").read_text() if node >= 0 else ""
        )
    except OSError:
        return None
    spans = [tuple(map(int, part.split("-"))) for part in listed.split(",") if part.strip()]
    return (
        (node, {core for span in spans for core in range(span[0], span[-1] + 1)}) if spans else None
    )


def near_gpu(uuid: str, work: Callable[[], T]) -> T:
    """What ``work`` returns. It runs in a thread of its own on the cores of the GPU's node, of
    which OpenMP's threads that it starts stay, and in this one where the node is not known or this
    process may not use its cores."""
    node = node_of(gpu_addresses().get(uuid, ""))
    cores = node[1] & os.sched_getaffinity(0) if node else set()
    if not cores:
        return work()

    def placed() -> T:
        os.sched_setaffinity(0, cores)  # of this thread
        return work()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(placed).result()
