"""Files of JSON lines that a run writes as it goes: whole lines only, and what a resumed run repeats is moved aside."""

from __future__ import annotations

import io
import json
import logging
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from openrlhf_ext.inputs import InputError, check, decode, is_number, json_lines
from openrlhf_ext.outputs import in_one_piece

logger = logging.getLogger(__name__)
Record = dict[str, Any]


class JsonLines:
    """Appends one JSON object after the other; each is in the file when ``append`` returns.

    A process that is killed in the middle of a line leaves it unfinished: readers leave it out, and the next writer
    removes it.

    Args:
        path: the file; folders are made.
        keep: which records of an existing file stay; the others are moved to ``<path>.superseded.<n>``, and with them
            lines that are no JSON objects.
    """

    def __init__(self, path: str | Path, keep: Callable[[Record], bool]) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._opened(keep)

    def keep(self, keep: Callable[[Record], bool]) -> None:
        """Moves aside what is not to be kept of what the file holds."""
        self._file.close()
        self._file = self._opened(keep)

    def _opened(self, keep: Callable[[Record], bool]) -> io.FileIO:
        if self._path.exists():
            _set_aside(self._path, keep)
        # without a buffer of Python's: a line that could not be written is not tried again at the end of the process
        return io.FileIO(self._path, "a")

    def append(self, record: Record) -> None:
        """Writes one line; a line that does not fit on the disk leaves nothing behind.

        Raises:
            OSError: naming the file.
            ValueError: a number is not finite.
        """
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        before = self._file.seek(0, os.SEEK_END)
        try:
            written = self._file.write(line)
        except OSError as error:
            raise OSError(error.errno, f"a line could not be written: {error.strerror}", str(self._path)) from error
        if written != len(line):
            self._file.truncate(before)
            raise OSError(f"{self._path}: {written} of the {len(line)} bytes of a line could be written; disk full?")

    def close(self) -> None:
        self._file.close()


def read_lines(path: str | Path) -> Iterator[tuple[int, Record]]:
    """Line numbers, from 1, and objects; a last line that a dying run left unfinished is left out.

    Raises:
        InputError: a line other than the last is not a JSON object; names file and line.
    """
    for number, line in _complete_lines(Path(path)):
        yield number, _object(line, path, number)


def step_of(record: Record) -> float:
    """The step of a record; infinite, after all steps, where it has none."""
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
    """What cannot be read is moved as well: it may be of anyone, and nothing that is kept depends on it."""
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
        aside = _free_name(path)
        aside.write_bytes(b"".join(superseded))
        logger.info("%s: %d records of an earlier run moved to %s", path, len(superseded), aside)
    with in_one_piece(path) as partial:
        partial.write_bytes(b"".join(kept))


def _free_name(path: Path) -> Path:
    number = 1
    while (candidate := path.with_name(f"{path.name}.superseded.{number}")).exists():
        number += 1
    return candidate
