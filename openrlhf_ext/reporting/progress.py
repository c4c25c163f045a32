"""One aligned line of plain text per step."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

HEADER_EVERY = 20


@dataclass(frozen=True)
class _Column:
    title: str
    metric: str
    width: int
    form: str

    def cell(self, metrics: Mapping[str, Any]) -> str:
        value = metrics.get(self.metric)
        if value is None:
            return "-".rjust(self.width)
        text = format(float(value), self.form) if math.isfinite(value) else str(float(value))
        return text.rjust(self.width)


COLUMNS = (
    _Column("reward", "reward/mean", 7, ".3f"),
    _Column("acc", "accuracy/mean", 6, ".3f"),
    _Column("entropy", "entropy/mean", 7, ".3f"),
    _Column("length", "response/length_mean", 7, ".1f"),
    _Column("kl_roll", "kl/rollout", 8, ".1e"),
    _Column("tok/s", "throughput/tokens_per_second", 7, ".0f"),
    _Column("gen_s", "time/generate", 6, ".2f"),
    _Column("grade_s", "time/grade", 7, ".2f"),
    _Column("logp_s", "time/logprob", 6, ".2f"),
    _Column("train_s", "time/train", 7, ".2f"),
    _Column("sync_s", "time/sync", 6, ".2f"),
    _Column("step_s", "time/step", 6, ".2f"),
)


class ProgressLine:
    """Shows each step as one line, with the column titles above the first and then every 20 lines.

    Args:
        total_steps: steps of the run, ``None`` where that is not known.
        write: receives each line without its end; standard output by default.
        label: ends the line of every step.
    """

    def __init__(self, total_steps: int | None, write: Callable[[str], Any] | None = None, label: str = "") -> None:
        self._total_steps, self._label = total_steps, [label] if label else []
        self._write = write or _write_line
        self._lines = 0
        self._step_width = max(len("step"), 2 * len(str(total_steps or "?")) + 1)

    def show(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the line of one step.

        Args:
            step: the step just finished.
            metrics: by their names in ``names``; a missing one is shown as ``-``.
        """
        if self._lines % HEADER_EVERY == 0:
            self._write(self._header())
        self._lines += 1
        position = f"{step}/{'?' if self._total_steps is None else self._total_steps}"
        cells = [position.rjust(self._step_width), *(column.cell(metrics) for column in COLUMNS), *self._label]
        self._write("  ".join(cells))

    def _header(self) -> str:
        return "  ".join(["step".rjust(self._step_width), *(c.title.rjust(c.width) for c in COLUMNS)])


def _write_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
