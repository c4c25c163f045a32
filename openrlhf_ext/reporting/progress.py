"""What a run shows as it goes: one aligned line of plain text per step, what it is doing right now,
and its figure.

Two processes write to the terminal: the driver its step lines and log records, its parent the line
of status. Neither asks the other: the status has no line end, and whatever else is written first
takes it away (``line_start``).
"""

from __future__ import annotations

import ctypes
import gc
import logging
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from openrlhf_ext.outputs import in_one_piece
from openrlhf_ext.redaction import RedactingFormatter, redact
from openrlhf_ext.reporting.lines import Record, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

logger = logging.getLogger(__name__)

HEADER_EVERY = 20

_ERASE = "\r\x1b[K"  # back to the first column, and clear to the end of the line
_QUIET_S = 2.0  # after which a terminal gets the line of status
_REWRITE_S = 1.0
_LINE_EVERY_S = 30.0  # where the output is no terminal
_RECENT_STEPS = 20


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

_BIT_EQUAL = _Column("bit_equal", "rollout/bit_equal", 9, ".12g")
EXACT = tuple(_BIT_EQUAL if each.metric == "kl/rollout" else each for each in COLUMNS)
"""Of exact mode, in which ``kl/rollout`` is 0."""

SUPERVISED = (
    _Column("loss", "loss/sft", 8, ".4f"),
    _Column("norm", "grad_norm", 8, ".3f"),
    _Column("lr", "lr", 8, ".1e"),
    _Column("tok/s", "throughput/train_tokens_per_second", 8, ".0f"),
    _Column("step_s", "time/step", 7, ".2f"),
)


class ProgressLine:
    """Shows each step as one line, with the column titles above the first and then every 20 lines.

    ``label`` ends every line; ``write`` receives each without its end, standard output by default.
    """

    def __init__(
        self,
        total_steps: int | None,
        write: Callable[[str], Any] | None = None,
        label: str = "",
        columns: Sequence[_Column] = COLUMNS,
    ) -> None:
        self._columns = columns
        self.total_steps, self._label = total_steps, [label] if label else []
        self._write = write or _write_line
        self._lines = 0
        self._step_width = max(len("step"), 2 * len(str(total_steps or "?")) + 1)

    def show(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self._lines % HEADER_EVERY == 0:
            titles = (column.title.rjust(column.width) for column in self._columns)
            self._write("  ".join(["step".rjust(self._step_width), *titles]))
        self._lines += 1
        position = f"{step}/{'?' if self.total_steps is None else self.total_steps}"
        cells = [
            position.rjust(self._step_width),
            *(column.cell(metrics) for column in self._columns),
            *self._label,
        ]
        self._write("  ".join(cells))


def _write_line(line: str) -> None:
    # in one piece: the other process may write in between
    _write(sys.stdout, f"{line_start(sys.stdout)}{line}\n")


# ---- the terminal

_lost: list[str] = []


def lost_outputs() -> list[str]:
    """Which outputs of this process were lost since the last call, and why."""
    lost = _lost.copy()
    _lost.clear()
    return lost


def _write(stream: TextIO, text: str) -> None:
    """A reader that has left, a terminal that was closed, and a full disk cost what is shown, not
    the run."""
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        _give_up(stream, error)


def _give_up(stream: TextIO, error: OSError) -> None:
    """What else is written to the stream, by libraries too and as Python ends, goes nowhere."""
    _lost.append(f"{stream.name}: {error.strerror or error}")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def line_start(stream: TextIO) -> str:
    """What every line must begin with that goes to a stream on which a line of status may stand."""
    return _ERASE if _can_rewrite(stream) else ""


def _can_rewrite(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class TerminalHandler(logging.StreamHandler):
    """Log records on standard error, without secrets, in the place of the line of status."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(RedactingFormatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))

    def format(self, record: logging.LogRecord) -> str:
        return line_start(self.stream) + super().format(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        """Called in the ``except`` of ``emit``."""
        if isinstance(error := sys.exception(), OSError):
            _give_up(self.stream, error)
        else:
            super().handleError(record)


# ---- what it is doing


class RunStatus:
    """Says what a run is doing: on a terminal in one line that is rewritten, elsewhere in a line
    every half minute.

    ``stream``: standard error by default; ``now``: monotonic clock in seconds.
    """

    def __init__(
        self, stream: TextIO | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream, self._now = stream or sys.stderr, now
        self._doing, self._detail, self._limit_s = "", "", math.inf
        self._step = 0
        self._steps: int | None = None
        self._step_seconds: list[float] = []
        self._began = self._step_ended = self._shown = now()
        self._is_shown = False

    def phase(self, doing: str, limit_s: float) -> None:
        """The run does something else now, for ``limit_s`` seconds at most."""
        self._doing, self._limit_s, self._detail, self._began = doing, limit_s, "", self._now()

    def detail(self, text: str) -> None:
        self._detail = text

    def step_ended(self, step: int, steps: int | None, seconds: float) -> None:
        self._step, self._steps = step, steps
        self._step_seconds = [*self._step_seconds, seconds][-_RECENT_STEPS:]
        self._step_ended = self._shown = self._now()
        self._is_shown = False

    def tick(self) -> None:
        """Shows the status if it is due; call it a few times a second."""
        now = self._now()
        if not self._doing:
            return
        if not _can_rewrite(self._stream):
            if now - self._shown >= _LINE_EVERY_S:
                self._shown = now
                logger.info("%s", self.text())
        elif now - self._shown >= (_REWRITE_S if self._is_shown else _QUIET_S):
            self._shown, self._is_shown = now, True
            width = os.get_terminal_size(self._stream.fileno()).columns or 80
            # a full line would wrap, and stay
            _write(self._stream, _ERASE + redact(self.text())[: width - 1])

    def clear(self) -> None:
        self._doing = ""
        if self._is_shown:
            _write(self._stream, _ERASE)

    def text(self) -> str:
        """What is being done, how far it is, since when, and how long the step and the run may
        still take."""
        now = self._now()
        parts = [f"{self._doing}: {duration(now - self._began)}{self._left(now)}", self._detail]
        return ", ".join(part for part in parts if part)

    def _left(self, now: float) -> str:
        """Estimates by the median of the latest steps; before the first one has ended, the
        deadline."""
        if not self._step_seconds:
            return f" of at most {duration(self._limit_s)}" if math.isfinite(self._limit_s) else ""
        if self._steps is None or self._step >= self._steps:
            return ""
        typical, spent = statistics.median(self._step_seconds), now - self._step_ended
        more = (self._steps - self._step - 1) * typical
        of_step = max(typical - spent, 0.0)
        return (
            f" (left: about {duration(of_step)} of the step, {duration(of_step + more)} of the run)"
        )


def duration(seconds: float) -> str:
    """Seconds as people say them: 42 s, 3 min 20 s, 2 h 5 min."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    parts = ((hours, "h"), (minutes, "min"), (0 if hours else rest, "s"))
    return " ".join(f"{number} {unit}" for number, unit in parts if number)


# ---- the figure

Panel = tuple[str, str | None, str, str]
"""Name of the training metric, of the held-out one, title, unit."""
PANELS: tuple[Panel, ...] = (
    ("reward/mean", None, "reward", "mean reward"),
    ("accuracy/mean", "eval/accuracy", "accuracy", "fraction correct"),
    ("entropy/mean", None, "entropy", "nats per token"),
    ("response/length_mean", "eval/response_length_mean", "response length", "tokens"),
)
SUPERVISED_PANELS: tuple[Panel, ...] = (
    ("loss/sft", "eval/loss", "loss", "nats per token"),
    ("grad_norm", None, "gradient norm", "norm before clipping"),
    ("lr", None, "learning rate", ""),
    ("throughput/train_tokens_per_second", None, "speed", "tokens per second"),
)
SMOOTHED_FROM = 20
"""Steps; a shorter curve is readable as it is."""
COLORS = ("#2457a6", "#c2571a", "#2f7d4f", "#8a4fa3", "#a8324a", "#0f7f8c")
"""Of every figure of the documentation."""


def plain(axes: Axes, grid: Literal["both", "x", "y"] = "both") -> None:
    axes.grid(axis=grid, alpha=0.3, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def write_figure(
    metrics_path: str | Path, out_png: str | Path, title: str = "", panels: Sequence[Panel] = PANELS
) -> None:
    """Draws a metrics file as a 2 x 2 figure. The image is replaced atomically. Uses no global
    state of matplotlib.

    Takes some tenths of a second, the first call one second more for importing matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = {
        "step",
        *(f"{name}{end}" for panel in panels for name in panel[:2] for end in ("", "_stderr")),
    }
    records = read_metrics(metrics_path, shown)
    figure = Figure(figsize=(10, 7), layout="constrained")
    for axes, (train, held_out, panel_title, unit) in zip(
        figure.subplots(2, 2).flat, panels, strict=True
    ):
        _draw(axes, records, train, held_out)
        axes.set(title=panel_title, xlabel="step", ylabel=unit)
    figure.suptitle(title)
    with in_one_piece(Path(out_png)) as partial:
        FigureCanvasAgg(figure).print_png(partial)
    # A figure is a cycle of some 10,000 objects: left to the collector's own time they are spread
    # over a heap that grows with the steps of the run, and glibc keeps the holes
    # (benchmarks/results/soak_cpu.json).
    figure.clear()
    del figure, axes
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _draw(axes: Axes, records: list[Record], train: str, held_out: str | None) -> None:
    steps, values = _series(records, train)
    window = smoothing_window(len(values))
    axes.plot(steps, values, color=COLORS[0], alpha=0.35 if window > 1 else 1.0, label="train")
    if window > 1:
        axes.plot(
            steps,
            moving_mean(values, window),
            color=COLORS[0],
            label=f"train, mean of {window} steps",
        )
    if held_out is not None and (points := _series(records, held_out))[0]:
        errors = _series(records, f"{held_out}_stderr")[1]
        known = errors if len(errors) == len(points[0]) else None
        label = "held out, ± standard error" if known else "held out"
        axes.errorbar(
            *points,
            yerr=known,
            color=COLORS[1],
            marker="o",
            markersize=4,
            capsize=2,
            ls="--",
            label=label,
        )
    plain(axes)
    axes.legend(loc="best", fontsize="small", frameon=False)
    axes.locator_params(axis="x", integer=True)


def _series(records: list[Record], name: str) -> tuple[list[int], list[float]]:
    present = [record for record in records if name in record]
    return [record["step"] for record in present], [record[name] for record in present]


def smoothing_window(steps: int) -> int:
    """A twentieth of the curve, at least three steps; 1 (no moving mean) of a short one."""
    return max(3, steps // 20) if steps >= SMOOTHED_FROM else 1


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of the finite values among the last ``window``, NaN where there is none."""
    import numpy as np

    padded = np.concatenate([np.full(window - 1, np.nan), np.asarray(values, dtype=np.float64)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, window)
    finite = np.isfinite(windows)
    counts = finite.sum(axis=1)
    sums = np.where(finite, windows, 0.0).sum(axis=1)
    return np.divide(sums, counts, out=np.full(len(counts), np.nan), where=counts > 0).tolist()
