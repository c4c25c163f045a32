"""Groups of ranks that give every response token a number: reference log-probs, values.

Shape suffixes: B = completions, T = response tokens of a completion, N = those of several completions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch
from torch import Tensor

from openrlhf_ext.megatron.batch import SequenceBatch, balance_rows


@dataclass(frozen=True)
class PendingScores:
    """Scores that the ranks are computing."""

    batch: SequenceBatch
    parts: list[list[int]]
    refs: list[Any]
    ranks_per_part: int

    def result(self, get: Callable[[list], list] = ray.get) -> Tensor:
        """(B, T) fp32 scores; waits for the ranks by ``get``."""
        # the first rank of a replica answers for all, but all must have succeeded
        answers = get(self.refs)[:: self.ranks_per_part]
        return padded_scores(self.batch, self.parts, [answer[0] for answer in answers])


def padded_scores(batch: SequenceBatch, parts: Sequence[list[int]], answers: Sequence[Tensor]) -> Tensor:
    """(B, T) fp32 scores of the response tokens, 0 elsewhere.

    Args:
        parts: rows of ``batch`` that each replica had.
        answers: its scores of their response tokens, (N,) each (``SequenceBatch.response_values``).
    """
    scores_BT, counts_B = torch.zeros(batch.mask_BT.shape), batch.counts_B
    for rows, answer_N in zip(parts, answers, strict=True):
        for row, scores in zip(rows, answer_N.split(counts_B[rows].tolist()), strict=bool(rows)):
            scores_BT[row, : len(scores)] = scores
    return scores_BT


@dataclass(frozen=True)
class Scorer:
    """A method of a group of ranks that maps a ``SequenceBatch`` to the scores of its N response tokens.

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
        return PendingScores(batch, parts, refs, self.group.duplicate_actors)
