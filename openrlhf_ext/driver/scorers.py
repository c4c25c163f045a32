"""Groups of ranks that give every response token a number: reference log-probs, values.

Shape suffixes: N = response tokens of all completions, n = those of one replica.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from openrlhf_ext.megatron.step.batch import SequenceBatch, balance_rows


@dataclass(frozen=True)
class PendingScores:
    """Scores that the ranks are computing."""

    batch: SequenceBatch
    parts: list[list[int]]
    refs: list[Any]
    ranks_per_part: int

    def result(self, get: Callable[[list], list]) -> Tensor:
        """(N,) fp32 scores; waits for the ranks by ``get``."""
        # the first rank of a replica answers for all, but all must have succeeded
        answers = get(self.refs)[:: self.ranks_per_part]
        return scores_in_order(self.batch, self.parts, [answer[0] for answer in answers])


def scores_in_order(batch: SequenceBatch, parts: Sequence[Sequence[int]], answers: Sequence[np.ndarray]) -> Tensor:
    """(N,) fp32 scores of the response tokens.

    Args:
        parts: rows of ``batch`` that each replica had.
        answers: its scores of their response tokens, one row behind the other.
    """
    scores_N = np.empty(batch.responses.tokens, np.float32)
    for rows, answer_n in zip(parts, answers, strict=True):
        batch.responses.put(scores_N, answer_n, rows)
    return torch.from_numpy(scores_N)


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
