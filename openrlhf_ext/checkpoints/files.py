"""Files that are complete or absent: written with a running checksum, fsynced, and checked against
a list; and state made of plain values and small tensors as JSON, which can never run code.

JSON has no tuples, bytes, tensors, or keys other than text. They are written as objects with the
key ``"!"``, which names what they are; floats keep every bit (NaN and infinities too, in Python's
notation).
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from openrlhf_ext.inputs import sha256_of

VISIBLE_S = 60.0
"""How long a file that another machine wrote may take to appear here: network file systems
cache."""

_CHUNK_BYTES = 16 << 20


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message names the file, what is wrong, and what
    to do."""


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint; ``path`` is relative to its folder, with forward slashes,
    ``sha256`` hexadecimal."""

    path: str
    size: int
    sha256: str


def write_file(folder: Path, path: str, chunks: Iterable[bytes | memoryview]) -> FileEntry:
    """Writes ``folder/path``, makes it durable (fsync of file and folder) and returns its entry.
    Raises
    CheckpointError: the operating system refused, for instance because the disk is full."""
    digest = hashlib.sha256()
    size = write_durably(folder / path, chunks, digest.update)
    return FileEntry(path, size, digest.hexdigest())


def write_durably(
    target: Path,
    chunks: Iterable[bytes | memoryview],
    seen: Callable[[memoryview], None] = lambda part: None,
) -> int:
    """Writes a file and makes it durable; ``seen`` is called with every part. Returns the size in
    bytes."""
    size = 0
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            for chunk in chunks:
                view = memoryview(chunk).cast("B")
                for start in range(0, len(view), _CHUNK_BYTES):
                    part = view[start : start + _CHUNK_BYTES]
                    file.write(part)
                    seen(part)
                size += len(view)
            file.flush()
            os.fsync(file.fileno())
        fsync_folder(target.parent)
    except OSError as error:
        raise CheckpointError(f"cannot write {target} after {size} bytes: {error}") from error
    return size


def fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def absent_files(folder: Path, sizes: Mapping[str, int], wait_s: float) -> list[str]:
    """Files (bytes by path) that another machine wrote and that are not here with their size after
    ``wait_s`` seconds."""
    deadline, absent = time.monotonic() + wait_s, list(sizes)
    while absent := [path for path in absent if not _is_there(folder / path, sizes[path])]:
        if time.monotonic() >= deadline:
            break
        time.sleep(0.2)
    return absent


def _is_there(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except FileNotFoundError:
        return False


def deal_files(entries: Iterable[FileEntry], ranks: int) -> list[list[FileEntry]]:
    """Shares of about the same number of bytes, the same on every rank: the largest file goes to
    who has least."""
    shares: list[list[FileEntry]] = [[] for _ in range(ranks)]
    bytes_of = [0] * ranks
    for entry in sorted(entries, key=lambda entry: (-entry.size, entry.path)):
        least = bytes_of.index(min(bytes_of))
        shares[least].append(entry)
        bytes_of[least] += entry.size
    return shares


def check_files(folder: Path, entries: Iterable[FileEntry], most: float = math.inf) -> list[str]:
    """What is wrong with files; of those of more than ``most`` bytes only the size is compared."""
    return [
        problem
        for entry in entries
        if (problem := _problem(folder / entry.path, entry, most)) is not None
    ]


def _problem(path: Path, entry: FileEntry, most: float) -> str | None:
    try:
        size = path.stat().st_size
        if size != entry.size:
            kind = "truncated" if size < entry.size else "longer than written"
            return f"{path} is {kind}: {size} bytes, the manifest says {entry.size}"
        if size <= most and (found := sha256_of(path)) != entry.sha256:
            return f"{path} is corrupted: its SHA-256 is {found}, the manifest says {entry.sha256}"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    return None


_KIND = "!"


def write_plain(folder: Path, path: str, state: Any) -> FileEntry:
    """Writes ``state`` to ``folder/path``. Raises TypeError, with the place, for what no checkpoint
    holds."""
    return write_file(folder, path, [json.dumps(_encode(state, "state"), indent=1).encode()])


def read_plain(path: Path) -> Any:
    """Reads what :func:`write_plain` wrote. Raises CheckpointError: the file cannot be read or is
    not such a file."""
    try:
        return _decode(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        MemoryError,
        RuntimeError,
    ) as error:
        raise CheckpointError(f"{path} is not a state written by this program: {error}") from error


def plain_copy(state: Any) -> Any:
    """What :func:`read_plain` reads of a state that was written; raises as :func:`write_plain`."""
    return _decode(json.loads(json.dumps(_encode(state, "state"))))


def _encode(value: Any, where: str) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    match value:
        case list():
            return [_encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
        case tuple():
            return {
                _KIND: "tuple",
                "items": [_encode(item, f"{where}[{i}]") for i, item in enumerate(value)],
            }
        case dict():
            return _encode_dict(value, where)
        case bytes():
            return {_KIND: "bytes", "data": base64.b64encode(value).decode()}
        case torch.Tensor():
            return _encode_tensor(value)
        case np.ndarray():
            return {**_encode_tensor(torch.from_numpy(np.ascontiguousarray(value))), _KIND: "array"}
        case np.generic():
            return value.item()
    raise TypeError(f"{where} is a {type(value).__name__}, which a checkpoint does not hold")


def _encode_dict(value: dict, where: str) -> dict:
    encoded = {key: _encode(item, f"{where}[{key!r}]") for key, item in value.items()}
    if all(isinstance(key, str) and key != _KIND for key in value):
        return encoded
    return {
        _KIND: "dict",
        "items": [[_encode(key, f"a key of {where}"), item] for key, item in encoded.items()],
    }


def _encode_tensor(value: torch.Tensor) -> dict:
    # bytes through uint8, since numpy knows no bfloat16
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    dtype = str(value.dtype).removeprefix("torch.")
    return {
        _KIND: "tensor",
        "dtype": dtype,
        "shape": list(value.shape),
        "data": base64.b64encode(raw).decode(),
    }


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value.get(_KIND):
        case None:
            return {key: _decode(item) for key, item in value.items()}
        case "tuple":
            return tuple(_decode(item) for item in value["items"])
        case "dict":
            return {_decode(key): _decode(item) for key, item in value["items"]}
        case "bytes":
            return base64.b64decode(value["data"], validate=True)
        case "tensor":
            return _decode_tensor(value)
        case "array":
            return _decode_tensor(value).numpy()
        case kind:
            raise ValueError(f"unknown kind {kind!r}")


def _decode_tensor(value: dict) -> torch.Tensor:
    dtype = getattr(torch, value["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {value['dtype']!r}")
    raw = base64.b64decode(value["data"], validate=True)
    flat = (
        torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        if raw
        else torch.empty(0, dtype=torch.uint8)
    )
    return flat.view(dtype).reshape(value["shape"])
