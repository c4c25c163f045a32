"""Statistics of graded samples: accuracy with its error, pass@k, maj@k. Pure functions of plain numbers."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations

_MOST_SUBSETS = 2000


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean.

    Raises:
        ValueError: there are no values.
    """
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


def majority_at_k(votes: Sequence[tuple[Hashable | None, bool]], k: int, seed: int = 0) -> float:
    """Estimate of the chance that the most frequent answer among ``k`` samples is correct.

    The mean over all subsets of ``k`` samples, or over 2000 drawn ones where there are more. A tie counts by the share
    of the tied answers that are correct; a subset without any answer counts as wrong.

    Args:
        votes: for each sample its answer (``None``: it states none) and whether it is correct.
        k: size of the vote.
        seed: of the drawn subsets.

    Raises:
        ValueError: unless ``1 <= k <= len(votes)``.
    """
    _require_k(k, len(votes))
    if math.comb(len(votes), k) <= _MOST_SUBSETS:
        return mean(map(_vote, combinations(votes, k)))
    draw = random.Random(seed)
    return mean(_vote(draw.sample(votes, k)) for _ in range(_MOST_SUBSETS))


def _vote(votes: Sequence[tuple[Hashable | None, bool]]) -> float:
    counts = Counter(answer for answer, _ in votes if answer is not None)
    if not counts:
        return 0.0
    most = max(counts.values())
    leaders = {answer for answer, count in counts.items() if count == most}
    correct = {answer for answer, is_correct in votes if is_correct}
    return len(leaders & correct) / len(leaders)


def _require_counts(successes: float, samples: int) -> None:
    if samples < 1 or not 0 <= successes <= samples:
        raise ValueError(f"need 0 <= successes <= samples and at least one sample, got {successes} of {samples}")


def _require_k(k: int, samples: int) -> None:
    if not 1 <= k <= samples:
        raise ValueError(f"k must be between 1 and the number of samples, got k = {k} of {samples}")
