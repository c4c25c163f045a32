"""Base classes of the models' Ray actors. Each holds one rank, and every RPC is a collective;
``TrainedActor`` adds training.

The actors follow the protocol of OpenRLHF's actors but do not import OpenRLHF, which no rank needs.
The driver imports these modules for their classes, and rank 0 finds the rendezvous address before
the others start. So methods that need Megatron import it themselves, after ``load_libraries`` has
imported it while the engines start.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import ray
import torch
import torch.distributed as dist

from openrlhf_ext.checkpoints import FileEntry
from openrlhf_ext.checkpoints.store import Witness, write_receipt
from openrlhf_ext.groups.stores import open_store
from openrlhf_ext.groups.watchdog import phase, start_watchdog
from openrlhf_ext.imports import without_collection
from openrlhf_ext.megatron.settings import ModelSettings
from openrlhf_ext.rollout.process import own_identity

if TYPE_CHECKING:
    from openrlhf_ext.megatron.critic import MegatronCritic
    from openrlhf_ext.megatron.host_memory import Swap
    from openrlhf_ext.megatron.policy import MegatronPolicy


class RankActor:
    """One rank of a Megatron model. The group calls every method on all ranks."""

    def __init__(
        self, world_size: int, rank: int, master_addr: str | None, master_port: int | None
    ) -> None:
        """Puts the rendezvous address into the environment; rank 0 gets none and finds one
        (``get_master_addr_port``)."""
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
            # otherwise gloo listens at the address of the host's name, which Debian may map to
            # 127.0.1.1: unreachable from other nodes
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)

    def get_master_addr_port(self) -> tuple[str, int]:
        return self._address

    def load_libraries(self) -> None:
        with without_collection():
            import_module("openrlhf_ext.megatron.policy")

    def join(self, settings: ModelSettings) -> dict[str, Any]:
        from openrlhf_ext.megatron.distributed import initialize_distributed

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        initialize_distributed(
            settings.layout, settings.megatron.collective_timeout_s, settings.train.seed
        )
        self.is_first_of_replica = settings.layout.answers_for_replica(dist.get_rank())
        address = start_watchdog(settings.megatron.collective_timeout_s)
        return {"rank": dist.get_rank(), "phases": address, **own_identity()}

    def empty_cache(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def for_replica(self, method: str, part: Any, *shared: Any) -> Any:
        """Calls a method with the part of this rank's replica and the shared arguments. Only the
        first rank of a replica answers, since the caller fetches what all ranks return."""
        answer = getattr(self, method)(part, *shared)
        return answer if self.is_first_of_replica else None


def _own_address() -> str:
    return ray.util.get_node_ip_address().strip("[]")  # IPv6 addresses come in brackets


def _interface(address: str) -> str | None:
    """Returns the network interface that has an IPv4 address, or has its network (127.0.0.2 is
    lo's); None if there is none."""
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
    """Returns 0 unless Ray's GPU isolation is off: Ray shows an actor only its own GPU."""
    if os.environ.get("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"):
        return str(ray.get_gpu_ids()[0])
    return "0"


class TrainedActor(RankActor, Witness):
    """An actor that trains. In a colocated run its model is on the device only while in use: a
    method begins with ``reload_states`` for the states that it needs, and ends with
    ``release_model``."""

    _writing: Future | None = None
    _writer: ThreadPoolExecutor | None = None

    def hold(self, model: MegatronPolicy | MegatronCritic, sleeps: bool) -> None:
        """Takes the model; call it once, when the model is built. ``sleeps``: others need its
        memory (``ds.enable_sleep``)."""
        from openrlhf_ext.megatron.host_memory import ModelStates

        self._model, self.sleeps = model, sleeps
        self.states = ModelStates(
            model.models, model.optimizer, model.device, model.settings.converters
        )
        self.offloads: list[Swap] = []
        self.reloads: list[Swap] = []

    def offload_states(self, *kinds: str) -> None:
        """Moves states (``megatron.host_memory.KINDS``; all if none are named) to host memory. Not
        a collective."""
        self.offloads.append(self.states.offload(*kinds))

    def reload_states(self, *kinds: str) -> None:
        self.reloads.append(self.states.reload(*kinds))

    def release_model(self) -> None:
        if self.sleeps:
            self.offload_states()

    def take_swaps(self) -> dict[str, float]:
        """Returns the size and time of all moves since the last call; empty if the model does not
        sleep."""
        offloads, reloads = self.offloads, self.reloads
        self.offloads, self.reloads = [], []
        if not self.sleeps:
            return {}
        return {
            "offload/freed_mib": sum(swap.measured_bytes for swap in offloads) / 2**20,
            "offload/seconds": sum(swap.seconds for swap in offloads),
            "offload/reload_seconds": sum(swap.seconds for swap in reloads),
        }

    def whole_model(self) -> MegatronPolicy | MegatronCritic:
        self.reload_states()
        return self._model

    def save_model(self, path: str) -> dict[str, int]:
        """Writes the model as an HF checkpoint; returns the sizes of its files on rank 0."""
        self.reload_states("parameters")
        return self._model.save_hf(path)

    # ---- resumable checkpoints

    def extra_state(self) -> dict[str, Any]:
        """Returns plain values for a checkpoint, which keeps rank 0's."""
        return {}

    def load_extra_state(self, extra: dict[str, Any]) -> None:
        """Restores the values of ``extra_state``."""

    def save_state(self, folder: str, name: str, background: bool) -> list[FileEntry] | None:
        """Writes this rank's part of the model ``name`` and returns its files. With ``background``,
        returns None as soon as the state is copied to host memory; ``has_saved`` and a receipt in
        the folder (``write_receipt``) report when it is written."""
        from openrlhf_ext.megatron.checkpoint import take_snapshot

        with phase("collecting a checkpoint"):
            snapshot = take_snapshot(self.whole_model(), self.extra_state(), copy=background)
        if not background:
            entries = snapshot.write(Path(folder), name)
            self.release_model()
            return entries
        self.release_model()
        self._writer = self._writer or ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        part = f"{name}-{dist.get_rank()}"
        self._writing = self._writer.submit(
            lambda: write_receipt(Path(folder), part, snapshot.write(Path(folder), name))
        )
        return None

    def has_saved(self, wait: bool) -> bool:
        """Returns whether the last background save is written; ``wait`` waits for it. Raises
        CheckpointError."""
        if self._writing is None:
            raise RuntimeError("has_saved() tells of a background save, and none was begun")
        if done := wait or self._writing.done():
            self._writing.result()
        return done

    @phase("loading a checkpoint")
    def load_state(self, folder: str, name: str) -> None:
        from openrlhf_ext.megatron.checkpoint import load_checkpoint

        self.load_extra_state(load_checkpoint(self.whole_model(), Path(folder) / name))
        self.release_model()

    @phase("checking what was loaded")
    def check_loaded(self, folder: str, name: str) -> None:
        from openrlhf_ext.megatron.checkpoint import check_loaded

        check_loaded(self.whole_model(), Path(folder) / name)
        self.release_model()
