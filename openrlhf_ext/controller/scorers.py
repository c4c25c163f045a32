"""Groups of ranks that give every response token a number: reference log-probs, values.

Shape suffixes: B = completions, T = response tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ray
import torch
from torch import Tensor

from openrlhf_ext.megatron.batch import SequenceBatch, balance_rows


@dataclass(frozen=True)
class PendingScores:
    """Scores that the ranks are computing."""

    shape: torch.Size
    parts: list[list[int]]
    refs: list[Any]
    ranks_per_part: int

    def result(self) -> Tensor:
        """(B, T) fp32 scores; waits for the ranks. The caller sets the deadline."""
        scores_BT = torch.zeros(self.shape)
        # every rank of a replica returns the same: the first one's is enough, but all must have succeeded
        answers = ray.get(self.refs)[:: self.ranks_per_part]
        for rows, answer in zip(self.parts, answers, strict=True):
            scores_BT[rows] = answer[0]
        return scores_BT


@dataclass(frozen=True)
class Scorer:
    """A method of a group of ranks that maps a ``SequenceBatch`` to (B, T) scores.

    Attributes:
        group: OpenRLHF's ``RayActorGroup``; contiguous blocks of its ``duplicate_actors`` ranks are one replica.
        method: name of the actors' method; takes ``batch``.
        replicas: data-parallel ranks.
        attention_length: of the group's model (``ModelShape``), for dealing sequences by their cost.
    """

    group: Any
    method: str
    replicas: int
    attention_length: float = math.inf

    def start(self, batch: SequenceBatch) -> PendingScores:
        """Deals the rows to the replicas; returns at once."""
        parts = balance_rows(batch.lengths_B, self.replicas, self.attention_length)
        refs = self.group.async_run_method_batch(self.method, batch=[batch.select(rows) for rows in parts])
        return PendingScores(batch.mask_BT.shape, parts, refs, self.group.duplicate_actors)
