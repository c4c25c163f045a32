"""What the controller sends to the policy ranks: who trains which rows in which optimizer step, and how.

The rows of a rollout batch are dealt before anything is computed. Each rank gets the tokens of its rows once, to
compute the old log-probs, and keeps them; what is sent to train them on is about the same rows in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from openrlhf_ext.algorithms import ShapedBatch
from openrlhf_ext.megatron.step.batch import balance_rows


@dataclass(frozen=True)
class Deal:
    """One data-parallel rank's rows of the rollout batch, ``steps[i]`` of them in optimizer step i."""

    steps: list[list[int]]

    @property
    def rows(self) -> list[int]:
        """All of them, in the order in which the rank has them."""
        return [row for step in self.steps for row in step]


@dataclass
class TrainingShard:
    """One data-parallel rank's share of every optimizer step: of the rows that it computed the old log-probs of.

    Attributes:
        mini_batches: each carries its whole step's denominators.
        seed: of random choices.
    """

    mini_batches: list[ShapedBatch]
    seed: int


def group_chunks(samples: int, group_size: int, mini_batch_size: int) -> Iterator[slice]:
    """Rows of each optimizer step: whole groups, ``mini_batch_size`` samples; the last one may be smaller."""
    per_step = max(1, mini_batch_size // group_size) * group_size
    for start in range(0, samples, per_step):
        yield slice(start, min(start + per_step, samples))


def deal(
    lengths_B: Tensor, chunks: Sequence[slice], data_parallel_size: int, attention_length: float = math.inf
) -> list[Deal]:
    """Each data-parallel rank's rows: every step is dealt at about equal cost (``batch.balance_rows``).

    Args:
        lengths_B: tokens of each sequence.
        chunks: rows of each optimizer step (``group_chunks``).
    """
    ranks = [Deal([]) for _ in range(data_parallel_size)]
    for chunk in chunks:
        for rank, part in zip(ranks, balance_rows(lengths_B[chunk], data_parallel_size, attention_length), strict=True):
            rank.steps.append([chunk.start + row for row in part])
    return ranks


def training_shards(
    shaped: ShapedBatch, chunks: Sequence[slice], deals: Sequence[Deal], seed: int = 0
) -> list[TrainingShard]:
    """Each data-parallel rank's shard of every optimizer step.

    ``prepare`` gets the old log-probs as those of the policy about to be updated, which they are in the first update
    of a rollout batch; for later ones the ranks prepare again (``preparation``).

    Args:
        chunks, deals: as the rows were dealt.
        seed: of random choices.
    """
    shards = [TrainingShard([], seed) for _ in deals]
    for step, chunk in enumerate(chunks):
        mini_batch = shaped.mini_batch(chunk)  # a slice is not copied
        mini_batch = mini_batch.algorithm.prepare(mini_batch.old_logprobs, mini_batch, seed=seed).lean()
        for shard, own in zip(shards, deals, strict=True):
            shard.mini_batches.append(mini_batch.select([row - chunk.start for row in own.steps[step]]))
    return shards
