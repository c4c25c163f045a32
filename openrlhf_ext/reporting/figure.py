"""The figure of a run: reward, entropy, length and accuracy over steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from openrlhf_ext.outputs import in_one_piece
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
SMOOTHED_FROM = 20
"""Steps; a shorter curve is readable as it is."""
COLORS = ("#2457a6", "#c2571a", "#2f7d4f", "#8a4fa3", "#a8324a", "#0f7f8c")
"""Of every figure of the documentation."""


def plain(axes: Axes, grid: Literal["both", "x", "y"] = "both") -> None:
    """What all figures have in common: a faint grid behind the data, and a frame on two sides."""
    axes.grid(axis=grid, alpha=0.3, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def write_figure(metrics_path: str | Path, out_png: str | Path, title: str = "") -> None:
    """Draw a metrics file as a 2 x 2 figure. The image is replaced atomically. Uses no global state of matplotlib.

    Takes some tenths of a second, the first call one second more for importing matplotlib.

    Args:
        out_png: the image; folders are made.

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
    window = smoothing_window(len(values))
    axes.plot(steps, values, color=COLORS[0], alpha=0.35 if window > 1 else 1.0, label="train")
    if window > 1:
        axes.plot(steps, moving_mean(values, window), color=COLORS[0], label=f"train, mean of {window} steps")
    if held_out is not None and (points := _series(records, held_out))[0]:
        errors = _series(records, f"{held_out}_stderr")[1]
        known = errors if len(errors) == len(points[0]) else None
        label = "held out, ± standard error" if known else "held out"
        axes.errorbar(*points, yerr=known, color=COLORS[1], marker="o", markersize=4, capsize=2, ls="--", label=label)
    plain(axes)
    axes.legend(loc="best", fontsize="small", frameon=False)
    axes.locator_params(axis="x", integer=True)


def _series(records: list[Record], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric; NaN stays and leaves a gap in the curve."""
    present = [record for record in records if name in record]
    return [record["step"] for record in present], [record[name] for record in present]


def smoothing_window(steps: int) -> int:
    """Steps of the moving mean of a curve: a twentieth of it, at least three; 1 (none) of a short one."""
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


def _replace(canvas: FigureCanvasAgg, out_png: Path) -> None:
    with in_one_piece(out_png) as partial:
        canvas.print_png(partial)
