"""What the controller sends to the policy ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from openrlhf_ext.algorithms import ShapedBatch
from openrlhf_ext.controller.preparation import Preparation
from openrlhf_ext.megatron.batch import SequenceBatch, balance_rows


@dataclass
class MiniBatchShard:
    """One data-parallel rank's ``rows`` of the rollout batch in one optimizer step.

    ``shaped`` carries the whole step's denominators. ``preparation`` is there for algorithms that choose tokens by
    what the current policy says of the whole mini-batch: for every update after the first.
    """

    rows: list[int]
    batch: SequenceBatch
    shaped: ShapedBatch
    preparation: Preparation | None = None


@dataclass
class TrainingShard:
    """One data-parallel rank's share of a rollout batch."""

    mini_batches: list[MiniBatchShard]


def group_chunks(samples: int, group_size: int, mini_batch_size: int) -> Iterator[list[int]]:
    """Row indices of each optimizer step: whole groups, ``mini_batch_size`` samples; the last one may be smaller."""
    per_step = max(1, mini_batch_size // group_size) * group_size
    for start in range(0, samples, per_step):
        yield list(range(start, min(start + per_step, samples)))


def mini_batch_shards(
    batch: SequenceBatch,
    shaped: ShapedBatch,
    group_size: int,
    mini_batch_size: int,
    data_parallel_size: int,
    seed: int = 0,
    attention_length: float = math.inf,
) -> list[list[MiniBatchShard]]:
    """For each data-parallel rank, its shard of every optimizer step, of about equal cost (``batch.balance_rows``).

    ``prepare`` gets the old log-probs as those of the policy about to be updated, which they are in the first update
    of a rollout batch; for later ones the shards carry a ``preparation``. ``seed`` seeds random choices.
    """
    ranks: list[list[MiniBatchShard]] = [[] for _ in range(data_parallel_size)]
    for rows in group_chunks(len(batch), group_size, mini_batch_size):
        step_shaped = shaped.mini_batch(slice(rows[0], rows[-1] + 1))  # a slice is not copied
        step_shaped = step_shaped.algorithm.prepare(step_shaped.old_logprobs, step_shaped, seed=seed).lean()
        for rank, part in enumerate(balance_rows(batch.lengths_B[rows], data_parallel_size, attention_length)):
            again = Preparation(step_shaped, list(part), seed) if step_shaped.algorithm.needs_prepare else None
            own = [rows[i] for i in part]
            ranks[rank].append(MiniBatchShard(own, batch.select(own), step_shaped.select(part), again))
    return ranks
