"""How many samples solve a problem: pass@k and maj@k, for evaluations in a run and of checkpoints
alike."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from itertools import combinations

import numpy as np

_MOST_SUBSETS = 2000
SOLVED = 1.0
"""A completion is right when its score reaches this."""

# Shape suffixes: D = subsets of the samples, S = samples, A = different answers.


def accuracy(scores: Sequence[float]) -> float:
    """The share of completions whose score counts as right."""
    return sum(score >= SOLVED for score in scores) / len(scores)


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... up to ``most``: sizes k of pass@k and maj@k."""
    return [2**exponent for exponent in range(most.bit_length())]


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of ``k`` samples is correct.

    ``1 - C(n - c, k) / C(n, k)`` (Chen et al., Evaluating Large Language Models Trained on Code,
    2021, eq. 1).
    """
    if samples < 1 or not 0 <= correct <= samples:
        raise ValueError(
            f"need 0 <= successes <= samples and at least one sample, got {correct} of {samples}"
        )
    _require_k(k, samples)
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def passes_at_k(right: Sequence[Sequence[bool]], ks: Sequence[int]) -> dict[int, list[float]]:
    """pass@k of each problem for every k, of whether each of its samples is right."""
    return {k: [pass_at_k(len(each), sum(each), k) for each in right] for k in ks}


def majorities(
    problems: Sequence[Sequence[tuple[Hashable | None, bool]]], ks: Sequence[int]
) -> dict[int, list[tuple[float, float]]]:
    """maj@k of each problem and its ties for every k, see :meth:`Votes.count`; none at all where no
    completion of any problem states an answer: there was no vote, and 0 would be a result."""
    if all(answer is None for votes in problems for answer, _ in votes):
        return {}
    return {k: list(map(Votes(len(problems[0]), k).count, problems)) for k in ks}


class Votes:
    """Votes of ``k`` of a problem's samples: the chance that the most frequent answer is correct.

    Estimated over all subsets of ``k`` samples, or over 2000 drawn ones where there are more.
    Several answers that lead together are drawn from with equal chances, so that a subset counts by
    the share of them that is correct (the papers state no rule for ties). A sample without an
    answer has no vote; a subset without any vote is wrong.
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

        A vote is a sample's answer (``None``: it states none) and whether it is correct.
        """
        answers = list(dict.fromkeys(answer for answer, _ in votes if answer is not None))
        if not answers:
            return 0.0, 0.0
        belongs_SA = np.array(
            [[answer == one for one in answers] for answer, _ in votes], dtype=np.float32
        )
        correct_A = (
            belongs_SA.T @ np.array([is_correct for _, is_correct in votes], dtype=np.float32) > 0
        )
        counts_DA = self._subsets_DS @ belongs_SA
        most_D = counts_DA.max(axis=1, keepdims=True)
        leads_DA = (counts_DA == most_D) & (most_D > 0)
        leaders_D = leads_DA.sum(axis=1)
        shares_D = (leads_DA & correct_A).sum(axis=1) / np.maximum(leaders_D, 1)
        return float(shares_D.mean()), float((leaders_D > 1).mean())


def _require_k(k: int, samples: int) -> None:
    if not 1 <= k <= samples:
        raise ValueError(f"k must be between 1 and the number of samples, got k = {k} of {samples}")
