"""What ranks say of every response token: which rows they get, scores of frozen models, values, the
KL penalty.

Rows of a rollout batch are dealt before anything is computed: each policy rank gets their tokens
once and keeps them. Shape suffixes: B = completions, N = response tokens of all completions, n =
those of one replica.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from openrlhf_ext.algorithms import LossBatch
from openrlhf_ext.algorithms.groups import group_chunks
from openrlhf_ext.algorithms.kl import kl_k3
from openrlhf_ext.algorithms.segments import BLOCK_TOKENS, float64_sum
from openrlhf_ext.algorithms.values import explained_variance
from openrlhf_ext.driver.placement import RankGroup
from openrlhf_ext.megatron.step.batch import SequenceBatch, ValueTargets, sequence_batch
from openrlhf_ext.megatron.step.dealing import TOKENS, RowCosts, deal_rows
from openrlhf_ext.ranks.auxiliary import CriticMiniBatch

_MAX_KL_ERROR = 0.2

# ---- rows of the replicas
# -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Deal:
    """One data-parallel rank's rows of the rollout batch, ``steps[i]`` of them in optimizer step
    i."""

    steps: list[list[int]]

    @property
    def rows(self) -> list[int]:
        """All of them, in the order in which the rank has them."""
        return [row for step in self.steps for row in step]


def deal(
    batch: SequenceBatch, chunks: Sequence[slice], data_parallel_size: int, costs: RowCosts = TOKENS
) -> list[Deal]:
    """Each data-parallel rank's rows: the rows of every optimizer step are dealt at equal cost
    (``deal_rows``)."""
    ranks = [Deal([]) for _ in range(data_parallel_size)]
    for chunk in chunks:
        for rank, part in zip(
            ranks, deal_rows(batch.select(chunk), data_parallel_size, costs), strict=True
        ):
            rank.steps.append([chunk.start + row for row in part])
    return ranks


# ---- scores
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PendingScores:
    """Scores that the ranks are computing."""

    batch: SequenceBatch
    parts: list[list[int]]
    refs: list[Any]
    group: RankGroup

    def result(self, get: Callable[[list], list]) -> Tensor:
        """(N,) fp32 scores; waits for the ranks by ``get``."""
        return scores_in_order(self.batch, self.parts, self.group.of_replicas(get(self.refs)))


def scores_in_order(
    batch: SequenceBatch, parts: Sequence[Sequence[int]], answers: Sequence[np.ndarray]
) -> Tensor:
    """(N,) fp32 scores of the response tokens, from each replica's scores of its rows, one row
    behind the other."""
    scores_N = np.empty(batch.responses.tokens, np.float32)
    for rows, answer_n in zip(parts, answers, strict=True):
        batch.responses.put(scores_N, answer_n, rows)
    return torch.from_numpy(scores_N)


@dataclass(frozen=True)
class Scorer:
    """A method of a group of ranks that maps a ``SequenceBatch`` to the scores of its N response
    tokens; sequences are dealt by their cost in the group's model."""

    group: RankGroup
    method: str
    costs: RowCosts = TOKENS

    def start(self, batch: SequenceBatch) -> PendingScores:
        """Deals the rows to the replicas; returns at once."""
        parts = deal_rows(batch, self.group.layout.data_parallel_size, self.costs)
        refs = self.group.ask_replicas(self.method, [batch.select(rows) for rows in parts])
        return PendingScores(batch, parts, refs, self.group)


def with_end(batch: SequenceBatch) -> SequenceBatch:
    """The sequences with one more token each, as their only response token: the state before it is
    that at the last token. Which token it is makes no difference, attention being causal. A reward
    model's score of a whole sequence is the value there, whatever the last token is, as in OpenRLHF
    0.11.2 (``models/model.py``); transformers' pooling leaves out a last token that is the
    padding's."""
    ends = [int(length) for length in batch.lengths_B]
    whole = [np.append(tokens_S.numpy(), np.int32(0)) for tokens_S in batch.tokens_M.split(ends)]
    return sequence_batch(whole, [[(end, end + 1)] for end in ends])


# ---- critic
# --------------------------------------------------------------------------------------------------


class ValueTrainer:
    """Asks a group of critic ranks for values, and trains it on the returns of a shaped batch: as
    many optimizer steps as the policy's, on the same mini-batches; its data-parallel ranks are its
    own."""

    def __init__(
        self, group: RankGroup, group_size: int, mini_batch_size: int, costs: RowCosts = TOKENS
    ) -> None:
        self.group, self.costs = group, costs
        self.group_size, self.mini_batch_size = group_size, mini_batch_size
        self._scorer = Scorer(group, "forward", costs)
        self._shards: list[list[CriticMiniBatch]] | None = None

    def start_values(self, batch: SequenceBatch) -> PendingScores:
        """Starts the forward pass; its result is (N,) values."""
        return self._scorer.start(batch)

    def take(self, batch: SequenceBatch, shaped: LossBatch) -> dict[str, float]:
        """Keeps what the next ``start_fit`` trains on; returns metrics of the values and
        returns."""
        replicas = self.group.layout.data_parallel_size
        self._shards = value_shards(
            batch, shaped, self.group_size, self.mini_batch_size, replicas, self.costs
        )
        return value_metrics(shaped)

    def start_fit(self, before: Fraction, after: Fraction) -> list[Any]:
        """Starts the optimizer steps of the batch last taken, which take the run from one share to
        another; every rank's result is the same metrics. Raises RuntimeError: no batch was taken
        since the last call."""
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
    """For each data-parallel rank of the critic, its part of every optimizer step."""
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


def value_metrics(shaped: LossBatch) -> dict[str, float]:
    """Means over completion tokens under the names of docs/metrics.md; ``explained_variance`` only
    if it is defined."""
    values_N, returns_N = shaped["values"], shaped["returns"]
    means = {"value/mean": float64_sum(values_N), "value/return_mean": float64_sum(returns_N)}
    metrics = {name: float(total) / len(values_N) for name, total in means.items()}
    explained = explained_variance(values_N, returns_N)
    return (
        metrics if explained is None else metrics | {"value/explained_variance": float(explained)}
    )


# ---- KL penalty
# --------------------------------------------------------------------------------------------------


class KLCoefficient:
    """The coefficient of the KL penalty that the next batch is trained with: constant, or steered
    to a ``target``, the mean KL per token in nats, within ``horizon`` samples.

    D. Ziegler et al., "Fine-Tuning Language Models from Human Preferences", arXiv 1909.08593,
    section 2.2, with the mean KL per token (as OpenRLHF) instead of the KL per completion.
    """

    def __init__(self, value: float, target: float | None = None, horizon: int = 10000) -> None:
        self.value, self.target, self.horizon = value, target, horizon

    def update(self, kl: float, samples: int) -> None:
        """Multiplies the coefficient by
        ``1 + clip(kl / target - 1, +-0.2) * samples / horizon``."""
        if self.target is not None:
            error = min(max(kl / self.target - 1, -_MAX_KL_ERROR), _MAX_KL_ERROR)
            self.value *= 1 + error * samples / self.horizon

    def state_dict(self) -> dict[str, float]:
        """What a resumed run has to know."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continues from a state."""
        self.value = float(state["value"])


def reference_kl(old_logprobs_N: Tensor, ref_logprobs_N: Tensor) -> float:
    """Mean over completion tokens of the k3 estimate of KL(policy || reference), nats; the policy
    sampled them."""
    blocks = zip(
        old_logprobs_N.split(BLOCK_TOKENS), ref_logprobs_N.split(BLOCK_TOKENS), strict=True
    )
    return sum(float(kl_k3(old_n.double(), ref_n.double()).sum()) for old_n, ref_n in blocks) / len(
        old_logprobs_N
    )
