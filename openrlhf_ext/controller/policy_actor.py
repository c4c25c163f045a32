"""The Ray actor that holds one rank of the Megatron policy.

OpenRLHF's trainer drives it through ``RayActorGroup`` with the method names of its own policy actor: ``forward``,
``append``, ``fit``, ``broadcast_to_vllm``, ``save_model``, ``save_checkpoint``.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

from openrlhf_ext.compat import BaseModelActor
from openrlhf_ext.controller.shards import TrainingShard
from openrlhf_ext.megatron.batch import SequenceBatch, sequence_batch
from openrlhf_ext.megatron.policy import LogprobEntropy, MegatronPolicy, PolicySettings, initialize_distributed
from openrlhf_ext.rollout.probe import check_sync, probe_tokens
from openrlhf_ext.rollout.weight_sync import BucketPlan, TensorSpec, make_sender

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SyncSettings:
    """How weights reach the rollout engines and how the arrival is proved."""

    transport: str
    engine_tensor_parallel_size: int
    bucket_bytes: int
    timeout_s: float
    probe_tolerance: float
    probe_length: int


@dataclass(frozen=True)
class CheckpointSettings:
    """Where checkpoints made during training go, and how many are kept."""

    folder: str
    max_num: int


class PolicyActor(BaseModelActor):
    """One rank of the policy. Every RPC is a collective: the group calls it on all ranks."""

    def init_model_from_pretrained(
        self,
        settings: PolicySettings,
        sync: SyncSettings,
        checkpoints: CheckpointSettings,
        max_epochs: int,
        engines: list,
    ) -> dict[str, Any]:
        """Builds the rank's model and optimizer and joins the weight-sync group; returns what the process is."""
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        initialize_distributed(settings.layout, settings.collective_timeout_s, settings.seed)
        self.policy = MegatronPolicy(settings)
        self.sync, self.checkpoints, self.engines, self.max_epochs = sync, checkpoints, engines, max_epochs
        self.shard: TrainingShard | None = None
        self.version = 0
        self.sender = self._connect() if dist.get_rank() == 0 and engines else None
        return {"rank": dist.get_rank(), "pid": os.getpid(), "host": socket.gethostname()}

    def _connect(self):
        specs = [TensorSpec(name, shape, dtype) for name, shape, dtype in self.policy.hf_specs()]
        sender = make_sender(
            self.sync.transport, BucketPlan.build(specs, self.sync.bucket_bytes), self.engines,
            self.sync.engine_tensor_parallel_size, self.sync.timeout_s,
        )  # fmt: skip
        sender.connect()
        return sender

    def empty_cache(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def execute_batch(self, method_name: str, all_data: dict[str, list], start_idx: int, end_idx: int) -> list:
        """OpenRLHF's batched call; our methods take one shard per data-parallel rank and pipeline inside it."""
        ((name, values),) = all_data.items()
        return [getattr(self, method_name)(**{name: value}) for value in values[start_idx:end_idx]]

    def forward(self, batch: SequenceBatch) -> LogprobEntropy | None:
        """Old log-probs and entropies of this replica's sequences."""
        return self.policy.logprobs(batch) if len(batch) else None

    def append(self, experience: TrainingShard) -> None:
        """Takes this replica's share of the next train step."""
        self.shard = experience

    def fit(self, kl_ctl: float = 0.0) -> dict[str, float]:
        """One optimizer step per mini-batch, ``max_epochs`` times over; metrics are the same on every rank."""
        steps = [
            self.policy.train_step(mini.batch, mini.shaped, mini.shaped.algorithm)
            for _ in range(self.max_epochs)
            for mini in self.shard.mini_batches
        ]
        self.shard = None
        mean = {name: sum(step[name] for step in steps) / len(steps) for name in steps[-1]}
        return mean | {"lr": steps[-1]["lr"], "optimizer_steps": float(len(steps))}

    def broadcast_to_vllm(self) -> dict[str, float]:
        """Sends the weights to all engines and proves that they sample from them."""
        started = time.perf_counter()
        self.version += 1
        if self.sender is not None:
            self.sender.send(self.policy.export(), self.version)
        else:
            for _ in self.policy.export():
                pass
        seconds = time.perf_counter() - started
        return self.prove_sync() | {"weight_sync/seconds": seconds}

    def prove_sync(self) -> dict[str, float]:
        """Compares the engines' log-probs of a fixed prompt with the policy's; raises WeightSyncMismatch."""
        tokens = probe_tokens(self.policy.shape.vocab_size, self.sync.probe_length, self.policy.settings.seed)
        row = torch.tensor(list(tokens), dtype=torch.long)
        ours = self.policy.logprobs(sequence_batch([row], [torch.ones(len(row) - 1)]), temperature=1.0).logprobs_BT[0]
        gauge = 0.0
        if self.sender is not None:
            theirs = ray.get([e.probe_logprobs.remote(row.tolist()) for e in self.engines], timeout=self.sync.timeout_s)
            gauge = check_sync(ours, theirs, self.sync.probe_tolerance, self.version)
        dist.barrier()
        return {"weight_sync/probe_max_abs_diff": gauge, "weight_sync/version": float(self.version)}

    def save_model(self, path: str) -> None:
        """Writes the final HF checkpoint."""
        self.policy.save_hf(path)

    def save_checkpoint(self, tag: str, client_states=None, metric_value=None, metric_key=None) -> None:
        """Writes ``<ckpt.path>/<tag>_hf``; the oldest step checkpoints beyond ``ckpt.max_num`` are deleted."""
        folder = Path(self.checkpoints.folder)
        self.policy.save_hf(folder / f"{tag}_hf")
        if dist.get_rank() == 0:
            for old in step_checkpoints(folder)[: -self.checkpoints.max_num]:
                shutil.rmtree(old)


def step_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints named ``global_step<N>_hf``, oldest first."""
    return sorted(folder.glob("global_step*_hf"), key=lambda p: int(re.sub(r"\D", "", p.name)))
