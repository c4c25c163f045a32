"""Checks that the engines sample from the policy's weights: both score the same fixed text after
every weight sync.

The model samples the text itself at the start of the run: random tokens are so unlikely (log-probs
of -15 to -20) that two sound implementations differ there by tenths of nats in bf16. A policy may
also move away from the text while it learns, so differences of unlikely tokens count in proportion
to their log-prob. The engine computes its last value from its prefix cache, so that keys and values
of older weights show too (`RolloutEngine.probe_logprobs`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from openrlhf_ext.rollout.sync.plan import WeightSyncMismatch

logger = logging.getLogger(__name__)

_GROWTH, _SLACK = 3.0, 0.25
"""Rounding grows as a policy sharpens, and a baseline may be 0."""
_LAST_TOKENS = 16
"""The text's last token is chosen among this many."""
_UNLIKELY = 5.0
"""Differences count in full down to a log-prob of minus this, below in proportion: rounding grows
with the number."""
_ONE_OF_ALL = 4.0
"""One token's rounding may be this many times the mean of all."""


def end_of_probe(logprobs: Sequence[float]) -> int:
    """Returns where to cut a sampled text: after one of the last tokens, the one whose probability
    is nearest one half. Only the last token is scored on top of the prefix cache, and a certain
    token is certain under any weights."""
    first = max(0, len(logprobs) - _LAST_TOKENS)
    return 1 + _of_two_minds(logprobs, range(first, len(logprobs)))[0]


def _of_two_minds(logprobs: Sequence[float], places: Iterable[int]) -> list[int]:
    """Sorts places by how near the probability of their token is to one half."""
    return sorted(places, key=lambda place: abs(math.exp(logprobs[place]) - 0.5))


def limit_of_probe(tolerance: float, baseline: float | None) -> float:
    """Returns the difference in nats above which a result is suspicious. Rounding grows with the
    model: at the start (``baseline`` None), with the weights from disk, any difference up to
    ``tolerance`` counts as rounding; later ones should be near the baseline."""
    return (
        tolerance if baseline is None else min(tolerance, _GROWTH * baseline + _SLACK * tolerance)
    )


@dataclass(frozen=True)
class Difference:
    """The difference between two models' log-probs of the same tokens, nats
    (`relative_difference`): mean over all tokens, that of the last token, and position of the
    largest."""

    mean: float
    last: float
    worst: int

    @property
    def size(self) -> float:
        """The value to compare with a limit: the mean, or the last token's share if that is out of
        proportion."""
        return max(self.mean, self.last / _ONE_OF_ALL)


def relative_difference(one_N: Tensor, other_N: Tensor) -> Difference:
    """Returns how far two models' (N,) log-probs of the same tokens are apart relative to their
    rounding: in full down to a log-prob of -5, below in proportion to it; infinite or NaN if one of
    them is not finite.

    bf16 keeps 8 bits of any number, so its rounding of an unlikely token's log-prob grows with the
    log-prob. Weighted by probability instead, the difference of a policy that had left the text was
    that of its few likeliest tokens, which reached 0.11 nats (tests/rollout/wide_model.py with
    other prompts, update 251; 0.02 on average in this form).
    """
    one_N, other_N = (values.detach().double().cpu().flatten() for values in (one_N, other_N))
    share_N = (one_N - other_N).abs() / (torch.maximum(one_N, other_N).neg() / _UNLIKELY).clamp(
        min=1.0
    )
    return Difference(float(share_N.mean()), float(share_N[-1]), int(share_N.argmax()))


def check_sync(
    policy_logprobs: Tensor,
    engine_logprobs: Sequence[Sequence[float]],
    tolerance: float,
    version: int,
    limit: float | None = None,
    score: Callable[[int], Sequence[Sequence[float]]] | None = None,
) -> float:
    """Returns the largest difference (`Difference.size`, nats) between any engine's log-probs and
    the policy's (T-1,) log-probs of tokens 1..T-1 of the probe at temperature 1.

    A difference above ``limit`` (None: none) is suspicious and logs a warning. Rounding explains
    none above ``tolerance``: raises WeightSyncMismatch. Checksums verify the weights; this finds an
    engine that computes something else from them (another temperature, other positions), or reads
    keys and values of old ones. With a ``tolerance`` of 0 (exact mode) one other bit is a mismatch.

    ``score`` returns the engines' log-probs of the first so many tokens of the probe. If nothing but
    a last token is out of proportion, it is asked for two other last tokens.
    """
    policy_N = policy_logprobs.detach().double().cpu().flatten()
    lengths = [len(engine) for engine in engine_logprobs]
    if not lengths or any(length != len(policy_N) for length in lengths):
        raise ValueError(
            f"the probe needs equally many log-probs: policy {len(policy_N)}, engines {lengths}"
        )
    found = [
        relative_difference(policy_N, torch.tensor(engine, dtype=torch.float64))
        for engine in engine_logprobs
    ]
    if score is not None and _only_last(found, tolerance):
        found = _with_other_ends(policy_N, found, score)
        logger.warning(
            "weight sync %d: the last token of the probe is out of proportion; the median of three "
            "last tokens differs by %s nats",
            version,
            ", ".join(f"{difference.last:.3g}" for difference in found),
        )
    lines = _describe(policy_N.tolist(), engine_logprobs, found, tolerance)
    if any(not difference.size <= tolerance for difference in found):  # NaN counts as a mismatch
        exact = "train.exact_rollout_enable asks for the same bits"
        allowed = "see weight_sync.probe_tolerance" if tolerance else exact
        raise WeightSyncMismatch(
            f"after weight sync {version} the rollout engines do not sample from the policy's "
            f"weights: log-probs of the probe differ by more than {tolerance:g} nats on average, "
            f"{allowed}\n{lines}"
        )
    largest = max(difference.size for difference in found)
    if limit is not None and largest > limit:
        logger.warning(
            "after weight sync %d policy and engines differ more than at the start of the run: "
            "above %.2g nats on average over the probe. The weights are proved by their "
            "checksums; look at kl/rollout\n%s",
            version,
            limit,
            lines,
        )
    return largest


def _only_last(found: Sequence[Difference], tolerance: float) -> bool:
    """Whether the last token makes a mismatch, and no mean. In exact mode every bit counts."""
    if tolerance == 0.0 or not all(difference.mean <= tolerance for difference in found):
        return False
    return any(difference.size > tolerance for difference in found)


def _with_other_ends(
    policy_N: Tensor,
    found: Sequence[Difference],
    score: Callable[[int], Sequence[Sequence[float]]],
) -> list[Difference]:
    """Takes for the last token's difference the median of three last tokens. Keys and values of old
    weights change all of them. Rounding reached 0.59 nats for one token of 5,076 (a toy in bf16,
    benchmarks/results/exact_cpu.json)."""
    last = len(policy_N) - 1
    lasts = [[difference.last] for difference in found]
    places = range(max(0, last - _LAST_TOKENS), last)
    for place in _of_two_minds(policy_N.tolist(), places)[:2]:
        for own, engine in zip(lasts, score(place + 2), strict=True):
            other = torch.tensor(engine, dtype=torch.float64)
            own.append(relative_difference(policy_N[: place + 1], other).last)
    return [
        replace(difference, last=sorted(own)[len(own) // 2])
        for difference, own in zip(found, lasts, strict=True)
    ]


def _describe(
    policy: Sequence[float],
    engines: Sequence[Sequence[float]],
    found: Sequence[Difference],
    tolerance: float,
) -> str:
    lines = []
    for index, (engine, difference) in enumerate(zip(engines, found, strict=True)):
        verdict = "ok" if difference.size <= tolerance else "MISMATCH"
        worst = difference.worst
        lines.append(
            f"- engine {index}: {verdict}, {difference.mean:.3g} on average, "
            f"{difference.last:.3g} at the last token, worst at position {worst}: policy "
            f"{policy[worst]:.6f}, engine {engine[worst]:.6f}"
        )
    return "\n".join(lines)
