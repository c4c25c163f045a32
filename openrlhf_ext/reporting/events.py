"""events.jsonl: what happened to a run besides its steps: ``event``, ``step``, ``time`` and its own facts."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openrlhf_ext.redaction import redacted
from openrlhf_ext.reporting.lines import JsonLines, step_of

EVENTS = {
    "start": "the command began: `options` (without secrets), those `set`, `versions`, `hardware`, `layout`, and "
    "`resume_step`: of the newest checkpoint if it is asked to resume, else 0",
    "ready": "engines and ranks are up: `processes`, by name their host and process id, and `steps`, how many are due",
    "resumed": "the ranks have loaded the checkpoint of `resume_step` from `path`",
    "evaluation": "`accuracy`, its standard error `stderr`, and `samples`",
    "checkpoint": "a checkpoint is complete: `of_step`, `path`, `mib`, `seconds`, and `best` if it is the best so far",
    "engine_replaced": "`engines` died or hang and are replaced: `of` (`rollout engine` or `guide engine`), `why`, and "
    "`restarts` so far",
    "groups_dropped": "groups that were not trained in this step: `filtered` by dynamic sampling, too `late`",
    "groups_late": "`count` groups of the step lagged by more than `train.max_staleness`, and were trained",
    "slow_rank": "policy `rank` on `host` holds the others up: `seconds` of its own, `over_mean` times the mean",
    "profile": "a rank's step was profiled: `rank`, `seconds` by kind, and `trace`, the file on `host`",
    "failure": "the run failed: `error` is the whole text that the terminal has, `traceback` has every "
    "frame of the driver",
    "restart": "it begins again from the last checkpoint: `number` of at most `most`",
    "interrupted": "the `signal` that ended the run, SIGINT (Ctrl-C) or SIGTERM; the newest `checkpoint`, or `why` "
    "the driver could not say it",
    "end": "the final checkpoint is in `path`; `results`: of the first and the last step and evaluation",
}
"""Kinds of events and their facts; docs/report.md shows this table."""

_OF_THE_RUN = {"start", "ready", "resumed", "failure", "restart", "interrupted", "end"}


class EventLog:
    """Writes the events of one run. A context manager.

    A run that starts anew moves the events of an earlier one to ``<path>.superseded.<n>``. One that goes on keeps what
    happened to the run as a whole (its starts, failures, restarts), and what belongs to steps that are not repeated.

    Args:
        path: the file; None = events are kept nowhere.
        goes_on: whether this is a part of the run that the file is about.
        now: wall clock in seconds.

    Attributes:
        step: the training step that is being made, or was made last; 0 before the first.
    """

    def __init__(
        self, path: str | Path | None = None, goes_on: bool = False, now: Callable[[], float] = time.time
    ) -> None:
        self._now, self.step = now, 0
        self._lines = JsonLines(path, keep=lambda _: goes_on) if path is not None else None

    def note(self, event: str, **facts: Any) -> None:
        """Writes one event.

        Args:
            event: a key of ``EVENTS``.
            facts: what JSON can hold; passwords in addresses are left out.

        Raises:
            KeyError: unknown event.
            OSError: the file cannot be written.
        """
        if event not in EVENTS:
            raise KeyError(f"unknown event {event!r}; known are {', '.join(EVENTS)}")
        if self._lines is not None:
            self._lines.append({"event": event, "step": self.step, "time": self._now(), **redacted(facts)})

    def repeat_from(self, step: int) -> None:
        """Moves aside the events of later steps, which will be made again."""
        self.step = step
        if self._lines is not None:
            self._lines.keep(lambda r: str(r.get("event")) in _OF_THE_RUN or step_of(r) <= step)

    def close(self) -> None:
        """Close the file."""
        if self._lines is not None:
            self._lines.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
