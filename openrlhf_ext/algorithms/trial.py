"""An algorithm tried on a made batch, by the steps that training takes: an error shows before
anything has started.

Shape suffixes: B = completions, N = tokens of all completions.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from openrlhf_ext.algorithms.base import Algorithm, LossBatch
from openrlhf_ext.algorithms.batch import RolloutBatch, check_values

_OURS = __name__.split(".")[0]
_LENGTHS = (3, 5, 2, 7, 4, 1, 6, 2)  # of a group's completions
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}


def try_algorithm(
    algorithm: Algorithm,
    group_size: int,
    absent: Sequence[str] = (),
    stored: Callable[[Any], Any] = copy.deepcopy,
) -> str:
    """Shape, loss and gradient of three groups, in float32 and float64; says what came out.

    Args:
        group_size: of the run; groups of more than eight are tried with eight.
        absent: tensors that the run has no source for.
        stored: what becomes of a state in a checkpoint.

    Raises:
        ValueError: an advantage, the loss or a gradient is not finite, the losses of shares do not
            add up to that of the mini-batch, `advantages` changes what it is given, or what is kept
            from one batch to the next would be
            lost: by a checkpoint, or because the loss writes it, on ranks.
        Exception: whatever the algorithm raises.
    """
    kind, before = type(algorithm), _kept(algorithm)
    has_none = (
        kind.state_dict is Algorithm.state_dict or kind.load_state_dict is Algorithm.load_state_dict
    )
    fresh = None if has_none else copy.deepcopy(algorithm)
    for dtype in _TOLERANCE:
        batch = made_batch(min(group_size, len(_LENGTHS)), dtype)
        nothing: dict[str, Any] = dict.fromkeys(absent)
        batch = dataclasses.replace(batch, **nothing)
        _check_changes_nothing(algorithm, batch)
        shaped = algorithm.shape(batch)
        check_values(f"{algorithm.name}.advantages", shaped.advantages, shaped.segments)
        shaping = _kept(algorithm)
        loss = _loss(algorithm, batch, shaped)
        if lost := _changed(shaping, _kept(algorithm)):
            raise ValueError(
                f"{algorithm.name}.loss or prepare changes {lost}, on a rank's copy of the "
                "algorithm, which is gone after the step: change it in advantages, which runs "
                "in the driver"
            )
    if (changed := _changed(before, shaping)) or fresh is not None:
        _check_state(algorithm, changed, fresh, batch, stored)
    least, most = torch.aminmax(shaped.advantages)
    return (
        f"3 made groups of {len(batch.lengths) // 3}: advantages {least:.3g} to {most:.3g}, loss "
        f"{loss:.3g}"
    )


# ---- what is kept from one batch to the next


def _check_state(
    algorithm: Algorithm,
    changed: str,
    fresh: Algorithm | None,
    batch: RolloutBatch,
    stored: Callable[[Any], Any],
) -> None:
    """What changed is in the state of a checkpoint: with it another instance, ``fresh``, has the
    same advantages."""
    rule = f"{algorithm.place} changes {changed}, which a run that is resumed would begin anew"
    if outside := [name for name in changed.split(", ") if name and not name.startswith("self.")]:
        raise ValueError(
            f"{rule}: keep {', '.join(outside)} in self, and return it from state_dict"
        )
    if fresh is None:
        raise ValueError(
            f"{rule}: define state_dict(self), which returns it for checkpoints, {{}} where "
            "nothing of it has to last, and load_state_dict(self, state), which takes it "
            "(docs/algorithms.md, State of your own)"
        )
    if state := algorithm.state_dict():
        fresh.load_state_dict(stored(state))
    ours, theirs = (_drawn_alike(one, batch) for one in (algorithm, fresh))
    if not torch.equal(ours, theirs):
        raise ValueError(
            f"{rule}: after load_state_dict(state_dict()) another instance has other advantages "
            f"for the same batch; state_dict has {', '.join(state) or 'nothing'}"
        )


def _drawn_alike(algorithm: Algorithm, batch: RolloutBatch) -> Tensor:
    """(N,) advantages, with the same random numbers each time, and without a trace in those of the
    process."""
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        advantages_N = algorithm.shape(batch).advantages
    random.setstate(before[0])
    np.random.set_state(before[1])
    return advantages_N


def _bits(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    # a lambda, a lock: by what it is, not what it holds
    except (pickle.PicklingError, TypeError, AttributeError):
        return repr(value).encode()


def _kept(algorithm: Algorithm) -> dict[str, bytes]:
    """What lasts from one batch to the next, by name: in the instance, in classes of the user's, in
    their module."""
    kinds = [
        kind
        for kind in type(algorithm).__mro__
        if kind is not object and kind.__module__.split(".")[0] != _OURS
    ]
    places: dict[str, Mapping[str, Any]] = {kind.__name__: vars(kind) for kind in kinds}
    if kinds:
        places[kinds[0].__module__] = vars(sys.modules[kinds[0].__module__])
    shared = {
        f"{place}.{name}": value
        for place, values in places.items()
        for name, value in values.items()
        if not (
            name.startswith("__")
            or callable(value)
            or inspect.ismodule(value)
            or isinstance(value, property)
        )
    }
    own = {f"self.{name}": value for name, value in vars(algorithm).items()}
    return {name: _bits(value) for name, value in (own | shared).items()}


def _changed(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> str:
    return ", ".join(name for name in {**before, **after} if before.get(name) != after.get(name))


# ---- the trial


def made_batch(group_size: int, dtype: torch.dtype) -> RolloutBatch:
    """Three groups with every optional tensor: of two every other completion is right, of the last
    one none.

    The last completion of a group is cut off.
    """
    lengths = torch.tensor(_LENGTHS[:group_size] * 3)
    rows, tokens = len(lengths), int(lengths.sum())
    generator = torch.Generator().manual_seed(0)

    def uniform(low: float, high: float) -> Tensor:
        return (
            torch.rand(tokens, generator=generator, dtype=torch.float64)
            .mul(high - low)
            .add(low)
            .to(dtype)
        )

    row_B = torch.arange(rows)
    is_right_B = (row_B % 2 == 0) & (row_B < 2 * group_size)
    policy_N = uniform(-3.0, -0.1)
    return RolloutBatch(
        tokens=torch.randint(5, 50, (tokens,), generator=generator),
        lengths=lengths,
        rewards=is_right_B.double(),
        group_ids=row_B // group_size,
        old_logprobs=policy_N,
        entropies=uniform(0.0, 2.0),
        ref_logprobs=policy_N - 0.05,
        guide_logprobs=policy_N - 0.1,
        rollout_logprobs=policy_N + 0.01,
        values=uniform(-0.5, 0.5),
        truncated=row_B % group_size == group_size - 1,
        from_guide=torch.zeros(rows, dtype=torch.bool),
        group_size=group_size,
    )


def _check_changes_nothing(algorithm: Algorithm, batch: RolloutBatch) -> None:
    kind = type(algorithm)
    if (
        kind.rollout_level is not Algorithm.rollout_level
        and kind.advantages is Algorithm.advantages
    ):
        return
    inputs = algorithm.inputs(batch)
    tensors = {
        name: value for name, value in vars(inputs.batch).items() if isinstance(value, Tensor)
    }
    before = {name: value.clone() for name, value in tensors.items()}
    algorithm.advantages(inputs)
    if changed := [name for name, value in tensors.items() if not torch.equal(value, before[name])]:
        raise ValueError(
            f"{algorithm.place} changes inputs.batch.{', '.join(changed)} in place, which loss "
            "and metrics read later: work on a copy (.clone())"
        )


def _loss(algorithm: Algorithm, batch: RolloutBatch, shaped: LossBatch) -> float:
    """Of the mini-batch after a small step of the policy."""
    logprobs_N = (1.02 * batch["old_logprobs"]).requires_grad_()
    prepared = algorithm.prepare(logprobs_N.detach(), shaped.mini_batch(slice(None)), seed=0).lean()
    value = algorithm.loss(logprobs_N, prepared).value
    # of a bonus: it reads a denominator that a loss of one's own may lack
    algorithm.entropy_slope(prepared)
    (gradient_N,) = torch.autograd.grad(value, logprobs_N)
    check_values(f"the gradient of {algorithm.name}.loss", gradient_N, prepared.segments)
    whole, half = float(value.detach()), len(prepared) // 2
    shares = [prepared.select(slice(0, half)), prepared.select(slice(half, None))]
    parts = zip(
        logprobs_N.detach().split([share.segments.tokens for share in shares]), shares, strict=True
    )
    added = sum(float(algorithm.loss(part_N, share).value) for part_N, share in parts)
    if not abs(added - whole) <= _TOLERANCE[logprobs_N.dtype] * max(1.0, abs(whole)):
        raise ValueError(
            f"{algorithm.name}.loss of two shares must add up to that of their mini-batch: got "
            f"{added:.9g} and {whole:.9g}. Divide by shaped.denominators instead of taking means "
            "over what a share holds, and draw nothing at random in the loss"
        )
    return whole
