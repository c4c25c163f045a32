"""What users are given: files that appear whole or not at all, tables as text."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def in_one_piece(path: Path) -> Iterator[Path]:
    """Where to write a file that is moved to ``path`` afterwards: nobody ever finds half of it.

    What is no ordinary file, such as /dev/stdout, is written to directly: for root, a move would put a file in the
    place of the device.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with in_one_piece(path) as partial:
        partial.write_text(text, encoding="utf-8")


def aligned(rows: Sequence[Sequence[str]], pad: Callable[[str, int], str] = str.rjust) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(pad, row, widths)).rstrip() for row in rows]
