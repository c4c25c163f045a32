"""The self-test ``train.drift_check``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from openrlhf_ext.driver.placement import RankGroup
from openrlhf_ext.driver.waits import call_ranks
from openrlhf_ext.megatron.step.batch import LogprobEntropy
from openrlhf_ext.rollout.probe import relative_difference

logger = logging.getLogger(__name__)


class DriftError(RuntimeError):
    """A step with learning rate 0 changed something."""


@dataclass
class DriftCheck:
    """The self-test of ``train.drift_check``: with a learning rate of 0, a step of the whole system
    must change nothing.

    It runs the real loop. Afterwards weights and master weights must be bitwise equal, the policy's
    log-probs of the batch equal within ``tolerance`` nats (`relative_difference`), and the engines'
    log-probs close to them (``mismatch_tolerance``, on average). A change points at a fault (a
    wrong reduction, an update of a frozen weight, stale weights, a lossy sync, a cache that
    outlived its weights) that ordinary training would hide.
    """

    policy: RankGroup
    tolerance: float
    mismatch_tolerance: float
    timeout_s: float
    steps: int = 0
    _before: list[str] = field(default_factory=list)

    def before_training(self) -> None:
        """Stores digests of the weights."""
        self._before = self._digests()

    def after_training(
        self, old: LogprobEntropy, new: LogprobEntropy, mean_mismatch: float | None
    ) -> dict[str, float]:
        """Returns the difference between the policy's log-probs ``old`` and ``new`` of the batch,
        as a metric. ``mean_mismatch`` is None if the engines report no log-probs. Raises
        DriftError, which lists the changes and their ranks."""
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
    """Returns a line that names the ranks whose weights changed."""
    ranks = [
        rank for rank, (one, other) in enumerate(zip(before, after, strict=True)) if one != other
    ]
    return [f"the weights changed on the policy ranks {ranks}"] if ranks else []


def logprob_problems(
    moved: float, tolerance: float, mean_mismatch: float | None, mismatch_tolerance: float
) -> list[str]:
    """Returns lines on log-probs that moved, or on engines that do not sample from the policy; NaN
    counts as moved."""
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
