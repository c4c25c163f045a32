"""Gauges of the ranks in a step: speed, memory, and busy time."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

from openrlhf_ext.algorithms import Algorithm
from openrlhf_ext.config import RunConfig
from openrlhf_ext.driver.placement import RankGroup
from openrlhf_ext.driver.waits import call_ranks
from openrlhf_ext.megatron.model.flops import ForwardFlops, forward_flops, peak_tflops
from openrlhf_ext.megatron.model.shape import ModelShape
from openrlhf_ext.megatron.step.batch import SequenceBatch
from openrlhf_ext.ranks.movement import movement_gauges
from openrlhf_ext.ranks.timers import RankReport
from openrlhf_ext.reporting import EventLog
from openrlhf_ext.rollout.response import Response

logger = logging.getLogger(__name__)

_NAMED_ABOVE = 1.5  # slowest rank / mean; above it, the terminal names the rank
_NAMED_FROM_S = 1.0
_DRAFTED_IN_A_STEP = 10  # tokens, in the time of a step without drafts

# ---- speed


def throughput_gauges(
    flops: ForwardFlops,
    tokens: int,
    epochs: int,
    ranks: int,
    seconds: Mapping[str, float],
    peak: float | None,
) -> dict[str, float]:
    """Returns the speed of the policy's ranks in the passes over the batch. Leaves out a phase that
    is missing in ``seconds`` or took no time. ``flops``: of one forward pass; ``peak``: TFLOP/s of
    one device (None: no MFU); ``tokens``: prompts included."""
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


# ---- drafts


@dataclass
class DraftWatch:
    """Warns, once, of drafts that cost more than they give."""

    _said: bool = False

    def watch(self, step: int, record: Mapping[str, float], num_tokens: int) -> None:
        """Looks at ``rollout/accepted`` of a step's record, which may be missing. A step that
        checks ``num_tokens`` gives 1 + accepted tokens; each that it checks is taken for a tenth of
        a step without drafts, its drafting included."""
        accepted = record.get("rollout/accepted", math.inf)
        least = num_tokens / _DRAFTED_IN_A_STEP
        if accepted >= least or self._said:
            return
        self._said = True
        logger.warning(
            "step %d: drafts cost more than they give: %.2f of %d tokens of a draft were accepted "
            "(rollout/accepted), they pay from %.2f on; train the head on this policy's texts, lower "
            "vllm.speculative.num_tokens, or set vllm.speculative.method none",
            step,
            accepted,
            num_tokens,
            least,
        )


# ---- ranks


def rank_gauges(reports: Sequence[RankReport]) -> dict[str, float]:
    """Returns memory and busy time of every rank, the slowest rank and the one with the most
    memory, and the fraction of padding."""
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
        # 0 if all was padding
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


def why_no_gradient(
    groups: Sequence[Sequence[Response]], algorithm: Algorithm, estimator: str
) -> str:
    """Says why a step had no gradient; ``groups``: the responses to each prompt."""
    threshold = getattr(algorithm.options, "success_threshold", None)
    rewards = [[one.reward for one in group if one.reward is not None] for group in groups]
    differing = [group for group in rewards if len(set(group)) > 1]
    if threshold is not None and differing:
        low = min(map(min, differing))
        high = max(map(max, differing))
        if high <= threshold or low > threshold:
            return (
                f"rewards in a group differ ({low:g} to {high:g}), but a completion is a success "
                f"only above algo.{estimator}.success_threshold {threshold:g}, "
                "so no group has both successes and failures. Set the threshold between the two"
            )
    return (
        "no completion of a group is better than another (algorithm/degenerate_groups), or none "
        "counts in the loss. If that goes on, look at rewards and completions "
        "(logger.samples_every)"
    )


@dataclass
class StepGauges:
    """Measures speed, memory, and the slowest rank step by step; notes a slow rank in
    ``events``."""

    policy: RankGroup
    shape: ModelShape
    config: RunConfig
    events: EventLog
    _named: set[int] = field(default_factory=set)

    def collect(self, batch: SequenceBatch, seconds: Mapping[str, float]) -> dict[str, float]:
        """Returns the gauges of the step that trained on ``batch`` and took ``seconds`` (names as
        in the records)."""
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
        # leave out a phase that did not run: only the critic trained (critic.freezing_steps), or no
        # old log-probs were computed (algo.old_logprobs)
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
        """Logs which rank slows the others down, once per rank."""
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
