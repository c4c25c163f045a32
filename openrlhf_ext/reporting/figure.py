"""The figure of a run: reward, entropy, length and accuracy over steps."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from openrlhf_ext.reporting.metrics import Record, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg

# name of the training metric, of the held-out one, title, unit
PANELS = (
    ("reward/mean", None, "reward", "mean reward"),
    ("accuracy/mean", "eval/accuracy", "accuracy", "fraction correct"),
    ("entropy/mean", None, "entropy", "nats per token"),
    ("response/length_mean", "eval/response_length_mean", "response length", "tokens"),
)
_SMOOTHED_FROM = 20  # steps; a shorter curve is readable as it is
_WINDOW_PARTS = 20


def write_figure(metrics_path: str | Path, out_png: str | Path, title: str = "") -> None:
    """Draw a metrics file as a 2 x 2 figure. The image is replaced atomically. Uses no global state of matplotlib.

    Takes some tenths of a second, the first call one second more for importing matplotlib.

    Args:
        metrics_path: written by ``MetricsWriter``.
        out_png: the image; folders are made.
        title: shown on top.

    Raises:
        ValueError: the file is not a metrics file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = read_metrics(metrics_path)
    figure = Figure(figsize=(10, 7), layout="constrained")
    for axes, (train, held_out, panel_title, unit) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        _draw(axes, records, train, held_out)
        axes.set(title=panel_title, xlabel="step", ylabel=unit)
    figure.suptitle(title)
    _replace(FigureCanvasAgg(figure), Path(out_png))


def _draw(axes: Axes, records: list[Record], train: str, held_out: str | None) -> None:
    steps, values = _series(records, train)
    smooth = len(values) >= _SMOOTHED_FROM
    axes.plot(steps, values, color="tab:blue", alpha=0.35 if smooth else 1.0, label="train")
    if smooth:
        axes.plot(steps, _moving_mean(values), color="tab:blue", label="train, moving mean")
    if held_out is not None and (points := _series(records, held_out))[0]:
        axes.plot(*points, color="tab:orange", marker="o", linestyle="--", label="held out")
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize="small")
    axes.locator_params(axis="x", integer=True)


def _series(records: list[Record], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric; NaN stays and leaves a gap in the curve."""
    present = [record for record in records if name in record]
    return [record["step"] for record in present], [record[name] for record in present]


def _moving_mean(values: list[float]) -> list[float]:
    """Mean of the finite values in the last twentieth of the run, at least three; NaN where there is none."""
    window = max(3, len(values) // _WINDOW_PARTS)
    recent = (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
    return [_finite_mean(part) for part in recent]


def _finite_mean(values: list[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def _replace(canvas: FigureCanvasAgg, out_png: Path) -> None:
    out_png.parent.mkdir(parents=True, exist_ok=True)
    partial = out_png.with_name(f".{out_png.name}.{os.getpid()}.partial")
    try:
        canvas.print_png(partial)
        os.replace(partial, out_png)
    finally:
        partial.unlink(missing_ok=True)
