"""State made of plain values and small tensors, as JSON: reading it can never run code.

JSON has no tuples, bytes, tensors, or keys other than text. They are written as objects with the key ``"!"``, which
names what they are; floats keep every bit (NaN and infinities too, in Python's notation).
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from openrlhf_ext.checkpoints.files import CheckpointError, FileEntry, write_file

_KIND = "!"


def write_plain(folder: Path, path: str, state: Any) -> FileEntry:
    """Writes ``state`` to ``folder/path``.

    Raises:
        TypeError: it holds something else than None, numbers, text, bytes, lists, tuples, dictionaries, tensors and
            numpy arrays; the message says where.
    """
    return write_file(folder, path, [json.dumps(_encode(state, "state"), indent=1).encode()])


def read_plain(path: Path) -> Any:
    """Reads what :func:`write_plain` wrote. Raises CheckpointError: the file cannot be read or is not such a file."""
    try:
        return _decode(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not a state written by this program: {error}") from error


def _encode(value: Any, where: str) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    match value:
        case list():
            return [_encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
        case tuple():
            return {_KIND: "tuple", "items": [_encode(item, f"{where}[{i}]") for i, item in enumerate(value)]}
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
    return {_KIND: "dict", "items": [[_encode(key, f"a key of {where}"), item] for key, item in encoded.items()]}


def _encode_tensor(value: torch.Tensor) -> dict:
    # bytes through uint8, since numpy knows no bfloat16
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    dtype = str(value.dtype).removeprefix("torch.")
    return {_KIND: "tensor", "dtype": dtype, "shape": list(value.shape), "data": base64.b64encode(raw).decode()}


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
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(value["shape"])
