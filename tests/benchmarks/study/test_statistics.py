from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from benchmarks.study.statistics import (
    detectable,
    equivalence,
    estimate,
    holm,
    mean_interval,
    sign_flip,
    wilson,
)

NUMBERS = st.lists(st.floats(-1, 1).map(lambda x: round(x, 3)), min_size=1, max_size=9)


@given(NUMBERS)
def test_sign_flip_counts_all_patterns_of_signs(values):
    sums = [
        abs(math.fsum(s * v for s, v in zip(signs, values, strict=True)))
        for signs in product((1, -1), repeat=len(values))
    ]
    expected = sum(each >= abs(math.fsum(values)) - 1e-9 for each in sums) / len(sums)
    assert sign_flip(values) == pytest.approx(expected)


def test_eight_seeds_are_the_least_for_five_contrasts():
    assert 5 * sign_flip([1.0] * 8) < 0.05 < 5 * sign_flip([1.0] * 7)


def test_more_seeds_than_patterns_are_drawn():
    draws = np.random.default_rng(0).normal(0.5, 1.0, 30)
    assert 0.0 < sign_flip(list(draws)) < 0.2


def test_holm_gives_the_published_example():
    # Holm 1979's procedure on p = .01, .04, .03, .005: worked by hand
    adjusted = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert adjusted == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=3), st.floats(0, 1), min_size=1, max_size=6))
def test_holm_only_raises_and_keeps_the_order(p_values):
    adjusted = holm(p_values)
    assert all(p <= adjusted[name] <= 1 for name, p in p_values.items())
    in_order = sorted(p_values, key=p_values.__getitem__)
    assert [adjusted[name] for name in in_order] == sorted(adjusted.values())


@pytest.mark.parametrize("count", [8, 20])
def test_intervals_cover_the_truth_about_as_often_as_they_say(count):
    draw = np.random.default_rng(count)
    hits = {"mean": 0, "iqm": 0}
    studies = 60
    for _ in range(studies):
        found = estimate(list(draw.normal(0.3, 1.0, count)))
        hits["mean"] += found.interval[0] <= 0.3 <= found.interval[1]
        hits["iqm"] += found.iqm_interval[0] <= 0.3 <= found.iqm_interval[1]
    # 95 % asked for; a bootstrap of few values is a little short. 60 studies: +- 0.06
    assert hits["mean"] / studies >= 0.88 and hits["iqm"] / studies >= 0.80, hits


@given(st.lists(st.integers(-30, 30), min_size=1, max_size=10), st.integers(-30, 30))
def test_the_interval_of_the_mean_holds_what_the_test_does_not_reject(values, mean):
    low, high = mean_interval(values)
    p = sign_flip([value - mean for value in values])
    if min(abs(mean - low), abs(mean - high)) > 1e-9:
        assert (low < mean < high) == (p >= 0.05)


def test_the_interval_of_many_seeds_is_near_that_of_the_t_distribution():
    draws = np.random.default_rng(0).normal(0.5, 1.0, 24)
    low, high = mean_interval(list(draws))
    expected = stats.t.interval(0.95, 23, draws.mean(), stats.sem(draws))
    assert (low, high) == pytest.approx(expected, abs=0.03)


def test_sign_flip_finds_nothing_in_noise_more_often_than_its_level():
    draw = np.random.default_rng(3)
    alarms = sum(sign_flip(list(draw.normal(0, 1, 8))) < 0.05 for _ in range(1000))
    assert 20 <= alarms <= 75


def test_equivalence_needs_a_small_difference_known_well():
    draw = np.random.default_rng(1)
    small = list(draw.normal(0.0, 0.005, 12))
    assert equivalence(small, margin=0.02) < 0.05
    assert equivalence([value + 0.03 for value in small], margin=0.02) > 0.05
    assert equivalence(list(draw.normal(0.0, 0.2, 12)), margin=0.02) > 0.05
    assert equivalence([0.0] * 8, 0.1) == equivalence([0.0], 0.1) == 1.0, (
        "nothing says how much they vary"
    )


def test_the_detectable_difference_is_found_in_four_of_five_studies():
    size = detectable(deviation=2.0, seeds=12)
    draw = np.random.default_rng(0)
    values = draw.normal(size, 2.0, (4000, 12))
    t = values.mean(1) / (values.std(1, ddof=1) / math.sqrt(12))
    # 2.201: t of 11 degrees of freedom
    assert (np.abs(t) > 2.201).mean() == pytest.approx(0.8, abs=0.025)
    assert detectable(2.0, 12, tests=5) > size
    assert all(detectable(1.0, seeds, 5) > detectable(1.0, seeds + 1, 5) for seeds in range(8, 40))


def test_what_few_seeds_can_see():
    """Eight seeds and five tests: only where all differences have one sign."""
    draw = np.random.default_rng(0)
    values = draw.normal(detectable(1.0, 8, tests=5), 1.0, (4000, 8))
    found = [5 * sign_flip(list(row)) < 0.05 for row in values[:1000]]
    assert np.mean(found) == pytest.approx(0.8, abs=0.04)
    assert (
        math.isinf(detectable(1.0, 7, tests=5))
        and math.isinf(detectable(1.0, 5))
        and detectable(1.0, 6) < 2
    )
    assert math.isnan(detectable(0.0, 8))


def test_degenerate_estimates_say_so():
    same = estimate([0.5, 0.5, 0.5])
    assert (same.interval, same.iqm_interval, same.deviation) == (
        (-math.inf, math.inf),
        (0.5, 0.5),
        0.0,
    )
    one = estimate([0.5])
    assert one.interval == (-math.inf, math.inf) and math.isnan(one.deviation)
    rare = estimate([0.0] * 7 + [-1 / 3])  # the middle half never changes
    assert rare.iqm == 0 and rare.iqm_interval[0] < 0 <= rare.iqm_interval[1] < 0.01
    assert -1 / 3 < rare.interval[0] < rare.interval[1] == 0
    with pytest.raises(ValueError, match="no values"):
        estimate([])


def test_wilson_of_none_and_all_is_no_point():
    low, high = wilson(0, 8)
    assert low == pytest.approx(0.0, abs=1e-12) and 0.3 < high < 0.35  # 0.324
    assert wilson(8, 8)[0] == pytest.approx(1 - high)
