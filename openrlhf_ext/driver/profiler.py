"""Profiles of single steps: ``profile.steps``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from openrlhf_ext.config import RunConfig
from openrlhf_ext.driver.placement import RankGroup
from openrlhf_ext.driver.waits import call_ranks
from openrlhf_ext.reporting import EventLog

logger = logging.getLogger(__name__)


class StepProfiler:
    """Profiles the ranks in ``profile.steps``, from the scores to the weight sync."""

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
        """Profiles the ranks while the body runs the step; does nothing if the step is not in
        ``profile.steps``."""
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
        """Returns seconds by kind of work, one line for each step and rank; empty if no step was
        profiled."""
        if not self._rows:
            return ""
        titles = ("step", "rank", "wall_s", *self._rows[0]["seconds"])
        lines = [titles]
        for row in self._rows:
            seconds = (row["wall"], *row["seconds"].values())
            lines.append((str(row["step"]), str(row["rank"]), *(f"{each:.3f}" for each in seconds)))
        widths = [max(9, len(title) + 2) for title in titles]
        return "\n".join("".join(map(str.rjust, line, widths)) for line in lines)
