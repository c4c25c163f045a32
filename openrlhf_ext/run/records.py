"""Writes the record of a step (metrics.jsonl, a line of progress, the figure), and builds the first
event of a run."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openrlhf_ext.checkpoints.store import step_of
from openrlhf_ext.config import RunConfig
from openrlhf_ext.config.show import shown_options
from openrlhf_ext.config.trained import TrainedConfig
from openrlhf_ext.inputs import InputError
from openrlhf_ext.locks import check_held
from openrlhf_ext.options import required
from openrlhf_ext.patches.environment import machine
from openrlhf_ext.reporting import (
    EventLog,
    HeldOutWriter,
    MetricsWriter,
    ProgressLine,
    SampleWriter,
    is_documented,
    read_metrics,
    write_figure,
)
from openrlhf_ext.reporting.progress import (
    COLUMNS,
    EXACT,
    PANELS,
    Panel,
    lost_outputs,
)
from openrlhf_ext.run.checkpoints import checkpoint_store
from openrlhf_ext.run.corridor import Watch

logger = logging.getLogger(__name__)

_FIGURE_EVERY_S = 10.0
_DROPPED = ("filtered", "late", "unstarted", "skipped")
# names in losses -> documented names
_RENAMED = {"clip_fraction": "loss/clip_fraction"}


def about(config: TrainedConfig, **layout: int) -> dict[str, Any]:
    """Returns the facts of a run's first event: options without secrets, versions, this machine,
    layout, resume step."""
    steps = (
        [step_of(folder) for folder in checkpoint_store(config).checkpoints()]
        if config.ckpt.load_enable
        else []
    )
    return {
        "options": shown_options(config),
        "set": sorted(config.sources),
        **machine(),
        "layout": config.layout.sizes | layout,
        "resume_step": max(steps, default=0),
    }


class Recorder:
    """Writes the records of one run. A background thread redraws the figure at most every ten
    seconds. Records after ``resume_step`` belong to steps that the run repeats, and are moved
    aside; 0 = all are."""

    columns: Sequence[Any] = COLUMNS
    panels: Sequence[Panel] = PANELS

    def __init__(
        self,
        config: TrainedConfig,
        total_steps: int | None,
        resume_step: int,
        events: EventLog,
        title: str = "",
    ) -> None:
        label = config.training_label
        self.metrics_path = Path(required(config.logger.metrics_path, "logger.metrics_path"))
        self.figure_path = Path(required(config.logger.figure_path, "logger.figure_path"))
        self.title = ", ".join(part for part in (title, label) if part)
        self.said_label = f", {label}" if label else ""
        self.writer = MetricsWriter(self.metrics_path, resume_step, label=label)
        self.progress = ProgressLine(total_steps, label=label, columns=self.columns)
        self.events = events
        train = config.train
        self.corridor = (
            None
            if train.corridor is None
            else Watch(train.corridor, train.corridor_action, self.events)
        )
        self._drawing: threading.Thread | None = None
        self._drawn_at = 0.0

    def write(self, step: int, record: Mapping[str, float]) -> dict[str, float]:
        """Writes and shows the record of one step; returns the written record."""
        written = self.writer.write(step, record)
        self.progress.show(step, record)
        for lost in lost_outputs():
            self.events.note("output_lost", why=lost)
        self.draw()
        self.watch(step, written)
        return written

    def watch(self, step: int, written: Mapping[str, float]) -> None:
        """Compares a record with those of the trusted runs."""
        if self.corridor is not None:
            self.corridor.look(step, written)

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
        """Draws the figure; logs an error, since metrics.jsonl has the numbers and the run can go
        on."""
        try:
            check_held()
            write_figure(self.metrics_path, self.figure_path, self.title, self.panels)
        except (OSError, InputError) as error:
            logger.error(
                "the figure %s could not be drawn: %s; metrics.jsonl has its numbers",
                self.figure_path,
                error,
            )

    def close(self) -> None:
        self.draw(wait=True)
        self.writer.close()


class StepRecorder(Recorder):
    """The recorder of a run that samples: makes one documented record from a step's results."""

    def __init__(
        self,
        config: RunConfig,
        total_steps: int | None,
        resume_step: int,
        events: EventLog,
        title: str,
        skipped_overlong: int,
        samples: SampleWriter,
        held_out: HeldOutWriter,
    ) -> None:
        if config.train.exact_rollout_enable:
            self.columns = EXACT
        super().__init__(config, total_steps, resume_step, events, title)
        self.skipped_overlong, self.samples, self.held_out = skipped_overlong, samples, held_out
        self.last_evaluation = self._evaluated() if resume_step else -1
        # a resumed run does not know the counts of its earlier part: its first step notes no drops
        self._dropped = dict.fromkeys(_DROPPED, 0.0) if resume_step == 0 else {}

    def _evaluated(self) -> int:
        return max(
            (r["step"] for r in read_metrics(self.metrics_path) if "eval/accuracy" in r), default=-1
        )

    def repeat_from(self, step: int, dropped: Mapping[str, int]) -> None:
        """Moves the records after ``step`` aside, when the run goes back to it with these counts of
        ``dropped`` groups."""
        for lines in (self.writer, self.samples, self.held_out, self.events):
            lines.repeat_from(step)
        self.last_evaluation, self._dropped = (
            self._evaluated(),
            {name: float(dropped[name]) for name in _DROPPED},
        )

    def step(
        self, step: int, logs: Mapping[str, float], engines: Sequence[Mapping[str, Any]]
    ) -> dict[str, float]:
        record = step_record(logs, engines) | {"prompts/skipped_overlong": self.skipped_overlong}
        self._note_groups(record)
        self.write(step, record)
        return record

    def _note_groups(self, record: Mapping[str, float]) -> None:
        """Notes the groups dropped since the last step, and those trained late, as events."""
        now = {
            name: record[f"groups/dropped_{name}"]
            for name in _DROPPED
            if f"groups/dropped_{name}" in record
        }
        more = {name: int(count - self._dropped.get(name, count)) for name, count in now.items()}
        self._dropped = now
        if any(more.values()):
            self.events.note("groups_dropped", **more)
        if late := int(record.get("groups/trained_late", 0)):
            self.events.note("groups_late", count=late)

    def evaluation(self, step: int, logs: dict[str, float]) -> None:
        """Writes the record of an evaluation after ``step`` steps."""
        self.last_evaluation = step
        self.watch(step, self.writer.write(step, logs))
        accuracy, error, samples = (
            logs["eval/accuracy"],
            logs["eval/accuracy_stderr"],
            logs["eval/samples"],
        )
        score, score_error = logs["eval/score_mean"], logs["eval/score_mean_stderr"]
        self.events.note(
            "evaluation", accuracy=accuracy, stderr=error, samples=samples, score=score
        )
        graded = f", mean score {score:.3f} +- {score_error:.3f}" if score != accuracy else ""
        said = "step %d: held-out accuracy %.3f +- %.3f%s (%d samples)%s"
        logger.info(said, step, accuracy, error, graded, samples, self.said_label)

    def close(self) -> None:
        super().close()
        self.samples.close()
        self.held_out.close()


def step_record(
    logs: Mapping[str, float], engines: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Returns one step's record under the names of docs/metrics.md, from its ``logs`` and each
    engine's ``rollout_stats``; other numbers go under ``algorithm/``."""
    named = {_RENAMED.get(name, name): value for name, value in logs.items()}
    record = {
        name if is_documented(name) else f"algorithm/{name}": value for name, value in named.items()
    }
    record["time/generate"] = max(stats["generation_s"] for stats in engines)
    record["time/grade"] = max(stats["exposed_grading_s"] for stats in engines)
    if drafts := sum(stats["drafts"] for stats in engines):
        record["rollout/accepted"] = sum(stats["accepted"] for stats in engines) / drafts
    busy = [stats["generation_s"] + stats["exposed_grading_s"] for stats in engines]
    record["time/idle_engines"] = max(0.0, record["time/step"] - sum(busy) / len(busy))
    record["throughput/tokens_per_second"] = record["tokens/generated"] / record["time/step"]
    return record
