"""Turns graded groups into training shards, and into metrics after the step."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from openrlhf_ext.algorithms import Algorithm, LossBatch
from openrlhf_ext.algorithms.kl import KLCoefficient
from openrlhf_ext.driver.bits import Bits, compared_bits
from openrlhf_ext.driver.critic import ValueTrainer
from openrlhf_ext.driver.description import describe, shown_samples, text_metrics
from openrlhf_ext.driver.rollouts import Group
from openrlhf_ext.driver.scoring import Get, Scored, Scoring
from openrlhf_ext.megatron.step.batch import LogprobEntropy, SequenceBatch
from openrlhf_ext.megatron.step.dealing import Deal
from openrlhf_ext.ranks.policy import TrainingShard

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Experience:
    """A scored and shaped batch of graded groups, with a shard for each data-parallel rank. The run
    shows the completions of ``shown`` groups (0 = all, None = none)."""

    scored: Scored
    shaped: LossBatch
    shards: list[TrainingShard]
    version: int
    shown: int | None
    seconds: dict[str, float]


@dataclass(frozen=True)
class Described:
    """Metrics and samples of a batch after its step. ``old``: the policy's log-probs and entropies
    before the step; ``samples``: in the form that ``SampleWriter`` takes; ``bits``: in exact mode,
    if tokens count."""

    groups: Sequence[Group]
    batch: SequenceBatch
    old: LogprobEntropy
    metrics: dict[str, float]
    samples: list[dict[str, Any]]
    bits: Bits | None = None


@dataclass
class ExperienceMaker:
    """Makes experience from groups. Shapes whole groups here, never on a shard. ``exact``: compare
    the bits of log-probs."""

    scoring: Scoring
    algorithm: Algorithm
    critic: ValueTrainer | None = None
    kl: KLCoefficient | None = None
    tokenizer: Any = None
    end_tokens: Collection[int] = ()
    exact: bool = False
    batches: int = field(default=0, init=False)

    @torch.no_grad()
    def make(
        self, groups: Sequence[Group], version: int, get: Get, shown: int | None = None
    ) -> Experience:
        """Scores the groups, shapes them, and cuts every data-parallel rank's shard.

        Old log-probs come from the weights ``version``. Raises ValueError as ``Scoring.score``
        does.
        """
        scored = self.scoring.score(groups, self.batches, get)
        if self.kl is not None:  # a copy that keeps the method's own state
            self.algorithm = self.algorithm.with_kl_coef(self.kl.value)
        shaped = self.algorithm.shape(scored.rollout)
        if self.critic is not None:
            self.critic.take(scored.batch, shaped)
        self.batches += 1
        shards = training_shards(shaped, scored.chunks, scored.deals, seed=self.batches)
        if scored.old is None:
            for shard, own in zip(shards, scored.deals, strict=True):
                shard.sequences = scored.routed.select(own.rows)
        seconds = {
            "time/logprob": scored.ended - scored.started,
            "time/shape": time.perf_counter() - scored.ended,
        }
        return Experience(scored, shaped, shards, version, shown, seconds)

    @torch.no_grad()
    def described(self, made: Experience, get: Get) -> Described:
        """Describes the batch after its step, and updates the KL coefficient for the next one."""
        started = time.perf_counter()
        scored, shaped = made.scored, made.shaped
        old = self.scoring.seen_logprobs(scored, get) if scored.old is None else scored.old
        rollout, metrics = describe(scored, shaped, old, self.algorithm, made.version)
        if self.tokenizer is not None:
            prompts = [group.prompt.text for group in scored.groups]
            metrics |= text_metrics(prompts, scored.samples, self.tokenizer, self.end_tokens)
        if self.kl is not None and rollout.ref_logprobs is not None:
            metrics["kl/coef"] = self.kl.value
            seen = rollout.rows(scored.seen_before)
            measured = self.algorithm.penalty.mean(
                seen["old_logprobs"], seen["ref_logprobs"], seen.segments
            )
            self.kl.update(measured, len(rollout.rewards))
        samples = [] if made.shown is None else shown_samples(scored, rollout, shaped, made.shown)
        bits = compared_bits(scored, old, made.version) if self.exact else None
        if bits is not None:
            metrics["rollout/bit_equal"] = 1.0 - bits.differing / bits.tokens
        metrics |= made.seconds
        metrics["time/shape"] += time.perf_counter() - started
        return Described(scored.groups, scored.batch, old, metrics, samples, bits)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint: the number of batches made, the KL coefficient, and
        the method's own state."""
        kl = self.kl.state_dict() if self.kl is not None else None
        return {"batches": self.batches, "kl": kl, "algorithm": self.algorithm.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state from ``state_dict``."""
        self.batches = state["batches"]
        if self.kl is not None and state["kl"] is not None:
            self.kl.load_state_dict(state["kl"])
        if kept := state.get("algorithm"):  # earlier releases saved no state
            self.algorithm.load_state_dict(kept)
        elif self.algorithm.state_dict():
            logger.warning(
                "the checkpoint holds no state of %s, which begins anew", self.algorithm.name
            )


def training_shards(
    shaped: LossBatch, chunks: Sequence[slice], deals: Sequence[Deal], seed: int = 0
) -> list[TrainingShard]:
    """Returns each data-parallel rank's shard of every optimizer step. ``prepare`` receives the old
    log-probs as those of the policy about to be updated, which holds for the first update of a
    rollout batch; for later updates the ranks call ``prepare`` again."""
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
