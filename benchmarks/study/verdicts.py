"""From rows to verdicts: paired differences, gates, and what they say of each claim."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from benchmarks.study.outcomes import Row, outcome
from benchmarks.study.runs import Run
from benchmarks.study.settings import Contrast, Gate, Study
from benchmarks.study.statistics import (
    LEVEL,
    Estimate,
    Interval,
    detectable,
    equivalence,
    estimate,
    holm,
    sign_flip,
    wilson,
)

Verdict = Literal[
    "supported",
    "supported, within the margin",
    "refuted",
    "refuted, within the margin",
    "higher",
    "lower",
    "equivalent",
    "inconclusive",
    "interim",
    "not testable here",
    "no data",
]


@dataclass(frozen=True)
class Judgment:
    """What the rows say of a contrast.

    Attributes:
        differences: first cell minus second, by seed; means over the learning rates that were kept.
        estimate: of them; None without any.
        p: of the sign-flip test; ``adjusted``: of Holm's, for primary contrasts.
        equivalence_p: of the two one-sided tests.
        detectable: smallest true difference that such a study finds in four of five cases.
        notes: what was left out, and why; gates that failed.
    """

    name: str
    contrast: Contrast
    verdict: Verdict
    differences: dict[int, float] = field(default_factory=dict)
    estimate: Estimate | None = None
    p: float = math.nan
    adjusted: float | None = None
    equivalence_p: float = math.nan
    detectable: float = math.nan
    notes: tuple[str, ...] = ()


def judge(study: Study, rows: Sequence[Row]) -> list[Judgment]:
    """Judges every contrast of a study.

    Args:
        rows: those that count: one for each run that ended, with ``error`` where it failed.
    """
    found = [_measured(study, name, contrast, rows) for name, contrast in study.contrasts.items()]
    primary = {
        each.name: each.p
        for each in found
        if each.contrast.role == "primary" and each.estimate is not None
    }
    # those that cannot be tested still count: which of them can is not known before
    together = sum(each.contrast.role == "primary" for each in found)
    adjusted = holm(primary | {f"\0{i}": 1.0 for i in range(together - len(primary))})
    return [_with_verdict(each, adjusted.get(each.name), together) for each in found]


def needed(study: Study, runs: Sequence[Run], rows: Sequence[Row]) -> list[Run]:
    """Those runs that a verdict needs: on the seeds after those that tune, a cell that is compared
    at its best learning rate runs at that one only, and not before it is known."""
    usable = [row for row in rows if "error" not in row]
    found = []
    for run in runs:
        contrasts = [each for each in study.contrasts.values() if run.arm.cell in each.cells]
        if contrasts and all(0 < each.tuned_on <= run.seed for each in contrasts):
            best = [(each, _best_rates(study, each, usable)) for each in contrasts]
            rates = [
                pair[each.cells.index(run.arm.cell)] for each, pair in best if pair is not None
            ]
            if run.arm.learning_rate not in rates:
                continue
        found.append(run)
    return found


def checks_failed(judgments: Sequence[Judgment]) -> list[str]:
    """Checks of the study that have not passed: a difference within one method, a planted one
    unseen, runs missing."""
    return [
        f"{each.name}: expected {each.contrast.expect}, found {each.verdict}"
        for each in judgments
        if each.contrast.role == "check" and not _check_holds(each)
    ]


def _check_holds(judgment: Judgment) -> bool:
    if judgment.contrast.expect == "none":
        return judgment.verdict in ("inconclusive", "equivalent")
    return judgment.verdict == "supported"


def _measured(study: Study, name: str, contrast: Contrast, rows: Sequence[Row]) -> Judgment:
    usable = [row for row in rows if row["cell"] in contrast.cells and "error" not in row]
    failures = sum(row["cell"] in contrast.cells and "error" in row for row in rows)
    notes = [f"{failures} runs failed"] if failures else []
    rates = _rates(study, contrast.cells[0])
    kept = [
        rate
        for rate in rates
        if _survives(contrast, [row for row in usable if row["learning_rate"] == rate])
    ]
    lost_rates = [rate for rate in rates if rate not in kept]
    notes += [
        f"learning rate {rate or 'of the options'} left out: not {_gate_text(contrast.survival)}"
        for rate in lost_rates
    ]
    pairs = [(rate, rate) for rate in kept]
    if contrast.tuned_on:
        best = _best_rates(study, contrast, usable)
        pairs = [best] if best is not None else []
        usable = [row for row in usable if row["seed"] >= contrast.tuned_on]
        notes += [
            f"{cell} at {rate}" for cell, rate in zip(contrast.cells, best or (), strict=False)
        ]
    else:
        usable = [row for row in usable if row["learning_rate"] in kept]
    seeds = range(contrast.tuned_on, study.task_of(contrast.cells[0]).seeds)
    by_commit = all(study.cells[cell].backend == "stack" for cell in contrast.cells)
    differences, incomplete, unpaired = _paired(contrast, usable, pairs, seeds, by_commit)
    notes += unpaired
    if not differences:
        verdict: Verdict = "no data" if kept else "not testable here"
        return Judgment(name, contrast, verdict, notes=tuple(notes))
    values = list(differences.values())
    described = estimate(values)
    gates = [*study.task_of(contrast.cells[0]).gates, *contrast.gates]
    failed = [text for gate in gates if (text := _failure(gate, contrast, usable))]
    # a verdict on some seeds, and another one on more of them, is two chances to be wrong
    verdict = "interim" if incomplete else "not testable here" if failed else "inconclusive"
    return Judgment(
        name,
        contrast,
        verdict,
        differences,
        described,
        sign_flip(values),
        equivalence_p=equivalence(values, contrast.margin),
        detectable=detectable(described.deviation, len(values)) if len(values) > 1 else math.nan,
        notes=(*notes, *failed),
    )


def _with_verdict(judgment: Judgment, adjusted: float | None, together: int) -> Judgment:
    described, contrast = judgment.estimate, judgment.contrast
    if contrast.role == "primary" and described is not None and described.count > 1:
        sees = detectable(described.deviation, described.count, together)
        judgment = replace(judgment, adjusted=adjusted, detectable=sees)
    if judgment.verdict != "inconclusive" or described is None:
        return judgment
    p = judgment.p if judgment.adjusted is None else judgment.adjusted
    same = judgment.equivalence_p < LEVEL
    if p >= LEVEL or (same and contrast.expect == "none"):
        return replace(judgment, verdict="equivalent" if same else "inconclusive")
    return replace(judgment, verdict=_found(contrast, described.mean, same))


def _found(contrast: Contrast, mean: float, within: bool) -> Verdict:
    """What a difference that is there says of the claim, or which one is higher where nothing is
    claimed."""
    if contrast.role != "check" and not contrast.claim:
        return "higher" if mean > 0 else "lower"
    if {"greater": mean > 0, "less": mean < 0, "none": False}[contrast.expect]:
        return "supported, within the margin" if within else "supported"
    return "refuted, within the margin" if within else "refuted"


def _rates(study: Study, cell: str) -> Sequence[float | None]:
    return study.cells[cell].learning_rates or (None,)


def _best_rates(study: Study, contrast: Contrast, rows: Sequence[Row]) -> tuple[Any, Any] | None:
    """Each cell's best learning rate on the seeds that tune; None as long as a run of theirs is not
    there."""
    sign = -1.0 if contrast.expect == "less" else 1.0
    by_place = {(row["cell"], row["learning_rate"], row["seed"]): row for row in rows}
    best: list[Any] = []
    for cell in contrast.cells:
        means: dict[Any, float] = {}
        for rate in _rates(study, cell):
            tuning = [by_place.get((cell, rate, seed)) for seed in range(contrast.tuned_on)]
            values = [
                math.nan if row is None else sign * outcome(row, contrast.outcome) for row in tuning
            ]
            means[rate] = math.fsum(values) / len(values)
        if any(map(math.isnan, means.values())):
            return None
        best.append(max(means, key=means.__getitem__))
    return best[0], best[1]


def _paired(
    contrast: Contrast,
    rows: Sequence[Row],
    rates: Sequence[tuple[Any, Any]],
    seeds: Sequence[int],
    by_commit: bool,
) -> tuple[dict[int, float], int, list[str]]:
    """First minus second by seed, where both have all learning rates and began with the same
    weights.

    Args:
        rates: of the first and of the second cell.
        seeds: that are planned.
        by_commit: both were run by the stack, whose code is no part of a row's key: at one commit,
        or they are no pair.

    Returns:
        Differences, the number of seeds that have not all their runs, and notes.
    """
    by_place = {(row["cell"], row["learning_rate"], row["seed"]): row for row in rows}
    differences, other_weights, other_commits, incomplete, undefined = {}, 0, 0, 0, 0
    for seed in seeds if rates else []:
        pairs = [
            [
                by_place.get((cell, rate, seed))
                for cell, rate in zip(contrast.cells, both, strict=True)
            ]
            for both in rates
        ]
        if any(None in pair for pair in pairs):
            incomplete += 1
        elif any(first["weights"] != second["weights"] for first, second in pairs):  # type: ignore[index]
            other_weights += 1
        elif by_commit and any(first["commit"] != second["commit"] for first, second in pairs):  # type: ignore[index]
            other_commits += 1
        else:
            found = [
                outcome(first, contrast.outcome) - outcome(second, contrast.outcome)  # type: ignore[arg-type]
                for first, second in pairs
            ]
            if any(map(math.isnan, found)):
                undefined += 1
            else:
                differences[seed] = math.fsum(found) / len(found)
    counted = [
        (incomplete, f"of {len(seeds)} seeds are not complete"),
        (
            other_weights,
            "seeds began with different weights in both cells (made on different machines)",
        ),
        (other_commits, "seeds were run at different commits in both cells"),
        (undefined, f"seeds have no {contrast.outcome}"),
    ]
    return differences, incomplete, [f"{count} {what}" for count, what in counted if count]


def _survives(contrast: Contrast, rows: Sequence[Row]) -> bool:
    """Whether a learning rate is kept; as long as it has no runs, it is."""
    return (
        contrast.survival is None or not rows or _failure(contrast.survival, contrast, rows) is None
    )


def _failure(gate: Gate, contrast: Contrast, rows: Sequence[Row]) -> str | None:
    """Why a gate is closed; None if it is open. Runs that have not the outcome, as those by the
    stack have not the lengths of evaluations, do not count."""
    cells = {"all": contrast.cells, "first": contrast.cells[:1], "second": contrast.cells[1:]}[
        gate.arms
    ]
    found = [outcome(row, gate.outcome) for row in rows if row["cell"] in cells]
    values = sorted(value for value in found if not math.isnan(value))
    inside = [_is_inside(gate, value) for value in values]
    if values and sum(inside) >= gate.share * len(values):
        return None
    spread = f"{values[0]:.3g} to {values[-1]:.3g}" if values else "nothing"
    return (
        f"gate closed: {_gate_text(gate)}; found {spread}, {sum(inside)} of {len(values)} runs "
        "inside"
    )


def _is_inside(gate: Gate, value: float) -> bool:
    low, high = (
        (-math.inf if gate.low is None else gate.low),
        (math.inf if gate.high is None else gate.high),
    )
    return low <= value <= high


def _gate_text(gate: Gate | None) -> str:
    if gate is None:
        return ""
    bounds = " and ".join(
        f"{word} {bound:g}"
        for word, bound in (("at least", gate.low), ("at most", gate.high))
        if bound is not None
    )
    share = "" if gate.share == 1 else f" in {100 * gate.share:.0f} % of the runs"
    return f"{gate.name} ({gate.outcome} {bounds}{share})"


def interval_of_share(rows: Sequence[Row], name: str) -> tuple[float, Interval] | None:
    """Share of runs with an outcome of 1, and its 95 % interval; None where no run has the
    outcome."""
    values = [value for row in rows if not math.isnan(value := outcome(row, name))]
    if not values:
        return None
    return sum(values) / len(values), wilson(int(sum(values)), len(values))


def by_arm(rows: Sequence[Row]) -> Mapping[tuple[str, Any], list[Row]]:
    """Runs that did not fail, by cell and learning rate."""
    found: dict[tuple[str, Any], list[Row]] = {}
    for row in rows:
        if "error" not in row:
            found.setdefault((row["cell"], row["learning_rate"]), []).append(row)
    return found
