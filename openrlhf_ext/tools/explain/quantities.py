"""From rollouts to what the picture shows: the method is run on all completions, one group is
described.

Shape suffixes: B = completions, N = tokens of all completions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from openrlhf_ext.algorithms import (
    Algorithm,
    LossBatch,
    RolloutBatch,
    get_algorithm,
    with_published_values,
)
from openrlhf_ext.tools.explain.picture import Completion, Explanation, Quantity
from openrlhf_ext.tools.explain.rollouts import TOKEN_NUMBERS, Rollout


def explain(
    rollouts: Sequence[Rollout], name: str, options: dict[str, Any], group: str | None = None
) -> Explanation:
    """Shapes all rollouts (complete groups) as one batch and describes one group of them, by
    default the first.

    Published values stand in for options without a default. Raises ValueError: unknown algorithm,
    option or group, or rollouts that the algorithm refuses.
    """
    group = rollouts[0].group if group is None else group
    rows = [row for row, rollout in enumerate(rollouts) if rollout.group == group]
    if not rows:
        known = ", ".join(dict.fromkeys(rollout.group for rollout in rollouts))
        raise ValueError(f"--group {group!r} is not in the file; its groups are {known}")
    options = with_published_values(name, options, max_length=max(map(len, rollouts)))
    algorithm = get_algorithm(name, **options)
    batch = make_batch(rollouts)
    shaped = algorithm.prepare(batch["old_logprobs"], algorithm.shape(batch), seed=0)
    quantities, notes = _quantities(algorithm, batch, shaped, {row: rollouts[row] for row in rows})
    if not bool(shaped.kept[rows[0]]):
        notes.append(
            "The group is dropped from the batch: all its completions are correct, or all are "
            "wrong."
        )
    elif not bool(shaped.segments.take(shaped.advantages, rows).any()):
        notes.append("The group teaches nothing: all its advantages are 0.")
    shown = ", ".join(f"{key}={json.dumps(value)}" for key, value in options.items())
    idea = (type(algorithm).__doc__ or "").strip().partition("\n\n")[0]
    return Explanation(
        title=f"{name}, group {group}" + (f"  ({shown})" if shown else ""),
        prompt=rollouts[rows[0]].record["prompt"],
        notes=(" ".join(idea.replace("`", "").split()), *notes),
        completions=tuple(_completion(rollouts[row], algorithm, shaped, row) for row in rows),
        quantities=tuple(quantities),
    )


def make_batch(rollouts: Sequence[Rollout]) -> RolloutBatch:
    """All completions, float64; groups are numbered in the order of the file."""
    numbers = {
        group: index
        for index, group in enumerate(dict.fromkeys(rollout.group for rollout in rollouts))
    }

    def flat(key: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor(
            [value for rollout in rollouts for value in rollout.of_policy(key)], dtype=dtype
        )

    def flags(key: str) -> Tensor | None:
        if not any(key in rollout.record for rollout in rollouts):
            return None
        return torch.tensor([rollout.record.get(key, False) for rollout in rollouts])

    present = [key for key in TOKEN_NUMBERS if key in rollouts[0].record]
    floats: dict[str, Any] = {
        "old_logprobs" if key == "logprobs" else key: flat(key, torch.float64) for key in present
    }
    return RolloutBatch(
        tokens=flat("token_ids", torch.int64),
        lengths=torch.tensor([len(rollout) for rollout in rollouts]),
        rewards=torch.tensor(
            [rollout.record["reward"] for rollout in rollouts], dtype=torch.float64
        ),
        group_ids=torch.tensor([numbers[rollout.group] for rollout in rollouts]),
        truncated=flags("truncated"),
        from_guide=flags("from_guide"),
        **floats,
    )


def _quantities(
    algorithm: Algorithm, batch: RolloutBatch, shaped: LossBatch, rows: Mapping[int, Rollout]
) -> tuple[list[Quantity], list[str]]:
    """The columns that a method has, and what is said instead of one that would show nothing
    new."""

    def panel(name: str, meaning: str, scale: Any, values_N: Tensor) -> Quantity:
        def row_values(row: int, own: list[bool]) -> tuple[float | None, ...]:
            values = iter(values_N[shaped.segments.span(slice(row, row + 1))].tolist())
            return tuple(float(next(values)) if is_own else None for is_own in own)

        return Quantity(
            name,
            meaning,
            scale,
            tuple(row_values(row, rollout.own) for row, rollout in rows.items()),
        )

    panels = [
        panel("entropy", "of the policy at this token, nats", "amount", batch["entropies"]),
        *(panel(*quantity) for quantity in _method_quantities(shaped)),
        panel(
            "advantage",
            "above 0 makes the token likelier, below 0 rarer",
            "signed",
            shaped.advantages,
        ),
    ]
    # gradient of the objective in the log-probs, at the policy that sampled, times the tokens that
    # count
    logprobs_N = batch["old_logprobs"].clone().requires_grad_()
    (gradient_N,) = torch.autograd.grad(algorithm.loss(logprobs_N, shaped).value, logprobs_N)
    update_N = -gradient_N * int(shaped.lengths[shaped.active].sum())
    if torch.allclose(update_N, shaped.advantages.to(update_N), rtol=1e-9, atol=1e-12):
        return panels, [
            "The first update pulls each token by its advantage: all tokens weigh the same."
        ]
    meaning = (
        "pull of the first update on the log-prob; the advantage, where all tokens weigh the same"
    )
    return [*panels, panel("update", meaning, "signed", update_N)], []


def _method_quantities(shaped: LossBatch) -> Iterator[tuple[str, str, str, Tensor]]:
    """Name, meaning, scale and (N,) values of what some methods expose and others do not."""
    names = shaped.names()
    if "Rpos" in names:
        reward = shaped["Rpos"] + shaped["Rneg"]
        reward_N = (
            reward if len(reward) == shaped.segments.tokens else shaped.segments.spread(reward)
        )
        yield "shaped reward", "before standardization", "signed", reward_N
    if "token_mask" in names:
        yield "trained", "entropy is among the highest of the batch", "choice", shaped["token_mask"]
    if "cov" in names:
        yield "covariance", "(A - mean A)(log-prob - mean log-prob)", "deviation", shaped["cov"]
        yield "held back", "chosen by its covariance", "choice", shaped["selection"]
    if "lambda" in names:
        yield (
            "lambda",
            "0 silences a conflict token, above 1 strengthens it",
            "factor",
            shaped["lambda"],
        )


def _completion(rollout: Rollout, algorithm: Algorithm, shaped: LossBatch, row: int) -> Completion:
    mark, verdict = _verdict(rollout, algorithm, shaped, row)
    reward, penalized = rollout.record["reward"], float(shaped.rewards[row])
    facts = [
        f"reward {reward:g}" + (f" (with penalties {penalized:g})" if penalized != reward else ""),
        verdict,
    ]
    tokens, written = (
        "1 token" if len(rollout) == 1 else f"{len(rollout)} tokens",
        rollout.own.count(False),
    )
    facts.append(f"{tokens} and {written} of the environment" if written else tokens)
    facts.append(f"mean entropy {sum(rollout.of_policy('entropies')) / len(rollout):.3f}")
    if rollout.record.get("truncated"):
        facts.append(
            "truncated"
            if bool(shaped.active[row]) or not bool(shaped.kept[row])
            else "truncated: no loss"
        )
    if "delta" in shaped.names() and float(shaped["delta"][row]) == 0:
        facts.append("removed by the entropy filter")
    return Completion(
        mark, ", ".join(fact for fact in facts if fact), tuple(rollout.record["tokens"])
    )


def _verdict(
    rollout: Rollout, algorithm: Algorithm, shaped: LossBatch, row: int
) -> tuple[str, str]:
    """Mark and word for the class that the method puts a completion into."""
    if "A" in shaped.names():
        sign = float(shaped["A"][row])
        return (
            ("+", "above the mean")
            if sign > 0
            else ("-", "below the mean")
            if sign < 0
            else (" ", "at the mean")
        )
    threshold = getattr(algorithm.options, "success_threshold", None)
    if threshold is None:
        return " ", ""
    return ("✓", "correct") if rollout.record["reward"] > threshold else ("✗", "wrong")
