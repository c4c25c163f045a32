"""The Ray actor of one policy rank: forward passes, optimizer steps, and its part of the weight
sync.

Shape suffixes: N = response tokens of this replica's sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
import torch
import torch.distributed as dist

from openrlhf_ext.algorithms import LossBatch
from openrlhf_ext.algorithms.segments import plain
from openrlhf_ext.checkpoints.tensors import digest
from openrlhf_ext.exact.walk import Digests, digests, policy_modules, recorded
from openrlhf_ext.groups.watchdog import phase
from openrlhf_ext.megatron.settings import ModelSettings
from openrlhf_ext.megatron.step.batch import LogprobEntropy, SequenceBatch, sequence_batch
from openrlhf_ext.ranks.actor import TrainedActor
from openrlhf_ext.ranks.movement import Movement
from openrlhf_ext.ranks.publishing import SyncSettings, WeightPublisher
from openrlhf_ext.ranks.shared_gpu import SharedGpu, device_bytes, state_bytes
from openrlhf_ext.ranks.timers import PhaseTimers, RankReport, StepProfile, timed

if TYPE_CHECKING:
    from torch.nn import Parameter

    from openrlhf_ext.megatron.policy import MegatronPolicy

_FIRST_UPDATE = {
    "abs_log_ratio": "abs_log_ratio",
    "loss/policy": "first/loss",
    "alignment": "first/alignment",
    "ref_kl": "first/ref_kl",
}
"""Metrics of the first update, and their names in its report: later updates start from moved
weights."""
_SEEDS_PER_ROLLOUT = 1 << 20
_VISIBLE = 0.01
"""Learning rate times trained parameters above which some parameters must change. Values of 0.02
lie 1e-4 apart in bf16, and a step of Adam is about as long as the rate, so a hundred parameters
reach the next value."""


@dataclass(frozen=True)
class SleepModes:
    """Which sides free their memory while the other works: ``ds.enable_sleep`` and
    ``vllm.enable_sleep``. ``engine_share``: an engine's share of a policy rank's GPU, None if
    engines have their own GPUs."""

    policy: bool = False
    engines: bool = False
    engine_share: float | None = None


@dataclass
class TrainingShard:
    """One data-parallel rank's part of every optimizer step, each with the whole step's
    denominators. ``seed``: for random choices. ``sequences``: those of ``mini_batches`` if no
    ``forward`` came before; None: those of the last ``forward``."""

    mini_batches: list[LossBatch]
    seed: int
    sequences: SequenceBatch | None = None


class PolicyActor(TrainedActor):
    """One rank of the policy. Every RPC is a collective: the group calls it on all ranks."""

    def init_model(
        self,
        settings: ModelSettings,
        sync: SyncSettings,
        max_epochs: int,
        engines: list,
        sleeping: SleepModes,
    ) -> dict[str, Any]:
        from openrlhf_ext.megatron.policy import MegatronPolicy

        about = self.join(settings)
        self.timers = PhaseTimers()
        self.max_epochs = max_epochs
        self.sleeping = sleeping
        self.batch: SequenceBatch | None = None
        self.shard: TrainingShard | None = None
        self.seen: list[LogprobEntropy] | None = None
        self.version = 0
        self.is_ahead = self.has_moved = False
        with phase("building the policy"):
            self.policy = MegatronPolicy(settings)
            self.policy.warm_up()
            # the ranks synchronize in the gradient reduction: exclude the waiting time from a
            # rank's own time
            model = self.policy.config
            model.finalize_model_grads_func = self.timers.without(model.finalize_model_grads_func)
            copies = {
                name: self.policy.host_copy(path) for name, path in settings.host_copies.items()
            }
            self.host_copies = {name: copy for name, copy in copies.items() if copy is not None}
            self.hold(self.policy, sleeping.policy)
            self.movement = Movement(self.policy)
            self.publisher = WeightPublisher(self.policy, sync, engines)
            self._check_memory(sleeping)
            self.publisher.connect()
        return about

    @property
    def _parameters(self) -> list[Parameter]:
        return [parameter for chunk in self.policy.chunks for parameter in chunk.parameters()]

    def _check_memory(self, sleeping: SleepModes) -> None:
        device = device_bytes()
        settings = self.policy.settings
        if device is None or sleeping.engine_share is None:
            return
        distributed = (
            settings.optimizer is not None and settings.megatron.distributed_optimizer_enable
        )
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        states = 0
        for of_all, copies in (
            (True, settings.layout.copies),
            (False, settings.layout.expert_copies),
        ):
            entries = 0
            for parameter in trained:
                if getattr(parameter, "allreduce", True) == of_all:
                    entries += parameter.numel()
            shards = copies if distributed else 1
            states += state_bytes(entries, trained[0].element_size(), shards, settings.adam_offload)
        frozen = [parameter for parameter in self._parameters if not parameter.requires_grad]
        states += sum(parameter.nbytes for parameter in frozen)
        states += self.policy.kept_bytes
        staging = 2 * self.publisher.plan.largest_frame
        SharedGpu(
            device, sleeping.engine_share, states, staging, sleeping.policy, sleeping.engines
        ).check()

    def start_profile(self, ranks: tuple[int, ...]) -> None:
        if dist.get_rank() in ranks:
            self.profile = StepProfile()

    def finish_profile(self, folder: str, step: int) -> dict[str, Any] | None:
        if (profile := self.__dict__.pop("profile", None)) is None:
            return None
        rank = dist.get_rank()
        return {"rank": rank, **profile.finish(Path(folder) / f"step{step}_rank{rank}.json.gz")}

    def rank_report(self) -> RankReport:
        """Returns this rank's time by phase and its padding since the last report, and its memory.
        Not a collective."""
        report = self.timers.report(dist.get_rank())
        counted = self.policy.schedule.take_count()
        return replace(
            report,
            packed_tokens=counted.packed,
            padding_tokens=counted.packed - counted.real,
            repeated_tokens=counted.repeated,
            moved=self.movement.take(),
        )

    def weight_digest(self) -> str:
        """Returns a fingerprint of this rank's weights and of the optimizer's parameters. Not a
        collective."""
        # Megatron: see ranks/actor.py
        from openrlhf_ext.megatron.step.optimizer import host_optimizers

        self.reload_states()
        optimizer = self.policy.optimizer
        tensors: list[torch.Tensor] = [*self._parameters]
        if optimizer is not None:
            for group in optimizer.param_groups:
                tensors += group["params"]
        for each in host_optimizers(optimizer):
            tensors += each.masters
        return digest(tensors)

    @phase("forward")
    @timed("logprob")
    def forward(self, batch: SequenceBatch) -> list[np.ndarray]:
        """Returns (N,) old log-probs and entropies of the response tokens of this replica's
        sequences; a replica may have none. Keeps the sequences for the next ``fit``."""
        self.reload_states("parameters")
        self.batch = self._with_experts(batch)
        routed: list[SequenceBatch] | None = None
        if self.policy.settings.train.routing_replay == "policy":
            routed = []
        values = self.policy.logprobs(self.batch, routed=routed)
        for replayed in routed or ():
            self.batch = replayed
        return [plain(values_N) for values_N in values]

    def _with_experts(self, batch: SequenceBatch) -> SequenceBatch:
        """Returns the batch with the experts of its references. Raises ValueError if they belong to
        another model."""
        if not batch.routed_B:
            return batch
        references = list(dict.fromkeys(reference for reference, _ in batch.routed_B))
        seconds = self.policy.settings.megatron.collective_timeout_s
        with phase("fetching the experts of completions"):
            try:
                groups = dict(zip(references, ray.get(references, timeout=seconds), strict=True))
            except ray.exceptions.GetTimeoutError as error:
                raise TimeoutError(
                    f"the experts of {len(references)} groups did not come from the engines' "
                    f"nodes within {seconds:g} s (megatron.collective_timeout_s)"
                ) from error
        experts_B = [groups[reference][number] for reference, number in batch.routed_B]
        shape = self.policy.shape
        wanted = shape.num_layers, shape.experts_per_token
        if wrong := {rows.shape[1:] for rows in experts_B} - {wanted}:
            raise ValueError(
                f"engines told experts of {sorted(wrong)} (layers, experts of a token), the "
                f"policy has {wanted}: the engines have another model"
            )
        return batch.with_experts(experts_B)

    @phase("reference log-probs")
    def reference_logprobs(self, batch: SequenceBatch) -> np.ndarray:
        return self._frozen_logprobs("reference", batch)

    @phase("guide log-probs")
    def guide_logprobs(self, batch: SequenceBatch) -> np.ndarray:
        return self._frozen_logprobs("guide", batch)

    def _frozen_logprobs(self, name: str, batch: SequenceBatch) -> np.ndarray:
        self.reload_states("parameters")
        copy = self.host_copies.get(name)
        swapped = nullcontext() if copy is None else copy.swapped_in()
        with self.policy.trained.as_loaded(), swapped:
            return plain(self.policy.logprobs(batch).logprobs_N)

    @phase("walk over modules")
    def walk(self, token_ids: Sequence[int]) -> Digests:
        """Returns what this rank's modules compute for a text (``exact.walk``), as digests."""
        self.reload_states("parameters")
        row = sequence_batch([np.array(token_ids, np.int32)], [[(1, len(token_ids))]])
        modules = [each for chunk in self.policy.chunks for each in policy_modules(chunk)]
        with recorded(modules) as states:
            self.policy.logprobs(row)
        return digests(states, len(token_ids))

    def take_shard(self, shard: TrainingShard) -> None:
        self.shard = shard
        self.seen = None
        if shard.sequences is not None:
            self.batch = self._with_experts(shard.sequences)
            self.seen = []

    @phase("training")
    @timed("train")
    def fit(self, before: Fraction, after: Fraction) -> dict[str, float]:
        """Runs one optimizer step per mini-batch, ``max_epochs`` times over; returns the same
        metrics on every rank. ``before`` and ``after``: the completed share of the run, for the
        learning-rate schedule."""
        batch = self.batch
        shard = self.shard
        if batch is None or shard is None or len(batch) != sum(map(len, shard.mini_batches)):
            raise RuntimeError(
                "fit() trains the sequences of the last forward() or of the shard, and there "
                "are others"
            )
        self.reload_states()
        self.movement.begin()
        mini_batches: list[tuple[SequenceBatch, LossBatch]] = []
        for _ in range(self.max_epochs):
            mini_batches += _mini_batches(batch, shard)
        updates = len(mini_batches)
        self.policy.plan_rates(before, after, updates)
        steps = []
        for number, mini in enumerate(mini_batches, start=1):
            with phase(f"update {number} of {updates}"):
                steps.append(self._update(*mini, shard.seed, number - 1, number < updates))

        self.is_ahead = True  # of the engines
        rate = sum(step["lr"] for step in steps if step["grad_norm"] > 0)
        trained = sum(p.numel() for p in self._parameters if p.requires_grad)
        self.has_moved = self.has_moved or rate * trained > _VISIBLE
        self.batch = self.shard = None
        self.movement.end()
        if self.sleeps:
            self.offload_states("gradients", "optimizer")

        mean = {}
        for name in steps[-1]:
            if name != "alignment":
                mean[name] = sum(step[name] for step in steps) / len(steps)
        first = {name: steps[0][of] for of, name in _FIRST_UPDATE.items() if of in steps[0]}
        return mean | first | {"lr": steps[-1]["lr"], "optimizer_steps": float(len(steps))}

    def seen_logprobs(self) -> list[np.ndarray] | None:
        """Returns (N,) log-probs and entropies of the last shard's own sequences, as their first
        update saw them; call it once. Returns None except on the first rank of each replica."""
        seen = self.seen
        self.seen = None
        if seen is None:
            raise RuntimeError("seen_logprobs() is of a fit() whose shard brought its sequences")
        if not self.is_first_of_replica:
            return None
        return [plain(torch.cat(values)) for values in zip(*seen, strict=True)]

    def _update(
        self, batch: SequenceBatch, shaped: LossBatch, seed: int, number: int, more: bool
    ) -> dict[str, float]:
        """Runs the optimizer step on a mini-batch. ``number`` counts the steps since the rollout;
        ``more`` is True if others follow."""
        shaped = reselected(self.policy, batch, shaped, seed, number)
        is_first_epoch = self.shard is not None and number < len(self.shard.mini_batches)
        seen = self.seen if is_first_epoch else None
        metrics = self.policy.train_step(batch, shaped, shaped.algorithm, more, seen)
        if metrics["grad_norm"] == 0.0 and self.policy.trained.is_beside_weights:
            require_no_advantages(shaped, self.policy.device)
        return metrics

    @phase("weight sync")
    @timed("sync")
    def send_weights(self) -> dict[str, float]:
        """Sends the weights to all engines and checks that they sample from them. Raises
        EnginesAtFault on every rank; the call can be repeated after these engines have been
        replaced."""
        self.reload_states("parameters")
        report = self.publisher.publish(self.version + 1, self.has_moved)
        self.version += 1
        self.is_ahead = self.has_moved = False
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
        self.reload_states("parameters")
        gauge = self.publisher.prove(
            self.version, before_asking=self._make_room, wake=self.sleeping.engines
        )
        return {"weight_sync/probe_diff": gauge, "weight_sync/version": float(self.version)}

    def _make_room(self) -> None:
        """Frees memory for colocated engines, which need their KV caches for the probe and right
        afterwards for the next rollouts."""
        if self.sleeps:
            self.offload_states()
            dist.barrier()

    @phase("connecting new engines")
    def replace_engines(self, engines: list, fresh: list[int]) -> None:
        """Connects other engines; those at the positions ``fresh`` get the current weights."""
        self.publisher.replace_engines(engines)
        if fresh:
            self.reload_states("parameters")
            self.publisher.bring_up_to_date(fresh, self.version + self.is_ahead)
            self.release_model()  # engines are replaced while the memory is theirs

    # ---- resumable checkpoints (TrainedActor)

    def extra_state(self) -> dict[str, Any]:
        return {"version": self.version}

    def load_extra_state(self, extra: dict[str, Any]) -> None:
        """Restores the version. The sync that follows a load sends the weights of the saved
        version, which the requests' seeds depend on."""
        self.version = extra["version"] - 1
        self.is_ahead = True
        self.has_moved = False


def _mini_batches(
    batch: SequenceBatch, shard: TrainingShard
) -> Iterator[tuple[SequenceBatch, LossBatch]]:
    """Yields a replica's part of each optimizer step; the rows of the steps follow each other."""
    first = 0
    for shaped in shard.mini_batches:
        yield batch.select(slice(first, first + len(shaped))), shaped
        first += len(shaped)


def require_no_advantages(shaped: LossBatch, device: torch.device) -> None:
    """Raises NoGradientError on every rank if the mini-batch has advantages but the adapters'
    gradient is exactly zero, which shows that they do not reach the loss. A collective."""
    from openrlhf_ext.megatron.step.optimizer import NoGradientError  # Megatron: see ranks/actor.py
    from openrlhf_ext.megatron.step.schedule import sum_over_replicas

    given = torch.tensor([float((shaped.advantages != 0).sum())], dtype=torch.float64)
    if (tokens := int(sum_over_replicas(given, device=device).item())) > 0:
        raise NoGradientError(
            f"{tokens} tokens of the mini-batch have an advantage, and the gradient of the "
            "adapters is exactly zero: they do not reach the loss"
        )


def reselected(
    policy: MegatronPolicy, batch: SequenceBatch, shaped: LossBatch, seed: int, update: int
) -> LossBatch:
    """Returns a replica's part of a mini-batch with its tokens selected again, if the algorithm
    selects by the current policy.

    The driver selects tokens with the old log-probs. They are those of the current policy only in
    the first update after a rollout (``update`` 0). Before each later update the ranks compute the
    log-probs of their parts again and select together: they sum a few sums and counts, and no rank
    sees another's tokens. A collective; random choices are the same on all ranks.
    """
    # Megatron: see ranks/actor.py
    from openrlhf_ext.megatron.step.schedule import agreed, sum_over_replicas

    if update == 0 or not shaped.algorithm.needs_prepare:
        return shaped
    new_N = agreed(policy.logprobs(batch).logprobs_N, policy.device)
    seed = seed * _SEEDS_PER_ROLLOUT + update
    return shaped.algorithm.prepare(
        new_N, shaped, seed=seed, total=partial(sum_over_replicas, device=policy.device)
    ).lean()
