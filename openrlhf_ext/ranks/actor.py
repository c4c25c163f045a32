"""What the Ray actors of all models have in common: one rank each, every RPC a collective.

They speak the protocol of OpenRLHF's actors, but do not import OpenRLHF, of which a rank needs nothing.

The driver imports these modules for their classes, and rank 0 says where to meet before the others start: what needs
Megatron imports it inside of its methods, after ``load_libraries`` has done so while the engines start.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from importlib import import_module
from typing import Any

import psutil
import ray
import torch
import torch.distributed as dist

from openrlhf_ext.imports import without_collection
from openrlhf_ext.megatron.settings import ModelSettings
from openrlhf_ext.megatron.watchdog import start_watchdog
from openrlhf_ext.rollout.process import own_identity
from openrlhf_ext.stores import open_store


class RankActor:
    """One rank of a Megatron model. The group calls every method on all ranks."""

    def __init__(self, world_size: int, rank: int, master_addr: str | None, master_port: int | None) -> None:
        """Puts the rendezvous into the environment; rank 0 gets no address and finds one (``get_master_addr_port``)."""
        self.is_first_of_replica = True
        if master_addr is None or master_port is None:
            self._store = open_store(_own_address())  # kept: `init_process_group` finds it
            self._address = (_own_address(), self._store.port)
        else:
            self._address = (master_addr, master_port)
        os.environ |= {
            "MASTER_ADDR": self._address[0],
            "MASTER_PORT": str(self._address[1]),
            "WORLD_SIZE": str(world_size),
            "RANK": str(rank),
            "LOCAL_RANK": _local_rank(),
        }
        if interface := _interface(_own_address()):
            # else gloo listens where the host's name leads, which Debian lets be 127.0.1.1: no other node gets there
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)

    def get_master_addr_port(self) -> tuple[str, int]:
        """Where the ranks meet. Not a collective."""
        return self._address

    def load_libraries(self) -> None:
        """Imports what ``init_model`` needs, which says it if that fails. Not a collective."""
        with without_collection():
            import_module("openrlhf_ext.megatron.policy")

    def join(self, settings: ModelSettings) -> dict[str, Any]:
        """Joins the process group of the model; returns what the process is."""
        from openrlhf_ext.megatron.distributed import initialize_distributed

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        initialize_distributed(settings.layout, settings.megatron.collective_timeout_s, settings.train.seed)
        self.is_first_of_replica = settings.layout.answers_for_replica(dist.get_rank())
        address = start_watchdog(settings.megatron.collective_timeout_s)
        return {"rank": dist.get_rank(), "phases": address, **own_identity()}

    def empty_cache(self) -> None:
        """Hands cached device memory back."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def execute_batch(self, method_name: str, all_data: dict[str, list], start_idx: int, end_idx: int) -> list:
        """OpenRLHF's batched call; our methods take one shard per data-parallel rank and pipeline inside it.

        All ranks of a replica come to the same answers: those of the first one go back, the others give None, because
        the caller fetches what all of them return.
        """
        ((name, values),) = all_data.items()
        answers = [getattr(self, method_name)(**{name: value}) for value in values[start_idx:end_idx]]
        return answers if self.is_first_of_replica else [None] * len(answers)


def _own_address() -> str:
    return ray.util.get_node_ip_address().strip("[]")  # IPv6 addresses come in brackets


def _interface(address: str) -> str | None:
    """The network interface that has an IPv4 address, or its network (127.0.0.2 is lo's); None: there is none."""
    own = ipaddress.ip_address(address)
    found = None
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family != socket.AF_INET or not entry.netmask:
                continue
            if entry.address == address:
                return name
            if own in ipaddress.ip_network(f"{entry.address}/{entry.netmask}", strict=False):
                found = name
    return found


def _local_rank() -> str:
    """Ray shows an actor only its own GPU, unless it was told not to."""
    if os.environ.get("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"):
        return str(ray.get_gpu_ids()[0])
    return "0"
