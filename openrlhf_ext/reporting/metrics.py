"""metrics.jsonl: one JSON object per step, appended and flushed as the run goes.

JSON has no NaN and no infinity. Such a value is written as ``null`` under its name, and its true value as text under
``nonfinite``: ``{"step": 3, "grad_norm": null, "nonfinite": {"grad_norm": "nan"}}``. :func:`read_metrics` puts it back.
What must be known of every number of a run, for instance that its FP8 is emulated, is the text under ``label``.
"""

from __future__ import annotations

import json
import logging
import math
import numbers
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from openrlhf_ext.reporting.names import LABEL, NONFINITE, STEP, TIME

logger = logging.getLogger(__name__)
Record = dict[str, Any]


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
        self._path = Path(path)
        self._label = {LABEL: label} if label else {}
        self._now = now
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            _set_aside(self._path, resume_step)
        self._file: TextIO = self._path.open("a", encoding="utf-8", buffering=1)

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
        self._file.write(_to_line(record))
        self._file.flush()
        return record

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: str | Path) -> list[Record]:
    """Read a metrics file; a last line that a dying run left unfinished is left out.

    Returns:
        Records in file order, NaN and infinities restored.

    Raises:
        ValueError: a line other than the last is not a JSON object; names file and line.
    """
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    complete, unfinished = lines[:-1], lines[-1]
    if unfinished:
        logger.warning("%s: the last line is unfinished and is left out", path)
    return [_from_line(line, path, number) for number, line in enumerate(complete, start=1)]


def _to_line(record: Record) -> str:
    nonfinite = {name: str(value) for name, value in record.items() if name != LABEL and not math.isfinite(value)}
    if nonfinite:
        record = {**record, **dict.fromkeys(nonfinite), NONFINITE: nonfinite}
    return json.dumps(record, allow_nan=False) + "\n"


def _from_line(line: str, path: str | Path, number: int) -> Record:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
    if not isinstance(record, dict) or STEP not in record:
        raise ValueError(f"{path}, line {number}: not a metrics record (an object with {STEP!r})")
    record.update((name, float(text)) for name, text in record.pop(NONFINITE, {}).items())
    return record


def _plain_number(name: str, value: Any) -> int | float:
    if callable(getattr(value, "item", None)):
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise TypeError(f"metric {name!r} must be one number, got {type(value).__name__}")
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _set_aside(path: Path, resume_step: int) -> None:
    """Keep the records up to ``resume_step`` in ``path``; move the rest beside it."""
    records = read_metrics(path)
    kept = [record for record in records if record[STEP] <= resume_step]
    superseded = [record for record in records if record[STEP] > resume_step]
    if resume_step == 0:
        kept, superseded = [], records
    if superseded:
        aside = _free_name(path)
        _write_all(aside, superseded)
        logger.info("%s: %d records of an earlier run moved to %s", path, len(superseded), aside)
    partial = path.with_name(path.name + ".partial")
    _write_all(partial, kept)
    os.replace(partial, path)


def _free_name(path: Path) -> Path:
    number = 1
    while (candidate := path.with_name(f"{path.name}.superseded.{number}")).exists():
        number += 1
    return candidate


def _write_all(path: Path, records: Iterable[Record]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(map(_to_line, records))
