"""From graded rollouts to training shards: old log-probs and entropies, shaping of whole groups,
mini-batches.

Shape suffixes: B = completions, N = response tokens of all completions.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from openrlhf_ext.algorithms import Algorithm, LossBatch, RolloutBatch
from openrlhf_ext.algorithms.groups import group_chunks, mini_batch_order
from openrlhf_ext.driver.gauges import (
    advantage_gauges,
    batch_metrics,
    conflict_gauges,
    correction_band,
    expected_of_first_update,
    guide_agreement,
    guide_gauges,
    reward_metrics,
    staleness_metrics,
    text_metrics,
)
from openrlhf_ext.driver.placement import RankGroup
from openrlhf_ext.driver.rollouts import Group
from openrlhf_ext.driver.scoring import (
    Deal,
    KLCoefficient,
    PendingScores,
    Scorer,
    ValueTrainer,
    deal,
    reference_kl,
    scores_in_order,
    with_end,
)
from openrlhf_ext.megatron.step.batch import LogprobEntropy, SequenceBatch, sequence_batch
from openrlhf_ext.megatron.step.dealing import TOKENS, RowCosts
from openrlhf_ext.ranks.policy import TrainingShard
from openrlhf_ext.reporting import chosen_groups
from openrlhf_ext.rollout.response import Response, graded

logger = logging.getLogger(__name__)

Get = Callable[[list], list]
"""Waits for Ray calls with the deadline of the phase: ``Deadline.get``."""


@dataclass(frozen=True)
class Shaped:
    """A batch as its method shaped it, of which ``shown`` groups are to be shown (0 = all, None =
    none)."""

    rollout: RolloutBatch
    batch: LossBatch
    shown: int | None


@dataclass(frozen=True)
class Experience:
    """What a batch of ``groups``, which are graded, became: a shard for each data-parallel rank,
    the sequences, what the policy said of them before the step, metrics, and ``samples`` as
    ``SampleWriter`` takes them, if that was asked for. Where the update tells what the policy says,
    that is None and ``shaped`` waits for it."""

    shards: list[TrainingShard]
    batch: SequenceBatch
    old: LogprobEntropy | None
    metrics: dict[str, float]
    groups: Sequence[Group]
    shaped: Shaped | None = None
    samples: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class ExperienceMaker:
    """Makes experience out of groups; these are shaped here, whole, and never on a shard.

    Sequences are dealt to the policy's ranks by their ``costs`` in its model. Old
    log-probs are of ``source``: ``config.estimator.old_logprobs``. ``replays``: the policy's ranks
    fetch the experts that the engines' routers took, and take them too; other models choose their
    own.
    """

    policy: RankGroup
    algorithm: Algorithm
    group_size: int
    mini_batch_size: int
    reference: Scorer | None = None
    critic: ValueTrainer | None = None
    kl: KLCoefficient | None = None
    costs: RowCosts = TOKENS
    guide: Scorer | None = None
    reward: Scorer | None = None
    source: str = "policy"
    engine_entropies: bool = False
    replays: bool = False
    tokenizer: Any = None
    end_tokens: Collection[int] = ()
    seed: int = 0
    batches: int = field(default=0, init=False)

    @torch.no_grad()
    def make(
        self, groups: Sequence[Group], version: int, get: Get, shown: int | None = None
    ) -> Experience:
        """Scores the groups, shapes them, and cuts every data-parallel rank's shard. Old log-probs
        are of the weights
        ``version``; completions of ``shown`` groups are shown (0 = of all, None = of none). Where
        the policy's log-probs come of the training pass, ``completed`` measures what depends on
        them."""
        groups = self._ordered(groups)
        batch = sequences_of(responses_of(groups, self.group_size))
        routed = (
            routed_by_engines(batch, responses_of(groups, self.group_size))
            if self.replays
            else batch
        )
        started = time.perf_counter()
        pending = self._start_scores(batch)
        old = self.old_logprobs(routed, get) if self.source == "policy" else None
        scores: dict[str, Any] = {name: scores.result(get) for name, scores in pending.items()}
        groups = with_rewards(groups, scores.pop("rewards")) if self.reward is not None else groups
        samples = responses_of(groups, self.group_size)
        for sample in samples:
            sample.check_reward()
        scored = time.perf_counter()
        rollout = dataclasses.replace(rollout_batch(samples, batch, old, self.group_size), **scores)
        if self.source == "engine":
            rollout = dataclasses.replace(rollout, old_logprobs=_of_engines(rollout))
        if self.engine_entropies:
            rollout = dataclasses.replace(rollout, entropies=_engine_entropies(samples))
        if self.kl is not None:  # a copy, which keeps what the method keeps in itself
            self.algorithm = self.algorithm.with_kl_coef(self.kl.value)
        shaped = self.algorithm.shape(rollout)
        metrics = reward_metrics(samples) | staleness_metrics(samples, version)
        if self.tokenizer is not None:
            prompts = [group.prompt.text for group in groups]
            metrics |= text_metrics(prompts, samples, self.tokenizer, self.end_tokens)
        metrics |= guide_gauges(samples) if self.guide is not None else {}
        metrics |= self.critic.take(batch, shaped) if self.critic is not None else {}
        self.batches += 1
        shards = self._shards(shaped, routed, with_sequences=old is None)
        made = Experience(shards, batch, old, metrics, groups, Shaped(rollout, shaped, shown))
        made = made if old is None else self._described(made, old, shaped.metrics)
        made.metrics.update(
            {"time/logprob": scored - started, "time/shape": time.perf_counter() - scored}
        )
        return made

    def _ordered(self, groups: Sequence[Group]) -> list[Group]:
        """Groups sorted by prompt, so that the batch does not depend on which engine was faster,
        then as they are cut into mini-batches."""
        by_prompt = sorted(groups, key=lambda group: group.prompt.text)
        per_step = max(1, self.mini_batch_size // self.group_size)
        return [
            by_prompt[i] for i in mini_batch_order(len(groups), per_step, self.seed, self.batches)
        ]

    @torch.no_grad()
    def completed(self, made: Experience, get: Get) -> Experience:
        """With what depends on the policy's log-probs, after the step: the training pass has
        computed them."""
        if made.shaped is None:
            return made
        started = time.perf_counter()
        answers = get(self.policy.ask("seen_logprobs"))
        old = self._of_rows(made.batch, self.policy.of_replicas(answers))
        shaped, rollout = made.shaped.batch, made.shaped.rollout
        if self.source == "update":
            rollout = dataclasses.replace(rollout, old_logprobs=old.logprobs_N)
        if not self.engine_entropies:
            rollout = dataclasses.replace(rollout, entropies=old.entropies_N)
        metrics = shaped.metrics | self.algorithm.measured(rollout, shaped)
        made = self._described(dataclasses.replace(made, old=old, shards=[]), old, metrics)
        made.metrics["time/shape"] += time.perf_counter() - started
        return made

    def _described(
        self, made: Experience, old: LogprobEntropy, of_method: Mapping[str, Tensor]
    ) -> Experience:
        """With what the batch is like for the policy, and after shaping; the next KL coefficient
        follows from it."""
        assert made.shaped is not None, "it is described once"
        shaped, by_N = made.shaped.batch, made.shaped.rollout.entropies
        rollout = dataclasses.replace(
            made.shaped.rollout, old_logprobs=old.logprobs_N, entropies=old.entropies_N
        )
        metrics = batch_metrics(rollout, correction_band(self.algorithm)) | conflict_gauges(
            rollout, shaped
        )
        if self.engine_entropies and by_N is not None:
            metrics["mismatch/entropy_mean_abs"] = float(
                (by_N - old.entropies_N).abs().double().mean()
            )
            rollout = dataclasses.replace(rollout, entropies=by_N)  # shown is what it was shaped by
        metrics |= {f"algorithm/{k}": float(v) for k, v in of_method.items()}
        metrics |= self._reference_metrics(rollout) | guide_agreement(rollout) | made.metrics
        rewards = [
            graded(response.reward) for response in responses_of(made.groups, self.group_size)
        ]
        metrics["mismatch/rewards"] = float(
            (rollout.rewards - torch.tensor(rewards).double()).abs().max()
        )
        metrics |= advantage_gauges(shaped, self.group_size, rewards)
        if not self.algorithm.needs_prepare:
            first = shaped.mini_batch(self._chunks(made.batch)[0])
            metrics |= expected_of_first_update(first, old.logprobs_N)
            if (
                first.ref_logprobs is not None
                and self.algorithm.penalty.estimator == "k3"
                and first.loss_mask.any()
            ):
                mask_N = first.loss_mask
                old_n = old.logprobs_N[: len(mask_N)][mask_N]
                metrics["expected/ref_kl"] = reference_kl(old_n, first.ref_logprobs[mask_N])
        shown = made.shaped.shown
        samples = [] if shown is None else shown_samples(made.groups, rollout, shaped, shown)
        return dataclasses.replace(made, metrics=metrics, samples=samples, shaped=None)

    def _shards(
        self, shaped: LossBatch, batch: SequenceBatch, with_sequences: bool
    ) -> list[TrainingShard]:
        deals = self._deals(batch)
        shards = training_shards(shaped, self._chunks(batch), deals, seed=self.batches)
        if with_sequences:
            for shard, own in zip(shards, deals, strict=True):
                shard.sequences = batch.select(own.rows)
        return shards

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

    def _start_scores(self, batch: SequenceBatch) -> dict[str, PendingScores]:
        """Starts what other models say of the tokens; on ranks of their own they work while the
        policy does."""
        pending = {} if self.reference is None else {"ref_logprobs": self.reference.start(batch)}
        if self.guide is not None:
            pending["guide_logprobs"] = self.guide.start(batch)
        if self.reward is not None:
            pending["rewards"] = self.reward.start(with_end(batch))
        return (
            pending
            if self.critic is None
            else {**pending, "values": self.critic.start_values(batch)}
        )

    def _reference_metrics(self, rollout: RolloutBatch) -> dict[str, float]:
        """Distance from the reference policy; the coefficient of the next batch follows from it."""
        if rollout.ref_logprobs is None:
            return {}
        policy_N = rollout["old_logprobs"]
        metrics = {"kl/reference": reference_kl(policy_N, rollout.ref_logprobs)}
        if self.kl is not None:
            metrics["kl/coef"] = self.kl.value
            measured = self.algorithm.penalty.mean(policy_N, rollout.ref_logprobs, rollout.segments)
            self.kl.update(measured, len(rollout.rewards))
        return metrics

    def old_logprobs(self, batch: SequenceBatch, get: Get) -> LogprobEntropy:
        """(N,) log-probs and entropies under the policy that is about to be trained; its ranks keep
        their rows."""
        parts = [batch.select(own.rows) for own in self._deals(batch)]
        answers = get(self.policy.ask_replicas("forward", parts))
        return self._of_rows(batch, self.policy.of_replicas(answers))

    def _of_rows(self, batch: SequenceBatch, results: Sequence[Sequence[Any]]) -> LogprobEntropy:
        """What every replica says of its rows, in the order of the batch."""
        parts = [own.rows for own in self._deals(batch)]
        return LogprobEntropy(
            *(scores_in_order(batch, parts, scores) for scores in zip(*results, strict=True))
        )

    def _chunks(self, batch: SequenceBatch) -> list[slice]:
        return list(group_chunks(len(batch), self.group_size, self.mini_batch_size))

    def _deals(self, batch: SequenceBatch) -> list[Deal]:
        return deal(batch, self._chunks(batch), self.policy.layout.data_parallel_size, self.costs)


def responses_of(groups: Sequence[Group], group_size: int) -> list[Response]:
    """The completions of groups, in their order. Raises ValueError: a group has not ``group_size``
    completions."""
    for group in groups:
        if len(group.responses) != group_size:
            raise ValueError(
                f"a group of {len(group.responses)} completions, rollout.n_samples_per_prompt is "
                f"{group_size}: {group.prompt.text!r}"
            )
    return [response for group in groups for response in group.responses]


def with_rewards(groups: Sequence[Group], rewards_B: Tensor) -> list[Group]:
    """The groups with the rewards that a reward model gives their completions, which are their
    scores too, as those of a reward function that returns rewards only."""
    rewards = iter(rewards_B.tolist())

    def of(response: Response) -> Response:
        reward = next(rewards)
        return dataclasses.replace(response, reward=reward, score=reward, receipt=None)

    return [Group(group.prompt, [of(response) for response in group.responses]) for group in groups]


def sequences_of(samples: Sequence[Response]) -> SequenceBatch:
    """The completions as the policy sees them."""
    return sequence_batch(
        [sample.tokens_S for sample in samples], [sample.actions for sample in samples]
    )


def routed_by_engines(batch: SequenceBatch, samples: Sequence[Response]) -> SequenceBatch:
    """The batch with references to the experts of every completion. Raises ValueError: a completion
    has none."""
    routed = [sample.experts_at for sample in samples if sample.experts_at is not None]
    if len(routed) < len(samples):
        raise ValueError(
            "train.routing_replay rollout: a completion came without experts of its engine"
        )
    return dataclasses.replace(batch, routed_B=tuple(routed))


def rollout_batch(
    samples: Sequence[Response], batch: SequenceBatch, old: LogprobEntropy | None, group_size: int
) -> RolloutBatch:
    """The algorithms' view of the batch."""
    return RolloutBatch(
        tokens=batch.targets_N,
        lengths=batch.counts_B,
        rewards=torch.tensor([graded(s.reward) for s in samples]).double(),
        group_ids=torch.arange(len(samples)) // group_size,
        old_logprobs=None if old is None else old.logprobs_N,
        entropies=None if old is None else old.entropies_N,
        rollout_logprobs=_rollout_logprobs(samples),
        truncated=torch.tensor([s.truncated for s in samples]),
        from_guide=torch.tensor([s.from_guide for s in samples]),
        group_size=group_size,
    )


def _of_engines(rollout: RolloutBatch) -> Tensor:
    """(N,) log-probs that tokens were sampled with."""
    if rollout.rollout_logprobs is None:
        raise ValueError(
            "algo.old_logprobs engine: a completion came without log-probs of its engine, as "
            "those of an agent whose rollout_log_probs are None; use algo.old_logprobs auto"
        )
    return rollout.rollout_logprobs


def _engine_entropies(samples: Sequence[Response]) -> Tensor:
    """(N,) entropies of the distributions that the engines sampled from."""
    told = [sample.entropies_T for sample in samples if sample.entropies_T is not None]
    if len(told) < len(samples):
        raise ValueError("algo.entropies engine: a completion came without entropies of its engine")
    return torch.from_numpy(np.concatenate(told))


def _rollout_logprobs(samples: Sequence[Response]) -> Tensor | None:
    """(N,) log-probs that the engines reported; None if one did not."""
    reported = [sample.logprobs_T for sample in samples if sample.logprobs_T is not None]
    return torch.from_numpy(np.concatenate(reported)) if len(reported) == len(samples) else None


_SHOWN = {
    "old_logprobs": "logprobs",
    "entropies": "entropies",
    "ref_logprobs": "ref_logprobs",
    "guide_logprobs": "guide_logprobs",
    "values": "values",
}


def shown_samples(
    groups: Sequence[Group], rollout: RolloutBatch, shaped: LossBatch, most: int
) -> list[dict[str, Any]]:
    """The completions of at most so many groups of the batch, those whose prompts were drawn first,
    as ``SampleWriter`` takes them."""
    order = sorted(range(len(groups)), key=lambda position: groups[position].prompt.number)
    chosen = chosen_groups(
        [sum(r.written for r in groups[position].responses) for position in order], most
    )
    starts = np.cumsum([0] + [len(group.responses) for group in groups])
    of_tokens = {key: getattr(rollout, name) for name, key in _SHOWN.items()}
    of_tokens |= {
        "advantages": shaped.advantages,
        "loss_mask": shaped.loss_mask.int(),
        "token_weights": shaped.token_weights,
    }
    shown = []
    for position in (order[place] for place in chosen):
        prompt = groups[position].prompt
        for row, response in enumerate(groups[position].responses, start=int(starts[position])):
            span = rollout.segments.span(slice(row, row + 1))
            own_T = response.sampled_T
            facts = {
                "group": prompt.number,
                "prompt": prompt.text,
                "token_ids": response.tokens_S[-len(own_T) :].tolist(),
                "reward": response.reward,
                "score": response.score,
                "truncated": response.truncated,
                "from_guide": response.from_guide,
                **_label(prompt.label),
            }
            if not own_T.all():
                facts["environment"] = (~own_T).astype(int).tolist()
            numbers = {
                key: _spread(values_N[span], own_T)
                for key, values_N in of_tokens.items()
                if values_N is not None
            }
            shown.append(facts | numbers)
    return shown


def _spread(values_n: Tensor, own_T: np.ndarray) -> list[Any]:
    """The numbers of the tokens that the policy sampled, and 0 for those that an agent's
    environment wrote."""
    spread_T = values_n.new_zeros(len(own_T))
    spread_T[torch.from_numpy(own_T)] = values_n
    return spread_T.tolist()


def _label(label: Any) -> dict[str, Any]:
    """What grading got as the label, as text where JSON cannot hold it; nothing where the data have
    none."""
    if label is None or label == "":  # "": OpenRLHF's, without data.label_key
        return {}
    try:
        json.dumps(label, allow_nan=False)
    except (TypeError, ValueError):
        return {"label": str(label)}
    return {"label": label}


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
