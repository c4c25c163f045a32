"""Weight sync over gloo: on every device, through host memory."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo

from openrlhf_ext.rollout.sync.collective import CollectiveReceiver, CollectiveSender


class Gloo:
    """torch's gloo process group, on the network interface that leads to the sender."""

    polled = False

    def device(self) -> torch.device:
        """Host memory."""
        return torch.device("cpu")

    def open(self, store: dist.Store, address: str, rank: int, world_size: int, timeout_s: float) -> ProcessGroupGloo:
        """Connect to every other rank."""
        options = ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [_gloo_device(address)]
        return ProcessGroupGloo(store, rank, world_size, options)

    def failure(self, work: dist.Work) -> str | None:
        """Gloo's wait raises."""
        return None

    def abort(self, group: Any) -> None:
        """Dropping the last reference closes the connections."""


class GlooWeightSender(CollectiveSender):
    """The policy's end."""

    transport = "gloo"
    collective = Gloo()


class GlooWeightReceiver(CollectiveReceiver):
    """An engine worker's end."""

    collective = Gloo()


def _gloo_device(peer_address: str) -> Any:
    """The network interface that leads to the peer, or the one named by GLOO_SOCKET_IFNAME."""
    if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
        return ProcessGroupGloo.create_device(interface=interface)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer_address, 9))  # sends nothing: only asks the routing table
        return ProcessGroupGloo.create_device(hostname=probe.getsockname()[0])
