"""From graded rollouts to training shards: old log-probs and entropies, shaping of whole groups, mini-batches.

Shape suffixes: B = completions, N = response tokens of all completions.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from openrlhf_ext.algorithms import RolloutBatch, ShapedBatch
from openrlhf_ext.algorithms.segments import float64_sum
from openrlhf_ext.driver.gauges import (
    DEFAULT_BAND,
    correction_band,
    guide_agreement,
    guide_gauges,
    policy_mismatch,
)
from openrlhf_ext.driver.kl_control import KLCoefficient, reference_kl
from openrlhf_ext.driver.rollouts import Group
from openrlhf_ext.driver.scorers import PendingScores, Scorer, scores_in_order
from openrlhf_ext.driver.shards import Deal, TrainingShard, deal, group_chunks, training_shards
from openrlhf_ext.driver.values import ValueTrainer
from openrlhf_ext.megatron.step.batch import LogprobEntropy, SequenceBatch, sequence_batch
from openrlhf_ext.rewards.executor import FAILED_KEY
from openrlhf_ext.rollout.response import Response

Get = Callable[[list], list]
"""Waits for Ray calls with the deadline of the phase: ``Deadline.get``."""


class ExperienceMaker:
    """Makes one ``TrainingShard`` per data-parallel rank; groups are shaped here, whole, and never on a shard."""

    def __init__(
        self, policy: Any, *, algorithm: Any, group_size: int, mini_batch_size: int, data_parallel_size: int,
        reference: Scorer | None = None, critic: ValueTrainer | None = None, kl: KLCoefficient | None = None,
        attention_length: float = math.inf, guide: Scorer | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            policy: actor group of the policy's ranks.
            attention_length: of the policy's model, for dealing sequences by their cost.
        """
        self.policy = policy
        self.algorithm = algorithm
        self.group_size = group_size
        self.mini_batch_size = mini_batch_size
        self.data_parallel_size = data_parallel_size
        self.attention_length = attention_length
        self.reference, self.critic, self.kl, self.guide = reference, critic, kl, guide
        self.metrics: dict[str, float] = {}
        self.batch: SequenceBatch | None = None  # the last one, with its old log-probs and entropies
        self.old: LogprobEntropy | None = None
        self.batches = 0

    @torch.no_grad()
    def make(self, groups: Sequence[Group], version: int, get: Get) -> list[TrainingShard]:
        """Every data-parallel rank's shard of this batch; ``metrics`` then describes it.

        Args:
            version: of the policy's weights, with which old log-probs are taken.
        """
        samples = in_group_order(groups, self.group_size)
        batch = sequences_of(samples)
        started = time.perf_counter()
        pending = self._start_scores(batch)
        old = self.old_logprobs(batch, get)
        scores = {name: scores.result(get) for name, scores in pending.items()}
        scored = time.perf_counter()
        self.batch, self.old = batch, old
        shaped = self._shape(dataclasses.replace(rollout_batch(samples, batch, old, self.group_size), **scores))
        self.metrics |= reward_metrics(samples) | staleness_metrics(samples, version)
        self.metrics |= guide_gauges(samples) if self.guide is not None else {}
        self.metrics |= self.critic.take(batch, shaped) if self.critic is not None else {}
        self.batches += 1
        shards = training_shards(shaped, self._chunks(batch), self._deals(batch), seed=self.batches)
        self.metrics |= {"time/logprob": scored - started, "time/shape": time.perf_counter() - scored}
        return shards

    def _shape(self, rollout: RolloutBatch) -> ShapedBatch:
        """The batch as the algorithm shapes it; ``metrics`` then describes it."""
        algorithm = self.algorithm if self.kl is None else self.algorithm.with_kl_coef(self.kl.value)
        shaped = algorithm.shape(rollout)
        self.metrics = batch_metrics(rollout, correction_band(self.algorithm))
        self.metrics |= {f"algorithm/{k}": float(v) for k, v in shaped.metrics.items()}
        self.metrics |= self._reference_metrics(rollout) | guide_agreement(rollout)
        return shaped

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run has to know: how many batches were made, the KL coefficient."""
        return {"batches": self.batches, "kl": self.kl.state_dict() if self.kl is not None else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state."""
        self.batches = state["batches"]
        if self.kl is not None and state["kl"] is not None:
            self.kl.load_state_dict(state["kl"])

    def _start_scores(self, batch: SequenceBatch) -> dict[str, PendingScores]:
        """Starts what other models say of the tokens; on ranks of their own they work while the policy does."""
        pending = {} if self.reference is None else {"ref_logprobs": self.reference.start(batch)}
        if self.guide is not None:
            pending["guide_logprobs"] = self.guide.start(batch)
        return pending if self.critic is None else {**pending, "values": self.critic.start_values(batch)}

    def _reference_metrics(self, rollout: RolloutBatch) -> dict[str, float]:
        """Distance from the reference policy; the coefficient of the next batch follows from it."""
        if self.reference is None:
            return {}
        metrics = {"kl/reference": reference_kl(rollout.old_logprobs, rollout.ref_logprobs)}
        if self.kl is not None:
            metrics["kl/coef"] = self.kl.value
            self.kl.update(metrics["kl/reference"], len(rollout.rewards))
        return metrics

    def old_logprobs(self, batch: SequenceBatch, get: Get) -> LogprobEntropy:
        """(N,) log-probs and entropies under the policy that is about to be trained; its ranks keep their rows."""
        parts = [own.rows for own in self._deals(batch)]
        refs = self.policy.async_run_method_batch("forward", batch=[batch.select(rows) for rows in parts])
        results = [answer[0] for answer in get(refs)[:: self.policy.duplicate_actors]]  # one batch for each replica
        return LogprobEntropy(*(scores_in_order(batch, parts, scores) for scores in zip(*results, strict=True)))

    def _chunks(self, batch: SequenceBatch) -> list[slice]:
        return list(group_chunks(len(batch), self.group_size, self.mini_batch_size))

    def _deals(self, batch: SequenceBatch) -> list[Deal]:
        return deal(batch.lengths_B, self._chunks(batch), self.data_parallel_size, self.attention_length)


def in_group_order(groups: Sequence[Group], group_size: int) -> list[Response]:
    """The completions of groups sorted by prompt, so that the batch does not depend on which engine was faster.

    Raises:
        ValueError: a group has not ``group_size`` completions.
    """
    for group in groups:
        if len(group.responses) != group_size:
            raise ValueError(
                f"a group of {len(group.responses)} completions, rollout.n_samples_per_prompt is {group_size}: "
                f"{group.prompt.text!r}"
            )
    return [sample for group in sorted(groups, key=lambda g: g.prompt.text) for sample in group.responses]


def sequences_of(samples: Sequence[Response]) -> SequenceBatch:
    """The completions as the policy sees them."""
    return sequence_batch([sample.tokens_S for sample in samples], [sample.actions for sample in samples])


def rollout_batch(
    samples: Sequence[Response], batch: SequenceBatch, old: LogprobEntropy, group_size: int
) -> RolloutBatch:
    """The algorithms' view of the batch."""
    return RolloutBatch(
        tokens=batch.targets_N,
        lengths=batch.counts_B,
        rewards=torch.tensor([s.reward for s in samples]).double(),
        group_ids=torch.arange(len(samples)) // group_size,
        old_logprobs=old.logprobs_N,
        entropies=old.entropies_N,
        rollout_logprobs=_rollout_logprobs(samples),
        truncated=torch.tensor([s.truncated for s in samples]),
        from_guide=torch.tensor([s.from_guide for s in samples]),
        group_size=group_size,
    )


def _rollout_logprobs(samples: Sequence[Response]) -> Tensor | None:
    """(N,) log-probs that the engines reported."""
    if any(s.logprobs_T is None for s in samples):
        return None
    return torch.from_numpy(np.concatenate([s.logprobs_T for s in samples]))


def batch_metrics(rollout: RolloutBatch, band: tuple[float, float] = DEFAULT_BAND) -> dict[str, float]:
    """Means over the rollout batch, under the names of docs/metrics.md."""
    rewards, tokens = rollout.rewards.float(), len(rollout.tokens)
    metrics = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(correction=0),
        "entropy/mean": float64_sum(rollout.entropies) / tokens,
        "response/length_mean": tokens / len(rewards),
        "response/truncated_rate": rollout.truncated.float().mean(),
        "tokens/generated": tokens,
    }
    if rollout.rollout_logprobs is not None:
        metrics |= policy_mismatch(rollout, band)
    return {name: float(value) for name, value in metrics.items()}


def reward_metrics(samples: Sequence[Response]) -> dict[str, float]:
    """Mean score, mean of every number the reward function returned in ``extra_logs``, and how many samples were not
    graded.
    """
    names = sorted(set(samples[0].extra_logs) - {FAILED_KEY})
    logs = {f"reward_log/{name}": sum(s.extra_logs[name] for s in samples) / len(samples) for name in names}
    logs["accuracy/mean"] = sum(sample.score for sample in samples) / len(samples)
    return logs | {"reward/failures": sum(s.extra_logs.get(FAILED_KEY, 0.0) for s in samples)}


def staleness_metrics(samples: Sequence[Response], version: int) -> dict[str, float]:
    """How many weight updates the policy, now at ``version``, is ahead of its weights that sampled each token.

    Empty if any response does not tell.
    """
    samples = [sample for sample in samples if not sample.from_guide]
    if not all(sample.versions for sample in samples):
        return {}
    ages = [(version - then, stop - start) for sample in samples for then, start, stop in sample.versions]
    mixed = sum(len({then for then, _, _ in sample.versions}) > 1 for sample in samples)
    return {
        "staleness/mean": sum(age * tokens for age, tokens in ages) / sum(tokens for _, tokens in ages),
        "staleness/max": float(max(age for age, _ in ages)),
        "staleness/mixed_fraction": mixed / len(samples),
    }
