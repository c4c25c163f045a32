from __future__ import annotations

import math

import pytest

from benchmarks.study.outcomes import OUTCOMES, is_outcome, outcome, smoothed
from tests.benchmarks.study.rows import row


def with_curves(**curves):
    return row("a", 0, 0.5, **curves)


def test_numbers_of_a_curve():
    run = with_curves(
        accuracy=[0.0, 0.2, 0.4, 0.6],
        short=[0.9, 0.6, 0.4, 0.6],
        filtered_completions=[0.0, 0.25, 0.0],
    )
    assert outcome(run, "mean_accuracy") == pytest.approx(0.3)
    assert outcome(run, "switch_step") == 3
    assert outcome(with_curves(short=[0.9] * 4), "switch_step") == 5, "later than the run"
    assert outcome(run, "largest_filtered") == 0.25
    assert math.isnan(outcome(with_curves(), "largest_filtered"))


@pytest.mark.parametrize(
    ("curve", "collapsed"),
    [
        ([0.8] * 10, 0),
        ([0.8] * 5 + [0.1] * 10, 1),
        ([0.8] * 5 + [0.1] * 2 + [0.8] * 8, 0),
        ([0.1] * 9 + [0.8], 0),
    ],
)
def test_what_is_below_seven_tenths_of_its_best_evaluation_at_the_end_has_collapsed(
    curve, collapsed
):
    """Of evaluations; rollouts may be anything."""
    run = row("a", 0, 0.5, tags=[0.9, 0.1], accuracy=[0.9, 0.1])
    run["evaluations"] = [
        {"step": step, "tags": level, "accuracy": level} for step, level in enumerate(curve)
    ]
    assert outcome(run, "tags_collapsed") == outcome(run, "accuracy_collapsed") == collapsed
    assert math.isnan(outcome(run, "ended_collapsed"))


def test_entropy_at_equal_accuracy_is_that_of_the_first_step_there():
    run = with_curves(accuracy=[0.2] * 5 + [0.9] * 5, entropy=[0.5] * 5 + [0.1] * 5)
    # means of five: accuracy 0.2, 0.34, 0.48, 0.62; entropy 0.5, 0.42, 0.34, 0.26
    assert outcome(run, "entropy_at_accuracy") == pytest.approx(0.26)
    assert math.isnan(
        outcome(with_curves(accuracy=[0.3] * 5, entropy=[0.1] * 5), "entropy_at_accuracy")
    )


def test_a_rebound_is_what_entropy_ends_above_its_lowest():
    assert outcome(
        with_curves(entropy=[0.5] * 5 + [0.1] * 5 + [0.4] * 5), "entropy_rebound"
    ) == pytest.approx(0.3)
    assert outcome(with_curves(entropy=[0.5, 0.4, 0.3]), "entropy_rebound") == 0


def test_numbers_of_evaluations():
    run = row("a", 0, 0.5)
    run["evaluations"] = [
        {"step": 0, "accuracy": 0.2, "pass@8": 0.6, "short": 0.99},
        {"step": 2, "accuracy": 0.7, "pass@8": 0.3},
        {"step": 4, "accuracy": 0.6, "pass@8": 0.9, "entropy_wrong": None},
    ]
    assert (outcome(run, "lowest_pass@8"), outcome(run, "drop")) == (0.3, pytest.approx(0.1))
    assert (outcome(run, "start/short"), outcome(run, "last/accuracy")) == (0.99, 0.6)
    assert math.isnan(outcome(run, "last/entropy_wrong")) and math.isnan(
        outcome(run, "last/nothing")
    )


def test_every_outcome_is_a_number_of_a_whole_run():
    run = with_curves(filtered_completions=[0.0], conflict_forward=[0.1])
    assert not [
        name
        for name in OUTCOMES
        if math.isnan(outcome(run, name)) and name != "entropy_at_accuracy"
    ]
    assert (
        is_outcome("start/x")
        and is_outcome("drop")
        and not is_outcome("start/")
        and not is_outcome("accuracy")
    )


def test_smoothing_looks_back_only():
    assert smoothed([1.0, 0.0, 0.0, 0.0, 0.0, 0.0]) == pytest.approx(
        [1, 0.5, 1 / 3, 0.25, 0.2, 0.0]
    )
