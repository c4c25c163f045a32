"""Files that are complete or absent: written with a running checksum, fsynced, and checked against a list."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_CHUNK_BYTES = 16 << 20


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message names the file, what is wrong, and what to do."""


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint.

    Attributes:
        path: relative to the checkpoint's folder, with forward slashes.
        size: bytes.
        sha256: hexadecimal, as ``sha256sum`` prints it.
    """

    path: str
    size: int
    sha256: str


def write_file(folder: Path, path: str, chunks: Iterable[bytes | memoryview]) -> FileEntry:
    """Writes ``folder/path``, makes it durable (fsync of file and folder) and returns its entry.

    Raises:
        CheckpointError: the operating system refused, for instance because the disk is full.
    """
    target = folder / path
    digest, size = hashlib.sha256(), 0
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            for chunk in chunks:
                view = memoryview(chunk).cast("B")
                for start in range(0, len(view), _CHUNK_BYTES):
                    part = view[start : start + _CHUNK_BYTES]
                    file.write(part)
                    digest.update(part)
                size += len(view)
            file.flush()
            os.fsync(file.fileno())
        fsync_folder(target.parent)
    except OSError as error:
        raise CheckpointError(f"cannot write {target} after {size} bytes: {error}") from error
    return FileEntry(path, size, digest.hexdigest())


def fsync_folder(folder: Path) -> None:
    """Makes the names in a folder durable: new files and renames survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_files(folder: Path, entries: Iterable[FileEntry]) -> list[str]:
    """What is wrong with the files: missing, of another size, or of another content. Empty if all are good."""
    return [problem for entry in entries if (problem := _problem(folder / entry.path, entry)) is not None]


def _problem(path: Path, entry: FileEntry) -> str | None:
    try:
        size = path.stat().st_size
        if size != entry.size:
            kind = "truncated" if size < entry.size else "longer than written"
            return f"{path} is {kind}: {size} bytes, the manifest says {entry.size}"
        if (found := sha256_of(path)) != entry.sha256:
            return f"{path} is corrupted: its SHA-256 is {found}, the manifest says {entry.sha256}"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    return None


def sha256_of(path: Path) -> str:
    """Checksum of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
