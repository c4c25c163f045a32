from __future__ import annotations

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf_ext.rewards.counting import Votes, pass_at_k
from openrlhf_ext.tools.evaluate.result import (
    clustered_standard_error,
    difference_in_errors,
    wilson_interval,
)

SCORES = st.sampled_from([0.0, 0.5, 1.0])


def test_clustered_error_by_hand() -> None:
    # grand mean 0.5; sums of deviations: 1, -1, 0; sqrt(3/2 * 2) / 6
    assert clustered_standard_error([[1, 1], [0, 0], [1, 0]]) == pytest.approx(math.sqrt(3) / 6)


def test_identical_samples_of_a_prompt_add_no_certainty() -> None:
    once = clustered_standard_error([[1], [0], [1], [1]])
    assert clustered_standard_error([[1] * 50, [0] * 50, [1] * 50, [1] * 50]) == pytest.approx(once)
    assert once > math.sqrt(0.75 * 0.25 / 200), "the error over 200 independent samples"


@given(
    st.integers(2, 6).flatmap(
        lambda n: st.lists(st.lists(SCORES, min_size=n, max_size=n), min_size=2, max_size=8)
    )
)
def test_with_equal_counts_it_is_the_error_of_the_prompt_means(scores: list[list[float]]) -> None:
    means = [statistics.fmean(group) for group in scores]
    expected = statistics.stdev(means) / math.sqrt(len(means))
    assert clustered_standard_error(scores) == pytest.approx(expected, abs=1e-12)


@given(st.lists(st.lists(SCORES, min_size=1, max_size=5), min_size=2, max_size=8), st.randoms())
def test_the_error_does_not_depend_on_order(scores: list[list[float]], random: object) -> None:
    shuffled = [random.sample(group, len(group)) for group in random.sample(scores, len(scores))]
    assert clustered_standard_error(shuffled) == pytest.approx(
        clustered_standard_error(scores), abs=1e-12
    )


@pytest.mark.parametrize("scores", [[], [[1.0, 0.0]], [[1.0], []]])
def test_the_error_needs_two_prompts_with_samples(scores: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="at least two prompts"):
        clustered_standard_error(scores)


def test_difference_in_errors() -> None:
    assert difference_in_errors(0.5, 0.03, 0.6, 0.04) == pytest.approx(2.0)
    assert difference_in_errors(0.5, 0.0, 0.5, 0.0) == 0.0
    assert difference_in_errors(0.5, 0.0, 0.6, 0.0) == math.inf


def test_pass_at_k_by_hand() -> None:
    assert pass_at_k(4, 1, 2) == pytest.approx(0.5)  # 1 - C(3,2)/C(4,2)
    assert pass_at_k(10, 3, 5) == pytest.approx(1 - 21 / 252)
    assert pass_at_k(5, 0, 5) == 0.0 and pass_at_k(5, 5, 1) == 1.0


@given(
    st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n)))
)
def test_pass_at_k_is_the_mean_over_all_subsets(case: tuple[int, int, int]) -> None:
    samples, correct, k = case
    outcomes = [True] * correct + [False] * (samples - correct)
    expected = statistics.fmean(any(subset) for subset in itertools.combinations(outcomes, k))
    assert pass_at_k(samples, correct, k) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("samples", "correct", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0), (0, 0, 1)]
)
def test_impossible_counts_are_refused(samples: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError, match="got"):
        pass_at_k(samples, correct, k)


RIGHT, WRONG, OTHER, NONE = ("7", True), ("8", False), ("9", False), (None, False)


@pytest.mark.parametrize(
    ("votes", "k", "expected", "ties"),
    [
        ([RIGHT, RIGHT, WRONG], 3, 1.0, 0),
        ([RIGHT, WRONG, WRONG], 3, 0.0, 0),
        ([RIGHT, WRONG], 2, 0.5, 1),
        ([RIGHT, WRONG, OTHER], 3, 1 / 3, 1),
        ([RIGHT, NONE, NONE], 3, 1.0, 0),
        ([NONE, NONE], 2, 0.0, 0),
        ([RIGHT, NONE, NONE], 2, 2 / 3, 0),
        ([RIGHT, RIGHT, WRONG], 2, (1.0 + 0.5 + 0.5) / 3, 2 / 3),
        ([RIGHT, WRONG, WRONG, NONE], 1, 0.25, 0),
    ],
)
def test_majority_by_hand(
    votes: list[tuple[str | None, bool]], k: int, expected: float, ties: float
) -> None:
    assert Votes(len(votes), k).count(votes) == pytest.approx((expected, ties), abs=1e-6)


def test_majority_over_many_subsets_is_drawn_with_a_seed() -> None:
    votes = [RIGHT] * 12 + [WRONG] * 8
    assert Votes(20, 10, seed=1).count(votes) == Votes(20, 10, seed=1).count(votes)
    ways = {
        right: math.comb(12, right) * math.comb(8, 10 - right) / math.comb(20, 10)
        for right in range(2, 11)
    }
    exact = sum(
        share * (1.0 if right > 5 else 0.5 if right == 5 else 0.0) for right, share in ways.items()
    )
    assert Votes(20, 10).count(votes) == pytest.approx((exact, ways[5]), abs=0.03)


def test_majority_needs_enough_samples() -> None:
    with pytest.raises(ValueError, match="k = 3 of 2"):
        Votes(2, 3)


@pytest.mark.parametrize(
    ("right", "of", "expected"),
    [
        (0, 16, (0.0, 0.1936)),
        (8, 16, (0.2800, 0.7200)),
        (16, 16, (0.8064, 1.0)),
        (0, 1, (0.0, 0.7935)),
    ],
)
def test_wilson_interval_of_single_completions(
    right: int, of: int, expected: tuple[float, float]
) -> None:
    # values of statsmodels.stats.proportion.proportion_confint(right, of, method="wilson")
    assert wilson_interval([1.0] * right + [0.0] * (of - right), 1) == pytest.approx(
        expected, abs=1e-4
    )


def test_completions_that_agree_count_once_and_those_that_do_not_all() -> None:
    agree, alone = wilson_interval([1.0, 0.0] * 8, 4), wilson_interval([1.0, 0.0] * 8, 1)
    assert agree == pytest.approx(alone)
    assert wilson_interval([0.0] * 16, 4) == wilson_interval([0.0] * 16, 1), (
        "nothing tells how alike they are"
    )
    assert wilson_interval([0.5] * 16, 4) == pytest.approx(wilson_interval([1.0, 0.0] * 32, 1))


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=9))
def test_the_interval_holds_the_mean_and_is_never_empty(shares: list[float]) -> None:
    low, high = wilson_interval(shares, 4)
    assert (
        0 <= low <= statistics.fmean(shares) + 1e-12
        and statistics.fmean(shares) <= high + 1e-12 <= 1 + 2e-12
    )
    assert high - low > 0.1
