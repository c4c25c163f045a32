"""Files of JSON lines that a run writes as it goes: whole lines only, and what a resumed run repeats is moved aside."""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)
Record = dict[str, Any]


class JsonLines:
    """Appends one JSON object after the other; each is in the file when ``append`` returns.

    A process that is killed in the middle of a line leaves it unfinished: readers leave it out, and the next writer
    removes it.

    Args:
        path: the file; folders are made.
        keep: which records of an existing file stay; the others are moved to ``<path>.superseded.<n>``.

    Raises:
        ValueError: a line of the existing file, other than an unfinished last one, is not a JSON object.
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
        """Close the file."""
        self._file.close()


def read_lines(path: str | Path) -> Iterator[tuple[int, Record]]:
    """Line numbers, from 1, and objects; a last line that a dying run left unfinished is left out.

    Raises:
        ValueError: a line other than the last is not a JSON object; names file and line.
    """
    for number, line in _complete_lines(Path(path)):
        yield number, _object(line, path, number)


def _complete_lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open(encoding="utf-8", newline="\n", errors="strict") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                logger.warning("%s: the last line is unfinished and is left out", path)
                return
            yield number, line


def _object(line: str, path: str | Path, number: int) -> Record:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
    if not isinstance(record, dict):
        raise ValueError(f"{path}, line {number}: not a JSON object, but {type(record).__name__}")
    return record


def _set_aside(path: Path, keep: Callable[[Record], bool]) -> None:
    kept: list[str] = []
    superseded: list[str] = []
    for number, line in _complete_lines(path):
        (kept if keep(_object(line, path, number)) else superseded).append(line)
    if superseded:
        aside = _free_name(path)
        aside.write_text("".join(superseded), encoding="utf-8")
        logger.info("%s: %d records of an earlier run moved to %s", path, len(superseded), aside)
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(kept), encoding="utf-8")
    os.replace(partial, path)


def _free_name(path: Path) -> Path:
    number = 1
    while (candidate := path.with_name(f"{path.name}.superseded.{number}")).exists():
        number += 1
    return candidate
