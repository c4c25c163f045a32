"""Scores graded groups: deals rows to ranks, and collects log-probs, values, and rewards.

The rows of a rollout batch are dealt before any computation: each policy rank receives the tokens
of its rows once and keeps them. Shape suffixes: B = completions, N = response tokens of all
completions, n = those of one replica.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from openrlhf_ext.algorithms import RolloutBatch
from openrlhf_ext.driver.placement import RankGroup
from openrlhf_ext.driver.rollouts import Group, routed_by_engines
from openrlhf_ext.megatron.step.batch import LogprobEntropy, SequenceBatch, sequence_batch
from openrlhf_ext.megatron.step.dealing import (
    TOKENS,
    Deal,
    RowCosts,
    deal,
    deal_rows,
    group_chunks,
    mini_batch_order,
)
from openrlhf_ext.rollout.response import Response, graded

Get = Callable[[list], list]
"""Waits for Ray calls within the deadline of the phase: ``Deadline.get``."""

# ---- scores


@dataclass(frozen=True)
class PendingScores:
    """Scores that the ranks are computing."""

    batch: SequenceBatch
    parts: list[list[int]]
    refs: list[Any]
    group: RankGroup

    def result(self, get: Callable[[list], list]) -> Tensor:
        """Returns (N,) fp32 scores; waits for the ranks with ``get``."""
        return scores_in_order(self.batch, self.parts, self.group.of_replicas(get(self.refs)))


def scores_in_order(
    batch: SequenceBatch, parts: Sequence[Sequence[int]], answers: Sequence[np.ndarray]
) -> Tensor:
    """Returns (N,) fp32 scores of the response tokens in the order of the batch. ``answers``: each
    replica's scores of its rows, concatenated."""
    scores_N = np.empty(batch.responses.tokens, np.float32)
    for rows, answer_n in zip(parts, answers, strict=True):
        batch.responses.put(scores_N, answer_n, rows)
    return torch.from_numpy(scores_N)


@dataclass(frozen=True)
class Scorer:
    """A method of a group of ranks that maps a ``SequenceBatch`` to the scores of its N response
    tokens. Deals sequences by their cost in the group's model."""

    group: RankGroup
    method: str
    costs: RowCosts = TOKENS

    def start_scores(self, batch: SequenceBatch) -> PendingScores:
        """Deals the rows to the replicas; returns at once."""
        parts = deal_rows(batch, self.group.layout.data_parallel_size, self.costs)
        refs = self.group.ask_replicas(self.method, [batch.select(rows) for rows in parts])
        return PendingScores(batch, parts, refs, self.group)


def with_end(batch: SequenceBatch) -> SequenceBatch:
    """Returns the sequences with one more token each as their only response token, so that the
    state before it is that of the last token. Attention is causal, so any token will do. A reward
    model's score of a whole sequence is the value there, whatever the last token is, as in OpenRLHF
    0.11.2 (``models/model.py``); transformers' pooling leaves out a last token that is the padding
    token."""
    ends = [int(length) for length in batch.lengths_B]
    whole = [np.append(tokens_S.numpy(), np.int32(0)) for tokens_S in batch.tokens_M.split(ends)]
    return sequence_batch(whole, [[(end, end + 1)] for end in ends])


# ---- the batch


@dataclass(frozen=True)
class Scored:
    """A batch of graded groups with the models' scores.

    ``chunks``: the rows of each optimizer step; ``deals``: those of each data-parallel rank.
    ``rollout``: the batch that the method shapes. ``old``: the policy's log-probs and entropies
    before the step, None if the training pass computes them. ``source``: whose log-probs the loss
    compares with (``config.estimator.old_logprobs``). ``started``, ``ended``: seconds of
    ``time.perf_counter`` around the forward passes.
    """

    groups: Sequence[Group]
    batch: SequenceBatch
    routed: SequenceBatch
    chunks: Sequence[slice]
    deals: Sequence[Deal]
    rollout: RolloutBatch
    old: LogprobEntropy | None
    source: str
    engine_entropies: bool
    started: float
    ended: float

    @property
    def samples(self) -> list[Response]:
        """The completions, in the order of the batch."""
        return [response for group in self.groups for response in group.responses]

    @property
    def seen_before(self) -> slice:
        """The rows whose log-probs are those of the policy before the step: all, or if updates
        compute them, those of the first one."""
        return self.chunks[0] if self.old is None else slice(0, len(self.samples))


@dataclass
class Scoring:
    """Scores batches of groups.

    Deals sequences to the policy's ranks by their ``costs`` in its model. ``replays``: the policy's
    ranks fetch the experts that the engines' routers chose, and use them; other models choose their
    own. ``seed`` sets the order of mini-batches.
    """

    policy: RankGroup
    group_size: int
    mini_batch_size: int
    reference: Scorer | None = None
    guide: Scorer | None = None
    reward: Scorer | None = None
    values: Scorer | None = None
    costs: RowCosts = TOKENS
    source: str = "policy"
    engine_entropies: bool = False
    replays: bool = False
    seed: int = 0

    def score(self, groups: Sequence[Group], number: int, get: Get) -> Scored:
        """Scores the groups of a batch; ``number`` counts the batches before it.

        Raises:
            ValueError: a group does not have ``group_size`` completions, or a completion lacks its
                reward, or log-probs or entropies that its engine should have returned.
        """
        groups = self.ordered(groups, number)
        samples = responses_of(groups, self.group_size)
        batch = sequences_of(samples)
        routed = routed_by_engines(batch, samples) if self.replays else batch
        started = time.perf_counter()
        pending = self._start(batch)
        chunks, deals = self.dealt(routed)
        old = self._forward(routed, deals, get) if self.source == "policy" else None
        scores: dict[str, Any] = {name: each.result(get) for name, each in pending.items()}
        if "rewards" in scores:
            groups = with_rewards(groups, scores.pop("rewards"))
            samples = responses_of(groups, self.group_size)
        for sample in samples:
            sample.check_reward()
        ended = time.perf_counter()
        rollout = dataclasses.replace(rollout_batch(samples, batch, old, self.group_size), **scores)
        if self.source == "engine":
            rollout = dataclasses.replace(rollout, old_logprobs=_of_engines(rollout))
        if self.engine_entropies:
            rollout = dataclasses.replace(rollout, entropies=_engine_entropies(samples))
        return Scored(
            groups,
            batch,
            routed,
            chunks,
            deals,
            rollout,
            old,
            self.source,
            self.engine_entropies,
            started,
            ended,
        )

    def ordered(self, groups: Sequence[Group], number: int) -> list[Group]:
        """Returns the groups sorted by prompt, so that the batch does not depend on engine speed,
        then permuted into the order of mini-batches."""
        by_prompt = sorted(groups, key=lambda group: group.prompt.text)
        per_step = max(1, self.mini_batch_size // self.group_size)
        return [by_prompt[i] for i in mini_batch_order(len(groups), per_step, self.seed, number)]

    def dealt(self, batch: SequenceBatch) -> tuple[list[slice], list[Deal]]:
        """Returns the rows of each optimizer step, and each data-parallel rank's share of them."""
        chunks = list(group_chunks(len(batch), self.group_size, self.mini_batch_size))
        return chunks, deal(batch, chunks, self.policy.layout.data_parallel_size, self.costs)

    def old_logprobs(self, batch: SequenceBatch, get: Get) -> LogprobEntropy:
        """Returns (N,) log-probs and entropies under the current policy; its ranks keep their
        rows."""
        return self._forward(batch, self.dealt(batch)[1], get)

    def seen_logprobs(self, scored: Scored, get: Get) -> LogprobEntropy:
        """Returns (N,) log-probs and entropies that this batch's training pass computed."""
        return self._in_order(scored.batch, scored.deals, get(self.policy.ask("seen_logprobs")))

    def _start(self, batch: SequenceBatch) -> dict[str, PendingScores]:
        """Starts the scores of the other models; models on their own ranks run beside the
        policy."""
        pending = {}
        if self.reference is not None:
            pending["ref_logprobs"] = self.reference.start_scores(batch)
        if self.guide is not None:
            pending["guide_logprobs"] = self.guide.start_scores(batch)
        if self.reward is not None:
            pending["rewards"] = self.reward.start_scores(with_end(batch))
        if self.values is not None:
            pending["values"] = self.values.start_scores(batch)
        return pending

    def _forward(self, batch: SequenceBatch, deals: Sequence[Deal], get: Get) -> LogprobEntropy:
        parts = [batch.select(own.rows) for own in deals]
        return self._in_order(batch, deals, get(self.policy.ask_replicas("forward", parts)))

    def _in_order(
        self, batch: SequenceBatch, deals: Sequence[Deal], answers: Sequence[Any]
    ) -> LogprobEntropy:
        """Returns every replica's scores of its rows, in the order of the batch."""
        parts = [own.rows for own in deals]
        each = zip(*self.policy.of_replicas(answers), strict=True)
        return LogprobEntropy(*(scores_in_order(batch, parts, scores) for scores in each))


def responses_of(groups: Sequence[Group], group_size: int) -> list[Response]:
    """Returns the completions of the groups in order. Raises ValueError if a group does not have
    ``group_size`` completions."""
    responses = []
    for group in groups:
        if len(group.responses) != group_size:
            raise ValueError(
                f"a group of {len(group.responses)} completions, rollout.n_samples_per_prompt is "
                f"{group_size}: {group.prompt.text!r}"
            )
        responses += group.responses
    return responses


def with_rewards(groups: Sequence[Group], rewards_B: Tensor) -> list[Group]:
    """Returns the groups with a reward model's rewards. A reward is also the completion's score, as
    with a reward function that returns only rewards."""
    rewards = iter(rewards_B.tolist())
    rewarded = []
    for group in groups:
        responses = []
        for response in group.responses:
            reward = next(rewards)
            responses.append(
                dataclasses.replace(response, reward=reward, score=reward, receipt=None)
            )
        rewarded.append(Group(group.prompt, responses))
    return rewarded


def sequences_of(samples: Sequence[Response]) -> SequenceBatch:
    """Returns the completions as token sequences for the policy."""
    return sequence_batch(
        [sample.tokens_S for sample in samples], [sample.actions for sample in samples]
    )


def rollout_batch(
    samples: Sequence[Response], batch: SequenceBatch, old: LogprobEntropy | None, group_size: int
) -> RolloutBatch:
    """Returns the batch in the form that the algorithms take."""
    old_N, entropies_N = old or (None, None)
    return RolloutBatch(
        tokens=batch.targets_N,
        lengths=batch.counts_B,
        rewards=torch.tensor([graded(sample.reward) for sample in samples]).double(),
        group_ids=torch.arange(len(samples)) // group_size,
        old_logprobs=old_N,
        entropies=entropies_N,
        rollout_logprobs=_rollout_logprobs(samples),
        truncated=torch.tensor([sample.truncated for sample in samples]),
        from_guide=torch.tensor([sample.from_guide for sample in samples]),
        group_size=group_size,
    )


def _of_engines(rollout: RolloutBatch) -> Tensor:
    """Returns (N,) log-probs under which the engines sampled the tokens."""
    if rollout.rollout_logprobs is None:
        raise ValueError(
            "old log-probs of the engines: a completion came without log-probs of its engine, as "
            "those of an agent whose rollout_log_probs are None; use algo.old_logprobs policy"
        )
    return rollout.rollout_logprobs


def _engine_entropies(samples: Sequence[Response]) -> Tensor:
    """Returns (N,) entropies of the distributions that the engines sampled from."""
    told = [sample.entropies_T for sample in samples if sample.entropies_T is not None]
    if len(told) < len(samples):
        raise ValueError("algo.entropies engine: a completion came without entropies of its engine")
    return torch.from_numpy(np.concatenate(told))


def _rollout_logprobs(samples: Sequence[Response]) -> Tensor | None:
    """Returns (N,) log-probs that the engines reported; None if any completion lacks them."""
    reported = [sample.logprobs_T for sample in samples if sample.logprobs_T is not None]
    return torch.from_numpy(np.concatenate(reported)) if len(reported) == len(samples) else None
