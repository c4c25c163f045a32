"""What is measured of every step, and how it is written down: metrics.jsonl, a line of progress, the figure.

Shape suffixes: N = response tokens of all completions, n = those of a block.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from openrlhf_ext.algorithms import Algorithm, RolloutBatch
from openrlhf_ext.algorithms.segments import Segments, float64_sum
from openrlhf_ext.driver.supervision import call_ranks
from openrlhf_ext.megatron.model.flops import ForwardFlops, forward_flops, peak_tflops
from openrlhf_ext.megatron.model.shape import ModelShape
from openrlhf_ext.megatron.step.batch import SequenceBatch
from openrlhf_ext.ranks.timers import RankReport
from openrlhf_ext.reporting import (
    EventLog,
    MetricsWriter,
    ProgressLine,
    SampleWriter,
    is_documented,
    write_figure,
)
from openrlhf_ext.rewards.grading import FAILED_KEY
from openrlhf_ext.rollout.response import Response

if TYPE_CHECKING:
    from openrlhf_ext.driver.placement import RankGroup

logger = logging.getLogger(__name__)

_FIGURE_EVERY_S = 10.0
DEFAULT_BAND = (0.5, 5.0)  # of the importance ratio: OpenRLHF's default for its correction
_NAMED_ABOVE = 1.5  # slowest rank / mean from which it is named on the terminal
_NAMED_FROM_S = 1.0
_DROPPED = ("filtered", "late")

# ---- the batch ----------------------------------------------------------------------------------------------------


def batch_metrics(rollout: RolloutBatch, band: tuple[float, float] = DEFAULT_BAND) -> dict[str, float]:
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
    if rollout.truncated is not None:
        metrics["response/truncated_rate"] = rollout.truncated.float().mean()
    return {name: float(value) for name, value in metrics.items()} | policy_mismatch(rollout, band)


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


# ---- trainer against engines --------------------------------------------------------------------------------------


def mismatch_gauges(
    policy_N: Tensor, rollout_N: Tensor, segments: Segments, band: tuple[float, float] = DEFAULT_BAND
) -> dict[str, float]:
    """How far the log-probs of the policy before the step are from those the engines sampled with.

    With d = policy - rollout and w = exp(d), both KL estimators have the right mean over tokens sampled from the
    engines and are never negative: k3 of KL(rollout || policy) is w - 1 - d, and of KL(policy || rollout), where the
    sample has to be weighted by w, w (1/w - 1 + d) = 1 - w + w d.

    Args:
        segments: which of the N tokens are of which completion.
        band: ratios outside are counted: what an importance correction with these thresholds drops or clamps.
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
        "mismatch/ess_tokens": _effective_fraction(sums[:, 5].logsumexp(0), sums[:, 6].logsumexp(0), segments.tokens),
        "mismatch/ess_completions": effective_sample_fraction(torch.cat(sequences)[segments.lengths_B > 0]),
        "mismatch/outside_band": outside,
    }


def _block_sums(d_n: Tensor, band: tuple[float, float]) -> Tensor:
    """(7,) of a block's d: sums of both KL terms, of |d| and of ratios outside the band; the largest |d|; the
    logarithms of the sums of w and of its squares.
    """
    if not len(d_n):
        return d_n.new_tensor([0.0, 0.0, 0.0, 0.0, 0.0, -math.inf, -math.inf])
    largest, (low, high) = d_n.max(), band
    relative_n = (d_n - largest).exp_()  # at most 1: its sums do not overflow
    w_n, abs_n = relative_n * largest.exp(), d_n.abs()
    outside = (len(d_n) - ((w_n >= low) & (w_n <= high)).sum()).double()
    logs = largest + relative_n.sum().log(), 2 * largest + relative_n.square_().sum().log()
    return torch.stack([
        (w_n - 1 - d_n).sum(), (1 - w_n + w_n * d_n).sum(), abs_n.sum(), outside, abs_n.max(), *logs
    ])  # fmt: skip


def policy_mismatch(rollout: RolloutBatch, band: tuple[float, float] = DEFAULT_BAND) -> dict[str, float]:
    """``mismatch_gauges`` of the policy's completions: those of a guide are meant to differ.

    Empty if an engine reported no log-probs.
    """
    guide_B, engines_N, segments = rollout.from_guide, rollout.rollout_logprobs, rollout.segments
    if engines_N is None:
        return {}
    rows = slice(None) if guide_B is None or not bool(guide_B.any()) else ~guide_B
    policy_N, engines_N = segments.take(rollout.old_logprobs, rows), segments.take(engines_N, rows)
    return mismatch_gauges(policy_N, engines_N, segments.select(rows), band)


def correction_band(algorithm: Algorithm) -> tuple[float, float]:
    """The ratios that the algorithm's importance correction keeps, or the usual ones if it does not go by ratios."""
    correction = algorithm.correction
    if correction is None or (correction.level, correction.gating) != ("token", "ratio"):
        return DEFAULT_BAND
    return correction.threshold


def effective_sample_fraction(log_weights: Tensor) -> float:
    """Effective sample size over the number of samples: (sum w)^2 / (n sum w^2), 1 if all weights are equal."""
    return _effective_fraction(log_weights.logsumexp(0), (2 * log_weights).logsumexp(0), len(log_weights))


def _effective_fraction(log_sum: Tensor, log_sum_of_squares: Tensor, count: int) -> float:
    return float((2 * log_sum - log_sum_of_squares - math.log(count)).exp())


# ---- the guide ----------------------------------------------------------------------------------------------------


def guide_gauges(samples: Sequence[Response]) -> dict[str, float]:
    """What the completions of the guide and those of the policy are like."""
    gauges = {"guide/fraction": sum(sample.from_guide for sample in samples) / len(samples)}
    for source, is_guide in (("guide", True), ("policy", False)):
        own = [sample for sample in samples if sample.from_guide == is_guide]
        gauges[f"{source}/reward_mean"] = sum(sample.reward for sample in own) / len(own)
        gauges[f"{source}/accuracy_mean"] = sum(sample.score for sample in own) / len(own)
        gauges[f"{source}/length_mean"] = sum(sample.sampled for sample in own) / len(own)
    return gauges


def guide_agreement(rollout: RolloutBatch) -> dict[str, float]:
    """Whether the guide's ranks and its engines say the same of its completions; nothing without a guide."""
    rows, ranks_N, engines_N = rollout.from_guide, rollout.guide_logprobs, rollout.rollout_logprobs
    if rows is None or ranks_N is None or engines_N is None:
        return {}
    ranks_n, engines_n = (rollout.segments.take(values_N, rows) for values_N in (ranks_N, engines_N))
    return {"guide/rollout_max_abs": float((ranks_n - engines_n).abs().max())}


# ---- speed --------------------------------------------------------------------------------------------------------


def throughput_gauges(
    flops: ForwardFlops, tokens: int, epochs: int, ranks: int, seconds: Mapping[str, float], peak: float | None
) -> dict[str, float]:
    """Speed of the policy's ranks in the passes over the batch.

    Args:
        flops: of one forward pass over the batch.
        tokens: prompt and response tokens of the batch.
        epochs: training passes over it.
        seconds: ``time/logprob`` and ``time/train`` of the step; a phase that is missing or took no time is left out.
        peak: TFLOP/s of one device; None leaves the MFU out.
    """
    gauges: dict[str, float] = {}
    for phase, work, passes in (("logprob", flops.total, 1), ("train", flops.training * epochs, epochs)):
        if (spent := seconds.get(f"time/{phase}", 0.0)) <= 0:
            continue
        gauges[f"throughput/{phase}_tokens_per_second"] = tokens * passes / spent
        gauges[f"throughput/{phase}_tflops_per_rank"] = tflops = work / spent / ranks / 1e12
        if peak is not None:
            gauges[f"throughput/{phase}_mfu"] = tflops / peak
    return gauges


# ---- ranks --------------------------------------------------------------------------------------------------------


def rank_gauges(reports: Sequence[RankReport]) -> dict[str, float]:
    """Memory and own time of every rank, which rank was the slowest and which the fullest, and how much was padding."""
    gauges: dict[str, float] = {}
    for report in reports:
        prefix = f"rank/{report.rank}/"
        gauges |= {f"{prefix}time_{phase}": seconds for phase, seconds in sorted(report.seconds.items())}
        gauges[f"{prefix}memory_gib"] = report.memory_bytes / 2**30
    slowest = max(reports, key=lambda report: report.busy_seconds)
    fullest = max(reports, key=lambda report: report.memory_bytes)
    mean = sum(report.busy_seconds for report in reports) / len(reports)
    if packed := sum(report.packed_tokens for report in reports):
        gauges["packs/padding_fraction"] = sum(report.padding_tokens for report in reports) / packed
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
    """Measures one step after the other.

    Attributes:
        epochs: training passes over each batch.
        peak: TFLOP/s of one device for the MFU; None = that of the device if it is known and ``bf16`` is set.
        timeout_s: longest wait for the ranks' reports.
        events: told of the slowest rank.
    """

    policy: RankGroup
    shape: ModelShape
    epochs: int
    peak: float | None
    bf16: bool
    timeout_s: float
    events: EventLog = field(default_factory=EventLog)
    _named: set[int] = field(default_factory=set)

    def collect(self, batch: SequenceBatch, seconds: Mapping[str, float]) -> dict[str, float]:
        """The gauges of the step that trained on ``batch`` and took ``seconds`` (names as in the records)."""
        reports: list[RankReport] = call_ranks(self.policy, "policy", "rank_report", self.timeout_s)
        gauges = rank_gauges(reports)
        self._name_slowest(reports, gauges)
        lengths, predicted = batch.lengths_B.tolist(), batch.responses.tokens
        flops = forward_flops(self.shape, lengths, predicted)
        if not any("train" in report.seconds for report in reports):  # only the critic trained (critic.freezing_steps)
            seconds = {name: spent for name, spent in seconds.items() if name != "time/train"}
        peak = self.peak or (peak_tflops(reports[0].device) if self.bf16 else None)
        return gauges | throughput_gauges(flops, sum(lengths), self.epochs, len(reports), seconds, peak)

    def _name_slowest(self, reports: Sequence[RankReport], gauges: Mapping[str, float]) -> None:
        """Says on the terminal which rank holds the others up, once per rank."""
        slowest = max(reports, key=lambda report: report.busy_seconds)
        ratio = gauges["rank/slowest_over_mean"]
        if ratio < _NAMED_ABOVE or slowest.busy_seconds < _NAMED_FROM_S or slowest.rank in self._named:
            return
        self._named.add(slowest.rank)
        self.events.note(
            "slow_rank", rank=slowest.rank, host=slowest.host, seconds=slowest.busy_seconds, over_mean=ratio
        )
        logger.warning(
            "policy rank %d on %s is the slowest: %.1f s of its own in this step, %.1f times the mean of all ranks",
            slowest.rank, slowest.host, slowest.busy_seconds, ratio,
        )  # fmt: skip


# ---- writing --------------------------------------------------------------------------------------------------------


class StepRecorder:
    """Turns what a step returned into one documented record and hands it to every sink.

    Args:
        metrics_path, figure_path: files; the figure is redrawn by a background thread at most every ten seconds.
        total_steps: expected number of steps, for the progress line.
        skipped_overlong: prompts that were left out before the run.
        resume_step: records of later steps are of a run that is being repeated, and are moved aside; 0 = all are.
        label: in every line, record and figure.
        events: told of evaluations, and of groups that were dropped or late.
        samples: gets completions of some steps; None = they are not kept.
    """

    def __init__(
        self, metrics_path: Path, figure_path: Path, total_steps: int, skipped_overlong: int, title: str = "",
        resume_step: int = 0, label: str = "", events: EventLog | None = None, samples: SampleWriter | None = None,
    ) -> None:  # fmt: skip
        self.metrics_path, self.figure_path = metrics_path, figure_path
        self.title = ", ".join(part for part in (title, label) if part)
        self.label = label
        self.writer = MetricsWriter(metrics_path, resume_step, label=label)
        self.progress = ProgressLine(total_steps, label=label)
        self.skipped_overlong = skipped_overlong
        self.last_evaluation = -1
        self.events, self.samples = events or EventLog(), samples
        # counts of an earlier part of a resumed run are not known: its first step says nothing
        self._dropped = dict.fromkeys(_DROPPED, 0.0) if resume_step == 0 else {}
        self._drawing: threading.Thread | None = None
        self._drawn_at = 0.0

    def step(self, step: int, logs: Mapping[str, float], engines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Writes the record of one step and returns it."""
        record = step_record(logs, engines) | {"prompts/skipped_overlong": self.skipped_overlong}
        self.writer.write(step, record)
        self._note_groups(record)
        self.progress.show(step, record)
        self.draw()
        return record

    def _note_groups(self, record: Mapping[str, float]) -> None:
        """Events of the groups that were dropped since the last step, and of those that were trained late."""
        now = {name: record[f"groups/dropped_{name}"] for name in _DROPPED if f"groups/dropped_{name}" in record}
        more = {name: int(count - self._dropped.get(name, count)) for name, count in now.items()}
        self._dropped = now
        if any(more.values()):
            self.events.note("groups_dropped", **more)
        if late := int(record.get("groups/trained_late", 0)):
            self.events.note("groups_late", count=late)

    def evaluation(self, step: int, logs: dict[str, float]) -> None:
        """Writes the record of an evaluation made after ``step`` steps."""
        self.last_evaluation = step
        self.writer.write(step, logs)
        accuracy, error = logs["eval/accuracy"], logs["eval/accuracy_stderr"]
        self.events.note("evaluation", accuracy=accuracy, stderr=error, samples=logs["eval/samples"])
        label = f", {self.label}" if self.label else ""
        logger.info(
            "step %d: held-out accuracy %.3f +- %.3f (%d samples)%s", step, accuracy, error, logs["eval/samples"], label
        )

    def draw(self, wait: bool = False) -> None:
        """Redraws the figure, in the background unless ``wait``."""
        if wait:
            if self._drawing is not None:
                self._drawing.join(timeout=60)
            self._draw()
            return
        busy = self._drawing is not None and self._drawing.is_alive()
        if busy or time.monotonic() - self._drawn_at < _FIGURE_EVERY_S:
            return
        self._drawn_at = time.monotonic()
        self._drawing = threading.Thread(target=self._draw, name="figure", daemon=True)
        self._drawing.start()

    def _draw(self) -> None:
        """A picture of what metrics.jsonl has is no reason to end a run, nor for a traceback of a thread."""
        try:
            write_figure(self.metrics_path, self.figure_path, self.title)
        except OSError as error:
            logger.error("the figure %s could not be drawn: %s; metrics.jsonl has its numbers", self.figure_path, error)

    def close(self) -> None:
        """Draws the last figure and closes the files."""
        self.draw(wait=True)
        self.writer.close()
        if self.samples is not None:
            self.samples.close()


# names that the algorithms' losses use -> documented names
_RENAMED = {"clip_fraction": "loss/clip_fraction"}


def step_record(logs: Mapping[str, float], engines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """One step under the names of docs/metrics.md; other numbers go under ``algorithm/``.

    Args:
        logs: with ``time/step`` and ``tokens/generated``.
        engines: ``rollout_stats`` of each engine in the step.
    """
    named = {_RENAMED.get(name, name): value for name, value in logs.items()}
    record = {name if is_documented(name) else f"algorithm/{name}": value for name, value in named.items()}
    record["time/generate"] = max(stats["generation_s"] for stats in engines)
    record["time/grade"] = max(stats["exposed_grading_s"] for stats in engines)
    busy = [stats["generation_s"] + stats["exposed_grading_s"] for stats in engines]
    record["time/idle_engines"] = max(0.0, record["time/step"] - sum(busy) / len(busy))
    record["throughput/tokens_per_second"] = record["tokens/generated"] / record["time/step"]
    return record
