"""From graded rollouts to training shards: old log-probs and entropies, shaping of whole groups, mini-batches.

Shape suffixes: B = completions, T = response tokens.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from openrlhf_ext.algorithms import RolloutBatch
from openrlhf_ext.algorithms.blocks import row_sums
from openrlhf_ext.controller.gauges import DEFAULT_BAND, correction_band, mismatch_gauges
from openrlhf_ext.controller.kl_control import KLCoefficient, reference_kl
from openrlhf_ext.controller.scorers import PendingScores, Scorer, padded_scores
from openrlhf_ext.controller.shards import TrainingShard, mini_batch_shards
from openrlhf_ext.controller.values import ValueTrainer
from openrlhf_ext.driver.rollouts import Group
from openrlhf_ext.megatron.batch import LogprobEntropy, SequenceBatch, balance_rows, sequence_batch
from openrlhf_ext.rewards.executor import FAILED_KEY
from openrlhf_ext.rollout.response import Response

Get = Callable[[list], list]
"""Waits for Ray calls with the deadline of the phase: ``Deadline.get``."""


class ExperienceMaker:
    """Makes one ``TrainingShard`` per data-parallel rank; groups are shaped here, whole, and never on a shard."""

    def __init__(
        self, policy: Any, *, algorithm: Any, group_size: int, mini_batch_size: int, data_parallel_size: int,
        reference: Scorer | None = None, critic: ValueTrainer | None = None, kl: KLCoefficient | None = None,
        attention_length: float = math.inf,
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
        self.reference, self.critic, self.kl = reference, critic, kl
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
        batch = sequence_batch(*zip(*(_row(sample) for sample in samples), strict=True))
        started = time.perf_counter()
        pending = self._start_scores(batch)
        old = self.old_logprobs(batch, get)
        scores = {name: scores.result(get) for name, scores in pending.items()}
        scored = time.perf_counter()
        self.batch, self.old = batch, old
        rollout = dataclasses.replace(rollout_batch(samples, batch, old, self.group_size), **scores)
        algorithm = self.algorithm if self.kl is None else self.algorithm.with_kl_coef(self.kl.value)
        shaped = algorithm.shape(rollout)
        shards = self._shards(batch, shaped)
        self.metrics = batch_metrics(samples, rollout, correction_band(self.algorithm))
        self.metrics |= {f"algorithm/{k}": float(v) for k, v in shaped.metrics.items()}
        self.metrics |= staleness_metrics(samples, version)
        self.metrics |= self._reference_metrics(rollout)
        self.metrics |= self.critic.take(batch, shaped) if self.critic is not None else {}
        self.metrics |= {"time/logprob": scored - started, "time/shape": time.perf_counter() - scored}
        return shards

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
        return pending if self.critic is None else {**pending, "values": self.critic.start_values(batch)}

    def _reference_metrics(self, rollout: RolloutBatch) -> dict[str, float]:
        """Distance from the reference policy; the coefficient of the next batch follows from it."""
        if self.reference is None:
            return {}
        metrics = {"kl/reference": reference_kl(rollout.old_logprobs, rollout.ref_logprobs, rollout.mask)}
        if self.kl is not None:
            metrics["kl/coef"] = self.kl.value
            self.kl.update(metrics["kl/reference"], len(rollout.rewards))
        return metrics

    def old_logprobs(self, batch: SequenceBatch, get: Get) -> LogprobEntropy:
        """(B, T) log-probs and entropies under the policy that is about to be trained."""
        parts = balance_rows(batch.lengths_B, self.data_parallel_size, self.attention_length)
        refs = self.policy.async_run_method_batch("forward", batch=[batch.select(rows) for rows in parts])
        results = get(refs)[:: self.policy.duplicate_actors]
        return LogprobEntropy(*(padded_scores(batch, parts, scores) for scores in zip(*results, strict=True)))

    def _shards(self, batch: SequenceBatch, shaped: Any) -> list[TrainingShard]:
        self.batches += 1
        ranks = mini_batch_shards(
            batch, shaped, self.group_size, self.mini_batch_size, self.data_parallel_size, seed=self.batches,
            attention_length=self.attention_length,
        )  # fmt: skip
        return [TrainingShard(mini_batches) for mini_batches in ranks]


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


def _row(sample: Response) -> tuple[Tensor, Tensor]:
    """Tokens, and 1 at every position that predicts a completion token (``sequence_batch``)."""
    mask_S = torch.zeros(len(sample.tokens_S), dtype=torch.long)
    for start, stop in sample.actions:
        mask_S[start:stop] = 1
    return torch.from_numpy(sample.tokens_S.astype("int64")), mask_S[1:]


def rollout_batch(
    samples: Sequence[Response], batch: SequenceBatch, old: LogprobEntropy, group_size: int
) -> RolloutBatch:
    """The algorithms' view of the batch."""
    return RolloutBatch(
        tokens=batch.targets_BT,
        mask=batch.mask_BT,
        rewards=torch.tensor([s.reward for s in samples]).double(),
        group_ids=torch.arange(len(samples)) // group_size,
        old_logprobs=old.logprobs_BT,
        entropies=old.entropies_BT,
        rollout_logprobs=_rollout_logprobs(samples, batch),
        truncated=torch.tensor([s.truncated for s in samples]),
        group_size=group_size,
    )


def _rollout_logprobs(samples: Sequence[Response], batch: SequenceBatch) -> Tensor | None:
    """(B, T) log-probs that the engines reported, aligned with the response tokens."""
    if any(s.logprobs_T is None for s in samples):
        return None
    result_BT = torch.zeros(batch.mask_BT.shape)
    for row_T, sample in zip(result_BT, samples, strict=True):
        row_T[: len(sample.logprobs_T)] = torch.from_numpy(sample.logprobs_T)
    return result_BT


def batch_metrics(
    samples: Sequence[Response], rollout: RolloutBatch, band: tuple[float, float] = DEFAULT_BAND
) -> dict[str, float]:
    """Means over the rollout batch, under the names of docs/metrics.md."""
    rewards, tokens = rollout.rewards.float(), rollout.mask.sum()
    metrics = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(correction=0),
        "accuracy/mean": sum(sample.score for sample in samples) / len(samples),
        "entropy/mean": row_sums(rollout.entropies, rollout.mask).sum() / tokens,
        "response/length_mean": tokens / len(samples),
        "response/truncated_rate": rollout.truncated.float().mean(),
        "tokens/generated": tokens,
    }
    if rollout.rollout_logprobs is not None:
        metrics |= mismatch_gauges(rollout.old_logprobs, rollout.rollout_logprobs, rollout.mask, band)
    return {name: float(value) for name, value in metrics.items()} | reward_logs(samples)


def reward_logs(samples: Sequence[Response]) -> dict[str, float]:
    """Mean of every number the reward function returned in ``extra_logs``, and how many samples were not graded."""
    names = sorted(set(samples[0].extra_logs) - {FAILED_KEY})
    logs = {f"reward_log/{name}": sum(s.extra_logs[name] for s in samples) / len(samples) for name in names}
    return logs | {"reward/failures": sum(s.extra_logs.get(FAILED_KEY, 0.0) for s in samples)}


def staleness_metrics(samples: Sequence[Response], version: int) -> dict[str, float]:
    """How many weight updates the policy, now at ``version``, is ahead of the weights that sampled each token.

    Empty if any response does not tell.
    """
    if not all(sample.versions for sample in samples):
        return {}
    ages = [(version - then, stop - start) for sample in samples for then, start, stop in sample.versions]
    mixed = sum(len({then for then, _, _ in sample.versions}) > 1 for sample in samples)
    return {
        "staleness/mean": sum(age * tokens for age, tokens in ages) / sum(tokens for _, tokens in ages),
        "staleness/max": float(max(age for age, _ in ages)),
        "staleness/mixed_fraction": mixed / len(samples),
    }
