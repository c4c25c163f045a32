"""Statistics of paired differences, one for each seed. Pure functions of plain numbers; the tests
are SciPy's.

Shape suffix: S = seeds.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

LEVEL = 0.05
POWER = 0.8
_RESAMPLES = 9999
_EXACT_SEEDS = 20  # 2**20 patterns of signs; with more seeds they are drawn
_DRAWN_SUBSETS = 100_000

Interval = tuple[float, float]


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds.

    Attributes:
        count: seeds.
        mean, deviation: arithmetic mean and standard deviation (n - 1).
        interval: 95 % interval of the mean, see ``mean_interval``.
        iqm: interquartile mean: of the middle half.
        iqm_interval: 95 % bootstrap interval of it.
    """

    count: int
    mean: float
    deviation: float
    interval: Interval
    iqm: float
    iqm_interval: Interval


def estimate(values: Sequence[float]) -> Estimate:
    """Describes one number for each seed; raises ValueError if there are none.

    The interval of the interquartile mean is a BCa bootstrap interval over seeds (Efron 1987), of
    percentiles where BCa has none; of few seeds it covers the truth less often than it says.
    Learning rates are not strata of their own (Agarwal et al. 2021 draw tasks apart): they share a
    seed's policy, so that a seed is drawn as a whole.
    """
    values_S = np.asarray(values, dtype=np.float64)
    if not len(values_S):
        raise ValueError("there are no values to describe")
    deviation = float(values_S.std(ddof=1)) if len(values_S) > 1 else math.nan
    return Estimate(
        len(values_S),
        float(values_S.mean()),
        deviation,
        mean_interval(values),
        float(_iqm(values_S)),
        _bootstrap(values_S, _iqm),
    )


def mean_interval(values: Sequence[float]) -> Interval:
    """95 % interval of the mean: the means that ``sign_flip`` does not reject; infinite of fewer
    than six seeds.

    Its ends are means of subsets of the seeds (Hartigan 1969): flipping the signs of a subset makes
    a sum as large as that of all just if the subset's mean is at most the mean in question.
    """
    values_S = np.asarray(values, dtype=np.float64)
    if len(values_S) <= _EXACT_SEEDS:
        sums, counts = np.zeros(1), np.zeros(1)
        for value in values_S:
            sums, counts = (
                np.concatenate([sums, sums + value]),
                np.concatenate([counts, counts + 1]),
            )
        means = sums[1:] / counts[1:]  # without the empty one
    else:
        members = np.random.default_rng(0).random((_DRAWN_SUBSETS, len(values_S))) < 0.5
        members = members[members.any(axis=1)]
        means = members @ values_S / members.sum(axis=1)
    place = math.ceil(LEVEL / 2 * (len(means) + 1)) - 2
    if place < 0:
        return -math.inf, math.inf
    means.partition((place, len(means) - 1 - place))
    return float(means[place]), float(means[-1 - place])


def _iqm(values_S: np.ndarray, axis: int = -1) -> np.ndarray:
    return np.asarray(stats.trim_mean(values_S, 0.25, axis=axis))


def _bootstrap(values_S: np.ndarray, statistic: object) -> Interval:
    if len(values_S) < 2 or np.ptp(values_S) == 0:
        return (
            (float(values_S[0]),) * 2
            if np.ptp(values_S) == 0 and len(values_S) > 1
            else (-math.inf, math.inf)
        )
    # BCa has no value where leaving out a seed never changes the statistic: one run of many
    # collapsed, say
    for method in ("BCa", "percentile"):
        with np.errstate(invalid="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", stats.DegenerateDataWarning)
            found = stats.bootstrap(
                (values_S,),
                statistic,
                n_resamples=_RESAMPLES,
                rng=np.random.default_rng(0),
                method=method,
            )
        low, high = map(float, found.confidence_interval)
        if math.isfinite(low) and math.isfinite(high):
            break
    return low, high


def sign_flip(differences: Sequence[float]) -> float:
    """Two-sided p of the mean difference: how often signs at random give one as far from 0.

    Exact up to 20 seeds (all patterns of signs), drawn beyond. The smallest p of n seeds is 2 /
    2^n.
    """
    values_S = np.asarray(differences, dtype=np.float64)
    if not values_S.any():
        return 1.0
    if len(values_S) > _EXACT_SEEDS:
        found = stats.permutation_test(
            (values_S,),
            np.mean,
            permutation_type="samples",
            vectorized=True,
            rng=np.random.default_rng(0),
        )
        return float(found.pvalue)
    sums = np.zeros(1)
    for value in values_S:
        sums = np.concatenate([sums + value, sums - value])
    # sums of the same numbers in another order may differ in their last digits
    return float((np.abs(sums) >= abs(values_S.sum()) - 1e-9 * np.abs(values_S).sum()).mean())


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """p-values for being judged together (Holm 1979): the smallest times their number, the next
    times one less."""
    adjusted, largest = {}, 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[name]))
        adjusted[name] = largest
    return adjusted


def equivalence(differences: Sequence[float], margin: float) -> float:
    """p of the two one-sided t tests that the mean lies within the margin (Schuirmann 1987): the
    larger of both.

    1 of differences that are all the same: nothing says how much they vary (no collapse in eight
    runs leaves room for one in three).
    """
    values_S = np.asarray(differences, dtype=np.float64)
    if len(values_S) < 2 or np.ptp(values_S) == 0:
        return 1.0
    above = stats.ttest_1samp(values_S, -margin, alternative="greater").pvalue
    below = stats.ttest_1samp(values_S, margin, alternative="less").pvalue
    return float(max(above, below))


def wilson(successes: int, trials: int) -> Interval:
    """95 % interval of a share (Wilson 1927)."""
    found = stats.binomtest(successes, trials).proportion_ci(method="wilson")
    return float(found.low), float(found.high)


def detectable(deviation: float, seeds: int, tests: int = 1) -> float:
    """Smallest mean difference that is seen in 80 % of the studies.

    That of a two-sided paired t test, which the sign-flip test comes near with many seeds. With few
    it may reject only where all differences have one sign. Infinite of seeds too few for any
    verdict, NaN without a deviation.

    Args:
        deviation: of the paired differences.
        seeds: at least 1.
        tests: judged together; the first step of Holm divides the level by their number.
    """
    if deviation == 0 or math.isnan(deviation):
        return math.nan
    smallest_p = 2.0 ** (1 - seeds)
    if smallest_p >= LEVEL / tests:
        return math.inf
    freedom = seeds - 1
    critical = stats.t.ppf(1 - LEVEL / tests / 2, freedom)
    # the mean over the deviations found: SciPy 1.17's noncentral t is NaN for some arguments,
    # cdf(-3.169, 10, 9) is
    scales = np.sqrt(stats.chi2.ppf((np.arange(1000) + 0.5) / 1000, freedom) / freedom)

    def power(effect: float) -> float:
        return float(
            np.mean(
                stats.norm.sf(critical * scales - effect)
                + stats.norm.cdf(-critical * scales - effect)
            )
        )

    low, high = 0.0, 2.0 * critical + 10.0  # in standard errors
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if power(middle) > POWER else (middle, high)
    size = high / math.sqrt(seeds)
    if 2 * smallest_p >= LEVEL / tests:
        size = max(size, float(stats.norm.ppf(POWER ** (1 / seeds))))
    return float(size * deviation)
