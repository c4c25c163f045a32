"""The ledger of a run's prompts (ledger.jsonl): what happened to each, one line per step, and its
audit.

``{"step": 3, "trained": [[8, "9f86d081884c7d65"], ...], "filtered": [...], "drawn": 20, "waiting":
[16, 17]}``: a prompt is its number in the order of drawing, over all episodes, with a digest of
text and label. ``waiting``: drawn prompts that no line has settled yet, so that the audit finds a
lost or repeated prompt in the line where it happens. The first line, and one after each resume,
describes the data: ``episode`` is a hash of all its prompts in any order. The last line of a run
that ends in order has ``end`` instead of ``step``.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from string import hexdigits
from typing import Any

from openrlhf_ext.inputs import INTEGER, InputError, Kind, check, is_integer, list_of
from openrlhf_ext.reporting.lines import JsonLines, Record, read_lines, run_options, step_of

LEDGER = "ledger.jsonl"
USED_UP, TIME_IS_UP = "the prompts are used up", "train.max_minutes"
REASONS = ("trained", "filtered", "late", "unstarted", "skipped", "in_flight", "queued")
"""Where a prompt ended: ``skipped`` = with a rejected batch; ``in_flight`` and ``queued`` = there
when the run ended."""

Entry = tuple[int, str]
"""A prompt's number and digest."""
_MOST_LOST = 100_000  # in one line; a larger number is damage
_HASH = Kind(
    "16 hexadecimal digits",
    lambda v: isinstance(v, str) and len(v) == 16 and not set(v) - set(hexdigits),
)
_ENTRY = Kind(
    "[number, digest]",
    lambda v: isinstance(v, list) and [*map(type, v)] == [int, str] and _HASH.holds(v[1]),
)
_COUNT = Kind("a number from 1 on", lambda value: is_integer(value) and value > 0)
_LINE = {"drawn": INTEGER, "waiting": list_of(INTEGER)}
_WHY = Kind(f"{USED_UP} or {TIME_IS_UP}", lambda value: value in (USED_UP, TIME_IS_UP))
_PARTS = {"step": INTEGER, "end": INTEGER, "why": _WHY, **dict.fromkeys(REASONS, list_of(_ENTRY))}
_START = {
    "step": INTEGER,
    "prompts": _COUNT,
    "episodes": _COUNT,
    "skipped_overlong": INTEGER,
    "episode": _HASH,
}

# the option that is necessary for a prompt, or the run, to end this way
_NEEDS = {
    "filtered": "algo.dynamic_filtering_enable",
    "late": "train.late_groups",
    "unstarted": "train.agent_func_path",
    "skipped": "train.rollback_on",
    **dict.fromkeys(("in_flight", "queued", TIME_IS_UP), TIME_IS_UP),
}
_WITHOUT = (None, False, "train", "wait")  # values of these options


def digest(text: str, label: Any) -> str:
    """Returns 64 bits of a prompt in hexadecimal; the same for a label restored from a checkpoint's
    JSON."""
    return hashlib.blake2b(
        json.dumps([text, label], default=repr).encode(), digest_size=8
    ).hexdigest()


def hash_of(digests: Iterable[str]) -> str:
    """Returns the hash of prompts in any order; each counts as often as it occurs."""
    return f"{sum(int(each, 16) for each in digests) % 2**64:016x}"


def open_ledger(path: Path, resume_step: int) -> JsonLines:
    """Opens the ledger of one run. Moves aside the lines after ``resume_step`` and the end of an
    earlier part; 0 = all lines."""
    return JsonLines(path, lambda line: 0 < resume_step >= step_of(line))


class Repeats:
    """Counts prompts that are trained more often within an episode than the data contains them, for
    example after a loader restarts. ``digests``: of all prompts; ``path``: a ledger whose steps
    count."""

    def __init__(self, digests: Iterable[str], path: Path) -> None:
        self._data, self._path = Counter(digests), path
        self._size = sum(self._data.values())
        self.read()

    def read(self) -> None:
        """Starts from the current lines of the ledger."""
        self._trained = Counter[tuple[int, str]]()
        for _, line in read_lines(self._path):
            self.add(line.get("trained", ()))

    def add(self, entries: Iterable[Entry]) -> int:
        """Counts these prompts and returns how many are repeated."""
        repeated = 0
        for number, of in entries:
            self._trained[number // self._size, of] += 1
            repeated += self._trained[number // self._size, of] > self._data[of]
        return repeated


class Audit:
    """The audit of a ledger. ``faults``: lost, repeated, or unknown prompts, episodes that differ
    from the data, and reasons that the options in events.jsonl do not allow; empty = the ledger
    holds. ``counts``: prompts by reason; ``waiting``: prompts drawn and not settled; ``end``: why
    the run ended, None = it goes on, or did not end in order; ``proved``: episodes that contain all
    prompts of the data, each once; ``since``: the first step that the ledger covers. Raises
    InputError if there is no ledger, or it is damaged."""

    def __init__(self, path: Path) -> None:
        self.faults, self.counts, self.waiting = list[str](), Counter[str](), set[int]()
        self.since = self.step = self.drawn = self.proved = 0
        self.end: str | None = None
        self._data = Record()
        self._settled: dict[int, tuple[str, str]] = {}  # number -> digest, and where
        self._starts: dict[int, int] = {}  # prompts drawn before -> step
        starts, last = run_options(path.with_name("events.jsonl"))
        self._sizes = {
            each["rollout.batch_size"] for each in starts if "rollout.batch_size" in each
        }
        for number, line in read_lines(path):
            where = f"{path}, line {number}"
            self._read(check(line, where, _LINE, _PARTS), where)
        if not self._data:
            raise InputError(f"{path} has no line yet")
        for reason, name in _NEEDS.items() if starts else ():
            count = self.counts[reason]
            if (count or self.end == reason) and all(
                one.get(name, True) in _WITHOUT for one in starts
            ):
                self.faults.append(
                    f"{reason} ended {count} prompts, or the run, and {name} does not allow it"
                )
        if last == "end" and self.end is None:
            raise InputError(f"{path} has no end, and events.jsonl has one; lines are missing")
        self._check_last(path)
        self._check_episodes()

    @property
    def lines(self) -> list[str]:
        """The result as text; the verdict first."""
        look = (
            "look at events.jsonl and the log around their steps (resumes, replaced engines, "
            "dropped groups)"
        )
        size, episodes, skipped = (
            self._data[key] for key in ("prompts", "episodes", "skipped_overlong")
        )
        since = (
            f"from step {self.since} on: another run folder or an earlier release has the steps "
            "before"
        )
        waits = f"{len(self.waiting)} prompts{_some(', numbers ', sorted(self.waiting))}"
        open_end = (
            f"step {self.step}: the run goes on, or did not end in order; not yet accounted for: "
            f"{waits}"
        )
        return [
            f"the ledger does not hold, {len(self.faults)} faults: {look}"
            if self.faults
            else f"the ledger holds{f' from step {self.since} on' if self.since else ''}",
            f"{self.drawn} prompts drawn, of {size} in each of {episodes} episodes; {skipped} "
            "too long, never drawn",
            ", ".join(f"{reason} {self.counts[reason]}" for reason in REASONS),
            f"episodes proved to be all prompts of the data, each once: {self.proved}",
            *([since] if self.since else []),
            f"the run ended after step {self.step}: {self.end}" if self.end else open_end,
        ]

    def _read(self, line: Record, where: str) -> None:
        step: int = line["step"] if "step" in line else line.get("end", -1)
        starts = "prompts" in line
        if starts:
            self._start(check(line, where, _START), where)
        elif not self._data or step != self.step + ("step" in line) or self.end is not None:
            raise InputError(
                f"{where}: step {step} follows step {self.step}; lines are missing or there twice"
            )
        if ("end" in line) != bool(line.get("why")):
            raise InputError(f"{where}: an end, and no other line, says why")
        entries = [
            (n, of, f"{reason} at step {step}")
            for reason in REASONS
            for n, of in line.get(reason, ())
        ]
        if line["drawn"] - self.drawn not in range(
            len(entries) + len(line["waiting"]) + _MOST_LOST
        ):
            raise InputError(
                f"{where}: {line['drawn']} prompts cannot be drawn, after {self.drawn} before"
            )
        self.waiting.update(range(self.drawn, line["drawn"]))
        for number, of, what in entries:
            self._settle(number, of, what)
        when = f"{'resuming from' if starts else 'at'} step {step}"
        lost = sorted(self.waiting - set(line["waiting"]))
        self.faults += [
            f"prompt {n} is lost {when}: neither trained, nor given up, nor waiting" for n in lost
        ]
        for number, times in sorted(Counter(line["waiting"]).items()):
            if times > 1 or number not in self.waiting:
                self.faults.append(
                    f"prompt {number} waits {when}, {times} times, and is {self._fate(number)}"
                )
        due, count = self._data["prompts"] * self._data["episodes"], len(line.get("trained", ()))
        is_last = not line["waiting"] and line["drawn"] >= due
        if (
            "step" in line
            and not starts
            and self._sizes
            and count not in self._sizes
            and not is_last
        ):
            self.faults.append(
                f"step {step} trained {count} prompts, rollout.batch_size is {sorted(self._sizes)}"
            )
        self.waiting, self.drawn, self.step, self.end = (
            set(line["waiting"]),
            line["drawn"],
            step,
            line.get("why"),
        )

    def _start(self, line: Record, where: str) -> None:
        step = line["step"]
        if self._data and step != self.step:
            said = (
                f"a start at step {step} follows step {self.step}; lines are missing or there twice"
            )
            raise InputError(f"{where}: {said}")
        if not self._data:  # step > 0: an earlier release without a ledger made the others
            self.since, self.waiting, self.drawn = step, set(line["waiting"]), line["drawn"]
        elif any(line[key] != self._data[key] for key in ("prompts", "episode")):
            self.faults.append(f"the run went on from step {step} with other data")
        self._data, self._starts[line["drawn"]], self.end = line, step, None

    def _settle(self, number: int, of: str, what: str) -> None:
        if number in self._settled or number not in self.waiting:
            self.faults.append(f"prompt {number} is {what}, and was before {self._fate(number)}")
        self.waiting.discard(number)
        self.counts[what.split()[0]] += 1
        self._settled[number] = of, what

    def _fate(self, number: int) -> str:
        here = (
            "waiting"
            if number in self.waiting
            else "not drawn, or lost, or trained before this ledger"
        )
        return self._settled[number][1] if number in self._settled else here

    def _check_last(self, path: Path) -> None:
        if self.end is not None and self.waiting:
            self.faults.append(
                f"the run has ended, and prompts still wait{_some(': ', sorted(self.waiting))}"
            )
        metrics = path.with_name("metrics.jsonl")
        recorded = (
            max((step_of(line) for _, line in read_lines(metrics)), default=0)
            if metrics.exists()
            else 0
        )
        if recorded > self.step + 1:  # one step is recorded before its line is written
            raise InputError(
                f"{path} ends with step {self.step}, {metrics.name} with {recorded}; lines are "
                "missing"
            )

    def _check_episodes(self) -> None:
        size, episodes = self._data["prompts"], dict[int, dict[int, str]]()  # by its first number
        for number, (of, _) in sorted(self._settled.items()):
            if number < self.drawn:
                episodes.setdefault(number - number % size, {})[number] = of
        due = size * self._data["episodes"]
        for first, found in episodes.items():
            last = min(first + size, self.drawn) - 1
            is_over = last == first + size - 1 or (self.end == USED_UP and first < due)
            if len(found) <= last - first or not is_over:
                continue  # some wait, or are of an earlier release
            if hash_of(found.values()) == self._data["episode"]:
                self.proved += 1
                continue
            times = Counter(found.values())
            starts = [step for drawn, step in self._starts.items() if first < drawn <= first + size]
            self.faults.append(
                f"prompts {first} to {last} are not those of the data, each once: the loader "
                f"went on at another place{_some(', resumed from step ', starts)}"
                f"{_some('; twice there: ', [number for number, of in found.items() if times[of] > 1])}"
            )
        # a resume with fewer episodes may already be beyond them
        if self.end == USED_UP and self.drawn != max(due, *self._starts):
            self.faults.append(f"the prompts were used up after {self.drawn}, and {due} were due")


def _some(before: str, numbers: list[int]) -> str:
    """Returns ``before`` and the first numbers; empty if there are none."""
    return (
        f"{before}{', '.join(map(str, numbers[:20]))}{', ...' * (len(numbers) > 20)}"
        if numbers
        else ""
    )
