"""What is measured of every step; which are accepted; the self-test ``train.drift_check``; profiles
of single steps.

Shape suffixes: N = response tokens of all completions, n = those of a block.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
from ray.exceptions import RayTaskError
from torch import Tensor

from openrlhf_ext.algorithms import Algorithm, LossBatch, RolloutBatch, mean_entropies
from openrlhf_ext.algorithms.segments import Segments, float64_sum
from openrlhf_ext.config import RunConfig
from openrlhf_ext.driver.placement import RankGroup
from openrlhf_ext.driver.waits import call_ranks
from openrlhf_ext.megatron.model.flops import ForwardFlops, forward_flops, peak_tflops
from openrlhf_ext.megatron.model.shape import ModelShape
from openrlhf_ext.megatron.step import NonFiniteUpdateError
from openrlhf_ext.megatron.step.batch import LogprobEntropy, SequenceBatch
from openrlhf_ext.ranks.movement import movement_gauges
from openrlhf_ext.ranks.timers import RankReport
from openrlhf_ext.reporting import EventLog
from openrlhf_ext.rewards.counting import accuracy
from openrlhf_ext.rewards.grading import FAILED_KEY
from openrlhf_ext.rollout.probe import relative_difference
from openrlhf_ext.rollout.response import Response, graded

logger = logging.getLogger(__name__)

DEFAULT_BAND = (0.5, 5.0)  # of the importance ratio: OpenRLHF's default for its correction
_NAMED_ABOVE = 1.5  # slowest rank / mean from which it is named on the terminal
_NAMED_FROM_S = 1.0
_JUDGED_BY, _ENOUGH_STEPS, _MOST_ROLLBACKS = 20, 5, 3

# ---- the batch
# --------------------------------------------------------------------------------------------------


def batch_metrics(
    rollout: RolloutBatch, band: tuple[float, float] = DEFAULT_BAND
) -> dict[str, float]:
    """Means over the rollout batch, under the names of docs/metrics.md."""
    rewards, tokens = rollout.rewards.float(), len(rollout.tokens)
    metrics: dict[str, float | Tensor] = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(correction=0),
        "response/length_mean": tokens / len(rewards),
        "tokens/generated": tokens,
    }
    if rollout.entropies is not None:
        metrics["entropy/mean"] = float64_sum(rollout.entropies) / tokens
        metrics["entropy/completion_mean"] = mean_entropies(
            rollout.entropies, rollout.segments
        ).mean()
        if rollout.old_logprobs is not None:
            pair = rollout.entropies, rollout.old_logprobs
            metrics["entropy/surprise_correlation"] = -_correlation(*pair, rollout.segments)
    if rollout.truncated is not None:
        metrics["response/truncated_rate"] = rollout.truncated.float().mean()
    return {name: float(value) for name, value in metrics.items()} | policy_mismatch(rollout, band)


def _correlation(one_N: Tensor, other_N: Tensor, segments: Segments) -> float:
    """Of two numbers of every token; 0 where one of them is the same everywhere."""
    sums = torch.zeros(5, dtype=torch.float64)
    for block in segments.blocks():
        x_n, y_n = one_N[block.tokens].double(), other_N[block.tokens].double()
        sums += torch.stack([x_n.sum(), y_n.sum(), x_n @ x_n, y_n @ y_n, x_n @ y_n])
    x, y, xx, yy, xy = (sums / max(1, segments.tokens)).tolist()
    spread = math.sqrt(max(0.0, (xx - x * x) * (yy - y * y)))
    return (xy - x * y) / spread if spread > 1e-12 else 0.0


def conflict_gauges(rollout: RolloutBatch, shaped: LossBatch) -> dict[str, float]:
    """What Simoni et al. (arXiv 2508.03772) plot of conflicts between completions of a prompt.

    ``conflict/mean`` (fig. 5b, whose unit the paper does not state): mean over completions of the
    number of tokens in a conflict span, of ``gtpo_conflict`` alone. ``conflict/prefix_*`` (eq. 6),
    of any method: completions of a prompt that begin with the same token share a prefix, whose
    gradient carries the sum of A_i / |o_i| over them; the mean of these sums over prefixes that
    positive and negative completions share, and the share of them where it is negative, so that
    GRPO makes what its good completions begin with less likely. Missing if there is no such prefix.
    """
    metrics = {}
    masks = [
        shaped.of_tokens[name]
        for name in ("forward_mask", "backward_mask")
        if name in shaped.of_tokens
    ]
    if masks:
        metrics["conflict/mean"] = float(torch.stack(masks).any(0).sum() / len(rollout.rewards))
    a_B = shaped.of_rows["A"] if "A" in shaped.of_rows else _group_relative(rollout)
    lengths_B = rollout.segments.lengths_B
    first_B = rollout.tokens[lengths_B.cumsum(0) - lengths_B]
    prefixes, of_B = torch.stack(
        [rollout.group_ids, first_B.to(rollout.group_ids.dtype)], 1
    ).unique(dim=0, return_inverse=True)
    zeros = torch.zeros(len(prefixes), dtype=torch.float64)
    sums = zeros.index_add(0, of_B, a_B / lengths_B)
    has_both = zeros.index_add(0, of_B, (a_B > 0).double()).gt(0) & zeros.index_add(
        0, of_B, (a_B < 0).double()
    ).gt(0)
    if bool(has_both.any()):
        metrics["conflict/prefix_advantage"] = float(sums[has_both].mean())
        metrics["conflict/prefix_penalized"] = float((sums[has_both] < 0).double().mean())
    return metrics


def _group_relative(rollout: RolloutBatch) -> Tensor:
    """(B,) float64 (r_i - mean r) / std r over the completions of a prompt, 0 where all are equal
    (eq. 12)."""
    _, index_B, sizes_Q = rollout.group_ids.unique(return_inverse=True, return_counts=True)
    zeros, rewards_B = torch.zeros(len(sizes_Q), dtype=torch.float64), rollout.rewards.double()
    centered_B = rewards_B - (zeros.index_add(0, index_B, rewards_B) / sizes_Q)[index_B]
    std_Q = (zeros.index_add(0, index_B, centered_B.square()) / (sizes_Q - 1).clamp(min=1)).sqrt()
    return torch.where(centered_B.abs() <= 1e-8, 0.0, centered_B / std_Q.clamp(min=1e-8)[index_B])


def reward_metrics(samples: Sequence[Response]) -> dict[str, float]:
    """Accuracy, mean score, mean of every number the reward function returned in ``extra_logs``,
    and how many samples were not graded."""
    names = sorted({name for sample in samples for name in sample.extra_logs} - {FAILED_KEY})
    logs = {
        f"reward_log/{name}": statistics.fmean(
            s.extra_logs[name] for s in samples if name in s.extra_logs
        )
        for name in names
    }
    scores = [graded(sample.score) for sample in samples]
    logs |= {"accuracy/mean": accuracy(scores), "score/mean": sum(scores) / len(scores)}
    return logs | {"reward/failures": sum(s.extra_logs.get(FAILED_KEY, 0.0) for s in samples)}


def text_metrics(
    prompts: Sequence[str], samples: Sequence[Response], tokenizer: Any, end_tokens: Collection[int]
) -> dict[str, float]:
    """What ``samples``, as many of each prompt, were sampled from beside the tokens of the prompts,
    and the share of those that were not cut and end in one of ``end_tokens``."""
    each, changed = len(samples) // len(prompts), 0
    for prompt, response in zip(prompts, samples[::each], strict=True):
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        changed += response.tokens_S[: response.actions[0][0]].tolist() != ids
    whole = [response for response in samples if not response.truncated]
    ended = sum(
        int(response.tokens_S[response.actions[-1][1] - 1]) in end_tokens for response in whole
    )
    metrics = {
        "prompts/length_mean": sum(response.actions[0][0] for response in samples) / len(samples)
    }
    metrics["prompts/changed"] = changed / len(prompts)
    distinct = {
        (number // each, response.tokens_S.tobytes()) for number, response in enumerate(samples)
    }
    metrics["response/distinct"] = len(distinct) / len(samples)
    return metrics | ({"response/ended": ended / len(whole)} if whole else {})


def staleness_metrics(samples: Sequence[Response], version: int) -> dict[str, float]:
    """How many weight updates the policy, now at ``version``, is ahead of its weights that sampled
    each token. Empty if any response does not tell."""
    samples = [sample for sample in samples if not sample.from_guide]
    if not all(sample.versions for sample in samples):
        return {}
    ages = [
        (version - then, stop - start)
        for sample in samples
        for then, start, stop in sample.versions
    ]
    mixed = sum(len({then for then, _, _ in sample.versions}) > 1 for sample in samples)
    return {
        "staleness/mean": sum(age * tokens for age, tokens in ages)
        / sum(tokens for _, tokens in ages),
        "staleness/max": float(max(age for age, _ in ages)),
        "staleness/mixed_fraction": mixed / len(samples),
    }


# ---- what was shaped against what is trained
# ----------------------------------------------------------------------


def advantage_gauges(
    shaped: LossBatch, group_size: int, rewards: Sequence[float]
) -> dict[str, float]:
    """Advantages of completions beside the rewards that they were graded with, in the order of the
    batch, in which the
    ``group_size`` completions of a prompt lie together: the correlation of what both differ by from
    the group's mean (missing where one of them does not differ), the size of the mean advantage of
    a group, and how far the advantages of a group with unlike rewards are from it."""
    segments = shaped.segments
    sums_B = torch.cat(
        [block.sums(shaped.advantages[block.tokens].double()) for block in segments.blocks()]
    )
    a_QG = (sums_B / segments.lengths_B.clamp(min=1)).view(-1, group_size)
    r_QG = torch.tensor(rewards, dtype=torch.float64).view(-1, group_size)
    a_QG, r_QG = (
        torch.where(shaped.kept.view_as(r_QG), values_QG, 0.0) for values_QG in (a_QG, r_QG)
    )
    gauges = {"advantage/group_mean_abs": float(a_QG.mean(1).abs().mean())}
    a_QG, r_QG = (values_QG - values_QG.mean(1, keepdim=True) for values_QG in (a_QG, r_QG))
    unequal_Q = r_QG.abs().amax(1) > 0
    if bool(unequal_Q.any()):
        gauges["advantage/group_rms"] = float(a_QG[unequal_Q].square().mean(1).sqrt().mean())
    if (spread := float((a_QG.square().sum() * r_QG.square().sum()).sqrt())) > 0:
        gauges["advantage/reward_correlation"] = float((a_QG * r_QG).sum()) / spread
    return gauges


def expected_of_first_update(mini_batch: LossBatch, logprobs_N: Tensor) -> dict[str, float]:
    """What ranks have to report of the first update with a mini-batch, the first rows of a batch,
    before which the policy's log-probs of it are ``logprobs_N``. In blocks of rows: a batch may
    have tens of millions of tokens."""
    totals = {"expected/loss": 0.0, "expected/alignment": 0.0}
    for block in mini_batch.segments.blocks():
        share = mini_batch.select(block.rows)
        loss = mini_batch.algorithm.loss(logprobs_N[block.tokens].double(), share)
        totals["expected/loss"] += float(loss.value)
        totals["expected/alignment"] += (
            float(loss.metrics["alignment"]) if "alignment" in loss.metrics else math.nan
        )
    return totals


def recounted(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a step, and in the place of what ranks report of their first update, and of
    what was expected, how far both are apart."""
    kept = {
        name: value
        for name, value in metrics.items()
        if not name.startswith(("first/", "expected/"))
    }
    for gauge, of in (
        ("mismatch/loss", "loss"),
        ("mismatch/trained", "alignment"),
        ("mismatch/reference", "ref_kl"),
    ):
        first, expected = metrics.get(f"first/{of}"), metrics.get(f"expected/{of}")
        if first is not None and expected is not None:
            kept[gauge] = abs(first - expected)
    return kept


# ---- trainer against engines
# --------------------------------------------------------------------------------------


def mismatch_gauges(
    policy_N: Tensor,
    rollout_N: Tensor,
    segments: Segments,
    band: tuple[float, float] = DEFAULT_BAND,
) -> dict[str, float]:
    """How far the log-probs of the policy before the step are from those the engines sampled with.

    With d = policy - rollout and w = exp(d), both KL estimators have the right mean over tokens
    sampled from the engines and are never negative: k3 of KL(rollout || policy) is w - 1 - d, and
    of KL(policy || rollout), where the sample has to be weighted by w, w (1/w - 1 + d) = 1 - w + w
    d. Ratios outside of ``band`` are counted: what an importance correction with these thresholds
    drops or clamps.
    """
    if not segments.tokens:
        return {}
    blocks, sequences = [], []
    for block in segments.blocks():
        d_n = policy_N[block.tokens].double() - rollout_N[block.tokens]
        sequences.append(block.sums(d_n))
        blocks.append(_block_sums(d_n, band))
    sums = torch.stack(blocks)
    forward, reverse, absolute, outside = (sums[:, :4].sum(0) / segments.tokens).tolist()
    return {
        "kl/rollout": forward,
        "kl/rollout_reverse": reverse,
        "kl/rollout_max_abs": float(sums[:, 4].max()),
        "mismatch/mean_abs": absolute,
        "mismatch/exp_mean_abs": math.exp(absolute),
        "mismatch/ess_tokens": _effective_fraction(
            sums[:, 5].logsumexp(0), sums[:, 6].logsumexp(0), segments.tokens
        ),
        "mismatch/ess_completions": effective_sample_fraction(
            torch.cat(sequences)[segments.lengths_B > 0]
        ),
        "mismatch/outside_band": outside,
    }


def _block_sums(d_n: Tensor, band: tuple[float, float]) -> Tensor:
    """(7,) of a block's d: sums of both KL terms, of |d| and of ratios outside the band; the
    largest |d|; the logarithms of the sums of w and of its squares."""
    if not len(d_n):
        return d_n.new_tensor([0.0, 0.0, 0.0, 0.0, 0.0, -math.inf, -math.inf])
    largest, (low, high) = d_n.max(), band
    relative_n = (d_n - largest).exp_()  # at most 1: its sums do not overflow
    w_n, abs_n = relative_n * largest.exp(), d_n.abs()
    outside = (len(d_n) - ((w_n >= low) & (w_n <= high)).sum()).double()
    logs = largest + relative_n.sum().log(), 2 * largest + relative_n.square_().sum().log()
    return torch.stack(
        [
            (w_n - 1 - d_n).sum(),
            (1 - w_n + w_n * d_n).sum(),
            abs_n.sum(),
            outside,
            abs_n.max(),
            *logs,
        ]
    )


def policy_mismatch(
    rollout: RolloutBatch, band: tuple[float, float] = DEFAULT_BAND
) -> dict[str, float]:
    """``mismatch_gauges`` of the policy's completions: those of a guide are meant to differ. Empty
    if an engine reported no log-probs."""
    guide_B, engines_N, segments = rollout.from_guide, rollout.rollout_logprobs, rollout.segments
    if engines_N is None:
        return {}
    rows = slice(None) if guide_B is None or not bool(guide_B.any()) else ~guide_B
    policy_N, engines_N = (
        segments.take(rollout["old_logprobs"], rows),
        segments.take(engines_N, rows),
    )
    return mismatch_gauges(policy_N, engines_N, segments.select(rows), band)


def correction_band(algorithm: Algorithm) -> tuple[float, float]:
    """The ratios that the algorithm's importance correction keeps, or the usual ones if it does not
    go by ratios."""
    correction = algorithm.correction
    if correction is None or (correction.level, correction.gating) != ("token", "ratio"):
        return DEFAULT_BAND
    return correction.threshold


def effective_sample_fraction(log_weights: Tensor) -> float:
    """Effective sample size over the number of samples: (sum w)^2 / (n sum w^2), 1 if all weights
    are equal."""
    return _effective_fraction(
        log_weights.logsumexp(0), (2 * log_weights).logsumexp(0), len(log_weights)
    )


def _effective_fraction(log_sum: Tensor, log_sum_of_squares: Tensor, count: int) -> float:
    return float((2 * log_sum - log_sum_of_squares - math.log(count)).exp())


# ---- the guide
# --------------------------------------------------------------------------------------------------


def guide_gauges(samples: Sequence[Response]) -> dict[str, float]:
    """What the completions of the guide and those of the policy are like; nothing of a guide that
    does not sample."""
    if not any(sample.from_guide for sample in samples):
        return {}
    gauges = {"guide/fraction": sum(sample.from_guide for sample in samples) / len(samples)}
    for source, is_guide in (("guide", True), ("policy", False)):
        own = [sample for sample in samples if sample.from_guide == is_guide]
        gauges[f"{source}/reward_mean"] = sum(graded(sample.reward) for sample in own) / len(own)
        gauges[f"{source}/accuracy_mean"] = accuracy([graded(sample.score) for sample in own])
        gauges[f"{source}/length_mean"] = sum(sample.sampled for sample in own) / len(own)
    return gauges


def guide_agreement(rollout: RolloutBatch) -> dict[str, float]:
    """Whether the guide's ranks and its engines say the same of its completions; nothing where it
    has none."""
    rows, ranks_N, engines_N = rollout.from_guide, rollout.guide_logprobs, rollout.rollout_logprobs
    if rows is None or not bool(rows.any()) or ranks_N is None or engines_N is None:
        return {}
    ranks_n, engines_n = (
        rollout.segments.take(values_N, rows) for values_N in (ranks_N, engines_N)
    )
    return {"guide/rollout_max_abs": float((ranks_n - engines_n).abs().max())}


# ---- speed
# --------------------------------------------------------------------------------------------------


def throughput_gauges(
    flops: ForwardFlops,
    tokens: int,
    epochs: int,
    ranks: int,
    seconds: Mapping[str, float],
    peak: float | None,
) -> dict[str, float]:
    """Speed of the policy's ranks in the passes over the batch; a phase that is missing in
    ``seconds`` or took no time is left out. ``flops`` is of one forward pass, ``peak`` TFLOP/s of
    one device (None: no MFU), ``tokens`` prompts included."""
    gauges: dict[str, float] = {}
    for phase, work, passes in (
        ("logprob", flops.total, 1),
        ("train", flops.training * epochs, epochs),
    ):
        if (spent := seconds.get(f"time/{phase}", 0.0)) <= 0:
            continue
        gauges[f"throughput/{phase}_tokens_per_second"] = tokens * passes / spent
        gauges[f"throughput/{phase}_tflops_per_rank"] = tflops = work / spent / ranks / 1e12
        if peak is not None:
            gauges[f"throughput/{phase}_mfu"] = tflops / peak
    return gauges


# ---- ranks
# --------------------------------------------------------------------------------------------------


def rank_gauges(reports: Sequence[RankReport]) -> dict[str, float]:
    """Memory and own time of every rank, which rank was the slowest and which the fullest, and how
    much was padding."""
    gauges: dict[str, float] = {}
    for report in reports:
        prefix = f"rank/{report.rank}/"
        gauges |= {
            f"{prefix}time_{phase}": seconds for phase, seconds in sorted(report.seconds.items())
        }
        gauges[f"{prefix}memory_gib"] = report.memory_bytes / 2**30
    slowest = max(reports, key=lambda report: report.busy_seconds)
    fullest = max(reports, key=lambda report: report.memory_bytes)
    mean = sum(report.busy_seconds for report in reports) / len(reports)
    if packed := sum(report.packed_tokens for report in reports):
        padding, repeated = (
            sum(map(attrgetter(name), reports)) for name in ("padding_tokens", "repeated_tokens")
        )
        gauges["packs/padding_fraction"] = padding / packed
        # 0 where all was padding
        gauges["packs/shared_fraction"] = repeated / max(1, packed - padding + repeated)
    gauges |= movement_gauges([report.moved for report in reports if report.moved is not None])
    if used := max(report.device_bytes for report in reports):
        gauges["memory/device_max_gib"] = used / 2**30
    return gauges | {
        "rank/slowest": float(slowest.rank),
        "rank/slowest_over_mean": slowest.busy_seconds / mean if mean > 0 else 1.0,
        "rank/fullest": float(fullest.rank),
        "memory/rank_max_gib": fullest.memory_bytes / 2**30,
    }


@dataclass
class StepGauges:
    """Measures one step after the other: speed, memory and the slowest rank, of which it tells
    ``events``."""

    policy: RankGroup
    shape: ModelShape
    config: RunConfig
    events: EventLog
    _named: set[int] = field(default_factory=set)

    def collect(self, batch: SequenceBatch, seconds: Mapping[str, float]) -> dict[str, float]:
        """The gauges of the step that trained on ``batch`` and took ``seconds`` (names as in the
        records)."""
        train = self.config.train
        reports: list[RankReport] = call_ranks(
            self.policy, "policy", "rank_report", train.step_timeout_s
        )
        gauges = rank_gauges(reports)
        self._name_slowest(reports, gauges)
        lengths, predicted = batch.lengths_B.tolist(), batch.responses.tokens
        flops = forward_flops(self.shape, lengths, predicted)
        shared = gauges.get("packs/shared_fraction", 0.0)
        flops = replace(
            flops, layers=round(flops.layers * (1.0 - shared)), frozen=self.config.ds.lora.enabled
        )
        # only the critic trained (critic.freezing_steps); no old log-probs were computed
        # (algo.old_logprobs)
        idle = [
            p for p in ("logprob", "train") if not any(p in report.seconds for report in reports)
        ]
        seconds = {
            name: spent for name, spent in seconds.items() if name.removeprefix("time/") not in idle
        }
        is_bf16 = self.config.megatron.param_dtype == "bf16"
        peak = self.config.logger.peak_tflops or (
            peak_tflops(reports[0].device) if is_bf16 else None
        )
        return gauges | throughput_gauges(
            flops, sum(lengths), train.max_epochs, len(reports), seconds, peak
        )

    def _name_slowest(self, reports: Sequence[RankReport], gauges: Mapping[str, float]) -> None:
        """Says on the terminal which rank holds the others up, once per rank."""
        slowest = max(reports, key=lambda report: report.busy_seconds)
        ratio = gauges["rank/slowest_over_mean"]
        if (
            ratio < _NAMED_ABOVE
            or slowest.busy_seconds < _NAMED_FROM_S
            or slowest.rank in self._named
        ):
            return
        self._named.add(slowest.rank)
        self.events.note(
            "slow_rank",
            rank=slowest.rank,
            host=slowest.host,
            seconds=slowest.busy_seconds,
            over_mean=ratio,
        )
        logger.warning(
            "policy rank %d on %s is the slowest: %.1f s of its own in this step, %.1f times "
            "the mean of all ranks",
            slowest.rank,
            slowest.host,
            slowest.busy_seconds,
            ratio,
        )


class StepJudge:
    """Accepts steps before the engines get their weights (``train.rollback_on``), or says ``why``
    not; counts
    ``rollbacks``. A step spikes if the norm of the policy's gradient before clipping, mean over its
    updates, is above
    ``train.spike_factor`` times the median of ``norms``: of the last 20 accepted steps that had a
    gradient, if they are at least five. Checkpoints hold these."""

    def __init__(self, config: RunConfig) -> None:
        self.norms: list[float] = []
        self.why, self.rollbacks, self._target, self._in_a_row = "", 0, -1, 0
        self._on, self._factor = config.train.rollback_on or (), config.train.spike_factor

    def accepted(self, train: Callable[[], dict[str, float]]) -> dict[str, float] | None:
        """The metrics of a step; None: it is to be undone."""
        try:
            metrics = train()
        except RayTaskError as error:
            if "nan" not in self._on or not isinstance(error.cause, NonFiniteUpdateError):
                raise
            self.why = str(error.cause)
            return None
        norm = metrics.get("grad_norm", 0.0)
        if "spike" in self._on and norm:
            median = statistics.median(self.norms) if len(self.norms) >= _ENOUGH_STEPS else norm
            if norm > self._factor * median:
                limit = (
                    f"{self._factor:g} (train.spike_factor) times {median:.4g}, the median of "
                    f"{len(self.norms)}"
                )
                self.why = f"the gradient's norm {norm:.4g} is above {limit} steps"
                return None
            self.norms = [*self.norms, norm][-_JUDGED_BY:]
        return metrics

    def count(self, step: int) -> None:
        """A rollback to the checkpoint of a step. Raises RuntimeError: it is one too many."""
        self._target, self._in_a_row = step, self._in_a_row + 1 if step == self._target else 1
        self.rollbacks += 1
        if self._in_a_row > _MOST_ROLLBACKS:
            raise RuntimeError(
                f"{self.why}\nit would be rollback {self._in_a_row} to step {step} without a new "
                "checkpoint, so it is not for single batches: lower actor.adam.lr, or look at "
                "the prompts of the rollback events"
            )


class DriftError(RuntimeError):
    """A step with learning rate 0 changed something."""


@dataclass
class DriftCheck:
    """The self-test of ``train.drift_check``: with a learning rate of 0, a step of the whole system
    must change nothing.

    It runs the real loop. Then weights and master weights have to be the same bits, the policy's
    log-probs of the batch the same numbers to ``tolerance`` nats (`relative_difference`), and the
    engines' close to them (``mismatch_tolerance``, on average). What moves points at a fault (a
    wrong reduction, an update of something frozen, stale weights, a lossy sync, a cache that
    outlived its weights) that ordinary training would hide.
    """

    policy: RankGroup
    tolerance: float
    mismatch_tolerance: float
    timeout_s: float
    steps: int = 0
    _before: list[str] = field(default_factory=list)

    def before_training(self) -> None:
        """Remembers the weights."""
        self._before = self._digests()

    def after_training(
        self, old: LogprobEntropy, new: LogprobEntropy, mean_mismatch: float | None
    ) -> dict[str, float]:
        """What moved between the policy's log-probs ``old`` and ``new`` of the batch, as metrics;
        ``mean_mismatch`` is None if the engines report none. Raises DriftError, which lists what
        moved and on which ranks."""
        self.steps += 1
        moved = relative_difference(old.logprobs_N, new.logprobs_N).mean
        problems = [
            *changed_ranks(self._before, self._digests()),
            *logprob_problems(moved, self.tolerance, mean_mismatch, self.mismatch_tolerance),
        ]
        if problems:
            raise DriftError(
                f"train.drift_check: step {self.steps} had learning rate 0 and changed something:\n"
                + "\n".join(f"- {problem}" for problem in problems)
            )
        logger.info(
            "drift check, step %d: weights unchanged, log-probs moved by %.1e nats",
            self.steps,
            moved,
        )
        return {"drift/logprob_diff": moved}

    def _digests(self) -> list[str]:
        return call_ranks(self.policy, "policy", "weight_digest", self.timeout_s)


def changed_ranks(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """A line that names the ranks whose weights are no longer the same bits."""
    ranks = [
        rank for rank, (one, other) in enumerate(zip(before, after, strict=True)) if one != other
    ]
    return [f"the weights changed on the policy ranks {ranks}"] if ranks else []


def logprob_problems(
    moved: float, tolerance: float, mean_mismatch: float | None, mismatch_tolerance: float
) -> list[str]:
    """Lines on log-probs that moved, or on engines that do not sample from the policy; NaN counts
    as moved."""
    problems = []
    if not moved <= tolerance:
        problems.append(
            f"the policy's log-probs of the batch moved by {moved:.2e} nats, allowed are "
            f"{tolerance:g}"
        )
    if mean_mismatch is not None and not mean_mismatch <= mismatch_tolerance:
        problems.append(
            f"policy and engines differ by {mean_mismatch:.2e} nats on average, allowed are "
            f"{mismatch_tolerance:g} (weight_sync.probe_tolerance)"
        )
    return problems


class StepProfiler:
    """Has ranks profile themselves in ``profile.steps``, from the scores to the sync of the
    weights."""

    def __init__(self, policy: RankGroup, config: RunConfig, steps: int, events: EventLog) -> None:
        self._policy, self._config, self._events = policy, config, events
        self._first, self._last = config.profile.first_and_last or (0, -1)
        self._rows: list[dict[str, Any]] = []
        if self._first > steps:
            logger.warning(
                "profile.steps %s: the run has %d steps, none is profiled",
                config.profile.steps,
                steps,
            )

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """The part of a step that the ranks make; nothing happens if the step is not to be
        profiled."""
        if not self._first <= step <= self._last:
            yield
            return
        timeout_s, folder = (
            self._config.train.step_timeout_s,
            str(self._config.logger.beside("profile")),
        )
        call_ranks(
            self._policy, "policy", "start_profile", timeout_s, ranks=self._config.profile.ranks
        )
        yield
        for profile in call_ranks(
            self._policy, "policy", "finish_profile", timeout_s, folder=folder, step=step
        ):
            if profile is not None:
                self._rows.append({"step": step, **profile})
                self._events.note("profile", **profile)

    def table(self) -> str:
        """Seconds by kind of work, a line for each step and rank; empty if no step was profiled."""
        if not self._rows:
            return ""
        titles = ("step", "rank", "wall_s", *self._rows[0]["seconds"])
        lines = [titles]
        for row in self._rows:
            seconds = (row["wall"], *row["seconds"].values())
            lines.append((str(row["step"]), str(row["rank"]), *(f"{each:.3f}" for each in seconds)))
        widths = [max(9, len(title) + 2) for title in titles]
        return "\n".join("".join(map(str.rjust, line, widths)) for line in lines)
