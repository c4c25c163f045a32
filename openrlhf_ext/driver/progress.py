"""How far a run is, by which learning rates warm up and decay."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

Span = tuple[Fraction, Fraction]


@dataclass
class Progress:
    """The share of a run that is completed, from 0 to 1: of its prompts, or of
    ``train.max_minutes`` if that is more.

    Prompts that dynamic sampling filters, that are late, or that are skipped count as those that
    are trained: schedules end where training ends, however many steps that takes. Without such
    prompts each batch is as many steps of a schedule as it has updates, exactly.

    Args:
        prompts: of the whole run, all episodes.
        batch: prompts of a full batch; the last batch may be smaller, and is as many steps of a
        schedule as others.
        minutes: after which this start of the run ends, None = never.
    """

    prompts: int
    batch: int
    minutes: float | None = None
    used: Fraction = Fraction(0)
    """Prompts that are used up behind the batch last taken; with ``minutes`` perhaps what the time
    is worth."""
    _before: Fraction = field(default=Fraction(0), init=False)
    _policy_from: Fraction = field(default=Fraction(0), init=False)
    _at_start: Fraction = field(default=Fraction(0), init=False)

    def start(self) -> None:
        """The time of ``minutes`` begins: it completes what is left of the run."""
        self._at_start = self._share(self.used)

    def take(self, used_up: int, seconds: float, policy_trains: bool) -> None:
        """A batch is taken: so many prompts are used up with it, so many ``seconds`` after the
        start."""
        self._before, used = self.used, Fraction(used_up)
        if self.minutes is not None:
            of_time = min(Fraction(seconds) / Fraction(60 * self.minutes), Fraction(1))
            used = max(
                used, (self._at_start + (1 - self._at_start) * of_time) * self._steps * self.batch
            )
        self.used = max(self.used, used)
        if not policy_trains:
            self._policy_from = self.used

    @property
    def of_run(self) -> Span:
        """Shares before and behind the batch last taken."""
        return self._share(self._before), self._share(self.used)

    @property
    def of_policy(self) -> Span:
        """The same of the steps that train the policy, which a critic's head start delays."""
        start = self._share(self._policy_from)
        before, after = (
            (share - start) / (1 - start) if start < 1 else Fraction(1) for share in self.of_run
        )
        return before, after

    @property
    def _steps(self) -> int:
        return math.ceil(self.prompts / self.batch)

    def _share(self, used: Fraction) -> Fraction:
        return Fraction(1) if used >= self.prompts else used / (self._steps * self.batch)

    def state_dict(self) -> dict[str, Any]:
        return {"used": str(self.used), "policy_from": str(self._policy_from)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.used, self._policy_from = Fraction(state["used"]), Fraction(state["policy_from"])
