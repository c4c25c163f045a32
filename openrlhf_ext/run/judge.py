"""Decides which steps to accept: ``train.rollback_on``."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from openrlhf_ext.config import RunConfig
from openrlhf_ext.megatron.step import NonFiniteUpdateError

_JUDGED_BY, _ENOUGH_STEPS, _MOST_ROLLBACKS = 20, 5, 3


class StepJudge:
    """Accepts or rejects steps before the engines get their weights (``train.rollback_on``).
    ``why``: the reason of a rejection. A step spikes if the norm of the policy's gradient before
    clipping, mean over its updates, is above ``train.spike_factor`` times the median of ``norms``,
    which holds those of the last 20 accepted steps that had a gradient, if they are at least five.
    Checkpoints hold ``norms``."""

    def __init__(self, config: RunConfig) -> None:
        self.norms: list[float] = []
        self.why, self.rollbacks, self._target, self._in_a_row = "", 0, -1, 0
        self._on, self._factor = config.train.rollback_on or (), config.train.spike_factor

    def accepted(self, train: Callable[[], dict[str, float]]) -> dict[str, float] | None:
        """Returns the metrics of a step, or None if the step must be undone."""
        try:
            metrics = train()
        except Exception as error:
            cause = getattr(error, "cause", error)  # Ray wraps a rank's error this way
            if "nan" not in self._on or not isinstance(cause, NonFiniteUpdateError):
                raise
            self.why = str(cause)
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
        """Counts a rollback to the checkpoint of a step. Raises RuntimeError if it is one too
        many."""
        self._target, self._in_a_row = step, self._in_a_row + 1 if step == self._target else 1
        self.rollbacks += 1
        if self._in_a_row > _MOST_ROLLBACKS:
            raise RuntimeError(
                f"{self.why}\nit would be rollback {self._in_a_row} to step {step} without a new "
                "checkpoint, so it is not for single batches: lower actor.adam.lr, or look at "
                "the prompts of the rollback events"
            )
