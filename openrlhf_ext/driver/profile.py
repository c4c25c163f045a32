"""Profiles of some steps of some policy ranks (``profile.steps``), and the table of them at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrlhf_ext.driver.waits import call_ranks
from openrlhf_ext.reporting import EventLog

if TYPE_CHECKING:
    from openrlhf_ext.driver.placement import RankGroup


class StepProfiler:
    """Has ranks profile themselves from the scores of a step to the sync of its weights.

    Args:
        steps: the first and the last one.
        ranks: of the policy.
        folder: of the traces, as the ranks see it.
        timeout_s: longest wait for a trace.
        events: told of every profile.
    """

    def __init__(
        self, policy: RankGroup, steps: tuple[int, int], ranks: tuple[int, ...], folder: Path, timeout_s: float,
        events: EventLog,
    ) -> None:  # fmt: skip
        self._policy, self._steps, self._ranks, self._folder = policy, steps, ranks, folder
        self._timeout_s, self._events = timeout_s, events
        self._rows: list[dict[str, Any]] = []

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """The part of a step that the ranks make; nothing happens if the step is not to be profiled."""
        if not self._steps[0] <= step <= self._steps[1]:
            yield
            return
        call_ranks(self._policy, "policy", "start_profile", self._timeout_s, ranks=self._ranks)
        yield
        folder = str(self._folder)
        for profile in call_ranks(self._policy, "policy", "finish_profile", self._timeout_s, folder=folder, step=step):
            if profile is not None:
                self._rows.append({"step": step, **profile})
                self._events.note("profile", **profile)

    def table(self) -> str:
        """Seconds by kind of work, a line for each step and rank; empty if no step was profiled."""
        if not self._rows:
            return ""
        kinds = list(self._rows[0]["seconds"])
        lines = ["".join(title.rjust(max(9, len(title) + 2)) for title in ("step", "rank", "wall_s", *kinds))]
        for row in self._rows:
            cells = [str(row["step"]), str(row["rank"]), *(f"{s:.3f}" for s in (row["wall"], *row["seconds"].values()))]
            titles = ("step", "rank", "wall_s", *kinds)
            lines.append("".join(cell.rjust(max(9, len(t) + 2)) for t, cell in zip(titles, cells, strict=True)))
        return "\n".join(lines)
