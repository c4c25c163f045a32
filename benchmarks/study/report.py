"""What a study leaves: cells.csv, table.md, figures, and one page with all of it."""

from __future__ import annotations

import base64
import csv
import html
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.study.outcomes import OUTCOMES, Row, outcome, smoothed
from benchmarks.study.settings import Study
from benchmarks.study.statistics import Estimate, estimate
from benchmarks.study.verdicts import Judgment, by_arm, checks_failed, interval_of_share, judge

_COLUMNS = (
    *OUTCOMES,
    "start/accuracy",
    "start/short",
    "last/accuracy",
    "last/greedy_accuracy",
    "last/pass@8",
)
_SHOWN = (
    "mean_accuracy",
    "last/accuracy",
    "last/greedy_accuracy",
    "last/pass@8",
    "lowest_pass@8",
    "switch_step",
    "entropy_at_accuracy",
    "mean_length",
)
_SHARES = ("accuracy_collapsed", "tags_collapsed", "ended_collapsed")
_ROLES = {
    "primary": "Primary contrasts (p adjusted together, Holm)",
    "check": "Checks of the study itself",
    "secondary": "Secondary contrasts (p of each alone)",
}
_PERCENT = ("accuracy", "pass@", "drop", "collapsed", "short", "ended", "tags")


def write_report(
    study: Study, name: str, rows: Sequence[Row], planned: int, folder: Path
) -> list[Path]:
    """Writes everything about these rows; returns the files.

    Args:
        name: of the study.
        rows: those that count, one for each run that ended.
        planned: runs of the whole study.
    """
    judgments = judge(study, rows)
    table = _table(study, name, rows, planned, judgments)
    written = [folder / "cells.csv", folder / "table.md"]
    written[0].write_text(_csv(rows), encoding="utf-8")
    written[1].write_text(table, encoding="utf-8")
    figures = _figures(study, rows, judgments, folder)
    page = folder / "study.html"
    page.write_text(_page(name, table, figures), encoding="utf-8")
    return [*written, *figures, page]


# ---- tables


def _csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        [
            "cell",
            "learning_rate",
            "outcome",
            "seeds",
            "mean",
            "sd",
            "low",
            "high",
            "iqm",
            "iqm_low",
            "iqm_high",
        ]
    )
    for (cell, rate), of_arm in by_arm(rows).items():
        for name in _COLUMNS:
            if (found := _estimate(of_arm, name)) is not None:
                numbers = [
                    found.mean,
                    found.deviation,
                    *found.interval,
                    found.iqm,
                    *found.iqm_interval,
                ]
                writer.writerow(
                    [cell, rate, name, found.count, *(f"{number:.6g}" for number in numbers)]
                )
    return text.getvalue()


def _estimate(rows: Sequence[Row], name: str) -> Estimate | None:
    values = [value for row in rows if not math.isnan(value := outcome(row, name))]
    return estimate(values) if values else None


def _table(
    study: Study, name: str, rows: Sequence[Row], planned: int, judgments: Sequence[Judgment]
) -> str:
    parts = [f"# Study {name}", "", *_head(rows, planned)]
    if alarms := checks_failed(judgments):
        parts += [
            "",
            "**The study's own checks have not passed; do not trust its verdicts:**",
            *(f"- {alarm}" for alarm in alarms),
        ]
    for role, title in _ROLES.items():
        if chosen := [each for each in judgments if each.contrast.role == role]:
            parts += ["", f"## {title}", "", *_contrast_lines(chosen)]
    for task in study.tasks:
        of_task = [row for row in rows if study.cells[row["cell"]].task == task]
        if of_task:
            parts += ["", f"## Task {task}", "", *_cell_lines(of_task)]
    if failures := [row for row in rows if "error" in row]:
        parts += [
            "",
            "## Failed runs",
            "",
            *(
                f"- {_arm(row['cell'], row['learning_rate'])}, seed {row['seed']}: {row['error']}"
                for row in failures
            ),
        ]
    return "\n".join(parts) + "\n"


def _head(rows: Sequence[Row], planned: int) -> list[str]:
    done = [row for row in rows if "error" not in row]
    said = [
        f"{len(done)} of {planned} runs" + ("" if len(done) == planned else ": **not complete**")
    ]
    for title, key in (("Hardware", "hardware"), ("Commits", "commit")):
        said.append(f"{title}: {'; '.join(sorted({str(row[key]) for row in rows})) or 'none'}")
    return [
        *(f"{line}  " for line in said),
        f"{sum(row['seconds'] for row in rows) / 3600:.2f} hours of runs",
    ]


def _contrast_lines(judgments: Sequence[Judgment]) -> list[str]:
    lines = [
        "| contrast | outcome | seeds | mean difference [95 %] | SD | IQM [95 %] | p | verdict "
        "| detectable |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    notes = []
    for each in judgments:
        contrast, found = each.contrast, each.estimate
        scale = _scale(contrast.outcome)
        # a hundredth of the margin is the least that is of interest
        decimals = max(2, 2 - math.floor(math.log10(scale * contrast.margin)))
        if found is None:
            cells = ["-"] * 5
            seeds = "0"
        else:
            p = each.p if each.adjusted is None else each.adjusted
            cells = [
                _with_interval(found.mean, found.interval, scale, decimals),
                f"{scale * found.deviation:.{decimals}f}",
                _with_interval(found.iqm, found.iqm_interval, scale, decimals),
                f"{p:.3g}",
                "-" if math.isnan(each.detectable) else f"{scale * each.detectable:.{decimals}f}",
            ]
            seeds = str(found.count)
        *numbers, sees = cells
        unit = f"{contrast.outcome}{', points' if scale == 100 else ''}"
        lines.append(
            f"| {each.name} | {unit} | {seeds} | {' | '.join(numbers)} | **{each.verdict}** | "
            f"{sees} |"
        )
        claim = f"claim: {contrast.claim}" if contrast.claim else ""
        source = f" ({contrast.source})" if contrast.source else ""
        judged = (
            f"margin {scale * contrast.margin:g}; equivalence p {each.equivalence_p:.3g}"
            if found
            else ""
        )
        about = [claim + source, judged, *each.notes]
        notes.append(f"- {each.name}: {'; '.join(text for text in about if text)}")
    return [*lines, "", *notes]


def _with_interval(value: float, interval: tuple[float, float], scale: float, decimals: int) -> str:
    shown = (f"{scale * number:+.{decimals}f}" for number in (value, *interval))
    return "{} [{}, {}]".format(*shown)


def _cell_lines(rows: Sequence[Row]) -> list[str]:
    arms = by_arm(rows)
    shown = [name for name in _SHOWN if any(_estimate(of_arm, name) for of_arm in arms.values())]
    shares = [
        name for name in _SHARES if any(interval_of_share(of_arm, name) for of_arm in arms.values())
    ]
    lines = [
        f"| cell | seeds | {' | '.join([*shown, *shares])} |",
        "|---" * (2 + len(shown) + len(shares)) + "|",
    ]
    for (cell, rate), of_arm in arms.items():
        numbers = [_number(_estimate(of_arm, name), _scale(name)) for name in shown]
        numbers += [_share(interval_of_share(of_arm, name)) for name in shares]
        lines.append(f"| {_arm(cell, rate)} | {len(of_arm)} | {' | '.join(numbers)} |")
    return [
        *lines,
        "",
        "Mean (SD over seeds); shares and accuracies in percent, entropy in nats; collapsed: "
        "share of runs [Wilson].",
    ]


def _number(found: Estimate | None, scale: float) -> str:
    return (
        "-"
        if found is None
        else f"{_digits(scale * found.mean)} ({_digits(scale * found.deviation)})"
    )


def _share(found: tuple[float, tuple[float, float]] | None) -> str:
    if found is None:
        return "-"
    share, (low, high) = found
    return f"{100 * share:.0f} [{100 * low:.0f}, {100 * high:.0f}]"


def _digits(value: float) -> str:
    return f"{value:.1f}" if abs(value) >= 1 else f"{value:.3f}"


def _scale(name: str) -> float:
    return (
        100.0 if any(word in name for word in _PERCENT) and not name.startswith("entropy") else 1.0
    )


def _arm(cell: str, rate: float | None) -> str:
    return cell if rate is None else f"{cell}@{rate:g}"


# ---- figures


def _figures(
    study: Study, rows: Sequence[Row], judgments: Sequence[Judgment], folder: Path
) -> list[Path]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    written = []

    def save(figure: Any, name: str) -> None:
        figure.savefig(folder / name, dpi=110, bbox_inches="tight")
        pyplot.close(figure)
        written.append(folder / name)

    for task in study.tasks:
        arms = by_arm([row for row in rows if study.cells[row["cell"]].task == task])
        if not arms:
            continue
        save(_curves(pyplot, task, arms), f"curves_{task}.png")
        save(_entropy(pyplot, task, arms), f"entropy_{task}.png")
        if any(rate is not None for _, rate in arms):
            save(_collapse(pyplot, task, arms), f"collapse_{task}.png")
    if any(each.estimate for each in judgments):
        save(_forest(pyplot, judgments), "contrasts.png")
    return written


def _curves(pyplot: Any, task: str, arms: Mapping[tuple[str, Any], Sequence[Row]]) -> Any:
    """What rollouts were like over steps: means over seeds, and the middle half."""
    import numpy as np

    figure, axes = pyplot.subplots(2, 3, figsize=(15, 7), sharex=True)
    for axis, name in zip(
        axes.flat, ("accuracy", "reward", "entropy", "length", "short", "ended"), strict=True
    ):
        for number, ((cell, rate), rows) in enumerate(arms.items()):
            curves = np.array([row["steps"][name] for row in rows], dtype=float)
            steps = np.arange(1, curves.shape[1] + 1)
            low, high = np.percentile(curves, [25, 75], axis=0)
            axis.plot(
                steps,
                curves.mean(axis=0),
                color=f"C{number % 10}",
                label=_arm(cell, rate),
                linewidth=1.2,
            )
            axis.fill_between(steps, low, high, color=f"C{number % 10}", alpha=0.12, linewidth=0)
        axis.set(title=name, xlabel="step")
    axes[0, 0].legend(fontsize=7)
    figure.suptitle(f"{task}: means over seeds; bands: middle half of the runs")
    return figure


def _entropy(pyplot: Any, task: str, arms: Mapping[tuple[str, Any], Sequence[Row]]) -> Any:
    figure, axis = pyplot.subplots(figsize=(6, 4.5))
    for number, ((cell, rate), rows) in enumerate(arms.items()):
        for place, row in enumerate(rows):
            steps = row["steps"]
            label = _arm(cell, rate) if place == 0 else None
            points = smoothed(steps["accuracy"]), smoothed(steps["entropy"])
            axis.plot(*points, color=f"C{number % 10}", alpha=0.35, linewidth=0.8, label=label)
    axis.set(
        title=f"{task}: entropy over accuracy, rollouts averaged over five steps, a line for each "
        "run",
        xlabel="accuracy",
        ylabel="entropy, nats",
    )
    axis.legend(fontsize=7)
    return figure


def _collapse(pyplot: Any, task: str, arms: Mapping[tuple[str, Any], Sequence[Row]]) -> Any:
    figure, axes = pyplot.subplots(1, len(_SHARES), figsize=(11, 3.5), sharey=True)
    cells = list(dict.fromkeys(cell for cell, _ in arms))
    for axis, name in zip(axes, _SHARES, strict=True):
        for number, cell in enumerate(cells):
            rates = sorted(rate for other, rate in arms if other == cell and rate is not None)
            found = [(rate, interval_of_share(arms[cell, rate], name)) for rate in rates]
            known = [
                (rate, share, low, high) for rate, at in found if at for share, (low, high) in [at]
            ]
            if known:
                x, y, low, high = zip(*known, strict=True)
                below = [max(0.0, a - b) for a, b in zip(y, low, strict=True)]
                above = [max(0.0, b - a) for a, b in zip(y, high, strict=True)]
                axis.errorbar(
                    x,
                    y,
                    [below, above],
                    color=f"C{number % 10}",
                    label=cell,
                    marker="o",
                    capsize=2,
                    linewidth=1,
                )
        axis.set(title=name, xlabel="learning rate", xscale="log")
    axes[0].set(ylabel="share of runs", ylim=(-0.05, 1.05))
    axes[0].legend(fontsize=7)
    figure.suptitle(
        f"{task}: runs whose last evaluation is below 0.7 of their best one (Wilson intervals)"
    )
    return figure


def _forest(pyplot: Any, judgments: Sequence[Judgment]) -> Any:
    shown = [
        each
        for each in judgments
        if each.estimate is not None and math.isfinite(each.estimate.interval[0])
    ]
    figure, axis = pyplot.subplots(figsize=(9, 0.8 + 0.45 * max(1, len(shown))))
    for place, each in enumerate(reversed(shown)):
        found, margin = each.estimate, each.contrast.margin
        if found is None:
            continue
        low, high = (value / margin for value in found.interval)
        axis.plot([low, high], [place, place], color="C0", linewidth=2)
        axis.plot(found.mean / margin, place, "o", color="C0")
    axis.axvspan(-1, 1, color="gray", alpha=0.15, linewidth=0)
    axis.axvline(0, color="black", linewidth=0.8)
    labels = [f"{each.name} ({each.contrast.outcome}): {each.verdict}" for each in reversed(shown)]
    axis.set_yticks(range(len(shown)), labels, fontsize=8)
    axis.set(
        xlabel="mean difference in units of the margin (gray: too small to matter), 95 % interval"
    )
    return figure


# ---- page

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1150px;margin:2em auto;padding:0 1em}table{"
    "border-collapse:collapse;font-size:13px}td,th{border:1px solid #ccc;padding:2px "
    "7px;text-align:left}img{max-width:100%}"
)


def _page(name: str, table: str, figures: Sequence[Path]) -> str:
    images = "\n".join(
        f'<img alt="{html.escape(path.stem)}" src="data:image/png;base64,{_base64(path)}">'
        for path in figures
    )
    title = html.escape(f"Study {name}")
    return (
        '<!doctype html><html lang="en"><meta '
        f'charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"<body>{_as_html(table)}{images}</body></html>\n"
    )


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def _as_html(markdown: str) -> str:
    """The few forms that ``_table`` writes: headings, lists, tables, bold."""
    parts: list[str] = []
    for line in markdown.splitlines():
        text = html.escape(line.strip())
        while text.count("**") >= 2:
            text = text.replace("**", "<b>", 1).replace("**", "</b>", 1)
        if text.startswith("#"):
            level = len(text) - len(text.lstrip("#"))
            parts.append(f"<h{level}>{text[level + 1 :]}</h{level}>")
        elif text.startswith("|---"):
            continue
        elif text.startswith("|"):
            cells = "".join(f"<td>{cell.strip()}</td>" for cell in text.strip("|").split("|"))
            opened = parts and parts[-1].startswith(("<tr>", "<table>"))
            parts.append(
                f"<tr>{cells}</tr>" if opened else f"<table><tr>{cells.replace('td>', 'th>')}</tr>"
            )
        elif text:
            parts.append(f"<p>{text}</p>")
    return _closed_tables(parts)


def _closed_tables(parts: Sequence[str]) -> str:
    text, open_table = [], False
    for part in parts:
        row = part.startswith(("<tr>", "<table>"))
        if open_table and not row:
            text.append("</table>")
        text.append(part)
        open_table = row
    return "\n".join([*text, "</table>" if open_table else ""])
