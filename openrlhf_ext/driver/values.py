"""The controller's side of the critic: values of a batch of rollouts, and what the critic is trained on.

Shape suffixes: N = response tokens of all completions.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch

from openrlhf_ext.algorithms import ShapedBatch
from openrlhf_ext.algorithms.gae import explained_variance
from openrlhf_ext.algorithms.segments import float64_sum
from openrlhf_ext.driver.scorers import PendingScores, Scorer
from openrlhf_ext.driver.shards import deal, group_chunks
from openrlhf_ext.megatron.step.batch import SequenceBatch, ValueTargets


@dataclass(frozen=True)
class ValueMiniBatch:
    """One data-parallel rank's share of one optimizer step of the critic."""

    batch: SequenceBatch
    targets: ValueTargets


class ValueTrainer:
    """Asks a group of critic ranks for values, and trains it on the returns of a shaped batch.

    The critic makes as many optimizer steps as the policy, on the same mini-batches; its data-parallel ranks are its
    own.

    Args:
        group: OpenRLHF's ``RayActorGroup`` of ``CriticActor``.
        replicas: its data-parallel ranks.
        group_size, mini_batch_size: samples per prompt and per optimizer step, as the policy's.
        attention_length: of the critic's model (``ModelShape``), for dealing sequences by their cost.
    """

    def __init__(
        self, group: Any, *, replicas: int, group_size: int, mini_batch_size: int, attention_length: float = math.inf
    ) -> None:
        self.group, self.replicas, self.attention_length = group, replicas, attention_length
        self.group_size, self.mini_batch_size = group_size, mini_batch_size
        self._scorer = Scorer(group, "forward", replicas, attention_length)
        self._shards: list[list[ValueMiniBatch]] | None = None

    def start_values(self, batch: SequenceBatch) -> PendingScores:
        """Starts the forward pass; its result is (N,) values."""
        return self._scorer.start(batch)

    def take(self, batch: SequenceBatch, shaped: ShapedBatch) -> dict[str, float]:
        """Keeps what the next ``start_fit`` trains on; returns metrics of the values and returns."""
        sizes = {"group_size": self.group_size, "mini_batch_size": self.mini_batch_size, "replicas": self.replicas}
        self._shards = value_shards(batch, shaped, **sizes, attention_length=self.attention_length)
        return value_metrics(shaped)

    def start_fit(self) -> list[Any]:
        """Starts the optimizer steps of the batch last taken; every rank's result is the same metrics.

        Raises:
            RuntimeError: no batch was taken since the last call.
        """
        if self._shards is None:
            raise RuntimeError("the critic has no batch to train on: take() comes before start_fit()")
        shards, self._shards = self._shards, None
        return self.group.async_run_method_batch("fit", mini_batches=shards)


def value_shards(
    batch: SequenceBatch,
    shaped: ShapedBatch,
    group_size: int,
    mini_batch_size: int,
    replicas: int,
    attention_length: float = math.inf,
) -> list[list[ValueMiniBatch]]:
    """For each data-parallel rank of the critic, its share of every optimizer step."""
    values_N, returns_N = (shaped.exposed[name].float() for name in ("values", "returns"))
    whole = ValueTargets(values_N, returns_N, shaped.segments, torch.tensor(0))
    chunks = list(group_chunks(len(batch), group_size, mini_batch_size))
    deals = deal(batch.lengths_B, chunks, replicas, attention_length)
    ranks: list[list[ValueMiniBatch]] = [[] for _ in range(replicas)]
    for step, chunk in enumerate(chunks):
        targets = dataclasses.replace(whole, tokens=shaped.lengths[chunk].sum())
        for rank, own in zip(ranks, deals, strict=True):
            rows = own.steps[step]
            rank.append(ValueMiniBatch(batch.select(rows), targets.select(rows)))
    return ranks


def value_metrics(shaped: ShapedBatch) -> dict[str, float]:
    """Means over completion tokens under the names of docs/metrics.md; ``explained_variance`` only if it is defined."""
    values_N, returns_N = shaped.exposed["values"], shaped.exposed["returns"]
    means = {"value/mean": float64_sum(values_N), "value/return_mean": float64_sum(returns_N)}
    metrics = {name: float(total) / len(values_N) for name, total in means.items()}
    explained = explained_variance(values_N, returns_N)
    return metrics if explained is None else metrics | {"value/explained_variance": float(explained)}
