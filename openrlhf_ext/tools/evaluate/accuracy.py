"""Statistics of graded samples: accuracy with its error, pass@k, maj@k, intervals. Pure functions of plain numbers."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations
from statistics import NormalDist

import numpy as np

_MOST_SUBSETS = 2000
_QUANTILE = NormalDist().inv_cdf(0.975)

# Shape suffixes: D = subsets of the samples, S = samples, A = different answers.


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean. Raises ValueError: there are no values."""
    numbers = list(values)
    if not numbers:
        raise ValueError("the mean of no values is undefined")
    return math.fsum(numbers) / len(numbers)


def clustered_standard_error(scores_by_prompt: Sequence[Sequence[float]]) -> float:
    """Standard error of the mean over all samples when the samples of a prompt belong together.

    Samples of one prompt succeed or fail together more often than samples of different prompts, so that the usual
    formula over all samples is too small. For prompts c with samples i and grand mean m of n samples in C prompts:
    ``sqrt(C / (C - 1) * sum_c (sum_i (s_ci - m))^2) / n`` (E. Miller, Adding Error Bars to Evals, 2024, section 2.2,
    with the correction for few clusters). With equally many samples per prompt it is the standard error of the prompt
    means.

    Args:
        scores_by_prompt: scores of each prompt's samples; prompts without samples are not allowed.

    Raises:
        ValueError: fewer than two prompts, or a prompt without samples.
    """
    clusters = len(scores_by_prompt)
    if clusters < 2 or not all(scores_by_prompt):
        raise ValueError(f"a standard error needs samples of at least two prompts, got {clusters}, each with samples")
    grand_mean = mean(score for scores in scores_by_prompt for score in scores)
    samples = sum(map(len, scores_by_prompt))
    squares = math.fsum(math.fsum(score - grand_mean for score in scores) ** 2 for scores in scores_by_prompt)
    return math.sqrt(clusters / (clusters - 1) * squares) / samples


def difference_in_errors(first: float, first_error: float, second: float, second_error: float) -> float:
    """How many standard errors two independent means lie apart; infinite if they differ without any error."""
    error = math.hypot(first_error, second_error)
    if error == 0:
        return 0.0 if first == second else math.inf
    return abs(first - second) / error


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of ``k`` samples is correct.

    ``1 - C(n - c, k) / C(n, k)`` (Chen et al., Evaluating Large Language Models Trained on Code, 2021, eq. 1).

    Raises:
        ValueError: unless ``0 <= correct <= samples`` and ``1 <= k <= samples``.
    """
    _require_counts(correct, samples)
    _require_k(k, samples)
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


class Votes:
    """Votes of ``k`` of a problem's samples: the chance that the most frequent answer is correct.

    Estimated over all subsets of ``k`` samples, or over 2000 drawn ones where there are more. Several answers that lead
    together are drawn from with equal chances, so that a subset counts by the share of them that is correct (the papers
    state no rule for ties). A sample without an answer has no vote; a subset without any vote is wrong.

    Args:
        samples: of a problem, the same for all of them.

    Raises:
        ValueError: unless ``1 <= k <= samples``.
    """

    def __init__(self, samples: int, k: int, seed: int = 0) -> None:
        _require_k(k, samples)
        if math.comb(samples, k) <= _MOST_SUBSETS:
            chosen = np.array(list(combinations(range(samples), k)))
        else:
            draw = np.random.default_rng(seed)
            chosen = np.array([draw.permutation(samples)[:k] for _ in range(_MOST_SUBSETS)])
        self._subsets_DS = np.zeros((len(chosen), samples), dtype=np.float32)
        np.put_along_axis(self._subsets_DS, chosen, 1.0, axis=1)

    def count(self, votes: Sequence[tuple[Hashable | None, bool]]) -> tuple[float, float]:
        """The chance of a correct majority, and the share of subsets in which several answers lead.

        Args:
            votes: for each sample its answer (``None``: it states none) and whether it is correct.
        """
        answers = list(dict.fromkeys(answer for answer, _ in votes if answer is not None))
        if not answers:
            return 0.0, 0.0
        belongs_SA = np.array([[answer == one for one in answers] for answer, _ in votes], dtype=np.float32)
        correct_A = belongs_SA.T @ np.array([is_correct for _, is_correct in votes], dtype=np.float32) > 0
        counts_DA = self._subsets_DS @ belongs_SA
        most_D = counts_DA.max(axis=1, keepdims=True)
        leads_DA = (counts_DA == most_D) & (most_D > 0)
        leaders_D = leads_DA.sum(axis=1)
        shares_D = (leads_DA & correct_A).sum(axis=1) / np.maximum(leaders_D, 1)
        return float(shares_D.mean()), float((leaders_D > 1).mean())


def wilson_interval(shares: Sequence[float], draws: int) -> tuple[float, float]:
    """95 % interval of the mean of each problem's share of successes.

    Wilson's interval (1927) of the effective number of draws: all draws over the design effect, which is the variance
    of the clustered mean over that of independent draws (Franco, Little, Louis and Slud, Comparative Study of
    Confidence Intervals for Proportions in Complex Sample Surveys, 2019). The effect is held between 1 and ``draws``:
    the effective number lies between that of the problems and that of all draws. Where all draws have the same outcome
    the effect cannot be seen: then the number is that of the problems.

    Args:
        shares: one for each problem, 0 to 1.
        draws: independent draws behind each of them.

    Raises:
        ValueError: there are no problems.
    """
    problems, center = len(shares), mean(shares)
    spread = center * (1 - center)
    effect = float(draws)
    if problems > 1 and spread > 0:
        squared_error = math.fsum((share - center) ** 2 for share in shares) / (problems - 1) / problems
        effect = min(max(squared_error * (problems * draws - 1) / spread, 1.0), effect)
    size, z = problems * draws / effect, _QUANTILE
    middle = (center + z**2 / (2 * size)) / (1 + z**2 / size)
    half = z * math.sqrt(max(spread, 0.0) / size + (z / (2 * size)) ** 2) / (1 + z**2 / size)
    return min(center, middle - half), max(center, middle + half)


def _require_counts(successes: float, samples: int) -> None:
    if samples < 1 or not 0 <= successes <= samples:
        raise ValueError(f"need 0 <= successes <= samples and at least one sample, got {successes} of {samples}")


def _require_k(k: int, samples: int) -> None:
    if not 1 <= k <= samples:
        raise ValueError(f"k must be between 1 and the number of samples, got k = {k} of {samples}")
