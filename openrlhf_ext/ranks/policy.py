"""The Ray actor that holds one rank of the Megatron policy.

OpenRLHF's trainer drives it through ``RayActorGroup`` with the method names of its own policy actor: ``forward``,
``append``, ``fit``, ``broadcast_to_vllm``, ``save_model``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist

from openrlhf_ext.algorithms import ShapedBatch
from openrlhf_ext.algorithms.segments import plain
from openrlhf_ext.checkpoints.tensors import digest
from openrlhf_ext.driver.gpu_sharing import Sleepers
from openrlhf_ext.driver.shards import TrainingShard
from openrlhf_ext.megatron.deadlines.watchdog import phase
from openrlhf_ext.megatron.settings import PolicySettings
from openrlhf_ext.megatron.step.batch import SequenceBatch
from openrlhf_ext.ranks.actor import RankActor
from openrlhf_ext.ranks.checkpoint import CheckpointedRank
from openrlhf_ext.ranks.offload import SleepingRank
from openrlhf_ext.ranks.publishing import SyncSettings, WeightPublisher
from openrlhf_ext.ranks.reselection import share_for_update
from openrlhf_ext.ranks.timers import RankClock, RankReport, timed

if TYPE_CHECKING:
    from openrlhf_ext.megatron.policy import MegatronPolicy

logger = logging.getLogger(__name__)


class PolicyActor(SleepingRank, CheckpointedRank, RankActor):
    """One rank of the policy. Every RPC is a collective: the group calls it on all ranks."""

    def init_model_from_pretrained(
        self,
        settings: PolicySettings,
        sync: SyncSettings,
        max_epochs: int,
        engines: list,
        sleepers: Sleepers | None = None,
    ) -> dict[str, Any]:
        """Builds the rank's model and optimizer and joins the weight-sync group; returns what the process is."""
        about = self.join(settings)
        self._build(settings, sync, max_epochs, engines, sleepers)
        return about

    @phase("building the policy")
    def _build(
        self, settings: PolicySettings, sync: SyncSettings, max_epochs: int, engines: list, sleepers: Sleepers
    ) -> None:
        from openrlhf_ext.megatron.policy import MegatronPolicy

        self.policy = MegatronPolicy(settings)
        self.clock = RankClock()
        # the ranks meet in the reduction: what one waits there is not its own time
        self.policy.config.finalize_model_grads_func = self.clock.without(self.policy.config.finalize_model_grads_func)
        self.host_copies = {name: self.policy.host_copy(path) for name, path in settings.host_copies.items()}
        self.sync, self.engines, self.max_epochs = sync, engines, max_epochs
        self.sleepers = sleepers or Sleepers()
        self.watch_states(self.policy, self.sleepers.policy)
        self.batch: SequenceBatch | None = None
        self.shard: TrainingShard | None = None
        self.version, self.is_ahead = 0, False
        self.publisher = WeightPublisher(self.policy, sync, engines) if engines else None
        if self.publisher is not None:
            self.publisher.connect()

    def rank_report(self) -> RankReport:
        """This rank's time by phase since the last report, and its memory. Not a collective."""
        return self.clock.report(dist.get_rank())

    def weight_digest(self) -> str:
        """Fingerprint of this rank's weights, and of what the optimizer updates. Not a collective."""
        self.reload_states()
        weights = [p for chunk in self.policy.chunks for p in chunk.parameters()]
        return digest(weights + [p for group in self.policy.optimizer.param_groups for p in group["params"]])

    @phase("forward")
    @timed("logprob")
    def forward(self, batch: SequenceBatch) -> list[np.ndarray]:
        """(N,) old log-probs and entropies of the response tokens of this replica's sequences, which may be none.

        The replica keeps the sequences: they are what the next ``fit`` is about.
        """
        self.reload_states("parameters")
        self.batch = batch
        return [plain(values_N) for values_N in self.policy.logprobs(batch)]

    @phase("reference log-probs")
    def reference_logprobs(self, batch: SequenceBatch) -> np.ndarray:
        """(N,) log-probs of the response tokens under the starting weights."""
        return self._frozen_logprobs("reference", batch)

    @phase("guide log-probs")
    def guide_logprobs(self, batch: SequenceBatch) -> np.ndarray:
        """(N,) log-probs of the response tokens under the guide."""
        return self._frozen_logprobs("guide", batch)

    def _frozen_logprobs(self, name: str, batch: SequenceBatch) -> np.ndarray:
        """(N,) log-probs of the response tokens under one of ``settings.host_copies``."""
        self.reload_states("parameters")
        with self.host_copies[name].swapped_in():
            return plain(self.policy.logprobs(batch).logprobs_N)

    def append(self, experience: TrainingShard) -> None:
        """Takes this replica's share of the next train step."""
        self.shard = experience

    @phase("training")
    @timed("train")
    def fit(self, kl_ctl: float = 0.0) -> dict[str, float]:
        """One optimizer step per mini-batch, ``max_epochs`` times over; metrics are the same on every rank."""
        self.reload_states()
        mini_batches = [mini for _ in range(self.max_epochs) for mini in self._mini_batches()]
        steps = [self._update(*mini, number) for number, mini in enumerate(mini_batches)]
        self.is_ahead = True  # of the version that the engines have
        self.batch = self.shard = None
        if self.sleeps:
            self.offload_states("gradients", "optimizer")
        mean = {name: sum(step[name] for step in steps) / len(steps) for name in steps[-1]}
        return mean | {"lr": steps[-1]["lr"], "optimizer_steps": float(len(steps))}

    def _mini_batches(self) -> Iterator[tuple[SequenceBatch, ShapedBatch]]:
        """This replica's share of each optimizer step: its rows lie one step behind the other."""
        if self.batch is None or len(self.batch) != sum(map(len, self.shard.mini_batches)):
            raise RuntimeError("fit() trains the sequences of the last forward(), and the shard is about others")
        first = 0
        for shaped in self.shard.mini_batches:
            yield self.batch.select(slice(first, first + len(shaped))), shaped
            first += len(shaped)

    def _update(self, batch: SequenceBatch, share: ShapedBatch, number: int) -> dict[str, float]:
        """The optimizer step on a mini-batch; ``number`` counts the steps since the rollout."""
        shaped = share_for_update(self.policy, batch, share, self.shard.seed, number)
        return self.policy.train_step(batch, shaped, shaped.algorithm)

    @phase("weight sync")
    @timed("sync")
    def broadcast_to_vllm(self) -> dict[str, float]:
        """Sends the weights to all engines and proves that they sample from them.

        Raises:
            EnginesAtFault: on every rank, with the positions of the engines that died, failed or hung; the call can be
                repeated when they have been replaced.
        """
        self.reload_states("parameters")
        report = self.publisher.publish(self.version + 1)
        self.version, self.is_ahead = self.version + 1, False
        sent = {}
        if report is not None:
            sent = {
                "weight_sync/seconds": report.seconds,
                "weight_sync/bytes": float(report.nbytes),
                "weight_sync/load_seconds": report.load_s,
            }
        return self.prove_sync() | sent | self.take_swaps()

    @phase("probe of the weight sync")
    def prove_sync(self) -> dict[str, float]:
        """Compares the engines' log-probs of a fixed prompt with the policy's; raises WeightSyncMismatch."""
        self.reload_states("parameters")
        gauge = self.publisher.prove(self.version, before_asking=self._make_room, wake=self.sleepers.engines)
        return {"weight_sync/probe_max_abs_diff": gauge, "weight_sync/version": float(self.version)}

    def _make_room(self) -> None:
        """Colocated engines need their KV caches for the probe, and right afterwards for the next rollouts."""
        if self.sleeps:
            self.offload_states()
            dist.barrier()

    @phase("connecting new engines")
    def replace_engines(self, engines: list, fresh: list[int]) -> None:
        """Goes on with these engines; those at the positions ``fresh`` get the present weights."""
        self.publisher.replace_engines(engines)
        self.engines = engines
        if fresh:
            self.reload_states("parameters")
            self.publisher.bring_up_to_date(fresh, self.version + self.is_ahead)
            self.release_model()  # engines are replaced while they have the memory

    def save_model(self, path: str) -> dict[str, int]:
        """Writes the policy as an HF checkpoint; returns the sizes of its files on rank 0."""
        self.reload_states("parameters")
        return self.policy.save_hf(path)

    # ---- resumable checkpoints (CheckpointedRank)

    def checkpointed_model(self) -> MegatronPolicy:
        """The policy, on its device."""
        self.reload_states()
        return self.policy

    def extra_state(self) -> dict[str, Any]:
        """How many times the weights were sent."""
        return {"version": self.version}

    def load_extra_state(self, extra: dict[str, Any]) -> None:
        """The sync that follows a load sends the weights of the saved version, which the requests' seeds depend on."""
        self.version = extra["version"] - 1
