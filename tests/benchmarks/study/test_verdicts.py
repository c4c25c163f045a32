from __future__ import annotations

import math

import pytest

from benchmarks.study.runs import runs_of
from benchmarks.study.verdicts import checks_failed, judge, needed
from tests.benchmarks.study.rows import row, study

PRIMARY = {"role": "primary"}
NOISE = [0.001, -0.001, 0.002, -0.002, 0.003, -0.003, 0.004, -0.004]


def pairs(differences, first="a", second="b", rate=None):
    """Runs of two cells with these differences of accuracy, a seed each."""
    return [
        made
        for seed, difference in enumerate(differences)
        for made in (row(first, seed, 0.5 + difference, rate), row(second, seed, 0.5, rate))
    ]


def judged(rows, given=PRIMARY, **kwargs):
    (judgment,) = judge(study({"it": given}, **kwargs), rows)
    return judgment


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.1 + x for x in NOISE], "supported"),
        ([-0.1 + x for x in NOISE], "refuted"),
        (NOISE, "equivalent"),
        ([0.3, -0.3, 0.2, -0.2, 0.1, -0.1, 0.25, -0.2], "inconclusive"),
        ([0.02 + x for x in NOISE], "supported, within the margin"),
        ([-0.02 + x for x in NOISE], "refuted, within the margin"),
        ([0.1 + x for x in NOISE[:7]], "interim"),
        ([], "no data"),
    ],
)
def test_differences_lead_to_verdicts(differences, verdict):
    assert judged(pairs(differences)).verdict == verdict


def test_what_nothing_is_claimed_of_is_higher_or_lower():
    assert judged(pairs([0.1 + x for x in NOISE]), {"claim": ""}).verdict == "higher"
    assert judged(pairs([-0.1 + x for x in NOISE]), {"claim": ""}).verdict == "lower"


def test_a_difference_that_does_not_matter_is_none():
    assert (
        judged(pairs([0.02 + x for x in NOISE]), {"role": "secondary", "expect": "none"}).verdict
        == "equivalent"
    )


def test_a_learning_rate_at_which_all_runs_failed_is_missed():
    rows = pairs([0.1] * 8, "c", "d", 1e-4)
    failed = [
        {k: v for k, v in made.items() if k != "steps"} | {"error": "inf"}
        for made in pairs([0.1] * 8, "c", "d", 1e-3)
    ]
    found = judged(rows + failed, {"cells": ["c", "d"]})
    assert found.verdict == "no data" and "8 of 8 seeds are not complete" in found.notes
    tuned = {"cells": ["c", "d"], "tuned_on": 2}
    assert judged(rows + failed, tuned).verdict == "no data", (
        "the other rate is not the best of both"
    )


def test_a_claim_of_less_is_supported_by_less():
    found = judged(pairs([-0.1 + x for x in NOISE]), {"role": "primary", "expect": "less"})
    assert found.verdict == "supported"
    assert found.estimate is not None and found.estimate.mean == pytest.approx(-0.1)


def test_primary_contrasts_are_judged_together_also_with_those_that_have_no_data():
    one_sided = [0.1] * 6  # p = 2 / 2**6 = 0.031
    alone = judge(study({"it": PRIMARY}, seeds=6), pairs(one_sided))[0]
    together = judge(
        study(
            {
                "it": PRIMARY,
                "other": {**PRIMARY, "cells": ["b", "a"]},
                "none": {**PRIMARY, "cells": ["c", "d"]},
            },
            seeds=6,
        ),
        pairs(one_sided),
    )[0]
    assert (alone.verdict, alone.adjusted) == ("supported", pytest.approx(2 / 64))
    assert (together.verdict, together.adjusted) == ("inconclusive", pytest.approx(6 / 64))
    secondary = judge(
        study({"it": {"role": "secondary"}, "other": PRIMARY}, seeds=6), pairs(one_sided)
    )[0]
    assert (secondary.verdict, secondary.adjusted) == ("supported", None)


def test_a_closed_gate_makes_a_claim_untestable_and_says_why():
    gate = {"name": "short answers are rare", "outcome": "start/short", "high": 0.5}
    for given, of_task in (({**PRIMARY, "gates": [gate]}, []), (PRIMARY, [gate])):
        found = judged(pairs([0.1 + x for x in NOISE]), given, gates=of_task)
        assert found.verdict == "not testable here"
        assert (
            "short answers are rare" in found.notes[-1] and "0 of 16 runs inside" in found.notes[-1]
        )
    half = {**gate, "high": 0.95, "share": 0.5}
    assert judged(pairs([0.1 + x for x in NOISE]), PRIMARY, gates=[half]).verdict == "supported"


def test_a_gate_is_of_the_runs_that_have_its_outcome():
    """Those by the stack do not measure lengths of evaluations; where nobody does, the gate is
    closed."""
    gate = {"name": "short answers are rare", "outcome": "start/short", "high": 0.95}

    def without(made):
        first, *others = made["evaluations"]
        return {**made, "evaluations": [{k: v for k, v in first.items() if k != "short"}, *others]}

    rows = pairs([0.1 + x for x in NOISE])
    half = [without(made) if made["cell"] == "a" else made for made in rows]
    assert judged(half, PRIMARY, gates=[gate]).verdict == "supported"
    nobody = judged([without(made) for made in rows], PRIMARY, gates=[gate])
    assert nobody.verdict == "not testable here" and "found nothing" in nobody.notes[-1]


def test_runs_by_the_stack_are_paired_at_one_commit():
    rows = pairs([0.1 + x for x in NOISE])
    rows[0] = {**rows[0], "commit": "another"}
    both, local = study({"it": PRIMARY}), study({"it": PRIMARY})
    for cell in ("a", "b"):
        both.cells[cell] = both.cells[cell].model_copy(update={"backend": "stack"})
    (by_stack,), (in_process,) = judge(both, rows), judge(local, rows)
    assert sorted(by_stack.differences) == [1, 2, 3, 4, 5, 6, 7]
    assert "1 seeds were run at different commits in both cells" in by_stack.notes
    assert len(in_process.differences) == 8, "their code is a part of the key"


def test_learning_rates_at_which_nothing_survives_are_left_out_for_both_cells():
    survival = {"name": "the tags survive", "outcome": "tags_collapsed", "high": 0, "share": 0.5}
    given = {"cells": ["c", "d"], "role": "primary", "survival": survival}
    low = pairs([0.1 + x for x in NOISE], "c", "d", 1e-4)
    high = [
        {**made, "evaluations": [*made["evaluations"], {"tags": 0.1}]}
        for made in pairs([-0.4] * 8, "c", "d", 1e-3)
    ]
    both = high + [{**made, "learning_rate": 1e-4} for made in high]
    found = judged(low + high, given)
    assert found.verdict == "supported" and found.estimate.mean == pytest.approx(0.1)
    assert "learning rate 0.001 left out: not the tags survive" in found.notes[0]
    assert judged(both, given).verdict == "not testable here"
    assert judged(high, given).verdict == "no data", "of the other rate"


def test_several_learning_rates_are_one_difference_for_each_seed():
    rows = pairs([0.1] * 8, "c", "d", 1e-4) + pairs([0.2] * 7, "c", "d", 1e-3)
    found = judged(rows, {"cells": ["c", "d"]})
    assert found.differences == pytest.approx({seed: 0.15 for seed in range(7)})
    assert "1 of 8 seeds are not complete" in found.notes and found.verdict == "interim"


def test_runs_that_failed_or_began_with_other_weights_are_no_pairs():
    rows = pairs([0.1] * 8)
    rows[0] = {**rows[0], "weights": "of another machine"}
    rows[2] = {
        "key": "x",
        "cell": "a",
        "learning_rate": None,
        "seed": 1,
        "seconds": 1.0,
        "error": "killed",
    }
    found = judged(rows)
    assert sorted(found.differences) == [2, 3, 4, 5, 6, 7]
    assert found.verdict == "interim" and found.notes[0] == "1 runs failed"
    assert any("different weights" in note for note in found.notes)


def test_an_outcome_that_a_run_has_not_is_no_pair():
    # 0.6 and 0.5: both reach 0.5
    found = judged(pairs([0.1] * 8), {"outcome": "entropy_at_accuracy"})
    assert len(found.differences) == 8
    found = judged(
        [{**r, "steps": {**r["steps"], "accuracy": [0.4] * 4}} for r in pairs([0.1] * 8)],
        {"outcome": "entropy_at_accuracy"},
    )
    assert found.verdict == "no data" and math.isnan(found.p)
    assert "8 seeds have no entropy_at_accuracy" in found.notes


def test_the_checks_of_a_study_sound_an_alarm():
    checks = {
        "A/A": {"role": "check", "expect": "none"},
        "planted": {"role": "check", "expect": "less"},
    }
    assert checks_failed(judge(study(checks), pairs(NOISE))) == [
        "planted: expected less, found equivalent"
    ]
    wrong = judge(study(checks), pairs([0.1 + x for x in NOISE]))
    assert checks_failed(wrong) == [
        "A/A: expected none, found refuted",
        "planted: expected less, found refuted",
    ]
    assert checks_failed(judge(study(checks), [])) == [
        "A/A: expected none, found no data",
        "planted: expected less, found no data",
    ]
    few = judge(study(checks), pairs(NOISE[:7]))
    assert checks_failed(few) == [
        "A/A: expected none, found interim",
        "planted: expected less, found interim",
    ]


def test_each_cell_at_its_own_best_learning_rate_chosen_on_seeds_that_do_not_count():
    """c is best at the high rate and d at the low one; compared at one rate each of them would win
    one."""
    levels = {("c", 1e-4): 0.3, ("c", 1e-3): 0.6, ("d", 1e-4): 0.5, ("d", 1e-3): 0.1}
    rows = [
        row(cell, seed, level + noise, rate)
        for (cell, rate), level in levels.items()
        for seed, noise in enumerate(NOISE if cell == "c" else [0.0] * 8)
    ]
    found = judged(rows, {"cells": ["c", "d"], "role": "primary", "tuned_on": 2})
    assert sorted(found.differences) == [2, 3, 4, 5, 6, 7]
    assert found.estimate.mean == pytest.approx(0.1, abs=0.01)
    assert found.notes[:2] == ("c at 0.001", "d at 0.0001")
    lucky = [
        {**made, "steps": {**made["steps"], "accuracy": [0.99] * 4}}
        if (made["cell"], made["learning_rate"]) == ("d", 1e-3) and made["seed"] >= 2
        else made
        for made in rows
    ]
    assert (
        judged(lucky, {"cells": ["c", "d"], "role": "primary", "tuned_on": 2}).differences
        == found.differences
    )
    assert (
        judged(
            [made for made in rows if made["seed"] >= 2], {"cells": ["c", "d"], "tuned_on": 2}
        ).verdict
        == "no data"
    )


def test_only_the_best_rate_is_run_on_the_seeds_that_count_and_not_before_it_is_known():
    planned = study({"it": {"cells": ["c", "d"], "tuned_on": 2}})
    runs = [run for run in runs_of(planned, planned.arms) if run.arm.cell in ("c", "d")]
    tuning = [run for run in runs if run.seed < 2]
    assert needed(planned, runs, []) == tuning
    levels = {("c", 1e-4): 0.3, ("c", 1e-3): 0.6, ("d", 1e-4): 0.5, ("d", 1e-3): 0.1}
    rows = [
        row(*arm, seed, level, rate) for (*arm, rate), level in levels.items() for seed in (0, 1)
    ]
    assert needed(planned, runs, rows[:-1]) == tuning
    later = [run for run in needed(planned, runs, rows) if run.seed >= 2]
    assert {(run.arm.cell, run.arm.learning_rate) for run in later} == {
        ("c", 1e-3),
        ("d", 1e-4),
    } and len(later) == 12
    compared = study({"it": {"cells": ["c", "d"], "tuned_on": 2}, "also": {"cells": ["c", "d"]}})
    assert needed(compared, runs, []) == runs, "another contrast is about every rate"
