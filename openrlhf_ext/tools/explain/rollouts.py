"""The rollouts file of `explain`: one JSON object per completion (docs/explain.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf_ext.inputs import (
    FLAG,
    INTEGER,
    NUMBER,
    TEXT,
    TEXT_OR_INTEGER,
    InputError,
    Kind,
    decode,
    is_integer,
    is_number,
    nearest,
    read_text,
    type_name,
)

TOKEN_NUMBERS = ("logprobs", "entropies", "ref_logprobs", "guide_logprobs", "values")
_REQUIRED = ("group", "prompt", "tokens", "token_ids", "reward", "logprobs", "entropies")
_OPTIONAL = (*TOKEN_NUMBERS[2:], "environment", "truncated", "from_guide", "step")
_IGNORED = ("comment", "rollout_logprobs", "score", "label", "advantages", "loss_mask", "token_weights")


@dataclass(frozen=True)
class Rollout:
    group: str
    line: int
    record: dict[str, Any]

    @property
    def own(self) -> list[bool]:
        """Which tokens the policy sampled; the others were written by an agent's environment."""
        return [not mark for mark in self.record.get("environment", [0] * len(self.record["tokens"]))]

    def __len__(self) -> int:
        return sum(self.own)

    def of_policy(self, key: str) -> list[Any]:
        """The entries of that key for the tokens that the policy sampled."""
        return [value for value, own in zip(self.record[key], self.own, strict=True) if own]


def read_rollouts(path: Path, step: int | None = None) -> list[Rollout]:
    """Reads and checks a rollouts file, one JSON object per completion; blank lines are skipped.

    Of a run's samples.jsonl, whose last line may still be being written, only this step's completions, or the last's.
    """
    rollouts: list[Rollout] = []
    # Not splitlines: it also splits at line separators that may stand inside a JSON string.
    lines = read_text(path).split("\n")
    if lines[0].startswith(_OF_A_RUN):
        lines[-1] = ""  # unfinished, or nothing
    for number, line in enumerate(lines, start=1):
        if line.strip():
            record = decode(line, f"{path}, line {number}")
            try:
                rollouts.append(_rollout(record, number))
            except InputError as error:
                raise InputError(f"{path}, line {number}: {error}") from error
    if not rollouts:
        raise InputError(f"{path} holds no completion")
    rollouts = _of_step(path, rollouts, step)
    _check_together(path, rollouts)
    return rollouts


def _of_step(path: Path, rollouts: list[Rollout], step: int | None) -> list[Rollout]:
    steps = list(dict.fromkeys(rollout.record.get("step") for rollout in rollouts))
    if step is None and steps == [None]:
        return rollouts
    if None in steps:
        raise InputError(f"{path}: step is on some lines and missing on others; give it for every completion or none")
    wanted = steps[-1] if step is None else step
    if wanted not in steps:
        raise InputError(f"--step {step} is not in {path}; its steps are {', '.join(map(str, steps))}")
    return [rollout for rollout in rollouts if rollout.record["step"] == wanted]


def _rollout(record: Any, number: int) -> Rollout:
    if not isinstance(record, dict):
        raise InputError(f"a completion must be a JSON object, got a {type_name(record)}")
    if missing := [key for key in _REQUIRED if key not in record]:
        raise InputError(f"missing {', '.join(missing)}; a completion needs {', '.join(_REQUIRED)}")
    for key in ("tokens", *record):
        _check_key(key, record[key], record)
    if all(record.get("environment", [0])):
        raise InputError("environment is 1 everywhere; every completion needs at least one token of the policy")
    return Rollout(str(record["group"]), number, record)


def _check_key(key: str, value: Any, record: dict[str, Any]) -> None:
    known = (*_REQUIRED, *_OPTIONAL, *_IGNORED)
    if key not in known:
        near = nearest(key, known)
        hint = f"; did you mean {near}?" if near else "."
        raise InputError(f"unknown key {key!r}{hint} Known keys: {', '.join(known)}")
    if key in _SCALARS:
        if not _SCALARS[key].holds(value):
            raise InputError(f"{key} must be {_SCALARS[key].words}, got {value!r}")
    elif key not in _IGNORED:
        _check_list(key, value, len(record["tokens"]) if isinstance(record["tokens"], list) else 0)


def _check_list(key: str, values: Any, tokens: int) -> None:
    if not isinstance(values, list):
        raise InputError(f"{key} must be a list with one entry per token, got {type(values).__name__}")
    if not values:
        raise InputError(f"{key} is empty; every completion needs at least one token")
    if len(values) != tokens:
        raise InputError(f"{key} has {len(values)} entries, tokens has {tokens}; one entry per token is needed")
    for index, value in enumerate(values):
        if not _LISTS[key].holds(value):
            raise InputError(f"{key}[{index}] must be {_LISTS[key].words}, got {value!r}")


_OF_A_RUN = '{"step": '
# rounding may leave the log-prob of a certain token a little above 0
_LOGPROB = Kind("a log-probability: a finite number, at most 0", lambda value: is_number(value) and value <= 1e-3)
_ENTROPY = Kind("an entropy in nats: a finite number, at least 0", lambda value: is_number(value) and value >= 0)
_SCALARS = {
    "group": Kind("an integer or a text", TEXT_OR_INTEGER.holds), "prompt": TEXT, "reward": NUMBER, "truncated": FLAG,
    "from_guide": FLAG, "step": Kind("a step: an integer", is_integer),
}  # fmt: skip
_LISTS = {
    "tokens": TEXT, "token_ids": INTEGER, "logprobs": _LOGPROB, "entropies": _ENTROPY, "ref_logprobs": _LOGPROB,
    "guide_logprobs": _LOGPROB, "values": NUMBER,
    "environment": Kind("0 or 1", lambda value: is_integer(value) and value in (0, 1)),
}  # fmt: skip


def _check_together(path: Path, rollouts: Sequence[Rollout]) -> None:
    """One prompt for each group, and optional numbers on every line or on none."""
    first_of: dict[str, Rollout] = {}
    first = rollouts[0]
    for rollout in rollouts:
        leader = first_of.setdefault(rollout.group, rollout)
        if rollout.record["prompt"] != leader.record["prompt"]:
            raise InputError(
                f"{path}, line {rollout.line}: prompt differs from that of line {leader.line}, both are of group "
                f"{rollout.group}; the completions of a group answer one prompt"
            )
        for key in TOKEN_NUMBERS:
            if (key in rollout.record) != (key in first.record):
                having, lacking = (rollout, first) if key in rollout.record else (first, rollout)
                raise InputError(
                    f"{path}: {key} is on line {having.line} and missing on line {lacking.line}; give it for every "
                    "completion or for none"
                )
