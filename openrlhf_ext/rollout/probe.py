"""The proof that the engines sample from the policy's weights: both score the same fixed prompt.

Run after every weight sync. The engine's last value is computed from its prefix cache where the prompt is longer than
a cache block, so that keys and values of older weights show too (`RolloutEngine.probe_logprobs`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from torch import Tensor

from openrlhf_ext.rollout.sync.checksum import WeightSyncMismatch

_GROWTH, _SLACK = 3.0, 0.25
"""Rounding grows while a policy sharpens; and a baseline may be 0."""


def probe_tokens(vocab_size: int, length: int, seed: int) -> list[int]:
    """A fixed prompt of tokens from `range(vocab_size)`; the same seed gives the same one.

    Args:
        length: number of tokens; more than the engine's cache block (128 on CPU, 16 on CUDA) to prove its prefix cache
            too, and less than its `max_model_len`.

    Raises:
        ValueError: `length` is below 2.
    """
    if length < 2:
        raise ValueError(f"a probe needs at least 2 tokens, of which all but the first are scored: got {length}")
    return random.Random(seed).choices(range(vocab_size), k=length)


def limit_of_probe(tolerance: float, baseline: float | None) -> float:
    """How far the log-probs may be apart.

    Two implementations of one model differ by their rounding, which grows with the model: at the start, when both
    sides have the weights from the disk, any difference up to the tolerance is taken for that. Later ones have to stay
    near it.

    Args:
        tolerance: at the start, nats.
        baseline: what was found at the start, nats; None: this is the start.
    """
    return tolerance if baseline is None else min(tolerance, _GROWTH * baseline + _SLACK * tolerance)


def check_sync(
    policy_logprobs: Tensor, engine_logprobs: Sequence[Sequence[float]], tolerance: float, version: int
) -> float:
    """Largest difference between the policy's and any engine's log-probs of the probe.

    Args:
        policy_logprobs: (T-1,) log-prob of tokens 1..T-1 of the probe at temperature 1.
        engine_logprobs: the same from each engine.
        tolerance: largest difference that rounding explains, nats (`limit_of_probe`).
        version: number of the weights just sent, for the message.

    Returns:
        max |policy - engine| in nats, over engines and positions.

    Raises:
        WeightSyncMismatch: some difference exceeds `tolerance` or is not a number; with both numbers.
        ValueError: the lengths differ, or there is no engine.
    """
    policy = policy_logprobs.detach().double().cpu().flatten().tolist()
    lengths = [len(engine) for engine in engine_logprobs]
    if not lengths or any(length != len(policy) for length in lengths):
        raise ValueError(f"the probe needs equally many log-probs: policy {len(policy)}, engines {lengths}")
    worst = [_worst(policy, engine) for engine in engine_logprobs]
    if any(not difference <= tolerance for difference, _ in worst):
        raise WeightSyncMismatch(_message(policy, engine_logprobs, worst, tolerance, version))
    return max(difference for difference, _ in worst)


def _worst(policy: Sequence[float], engine: Sequence[float]) -> tuple[float, int]:
    differences = [abs(a - b) for a, b in zip(policy, engine, strict=True)]
    ranked = [math.inf if math.isnan(difference) else difference for difference in differences]
    position = max(range(len(ranked)), key=ranked.__getitem__)
    return ranked[position], position


def _message(
    policy: Sequence[float],
    engines: Sequence[Sequence[float]],
    worst: Sequence[tuple[float, int]],
    tolerance: float,
    version: int,
) -> str:
    lines = [
        f"after weight sync {version} the rollout engines do not sample from the policy's weights: log-probs of the "
        f"probe differ by more than {tolerance:g} nats, see weight_sync.probe_tolerance"
    ]
    for index, (engine, (difference, position)) in enumerate(zip(engines, worst, strict=True)):
        verdict = "ok" if difference <= tolerance else "MISMATCH"
        lines.append(
            f"- engine {index}: {verdict}, worst at position {position}: policy {policy[position]:.6f}, engine "
            f"{engine[position]:.6f}, difference {difference:.3g}"
        )
    return "\n".join(lines)
