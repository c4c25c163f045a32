"""Which prompts a run has trained, and why not the others: ledger.jsonl, a line for each step, and its check.

``{"step": 3, "trained": [[8, "9f86d081884c7d65"], ...], "filtered": [...], "drawn": 20, "waiting": [16, 17]}``: a prompt
is its number in the order of drawing, which goes on over episodes, with a digest of text and label. ``waiting`` are the
prompts drawn that no line has settled yet, so a prompt that is lost or used twice is found in the line where it happens.
The first line, and another one after each resume, says what the data is; ``episode`` is a hash of all its prompts that
does not depend on their order. The last line of a run that ends in order has ``end`` in the place of ``step``.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from openrlhf_ext.inputs import INTEGER, TEXT, InputError, Kind, check, is_integer, list_of
from openrlhf_ext.reporting.lines import JsonLines, Record, Writer, read_lines, step_of

LEDGER = "ledger.jsonl"
TRAINED = "trained"
USED_UP, TIME_IS_UP = "the prompts are used up", "train.max_minutes"
GIVEN_UP = ("filtered", "late", "unstarted", "skipped")
"""Why a prompt that was drawn is not trained; ``skipped``: a batch that was passed over after a rollback."""
LEFT = ("in_flight", "queued")
"""Where prompts were when the run ended."""

Entry = tuple[int, str]
"""A prompt's number and digest."""
_ENTRY = Kind(
    "a prompt's number and digest",
    lambda v: isinstance(v, list) and len(v) == 2 and is_integer(v[0]) and isinstance(v[1], str) and _is_hash(v[1]),
)
_HASH = Kind("16 hexadecimal digits", lambda value: isinstance(value, str) and _is_hash(value))
_LINE = {"drawn": INTEGER, "waiting": list_of(INTEGER)}
_PARTS = {
    **dict.fromkeys(("step", "end", "prompts", "episodes", "skipped_overlong"), INTEGER), "why": TEXT, "episode": _HASH,
    **dict.fromkeys((TRAINED, *GIVEN_UP, *LEFT), list_of(_ENTRY)),
}  # fmt: skip


def digest(text: str, label: Any) -> str:
    """64 bits of a prompt, in hexadecimal; those of what a checkpoint has made of the label are the same."""
    return hashlib.blake2b(json.dumps([text, label], default=repr).encode(), digest_size=8).hexdigest()


def hash_of(digests: Iterable[str]) -> str:
    """Of prompts in any order, each as often as it is there."""
    return f"{sum(int(each, 16) for each in digests) % 2**64:016x}"


def _is_hash(text: str) -> bool:
    return len(text) == 16 and not set(text) - set("0123456789abcdef")


class Ledger(Writer):
    """Writes the lines of one run, to no file without a path; ``data``: what its prompts are. Lines after
    ``resume_step``, and how an earlier part of the run ended, are moved aside; 0 = all are."""

    def __init__(
        self, path: Path | None = None, resume_step: int = 0, data: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self.data = data
        is_kept = lambda line: resume_step > 0 and step_of(line) <= resume_step  # noqa: E731
        self._lines = None if path is None else JsonLines(path, is_kept)

    def write(self, line: Record) -> None:
        if self._lines is not None:
            self._lines.append(line)


class Audit:
    """What a ledger comes to. Raises InputError: it is not there, or damaged.

    Attributes:
        faults: every prompt that is lost, doubled or unknown, and episodes that are not the data; empty = it holds.
        counts: prompts that were trained, or not, by reason.
        waiting: prompts that were drawn and that no line has settled.
        data: what the last start said of the data.
        since, step: the first (0 = of the whole run) and the last step that it accounts for.
        end: why the run ended; None: it goes on, or did not end in order.
        proved: episodes whose prompts are those of the data, each once.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.faults, self.data, self.end = path, list[str](), Record(), None
        self.counts, self.waiting = Counter[str](), set[int]()
        self.since = self.step = self.drawn = self.proved = 0
        self._done: dict[int, tuple[str, str]] = {}  # number -> digest, and where it was settled
        self._starts: dict[int, int] = {}  # prompts drawn before -> step
        for number, line in read_lines(path):
            where = f"{path}, line {number}"
            self._read(check(line, where, _LINE, _PARTS), where)
        if not self.data:
            raise InputError(f"{path} has no line yet")
        self._check_episodes()

    @property
    def lines(self) -> list[str]:
        """What it comes to, in words."""
        data, skipped = self.data, self.data["skipped_overlong"]
        counts = ", ".join(f"{reason} {self.counts[reason]}" for reason in (TRAINED, *GIVEN_UP, *LEFT))
        said = [f"{self.drawn} prompts drawn, of {data['prompts']} in each of {data['episodes']} episodes"]
        said[0] += f"; {skipped} are too long and never drawn" if skipped else ""
        said += [counts, f"episodes proved to be all prompts of the data, each once: {self.proved}"]
        if self.since:
            said.append(f"it accounts from step {self.since} on: an earlier release made the steps before")
        if self.end is None:
            some = shortened(sorted(self.waiting))
            said.append(f"not yet accounted for, the run did not end: {len(self.waiting)} prompts waiting{some}")
        else:
            said.append(f"the run ended after step {self.step}: {self.end}")
        return said

    def _read(self, line: Record, where: str) -> None:
        step = line.get("step", line.get("end"))
        if "prompts" in line:
            self._start(line, where)
        elif not self.data or step != self.step + ("step" in line):
            raise InputError(f"{where}: step {step} follows step {self.step}; lines are missing or twice")
        self.waiting.update(range(self.drawn, line["drawn"]))
        for reason in (TRAINED, *GIVEN_UP, *LEFT):
            for number, of in line.get(reason, ()):
                self._settle(number, of, reason, f"{reason} at step {step}")
        when = "resuming from" if "prompts" in line else "at"
        for number in sorted(self.waiting - set(line["waiting"])):
            self.faults.append(f"prompt {number} is lost {when} step {step}: neither trained, given up, nor waiting")
        for number, times in sorted(Counter(line["waiting"]).items()):
            if number not in self.waiting:
                self.faults.append(f"prompt {number} waits {when} step {step}, and is {self._fate(number)}")
            elif times > 1:
                self.faults.append(f"prompt {number} waits {times} times {when} step {step}")
        self.waiting, self.drawn, self.step = set(line["waiting"]), line["drawn"], step
        self.end = line.get("why")

    def _start(self, line: Record, where: str) -> None:
        check(line, where, {key: _PARTS[key] for key in ("step", "prompts", "episodes", "skipped_overlong", "episode")})
        same = ("prompts", "episode")
        if line["step"] < self.step:
            raise InputError(f"{where}: a start at step {line['step']} follows step {self.step}")
        if not self.data or line["step"] > self.step:  # a release without a ledger made the steps before
            self.since, self.waiting, self.drawn = line["step"], set(line["waiting"]), line["drawn"]
        elif any(line[key] != self.data[key] for key in same):
            self.faults.append(f"the run went on from step {line['step']} with other data")
        self._starts[line["drawn"]] = line["step"]
        self.data = line

    def _settle(self, number: int, of: str, reason: str, where: str) -> None:
        if number not in self.waiting:
            self.faults.append(f"prompt {number} is {where}, and was before {self._fate(number)}")
            return
        self.waiting.remove(number)
        self.counts[reason] += 1
        self._done[number] = of, where

    def _fate(self, number: int) -> str:
        return self._done[number][1] if number in self._done else "unknown: not drawn, or lost"

    def _check_episodes(self) -> None:
        size = self.data["prompts"]
        for first in range(0, self.drawn - size + 1, size):
            found = [self._done[number][0] for number in range(first, first + size) if number in self._done]
            if len(found) < size:
                continue  # some wait, or an earlier release trained them
            if hash_of(found) == self.data["episode"]:
                self.proved += 1
                continue
            again = [first + i for i, each in enumerate(found) if found.count(each) > 1]
            starts = [step for drawn, step in self._starts.items() if first <= drawn <= first + size]
            self.faults.append(
                f"prompts {first} to {first + size - 1} are not those of the data, each once: the loader went on at "
                f"another place{shortened(again, '; twice the same text and label')}"
                f"{shortened(starts, '; look at what was resumed from step')}"
            )
        due = max(size * self.data["episodes"], *self._starts)  # a run that goes on with fewer may be beyond them
        if self.end == USED_UP and self.drawn != due:
            self.faults.append(f"the prompts were used up after {self.drawn}, and {due} were due")


def shortened(numbers: list[int], before: str = "") -> str:
    """The first of them, to follow a sentence; empty if there are none."""
    more = f" and {len(numbers) - 20} more" if len(numbers) > 20 else ""
    return f"{before}: {', '.join(map(str, numbers[:20]))}{more}" if numbers else ""
