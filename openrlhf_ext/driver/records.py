"""What a run writes down while it goes: metrics.jsonl, one line of progress per step, the figure."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openrlhf_ext.reporting import MetricsWriter, ProgressLine, is_documented, write_figure

logger = logging.getLogger(__name__)

_FIGURE_EVERY_S = 10.0


class StepRecorder:
    """Turns what a step returned into one documented record and hands it to every sink.

    Args:
        metrics_path, figure_path: files; the figure is redrawn by a background thread at most every ten seconds.
        total_steps: expected number of steps, for the progress line.
        skipped_overlong: prompts that were left out before the run.
        resume_step: records of later steps are of a run that is being repeated, and are moved aside; 0 = all are.
    """

    def __init__(
        self, metrics_path: Path, figure_path: Path, total_steps: int, skipped_overlong: int, title: str = "",
        resume_step: int = 0,
    ) -> None:  # fmt: skip
        self.metrics_path, self.figure_path, self.title = metrics_path, figure_path, title
        self.writer = MetricsWriter(metrics_path, resume_step)
        self.progress = ProgressLine(total_steps)
        self.skipped_overlong = skipped_overlong
        self.last_step, self.last_evaluation = 0, -1
        self._drawing: threading.Thread | None = None
        self._drawn_at = 0.0

    def step(self, step: int, logs: Mapping[str, float], engines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Writes the record of one step and returns it."""
        record = step_record(logs, engines) | {"prompts/skipped_overlong": self.skipped_overlong}
        self.last_step = step
        self.writer.write(step, record)
        self.progress.show(step, record)
        self.draw()
        return record

    def evaluation(self, step: int, logs: dict[str, float]) -> None:
        """Writes the record of an evaluation made after ``step`` steps."""
        self.last_evaluation = step
        self.writer.write(step, logs)
        accuracy, error = logs["eval/accuracy"], logs["eval/accuracy_stderr"]
        logger.info("step %d: held-out accuracy %.3f +- %.3f (%d samples)", step, accuracy, error, logs["eval/samples"])

    def draw(self, wait: bool = False) -> None:
        """Redraws the figure, in the background unless ``wait``."""
        if wait:
            if self._drawing is not None:
                self._drawing.join(timeout=60)
            write_figure(self.metrics_path, self.figure_path, self.title)
            return
        busy = self._drawing is not None and self._drawing.is_alive()
        if busy or time.monotonic() - self._drawn_at < _FIGURE_EVERY_S:
            return
        self._drawn_at = time.monotonic()
        arguments = (self.metrics_path, self.figure_path, self.title)
        self._drawing = threading.Thread(target=write_figure, args=arguments, name="figure", daemon=True)
        self._drawing.start()

    def close(self) -> None:
        """Draws the last figure and closes the file."""
        self.draw(wait=True)
        self.writer.close()


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
