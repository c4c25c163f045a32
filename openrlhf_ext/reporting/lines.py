"""What a run writes as it goes, in lines of JSON: metrics.jsonl, events.jsonl, samples.jsonl.

Whole lines only, and what a resumed run repeats is moved aside. JSON has no NaN and no infinity: in
metrics.jsonl such a value is ``null`` under its name, and its true value text under ``nonfinite``:
``{"step": 3, "grad_norm": null, "nonfinite": {"grad_norm": "nan"}}``; :func:`read_metrics` puts it
back. What must be known of every number of a run, for instance that a precision is emulated, is the
text under ``label``.
"""

from __future__ import annotations

import io
import json
import logging
import math
import numbers
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, Self

from openrlhf_ext.inputs import (
    INTEGER,
    MAP,
    NUMBER,
    TEXT,
    InputError,
    Kind,
    check,
    decode,
    free_name,
    is_number,
    json_lines,
    map_of,
    shown,
)
from openrlhf_ext.outputs import in_one_piece, require_in_place
from openrlhf_ext.redaction import redacted
from openrlhf_ext.reporting.names import LABEL, NONFINITE, STEP, TIME

logger = logging.getLogger(__name__)
Record = dict[str, Any]


class JsonLines:
    """Appends one JSON object after the other; each is in the file when ``append`` returns.

    A process that is killed in the middle of a line leaves it unfinished: readers leave it out, and
    the next writer removes it. ``keep``: which records of an existing file stay; the others are
    moved to ``<path>.superseded.<n>``, and with them lines that are no JSON objects.
    """

    def __init__(self, path: str | Path, keep: Callable[[Record], bool]) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._opened(keep)

    def keep(self, keep: Callable[[Record], bool]) -> None:
        self._file.close()
        self._file = self._opened(keep)

    def _opened(self, keep: Callable[[Record], bool]) -> io.FileIO:
        if self._path.exists():
            _set_aside(self._path, keep)
        # without a buffer of Python's: a line that could not be written is not tried again at the
        # end of the process
        return io.FileIO(self._path, "a")

    def append(self, record: Record) -> None:
        """Writes one line; a line that does not fit on the disk leaves nothing behind. ValueError:
        a number is not finite; FileDisplaced: the file is not the one under its name any more."""
        require_in_place(self._file.fileno(), self._path)
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        before = self._file.seek(0, os.SEEK_END)
        try:
            written = self._file.write(line)
        except OSError as error:
            raise OSError(
                error.errno, f"a line could not be written: {error.strerror}", str(self._path)
            ) from error
        if written != len(line):
            self._file.truncate(before)
            raise OSError(
                f"{self._path}: {written} of the {len(line)} bytes of a line could be written; "
                "disk full?"
            )

    def close(self) -> None:
        self._file.close()


def read_lines(path: str | Path) -> Iterator[tuple[int, Record]]:
    """Line numbers, from 1, and objects; a last line that a dying run left unfinished is left
    out."""
    for number, line in _complete_lines(Path(path)):
        yield number, _object(line, path, number)


def step_of(record: Record) -> float:
    """Infinite, after all steps, where a record has none."""
    step: Any = record.get("step")
    return step if is_number(step) else math.inf


def _complete_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    for number, line in json_lines(path):
        if not line.endswith(b"\n"):
            logger.warning("%s: the last line is unfinished and is left out", path)
            return
        yield number, line


def _object(line: bytes, path: str | Path, number: int) -> Record:
    where = f"{path}, line {number}"
    return check(decode(line, where), where, {})


def _set_aside(path: Path, keep: Callable[[Record], bool]) -> None:
    """What cannot be read is moved as well: it may be of anyone, and nothing that is kept depends
    on it."""
    kept: list[bytes] = []
    superseded: list[bytes] = []
    for number, line in _complete_lines(path):
        try:
            is_kept = keep(_object(line, path, number))
        except InputError as error:
            logger.warning("%s; the line is moved aside", error)
            is_kept = False
        (kept if is_kept else superseded).append(line)
    if superseded:
        aside = free_name(path.with_name(f"{path.name}.superseded"))
        aside.write_bytes(b"".join(superseded))
        logger.info("%s: %d records of an earlier run moved to %s", path, len(superseded), aside)
    with in_one_piece(path) as partial:
        partial.write_bytes(b"".join(kept))


# ---- metrics.jsonl

_NONFINITE = Kind("nan, inf or -inf", lambda value: value in ("nan", "inf", "-inf"))


class Writer:
    """Of a file of lines, or of none; a context manager."""

    _lines: JsonLines | None

    def repeat_from(self, step: int) -> None:
        """Steps after this one are made again: what the file holds of them is moved aside."""
        if self._lines is not None:
            self._lines.keep(
                lambda record: str(record.get("event")) in _OF_THE_RUN or step_of(record) <= step
            )

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MetricsWriter(Writer):
    """Appends one record per step.

    Records of steps after ``resume_step`` that the file already holds belong to a run that is being
    repeated: they are moved to ``<path>.superseded.<n>``, and nothing is lost. The default 0 starts
    the file anew in this way. ``now``:
    wall clock in seconds.
    """

    def __init__(
        self,
        path: str | Path,
        resume_step: int = 0,
        now: Callable[[], float] = time.time,
        label: str = "",
    ) -> None:
        self._label = {LABEL: label} if label else {}
        self._now = now
        self._lines: JsonLines = JsonLines(
            path, lambda r: resume_step > 0 and step_of(r) <= resume_step
        )

    def write(self, step: int, metrics: Mapping[str, Any]) -> Record:
        """Writes and returns a record: plain numbers (NaN kept), ``step``, ``time`` and ``label``.

        Metrics are int, float, bool, or a numpy or torch scalar; TypeError if a value is not one
        number.
        """
        if reserved := {STEP, TIME, NONFINITE, LABEL}.intersection(metrics):
            raise ValueError(f"metrics may not hold {sorted(reserved)}: the writer sets them")
        record: Record = {STEP: step, TIME: self._now(), **self._label}
        record.update((name, _plain_number(name, value)) for name, value in metrics.items())
        self._lines.append(_plain(record))
        return record


def read_metrics(path: str | Path, names: AbstractSet[str] | None = None) -> list[Record]:
    """Records in file order, NaN and infinities restored; a last line that a dying run left
    unfinished is left out.
    ``names``: which metrics of each are kept, None = all."""
    records = (_restored(record, path, number) for number, record in read_lines(path))
    return [
        each if names is None else {name: each[name] for name in names & each.keys()}
        for each in records
    ]


def _plain(record: Record) -> Record:
    nonfinite = {
        name: str(value)
        for name, value in record.items()
        if name != LABEL and not math.isfinite(value)
    }
    return {**record, **dict.fromkeys(nonfinite), NONFINITE: nonfinite} if nonfinite else record


def _restored(record: Record, path: str | Path, number: int) -> Record:
    """The record with what is not finite; its values are numbers."""
    where = f"{path}, line {number}"
    check(record, where, {}, {NONFINITE: map_of(_NONFINITE)})
    record.update((name, float(text)) for name, text in record.pop(NONFINITE, {}).items())
    check(record, where, {STEP: INTEGER}, {TIME: NUMBER, LABEL: TEXT})
    if wrong := [
        n
        for n, value in record.items()
        if n != LABEL and not (is_number(value) or isinstance(value, float))
    ]:
        raise InputError(f"{where}: {wrong[0]} must be a number, got {shown(record[wrong[0]])}")
    return record


def _plain_number(name: str, value: Any) -> int | float:
    if callable(getattr(value, "item", None)):
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise TypeError(f"metric {name!r} must be one number, got {type(value).__name__}")
    return int(value) if isinstance(value, numbers.Integral) else float(value)


# ---- events.jsonl

EVENTS = {
    "start": "the command began: `options` (without secrets), those `set`, `versions`, `hardware`, "
    "`layout`, and `resume_step`: of the newest checkpoint if it is asked to resume, else 0",
    "ready": "engines and ranks are up: `processes`, by name their host and process id, and `steps`, how "
    "many are due",
    "resumed": "the ranks have loaded the checkpoint of `resume_step` from `path`",
    "evaluation": "`accuracy`, its standard error `stderr`, and `samples`",
    "checkpoint": "a checkpoint is complete: `of_step`, `path`, `mib`, `seconds`, and `best` if it is the "
    "best so far",
    "engine_replaced": "`engines` died or hang and are replaced: `of` (`rollout engine` or `guide engine`), `why`, "
    "and `restarts` so far",
    "engine_lost": "`engine` died or hangs, and the others, `alive` of them, go on (`vllm.min_engines`): `of`, "
    "`why`",
    "engine_joined": "a new `engine` has the policy's weights and samples: `of`, and how many are `alive`",
    "groups_dropped": "groups that were not trained in this step: `filtered` by dynamic sampling, too `late`, "
    "with an episode that failed before its first word (`unstarted`), `skipped` after a rollback",
    "groups_late": "`count` groups of the step lagged by more than `train.max_staleness`, and were trained",
    "corridor_left": "the step is outside of `train.corridor`: `metrics`, by name the `value` (null: none), and "
    "`low` and `high` of the band",
    "rollback": "`step` was not accepted, `why`: the run went back to step `to` and leaves `prompts` (their "
    "numbers in the order of drawing) out; `rollbacks` so far",
    "not_exact": "with `train.exact_rollout_enable`: `differing` of `tokens` log-probs are not the same bits in "
    "policy and engine; the worst `token`, its `place`, and both log-probs, `policy` and `engine`",
    "slow_rank": "policy `rank` on `host` holds the others up: `seconds` of its own, `over_mean` times the "
    "mean",
    "profile": "a rank's step was profiled: `rank`, `seconds` by kind, and `trace`, the file on `host`",
    "output_lost": "what the run shows cannot be written any more, to standard output or error: `why`; it goes "
    "on",
    "failure": "the run failed: `error` is the whole text that the terminal has, `traceback` has every "
    "frame of the driver",
    "restart": "it begins again from the last checkpoint: `number` of at most `most`",
    "interrupted": "the `signal` that ended the run, SIGINT (Ctrl-C), SIGTERM or SIGHUP; the newest "
    "`checkpoint`, or `why` the driver could not say it",
    "end": "the final checkpoint is in `path`; `results`: of the first and the last step and "
    "evaluation",
}
"""Kinds of events and their facts; docs/report.md shows this table."""

_OF_THE_RUN = {"start", "ready", "resumed", "failure", "restart", "rollback", "interrupted", "end"}


def run_options(path: Path) -> tuple[list[Record], str]:
    """The options of every start that events.jsonl tells of, and which of start, failure and end
    came last."""
    events = [event for _, event in read_lines(path)] if path.is_file() else []
    starts = [
        check(each, str(path), {"options": MAP})["options"]
        for each in events
        if each.get("event") == "start"
    ]
    ends = [
        each["event"]
        for each in events
        if each.get("event") in ("start", "restart", "failure", "end")
    ]
    return starts, ends[-1] if ends else ""


class EventLog(Writer):
    """Writes the events of one run.

    A run that starts anew moves the events of an earlier one to ``<path>.superseded.<n>``. One that
    ``goes_on`` keeps what happened to the run as a whole (its starts, failures, restarts), and what
    belongs to steps that are not repeated. Without a path events are kept nowhere. ``step``: the
    training step that is being made, or was made last; 0 before the first.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        goes_on: bool = False,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._now, self.step = now, 0
        self._lines = JsonLines(path, keep=lambda _: goes_on) if path is not None else None

    def note(self, event: str, **facts: Any) -> None:
        """Writes one of ``EVENTS``, without passwords of addresses; facts are what JSON can
        hold."""
        if event not in EVENTS:
            raise KeyError(f"unknown event {event!r}; known are {', '.join(EVENTS)}")
        if self._lines is not None:
            self._lines.append(
                {"event": event, "step": self.step, "time": self._now(), **redacted(facts)}
            )

    def repeat_from(self, step: int) -> None:
        super().repeat_from(step)
        self.step = step


# ---- samples.jsonl, in the form that explain reads, and eval_samples.jsonl

_PARTS_OF_A_RUN = 20
_TOKENS = 1 << 16  # some 40 bytes each: 20 steps of a run whose groups hold no more take 50 MB
_DECIMALS = 4  # of numbers per token
# of those whose difference is looked at: a gap in fp32 is some 1e-6
_FINE_DECIMALS = {"logprobs": 7, "rollout_logprobs": 7}


class SampleWriter(Writer):
    """Writes completions of the steps that are due: the first, and every ``every``-th.

    None = a twentieth of the run, -1 = never. Completions of steps after ``resume_step`` are moved
    aside.
    """

    def __init__(
        self,
        path: str | Path,
        every: int | None,
        total_steps: int,
        texts: Callable[[list[int]], list[str]],
        groups: int,
        resume_step: int = 0,
    ) -> None:
        self._every = max(1, math.ceil(total_steps / _PARTS_OF_A_RUN)) if every is None else every
        self._lines: JsonLines = JsonLines(
            path, lambda record: resume_step > 0 and step_of(record) <= resume_step
        )
        self._texts, self._groups = texts, groups

    def groups_due(self, step: int) -> int | None:
        """How many groups of the step are written, 0 = all; None = none."""
        return (
            self._groups if self._every != -1 and (step == 1 or step % self._every == 0) else None
        )

    def write(self, step: int, completions: Sequence[Mapping[str, Any]]) -> None:
        """Writes completions: keys of the format but ``tokens``, and ``advantages``."""
        for completion in completions:
            numbers = {
                key: [_rounded(key, value) for value in values]
                for key, values in completion.items()
                if isinstance(values, list) and key not in ("token_ids", "label")
            }
            tokens = self._texts(completion["token_ids"])
            self._lines.append({"step": step, **completion, "tokens": tokens, **numbers})


class HeldOutWriter(SampleWriter):
    """Writes completions of the evaluations that are due: the first, and each that is ``every``
    steps or more after the one that was written last."""

    _last = -math.inf

    def groups_due(self, step: int) -> int | None:
        is_due = self._every != -1 and step - self._last >= self._every
        return self._groups if is_due else None

    def write(self, step: int, completions: Sequence[Mapping[str, Any]]) -> None:
        super().write(step, completions)
        self._last = step

    def repeat_from(self, step: int) -> None:
        super().repeat_from(step)
        self._last = min(self._last, step)


def chosen_groups(lengths: Sequence[int], groups: int) -> list[int]:
    """Positions of the groups of a step that are kept: the first that fit into the bound, or the
    shortest one if none does; 0 ``groups`` = all of them, whatever their size. ``lengths``: tokens
    of each."""
    if groups == 0:
        return list(range(len(lengths)))
    fitting: list[int] = []
    left = _TOKENS
    for position, tokens in enumerate(lengths):
        if tokens <= left and len(fitting) < groups:
            fitting.append(position)
            left -= tokens
    return fitting or [min(range(len(lengths)), key=lengths.__getitem__)]


def _rounded(key: str, value: float) -> float | None:
    """None stands for what is not finite, which JSON cannot hold."""
    if not math.isfinite(value):
        return None
    value = round(value, _FINE_DECIMALS.get(key, _DECIMALS))
    # rounding leaves the entropy of a certain token a little below 0, and its log-prob a little
    # above
    limits = {"entropies": max(0.0, value), "logprobs": min(0.0, value)}
    return limits.get(key, value)
