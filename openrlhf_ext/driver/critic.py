"""The critic beside the policy: its values, and its training on the same batches."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

import torch

from openrlhf_ext.algorithms import LossBatch
from openrlhf_ext.driver.placement import RankGroup
from openrlhf_ext.driver.scoring import Scorer
from openrlhf_ext.megatron.step.batch import SequenceBatch, ValueTargets
from openrlhf_ext.megatron.step.dealing import TOKENS, RowCosts, deal, group_chunks
from openrlhf_ext.ranks.auxiliary import CriticMiniBatch


class ValueTrainer:
    """Computes values on a group of critic ranks, and trains it on the returns of a shaped batch:
    as many optimizer steps as the policy, on the same mini-batches, dealt to its own data-parallel
    ranks. ``values`` scores tokens."""

    def __init__(
        self, group: RankGroup, group_size: int, mini_batch_size: int, costs: RowCosts = TOKENS
    ) -> None:
        self.group, self.costs = group, costs
        self.group_size, self.mini_batch_size = group_size, mini_batch_size
        self.values = Scorer(group, "forward", costs)
        self._shards: list[list[CriticMiniBatch]] | None = None

    def take(self, batch: SequenceBatch, shaped: LossBatch) -> None:
        """Keeps the batch for the next ``start_fit``."""
        replicas = self.group.layout.data_parallel_size
        self._shards = value_shards(
            batch, shaped, self.group_size, self.mini_batch_size, replicas, self.costs
        )

    def start_fit(self, before: Fraction, after: Fraction) -> list[Any]:
        """Starts the optimizer steps of the batch last taken, which take the run from share
        ``before`` to share ``after``; every rank returns the same metrics. Raises RuntimeError if
        no batch was taken since the last call."""
        if self._shards is None:
            raise RuntimeError(
                "the critic has no batch to train on: take() comes before start_fit()"
            )
        shards, self._shards = self._shards, None
        return self.group.ask_replicas("fit", shards, before, after)


def value_shards(
    batch: SequenceBatch,
    shaped: LossBatch,
    group_size: int,
    mini_batch_size: int,
    replicas: int,
    costs: RowCosts = TOKENS,
) -> list[list[CriticMiniBatch]]:
    """Returns each critic data-parallel rank's part of every optimizer step."""
    values_N, returns_N = (shaped[name].float() for name in ("values", "returns"))
    whole = ValueTargets(values_N, returns_N, shaped.segments, torch.tensor(0))
    chunks = list(group_chunks(len(batch), group_size, mini_batch_size))
    deals = deal(batch, chunks, replicas, costs)
    ranks: list[list[CriticMiniBatch]] = [[] for _ in range(replicas)]
    for step, chunk in enumerate(chunks):
        targets = dataclasses.replace(whole, tokens=shaped.lengths[chunk].sum())
        for rank, own in zip(ranks, deals, strict=True):
            rows = own.steps[step]
            rank.append(CriticMiniBatch(batch.select(rows), targets.select(rows)))
    return ranks
