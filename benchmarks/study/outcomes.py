"""One number of a run: what contrasts and gates are about. Pure functions of a row's curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

SHAPED = ("degenerate_groups", "conflict_forward", "conflict_backward", "filtered_completions")
"""Metrics of an algorithm that a study keeps."""
_STAYS = 0.7  # of the best: what ends below it has collapsed
_WINDOW = 5  # steps over which curves of rollouts are averaged before their best is taken

Row = Mapping[str, Any]


def outcome(row: Row, name: str) -> float:
    """An outcome of a run; NaN where it has none (entropy of wrong completions, of which there are
    none).

    ``start/NAME`` and ``last/NAME`` are numbers of the evaluation before the first and after the
    last step.

    Raises:
        KeyError: there is no such outcome.
    """
    place, _, measured = name.partition("/")
    if place in ("start", "last") and measured:
        evaluation = row["evaluations"][0 if place == "start" else -1]
        value = evaluation.get(measured)
        return math.nan if value is None else float(value)
    return OUTCOMES[name](row)


def is_outcome(name: str) -> bool:
    """Whether there may be such an outcome."""
    return name in OUTCOMES or (
        name.partition("/")[0] in ("start", "last") and bool(name.partition("/")[2])
    )


def _mean_accuracy(row: Row) -> float:
    return _mean(row["steps"]["accuracy"])


def _lowest_pass_8(row: Row) -> float:
    return min(_curve(row, "pass@8"), default=math.nan)


def _switch_step(row: Row) -> float:
    """First step at which fewer than half of the completions are short; one more than there are, if
    there is none."""
    short = row["steps"]["short"]
    return float(next((step for step, share in enumerate(short, 1) if share < 0.5), len(short) + 1))


def _drop(row: Row) -> float:
    accuracies = _curve(row, "accuracy")
    return max(accuracies) - accuracies[-1]


def _collapsed(name: str) -> Callable[[Row], float]:
    def collapsed(row: Row) -> float:
        """1 if the last evaluation is below 0.7 of the best one; else 0.

        Not of rollouts: a step of a few prompts is far above or below what the policy can; the best
        of many is luck.
        """
        curve = _curve(row, name)
        return float(curve[-1] < _STAYS * max(curve)) if curve else math.nan

    return collapsed


def _lowest_entropy(row: Row) -> float:
    return min(smoothed(row["steps"]["entropy"]))


def _entropy_rebound(row: Row) -> float:
    """How far entropy ends above its lowest, both averaged over five steps; 0 where it only
    falls."""
    entropy = smoothed(row["steps"]["entropy"])
    return entropy[-1] - min(entropy)


def _entropy_at_accuracy(row: Row) -> float:
    """Entropy when the accuracy, averaged over five steps, is first at 0.5; NaN if it never is."""
    accuracy, entropy = (smoothed(row["steps"][name]) for name in ("accuracy", "entropy"))
    return next((h for a, h in zip(accuracy, entropy, strict=True) if a >= 0.5), math.nan)


def _largest(name: str) -> Callable[[Row], float]:
    return lambda row: max(row["steps"].get(name, []), default=math.nan)


def _average(name: str) -> Callable[[Row], float]:
    return lambda row: _mean(row["steps"].get(name, []))


OUTCOMES: dict[str, Callable[[Row], float]] = {
    "mean_accuracy": _mean_accuracy,
    "lowest_pass@8": _lowest_pass_8,
    "switch_step": _switch_step,
    "drop": _drop,
    "accuracy_collapsed": _collapsed("accuracy"),
    "tags_collapsed": _collapsed("tags"),
    "ended_collapsed": _collapsed("ended"),
    "lowest_entropy": _lowest_entropy,
    "entropy_rebound": _entropy_rebound,
    "entropy_at_accuracy": _entropy_at_accuracy,
    "mean_length": _average("length"),
    "mean_clip_fraction": _average("clip_fraction"),
    "largest_filtered": _largest("filtered_completions"),
    "mean_conflicts": _average("conflict_forward"),
    "shaping_seconds": _average("shaping_s"),
    "step_seconds": _average("step_s"),
}
"""By name; of curves over steps unless docs/science.md says otherwise."""


def smoothed(values: Sequence[float]) -> list[float]:
    """Means of up to five values that end at each."""
    return [_mean(values[max(0, end - _WINDOW) : end]) for end in range(1, len(values) + 1)]


def _curve(row: Row, name: str) -> list[float]:
    return [evaluation[name] for evaluation in row["evaluations"] if name in evaluation]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
