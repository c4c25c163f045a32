"""An algorithm tried on a made batch, by the steps that training takes: an error shows before anything has started.

Shape suffixes: B = completions, N = tokens of all completions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from openrlhf_ext.algorithms.base import Algorithm, LossBatch
from openrlhf_ext.algorithms.batch import RolloutBatch, check_values

_LENGTHS = (3, 5, 2, 7, 4, 1, 6, 2)  # of a group's completions
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}


def try_algorithm(algorithm: Algorithm, group_size: int, absent: Sequence[str] = ()) -> str:
    """Shape, loss and gradient of three groups, in float32 and float64; says what came out.

    Args:
        group_size: of the run; groups of more than eight are tried with eight.
        absent: tensors that the run has no source for.

    Raises:
        ValueError: an advantage, the loss or a gradient is not finite, the losses of shares do not add up to that of
            the mini-batch, or `advantages` changes what it is given.
        Exception: whatever the algorithm raises.
    """
    for dtype in _TOLERANCE:
        batch = made_batch(min(group_size, len(_LENGTHS)), dtype)
        nothing: dict[str, Any] = dict.fromkeys(absent)
        batch = dataclasses.replace(batch, **nothing)
        _check_changes_nothing(algorithm, batch)
        shaped = algorithm.shape(batch)
        check_values(f"{algorithm.name}.advantages", shaped.advantages, shaped.segments)
        loss = _loss(algorithm, batch, shaped)
    least, most = torch.aminmax(shaped.advantages)
    return f"3 made groups of {len(batch.lengths) // 3}: advantages {least:.3g} to {most:.3g}, loss {loss:.3g}"


def made_batch(group_size: int, dtype: torch.dtype) -> RolloutBatch:
    """Three groups with every optional tensor: of two every other completion is right, of the last one none.

    The last completion of a group is cut off.
    """
    lengths = torch.tensor(_LENGTHS[:group_size] * 3)
    rows, tokens = len(lengths), int(lengths.sum())
    generator = torch.Generator().manual_seed(0)

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(tokens, generator=generator, dtype=torch.float64).mul(high - low).add(low).to(dtype)

    row_B = torch.arange(rows)
    is_right_B = (row_B % 2 == 0) & (row_B < 2 * group_size)
    policy_N = uniform(-3.0, -0.1)
    return RolloutBatch(
        tokens=torch.randint(5, 50, (tokens,), generator=generator), lengths=lengths,
        rewards=is_right_B.double(), group_ids=row_B // group_size, old_logprobs=policy_N,
        entropies=uniform(0.0, 2.0), ref_logprobs=policy_N - 0.05, guide_logprobs=policy_N - 0.1,
        rollout_logprobs=policy_N + 0.01, values=uniform(-0.5, 0.5), truncated=row_B % group_size == group_size - 1,
        from_guide=torch.zeros(rows, dtype=torch.bool), group_size=group_size,
    )  # fmt: skip


def _check_changes_nothing(algorithm: Algorithm, batch: RolloutBatch) -> None:
    kind = type(algorithm)
    if kind.rollout_level is not Algorithm.rollout_level and kind.advantages is Algorithm.advantages:
        return
    inputs = algorithm.inputs(batch)
    tensors = {name: value for name, value in vars(inputs.batch).items() if isinstance(value, Tensor)}
    before = {name: value.clone() for name, value in tensors.items()}
    algorithm.advantages(inputs)
    if changed := [name for name, value in tensors.items() if not torch.equal(value, before[name])]:
        raise ValueError(
            f"{algorithm.place} changes inputs.batch.{', '.join(changed)} in place, which loss and metrics read later: "
            "work on a copy (.clone())"
        )


def _loss(algorithm: Algorithm, batch: RolloutBatch, shaped: LossBatch) -> float:
    """Of the mini-batch after a small step of the policy."""
    logprobs_N = (1.02 * batch["old_logprobs"]).requires_grad_()
    prepared = algorithm.prepare(logprobs_N.detach(), shaped.mini_batch(slice(None)), seed=0).lean()
    value = algorithm.loss(logprobs_N, prepared).value
    algorithm.entropy_slope(prepared)  # of a bonus: it reads a denominator that a loss of one's own may lack
    (gradient_N,) = torch.autograd.grad(value, logprobs_N)
    check_values(f"the gradient of {algorithm.name}.loss", gradient_N, prepared.segments)
    whole, half = float(value.detach()), len(prepared) // 2
    shares = [prepared.select(slice(0, half)), prepared.select(slice(half, None))]
    parts = zip(logprobs_N.detach().split([share.segments.tokens for share in shares]), shares, strict=True)
    added = sum(float(algorithm.loss(part_N, share).value) for part_N, share in parts)
    if not abs(added - whole) <= _TOLERANCE[logprobs_N.dtype] * max(1.0, abs(whole)):
        raise ValueError(
            f"{algorithm.name}.loss of two shares must add up to that of their mini-batch: got {added:.9g} and "
            f"{whole:.9g}. Divide by shaped.denominators instead of taking means over what a share holds, and draw "
            "nothing at random in the loss"
        )
    return whole
