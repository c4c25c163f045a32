"""metrics.jsonl: one JSON object per step, appended and flushed as the run goes.

JSON has no NaN and no infinity. Such a value is written as ``null`` under its name, and its true value as text under
``nonfinite``: ``{"step": 3, "grad_norm": null, "nonfinite": {"grad_norm": "nan"}}``. :func:`read_metrics` puts it back.
What must be known of every number of a run, for instance that a precision is emulated, is the text under ``label``.
"""

from __future__ import annotations

import math
import numbers
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from openrlhf_ext.inputs import INTEGER, NUMBER, TEXT, InputError, Kind, check, is_number, map_of, shown
from openrlhf_ext.reporting.lines import JsonLines, Record, read_lines, step_of
from openrlhf_ext.reporting.names import LABEL, NONFINITE, STEP, TIME

_NONFINITE = Kind("nan, inf or -inf", lambda value: value in ("nan", "inf", "-inf"))


class MetricsWriter:
    """Appends one record per step. A context manager.

    Records of steps after ``resume_step`` that the file already holds belong to a run that is being repeated: they are
    moved to ``<path>.superseded.<n>``, and nothing is lost. The default 0 starts the file anew in this way.

    Args:
        path: the file; folders are made.
        resume_step: last step to keep.
        now: wall clock in seconds.
        label: text in every record; empty = none.
    """

    def __init__(
        self, path: str | Path, resume_step: int = 0, now: Callable[[], float] = time.time, label: str = ""
    ) -> None:
        self._label = {LABEL: label} if label else {}
        self._now = now
        self._lines = JsonLines(path, keep=lambda record: resume_step > 0 and step_of(record) <= resume_step)

    def write(self, step: int, metrics: Mapping[str, Any]) -> Record:
        """Write one record and flush it.

        Args:
            step: the step; not smaller than that of earlier records.
            metrics: numbers by name: int, float, bool, or a numpy or torch scalar.

        Returns:
            The record with plain numbers (NaN kept), ``step``, ``time`` and ``label``.

        Raises:
            TypeError: a value is not one number.
            ValueError: ``metrics`` holds ``step``, ``time``, ``nonfinite`` or ``label``.
        """
        if reserved := {STEP, TIME, NONFINITE, LABEL}.intersection(metrics):
            raise ValueError(f"metrics may not hold {sorted(reserved)}: the writer sets them")
        record: Record = {STEP: step, TIME: self._now(), **self._label}
        record.update((name, _plain_number(name, value)) for name, value in metrics.items())
        self._lines.append(_plain(record))
        return record

    def close(self) -> None:
        self._lines.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: str | Path) -> list[Record]:
    """Read a metrics file; a last line that a dying run left unfinished is left out.

    Returns:
        Records in file order, NaN and infinities restored.

    Raises:
        InputError: a line other than the last is not a JSON object of numbers; names file and line.
    """
    return [_restored(record, path, number) for number, record in read_lines(path)]


def _plain(record: Record) -> Record:
    nonfinite = {name: str(value) for name, value in record.items() if name != LABEL and not math.isfinite(value)}
    return {**record, **dict.fromkeys(nonfinite), NONFINITE: nonfinite} if nonfinite else record


def _restored(record: Record, path: str | Path, number: int) -> Record:
    """The record with what is not finite; its values are numbers."""
    where = f"{path}, line {number}"
    check(record, where, {}, {NONFINITE: map_of(_NONFINITE)})
    record.update((name, float(text)) for name, text in record.pop(NONFINITE, {}).items())
    check(record, where, {STEP: INTEGER}, {TIME: NUMBER, LABEL: TEXT})
    if wrong := [n for n, value in record.items() if n != LABEL and not (is_number(value) or isinstance(value, float))]:
        raise InputError(f"{where}: {wrong[0]} must be a number, got {shown(record[wrong[0]])}")
    return record


def _plain_number(name: str, value: Any) -> int | float:
    if callable(getattr(value, "item", None)):
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise TypeError(f"metric {name!r} must be one number, got {type(value).__name__}")
    return int(value) if isinstance(value, numbers.Integral) else float(value)
