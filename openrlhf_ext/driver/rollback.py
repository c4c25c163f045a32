"""Steps that would spoil the training (``train.rollback_on``), noticed before the engines get their weights.

A step spikes if the norm of the policy's gradient before clipping, mean over the updates of the step, is above
``train.spike_factor`` times the median of the last 20 steps that were accepted and had a gradient; of fewer than five
there is no median. The norms are part of a checkpoint, so that a run that goes back judges as it did then.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

from ray.exceptions import RayTaskError

from openrlhf_ext.config import RunConfig
from openrlhf_ext.megatron.step.faults import NonFiniteUpdateError

_WINDOW, _ENOUGH = 20, 5
_MOST = 3


class SpoiledStep(RuntimeError):
    """The weights are not to be used: the run goes back to its last checkpoint and leaves the batch out."""


class StepJudge:
    """Says which steps are accepted; ``norms`` are those of the last ones. Counts ``rollbacks``."""

    def __init__(self, config: RunConfig) -> None:
        self.norms: list[float] = []
        self.rollbacks = 0
        self._on, self._factor = config.train.rollback_on or (), config.train.spike_factor
        self._target, self._in_a_row = -1, 0

    def judged(self, train: Callable[[], dict[str, float]]) -> dict[str, float]:
        """The metrics of a step. Raises SpoiledStep."""
        try:
            metrics = train()
        except RayTaskError as error:
            if "nan" in self._on and isinstance(error.cause, NonFiniteUpdateError):
                raise SpoiledStep(str(error.cause)) from error
            raise
        norm = metrics.get("grad_norm", 0.0)
        if "spike" in self._on and norm:
            median = statistics.median(self.norms) if len(self.norms) >= _ENOUGH else norm
            if norm > self._factor * median:
                raise SpoiledStep(
                    f"a spike: the gradient's norm {norm:.4g} is above {self._factor:g} times (train.spike_factor) "
                    f"{median:.4g}, the median of the last {len(self.norms)} steps"
                )
            self.norms = [*self.norms, norm][-_WINDOW:]
        return metrics

    def count(self, step: int) -> None:
        """A rollback to the checkpoint of a step. Raises RuntimeError: too many to the same one."""
        self._target, self._in_a_row = step, self._in_a_row + 1 if step == self._target else 1
        self.rollbacks += 1
        if self._in_a_row > _MOST:
            raise RuntimeError(
                f"{_MOST} rollbacks to the checkpoint of step {step} have led to no new one, so it is not for single "
                "batches: lower actor.adam.lr, or look at the prompts that the rollback events name"
            )
