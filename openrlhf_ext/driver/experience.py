"""From graded groups to training shards, and to what is said of them: score, shape, cut; after the
step, describe."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from openrlhf_ext.algorithms import Algorithm, LossBatch
from openrlhf_ext.driver.critic import ValueTrainer
from openrlhf_ext.driver.description import describe, shown_samples, text_metrics
from openrlhf_ext.driver.kl import KLCoefficient
from openrlhf_ext.driver.rollouts import Group
from openrlhf_ext.driver.scoring import Get, Scored, Scoring
from openrlhf_ext.megatron.step.batch import LogprobEntropy, SequenceBatch
from openrlhf_ext.megatron.step.dealing import Deal
from openrlhf_ext.ranks.policy import TrainingShard

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Experience:
    """What a batch of graded groups became: a shard for each data-parallel rank. Completions of
    ``shown`` groups are to be shown (0 = of all, None = of none)."""

    scored: Scored
    shaped: LossBatch
    shards: list[TrainingShard]
    version: int
    shown: int | None
    seconds: dict[str, float]


@dataclass(frozen=True)
class Described:
    """What is said of a batch after its step: ``old`` is what the policy said of it before,
    ``samples`` are as ``SampleWriter`` takes them."""

    groups: Sequence[Group]
    batch: SequenceBatch
    old: LogprobEntropy
    metrics: dict[str, float]
    samples: list[dict[str, Any]]


@dataclass
class ExperienceMaker:
    """Makes experience out of groups; these are shaped here, whole, and never on a shard."""

    scoring: Scoring
    algorithm: Algorithm
    critic: ValueTrainer | None = None
    kl: KLCoefficient | None = None
    tokenizer: Any = None
    end_tokens: Collection[int] = ()
    batches: int = field(default=0, init=False)

    @torch.no_grad()
    def make(
        self, groups: Sequence[Group], version: int, get: Get, shown: int | None = None
    ) -> Experience:
        """Scores the groups, shapes them, and cuts every data-parallel rank's shard.

        Old log-probs are of the weights ``version``. Raises ValueError: see ``Scoring.score``.
        """
        started = time.perf_counter()
        scored = self.scoring.score(groups, self.batches, get)
        shaping = time.perf_counter()
        if self.kl is not None:  # a copy, which keeps what the method keeps in itself
            self.algorithm = self.algorithm.with_kl_coef(self.kl.value)
        shaped = self.algorithm.shape(scored.rollout)
        if self.critic is not None:
            self.critic.take(scored.batch, shaped)
        self.batches += 1
        shards = training_shards(shaped, scored.chunks, scored.deals, seed=self.batches)
        if scored.old is None:
            for shard, own in zip(shards, scored.deals, strict=True):
                shard.sequences = scored.routed.select(own.rows)
        seconds = {"time/logprob": shaping - started, "time/shape": time.perf_counter() - shaping}
        return Experience(scored, shaped, shards, version, shown, seconds)

    @torch.no_grad()
    def described(self, made: Experience, get: Get) -> Described:
        """What the batch was like, after its step; the next KL coefficient follows from it."""
        started = time.perf_counter()
        scored, shaped = made.scored, made.shaped
        old = self.scoring.seen_logprobs(scored, get) if scored.old is None else scored.old
        rollout, metrics = describe(scored, shaped, old, self.algorithm, made.version)
        if self.tokenizer is not None:
            prompts = [group.prompt.text for group in scored.groups]
            metrics |= text_metrics(prompts, scored.samples, self.tokenizer, self.end_tokens)
        if self.kl is not None and rollout.ref_logprobs is not None:
            metrics["kl/coef"] = self.kl.value
            measured = self.algorithm.penalty.mean(
                old.logprobs_N, rollout.ref_logprobs, rollout.segments
            )
            self.kl.update(measured, len(rollout.rewards))
        samples = (
            [] if made.shown is None else shown_samples(scored.groups, rollout, shaped, made.shown)
        )
        metrics |= made.seconds
        metrics["time/shape"] += time.perf_counter() - started
        return Described(scored.groups, scored.batch, old, metrics, samples)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run has to know: how many batches were made, the KL coefficient, what the
        method keeps."""
        kl = self.kl.state_dict() if self.kl is not None else None
        return {"batches": self.batches, "kl": kl, "algorithm": self.algorithm.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state."""
        self.batches = state["batches"]
        if self.kl is not None and state["kl"] is not None:
            self.kl.load_state_dict(state["kl"])
        if kept := state.get("algorithm"):  # earlier releases kept nothing
            self.algorithm.load_state_dict(kept)
        elif self.algorithm.state_dict():
            logger.warning(
                "the checkpoint holds no state of %s, which begins anew", self.algorithm.name
            )


def training_shards(
    shaped: LossBatch, chunks: Sequence[slice], deals: Sequence[Deal], seed: int = 0
) -> list[TrainingShard]:
    """Each data-parallel rank's shard of every optimizer step. ``prepare`` gets the old log-probs
    as those of the policy about to be updated, which they are in the first update of a rollout
    batch; for later ones the ranks prepare again."""
    shards = [TrainingShard([], seed) for _ in deals]
    for step, chunk in enumerate(chunks):
        mini_batch = shaped.mini_batch(chunk)  # a slice is not copied
        if mini_batch.old_logprobs is not None:
            mini_batch = mini_batch.algorithm.prepare(
                mini_batch.old_logprobs, mini_batch, seed=seed
            )
        mini_batch = mini_batch.lean()
        for shard, own in zip(shards, deals, strict=True):
            shard.mini_batches.append(
                mini_batch.select([row - chunk.start for row in own.steps[step]])
            )
    return shards
