"""How a step is written down: metrics.jsonl, a line of progress, the figure."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openrlhf_ext.reporting import (
    EventLog,
    MetricsWriter,
    ProgressLine,
    SampleWriter,
    is_documented,
    read_metrics,
    write_figure,
)

logger = logging.getLogger(__name__)

_FIGURE_EVERY_S = 10.0
_DROPPED = ("filtered", "late")


class StepRecorder:
    """Turns what a step returned into one documented record and hands it to every sink.

    The figure is redrawn by a background thread at most every ten seconds. Records of steps after ``resume_step``
    are of a run that is being repeated, and are moved aside; 0 = all are.
    """

    def __init__(
        self, metrics_path: Path, figure_path: Path, total_steps: int | None, skipped_overlong: int, title: str = "",
        resume_step: int = 0, label: str = "", events: EventLog | None = None, samples: SampleWriter | None = None,
    ) -> None:  # fmt: skip
        self.metrics_path, self.figure_path = metrics_path, figure_path
        self.title = ", ".join(part for part in (title, label) if part)
        self.label = label
        self.writer = MetricsWriter(metrics_path, resume_step, label=label)
        self.progress = ProgressLine(total_steps, label=label)
        self.skipped_overlong = skipped_overlong
        evaluated = read_metrics(metrics_path) if resume_step else []
        self.last_evaluation = max((r["step"] for r in evaluated if "eval/accuracy" in r), default=-1)
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
    """One step under the names of docs/metrics.md, from its ``logs`` and each engine's ``rollout_stats``; other numbers
    go under ``algorithm/``."""
    named = {_RENAMED.get(name, name): value for name, value in logs.items()}
    record = {name if is_documented(name) else f"algorithm/{name}": value for name, value in named.items()}
    record["time/generate"] = max(stats["generation_s"] for stats in engines)
    record["time/grade"] = max(stats["exposed_grading_s"] for stats in engines)
    busy = [stats["generation_s"] + stats["exposed_grading_s"] for stats in engines]
    record["time/idle_engines"] = max(0.0, record["time/step"] - sum(busy) / len(busy))
    record["throughput/tokens_per_second"] = record["tokens/generated"] / record["time/step"]
    return record
