"""What the Ray actors of models beside the policy have in common: one rank each, every RPC a collective."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
import torch.distributed as dist

from openrlhf_ext.compat import BaseModelActor
from openrlhf_ext.megatron.base import PolicySettings, initialize_distributed
from openrlhf_ext.megatron.phases import start_monitor


class RankActor(BaseModelActor):
    """One rank of a Megatron model. The group calls every method on all ranks."""

    def join(self, settings: PolicySettings) -> dict[str, Any]:
        """Joins the process group of the model; returns what the process is."""
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        initialize_distributed(settings.layout, settings.collective_timeout_s, settings.seed)
        address = start_monitor(settings.collective_timeout_s)
        return {"rank": dist.get_rank(), "pid": os.getpid(), "host": socket.gethostname(), "phases": address}

    def empty_cache(self) -> None:
        """Hands cached device memory back."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def execute_batch(self, method_name: str, all_data: dict[str, list], start_idx: int, end_idx: int) -> list:
        """OpenRLHF's batched call; our methods take one shard per data-parallel rank and pipeline inside it."""
        ((name, values),) = all_data.items()
        return [getattr(self, method_name)(**{name: value}) for value in values[start_idx:end_idx]]
