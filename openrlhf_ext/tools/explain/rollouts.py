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
    check,
    decode,
    did_you_mean,
    is_integer,
    is_number,
    read_text,
)

TOKEN_NUMBERS = ("logprobs", "entropies", "ref_logprobs", "guide_logprobs", "values")
# rounding may leave the log-prob of a certain token a little above 0
_LOGPROB = Kind(
    "a log-probability: a finite number, at most 0",
    lambda value: is_number(value) and value <= 1e-3,
)
_ENTRIES = {
    "tokens": TEXT,
    "token_ids": INTEGER,
    "logprobs": _LOGPROB,
    "ref_logprobs": _LOGPROB,
    "guide_logprobs": _LOGPROB,
    "entropies": Kind(
        "an entropy in nats: a finite number, at least 0", lambda v: is_number(v) and v >= 0
    ),
    "values": NUMBER,
    "environment": Kind("0 or 1", lambda value: is_integer(value) and value in (0, 1)),
}
"""What a list of a completion has for each token."""
_LIST = Kind("a list with one entry per token", lambda value: isinstance(value, list))
_REQUIRED = {
    "group": TEXT_OR_INTEGER, "prompt": TEXT, "tokens": _LIST, "token_ids": _LIST, "reward": NUMBER, "logprobs": _LIST,
    "entropies": _LIST,
}  # fmt: skip
_OPTIONAL = dict.fromkeys(("ref_logprobs", "guide_logprobs", "values", "environment"), _LIST) | {
    "truncated": FLAG,
    "from_guide": FLAG,
    "step": INTEGER,
}
_KNOWN = (
    *_REQUIRED,
    *_OPTIONAL,
    "comment",
    "rollout_logprobs",
    "score",
    "label",
    "advantages",
    "loss_mask",
    "token_weights",
    "updates",
)
_OF_A_RUN = '{"step": '


@dataclass(frozen=True)
class Rollout:
    group: str
    line: int
    record: dict[str, Any]

    @property
    def own(self) -> list[bool]:
        """Which tokens the policy sampled; the others were written by an agent's environment."""
        return [
            not mark for mark in self.record.get("environment", [0] * len(self.record["tokens"]))
        ]

    def __len__(self) -> int:
        return sum(self.own)

    def of_policy(self, key: str) -> list[Any]:
        """The entries of that key for the tokens that the policy sampled."""
        return [value for value, own in zip(self.record[key], self.own, strict=True) if own]


def read_rollouts(path: Path, step: int | None = None) -> list[Rollout]:
    """Reads and checks a rollouts file, one JSON object per completion; blank lines are skipped.
    Raises InputError.

    Of a run's samples.jsonl, whose last line may still be being written, only this step's
    completions, or the last's.
    """
    # Not splitlines: it also splits at line separators that may stand inside a JSON string.
    lines = read_text(path).split("\n")
    if lines[0].startswith(_OF_A_RUN):
        lines[-1] = ""  # unfinished, or nothing
    rollouts = [
        _rollout(line, n, f"{path}, line {n}")
        for n, line in enumerate(lines, start=1)
        if line.strip()
    ]
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
        raise InputError(
            f"{path}: step is on some lines and missing on others; give it for every completion "
            "or none"
        )
    wanted = steps[-1] if step is None else step
    if wanted not in steps:
        raise InputError(
            f"--step {step} is not in {path}; its steps are {', '.join(map(str, steps))}"
        )
    return [rollout for rollout in rollouts if rollout.record["step"] == wanted]


def _rollout(line: str, number: int, where: str) -> Rollout:
    record = check(
        decode(line, where), where, _REQUIRED, _OPTIONAL, "docs/explain.md lists the keys"
    )
    for key in record:
        if key not in _KNOWN:
            hint = did_you_mean(key, _KNOWN, "see docs/explain.md.")
            raise InputError(
                f"{where}: unknown key {key!r}; {hint} Known keys: {', '.join(_KNOWN)}"
            )
    if not (tokens := len(record["tokens"])):
        raise InputError(f"{where}: tokens is empty; every completion needs at least one token")
    for key, kind in _ENTRIES.items():
        values = record.get(key, record["tokens"])
        if len(values) != tokens:
            raise InputError(
                f"{where}: {key} has {len(values)} entries, tokens has {tokens}; one per token "
                "is needed"
            )
        for index, value in enumerate(values if key in record else ()):
            if not kind.holds(value):
                raise InputError(f"{where}: {key}[{index}] must be {kind.words}, got {value!r}")
    if all(record.get("environment", [0])):
        raise InputError(
            f"{where}: environment is 1 everywhere; a completion needs at least one token of the "
            "policy"
        )
    return Rollout(str(record["group"]), number, record)


def _check_together(path: Path, rollouts: Sequence[Rollout]) -> None:
    """One prompt for each group, and optional numbers on every line or on none."""
    first, first_of = rollouts[0], dict[str, Rollout]()
    for rollout in rollouts:
        leader = first_of.setdefault(rollout.group, rollout)
        if rollout.record["prompt"] != leader.record["prompt"]:
            raise InputError(
                f"{path}, line {rollout.line}: prompt differs from that of line {leader.line}, "
                f"both are of group {rollout.group}; the completions of a group answer one prompt"
            )
        for key in TOKEN_NUMBERS:
            if (key in rollout.record) != (key in first.record):
                having, lacking = (rollout, first) if key in rollout.record else (first, rollout)
                raise InputError(
                    f"{path}: {key} is on line {having.line} and missing on line {lacking.line}; "
                    "give it for every completion or for none"
                )
