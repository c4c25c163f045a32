"""From graded rollouts to training shards: old log-probs and entropies, shaping of whole groups, mini-batches.

Shape suffixes: B = completions, T = response tokens.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import torch
from torch import Tensor

from openrlhf_ext.algorithms import RolloutBatch
from openrlhf_ext.algorithms.blocks import row_sums
from openrlhf_ext.compat import Experience, RemoteExperienceMaker
from openrlhf_ext.controller.gauges import DEFAULT_BAND, correction_band, mismatch_gauges
from openrlhf_ext.controller.kl_control import KLCoefficient, reference_kl
from openrlhf_ext.controller.rollout_sample import staleness_metrics
from openrlhf_ext.controller.scorers import PendingScores, Scorer, padded_scores
from openrlhf_ext.controller.shards import TrainingShard, mini_batch_shards
from openrlhf_ext.controller.values import ValueTrainer
from openrlhf_ext.megatron.batch import LogprobEntropy, SequenceBatch, balance_rows, sequence_batch


class ShapingExperienceMaker(RemoteExperienceMaker):
    """Makes one ``TrainingShard`` per data-parallel rank; groups are shaped here, whole, and never on a shard."""

    def __init__(
        self, *args: Any, algorithm: Any, group_size: int, mini_batch_size: int, data_parallel_size: int,
        reference: Scorer | None = None, critic: ValueTrainer | None = None, kl: KLCoefficient | None = None,
        attention_length: float = math.inf,
    ) -> None:  # fmt: skip
        super().__init__(*args)
        self.algorithm = algorithm
        self.group_size = group_size
        self.mini_batch_size = mini_batch_size
        self.data_parallel_size = data_parallel_size
        self.attention_length = attention_length  # of the policy's model, for dealing sequences by their cost
        self.reference, self.critic, self.kl = reference, critic, kl
        self.metrics: dict[str, float] = {}
        self.batch: SequenceBatch | None = None  # the last one, with its old log-probs and entropies
        self.old: LogprobEntropy | None = None
        self.policy_version = 0  # of the weights that old log-probs are taken with; set by the trainer
        self._batches = 0

    @torch.no_grad()
    def make_experience_batch(self, rollout_samples: list[Experience]) -> list[TrainingShard]:
        """Every data-parallel rank's shard of this rollout batch; ``metrics`` then describes the batch."""
        samples = in_group_order(rollout_samples, self.group_size)
        batch = sequence_batch([s.sequences[0] for s in samples], [s.action_mask[0] for s in samples])
        started = time.perf_counter()
        pending = self._start_scores(batch)
        old = self.old_logprobs(batch)
        scores = {name: scores.result() for name, scores in pending.items()}
        scored = time.perf_counter()
        self.batch, self.old = batch, old
        rollout = dataclasses.replace(rollout_batch(samples, batch, old, self.group_size), **scores)
        algorithm = self.algorithm if self.kl is None else self.algorithm.with_kl_coef(self.kl.value)
        shaped = algorithm.shape(rollout)
        shards = self._shards(samples, batch, shaped)
        self.metrics = batch_metrics(samples, rollout, correction_band(self.algorithm))
        self.metrics |= {f"algorithm/{k}": float(v) for k, v in shaped.metrics.items()}
        self.metrics |= staleness_metrics(samples, self.policy_version)
        self.metrics |= self._reference_metrics(rollout)
        self.metrics |= self.critic.take(batch, shaped) if self.critic is not None else {}
        self.metrics |= {"time/logprob": scored - started, "time/shape": time.perf_counter() - scored}
        return shards

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

    def old_logprobs(self, batch: SequenceBatch) -> LogprobEntropy:
        """(B, T) log-probs and entropies under the policy that is about to be trained."""
        parts = balance_rows(batch.lengths_B, self.data_parallel_size, self.attention_length)
        refs = self.actor_model_group.async_run_method_batch("forward", batch=[batch.select(rows) for rows in parts])
        results = self._flatten_results(refs, self.actor_model_group.duplicate_actors)
        return LogprobEntropy(*(padded_scores(batch, parts, scores) for scores in zip(*results, strict=True)))

    def _shards(self, samples: list[Experience], batch: SequenceBatch, shaped: Any) -> list[TrainingShard]:
        self._batches += 1
        ranks = mini_batch_shards(
            batch, shaped, self.group_size, self.mini_batch_size, self.data_parallel_size, seed=self._batches,
            attention_length=self.attention_length,
        )  # fmt: skip
        rewards = torch.cat([s.rewards for s in samples]).float()
        lengths, truncated = (torch.cat([getattr(s, k) for s in samples]) for k in ("response_length", "truncated"))
        shards = []
        for mini_batches in ranks:
            rows = [row for mini in mini_batches for row in mini.rows]
            shards.append(
                TrainingShard(
                    sequences=batch.tokens_BS[
                        rows[:1]
                    ],  # OpenRLHF's trainer shows the first; the rows are in mini_batches
                    response_length=lengths[rows],
                    truncated=truncated[rows],
                    info={"reward": rewards[rows]},
                    mini_batches=mini_batches,
                )
            )
        return shards


def in_group_order(samples: list[Experience], group_size: int) -> list[Experience]:
    """Groups sorted by prompt, so that the batch does not depend on the order in which engines finished.

    Raises:
        ValueError: completions of one prompt do not stand together in blocks of ``group_size``.
    """
    if len(samples) % group_size:
        raise ValueError(
            f"{len(samples)} completions are not whole groups of rollout.n_samples_per_prompt = {group_size}"
        )
    groups = [samples[i : i + group_size] for i in range(0, len(samples), group_size)]
    for group in groups:
        if len(prompts := {s.prompts[0] for s in group}) != 1:
            raise ValueError(f"a group of completions mixes {len(prompts)} prompts: {sorted(prompts)}")
    return [sample for group in sorted(groups, key=lambda g: g[0].prompts[0]) for sample in group]


def rollout_batch(
    samples: list[Experience], batch: SequenceBatch, old: LogprobEntropy, group_size: int
) -> RolloutBatch:
    """The algorithms' view of the batch."""
    return RolloutBatch(
        tokens=batch.targets_BT,
        mask=batch.mask_BT,
        rewards=torch.cat([s.rewards for s in samples]).double(),
        group_ids=torch.arange(len(samples)) // group_size,
        old_logprobs=old.logprobs_BT,
        entropies=old.entropies_BT,
        rollout_logprobs=_rollout_logprobs(samples, batch),
        truncated=torch.cat([s.truncated for s in samples]).bool(),
        group_size=group_size,
    )


def _rollout_logprobs(samples: list[Experience], batch: SequenceBatch) -> Tensor | None:
    """(B, T) log-probs that the engines reported, aligned with the response tokens."""
    if any(s.rollout_log_probs is None for s in samples):
        return None
    result_BT = torch.zeros(batch.mask_BT.shape)
    for row, sample in enumerate(samples):
        positions = batch.predict_BT[row][batch.mask_BT[row]]
        result_BT[row, : len(positions)] = sample.rollout_log_probs[0][positions].float()
    return result_BT


def batch_metrics(
    samples: list[Experience], rollout: RolloutBatch, band: tuple[float, float] = DEFAULT_BAND
) -> dict[str, float]:
    """Means over the rollout batch, under the names of docs/metrics.md."""
    rewards, tokens = rollout.rewards.float(), rollout.mask.sum()
    metrics = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(correction=0),
        "accuracy/mean": torch.cat([s.scores for s in samples]).float().mean(),
        "entropy/mean": row_sums(rollout.entropies, rollout.mask).sum() / tokens,
        "response/length_mean": tokens / len(samples),
        "response/truncated_rate": rollout.truncated.float().mean(),
        "tokens/generated": tokens,
    }
    if rollout.rollout_logprobs is not None:
        metrics |= mismatch_gauges(rollout.old_logprobs, rollout.rollout_logprobs, rollout.mask, band)
    return {name: float(value) for name, value in metrics.items()} | reward_logs(samples)


_NOT_REWARD_LOGS = {"reward", "score", "response_clip_ratio", "reward_failed"}


def reward_logs(samples: list[Experience]) -> dict[str, float]:
    """Mean of every number the reward function returned in ``extra_logs``, and how many samples were not graded."""
    info = [{name: float(value) for name, value in sample.info.items()} for sample in samples]
    names = sorted(set(info[0]) - _NOT_REWARD_LOGS)
    logs = {f"reward_log/{name}": sum(i[name] for i in info) / len(info) for name in names}
    return logs | {"reward/failures": sum(i.get("reward_failed", 0.0) for i in info)}
