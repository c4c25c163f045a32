"""What users are given: files that appear whole or not at all, tables as text."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_NO_SUCH_NAME = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


class FileDisplaced(OSError):
    """A file that this process has open is not the one under its name any more; with the remedy."""


def require_in_place(descriptor: int, path: Path) -> None:
    """Raises FileDisplaced: what is under ``path`` is not the open file ``descriptor``, so that
    whatever is written there is lost, or is in the folder of somebody else."""
    try:
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return
    except OSError as error:
        if error.errno not in _NO_SUCH_NAME:  # a network's hiccup: nobody has taken the name away
            return
    raise FileDisplaced(
        f"{path} is not the file that this process has opened: it, or the folder {path.parent}, "
        "was removed, renamed or replaced, and somebody else may work there. Nothing more is "
        "written. Begin again in another folder; if it was only renamed, rename it back and add "
        "--ckpt.load_enable"
    )


@contextmanager
def in_one_piece(path: Path) -> Iterator[Path]:
    """Where to write a file that is moved to ``path`` afterwards: nobody ever finds half of it.

    What is no ordinary file, such as /dev/stdout, is written to directly: for root, a move would
    put a file in the place of the device.
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
