"""Tensors cut into pieces over the ranks of one layout, and put together for the ranks of another.

A global tensor is cut into disjoint boxes (*blocks*: what one model-parallel rank holds), and a
block into ranges of its row-major elements (*pieces*: what one data-parallel rank holds of it).
Every rank writes its pieces into one safetensors file; an index says which piece is where. A reader
asks for any range of any block of any layout.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from openrlhf_ext.checkpoints.files import (
    CheckpointError,
    FileEntry,
    read_plain,
    write_file,
    write_plain,
)
from openrlhf_ext.inputs import INNER_PATH, shown

# safetensors' names of the types
TYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class Block:
    """A box of a global tensor: elements ``offset`` to ``offset + shape`` of each dimension."""

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def overlap(self, other: Block) -> tuple[slice, ...] | None:
        shared = []
        for mine, size, theirs, other_size in zip(
            self.offset, self.shape, other.offset, other.shape, strict=True
        ):
            low, high = max(mine, theirs), min(mine + size, theirs + other_size)
            if low >= high:
                return None
            shared.append(slice(low, high))
        return tuple(shared)

    def local(self, box: Sequence[slice]) -> tuple[slice, ...]:
        return tuple(slice(s.start - o, s.stop - o) for s, o in zip(box, self.offset, strict=True))


@dataclass(frozen=True)
class BlockRange:
    block: Block
    start: int
    end: int

    @classmethod
    def whole(cls, block: Block) -> BlockRange:
        return cls(block, 0, block.numel)

    @property
    def name(self) -> str:
        """Name of the tensor in its safetensors file; unique in a checkpoint."""
        return f"{self.block.key}@{'.'.join(map(str, self.block.offset))}+{self.start}"

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return (
            self.block.shape
            if (self.start, self.end) == (0, self.block.numel)
            else (self.end - self.start,)
        )


def write_pieces(folder: Path, path: str, pieces: Sequence[tuple[BlockRange, Tensor]]) -> FileEntry:
    """Writes a safetensors file; host memory holds one tensor at a time (GPU), none (CPU)."""
    entries = [(piece.name, tensor.dtype, piece.stored_shape) for piece, tensor in pieces]
    return write_file(folder, path, safetensors_chunks(entries, (tensor for _, tensor in pieces)))


def safetensors_chunks(
    entries: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], values: Iterable[Tensor]
) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file; host memory holds one of ``values`` at a time (GPU), none
    (CPU). ``entries``:
    name, type and shape; ``values``: their elements in the same order, row-major, in tensors of any
    shape, size and device."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in entries:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": TYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for value in values:
        flat = value.detach().cpu().contiguous().reshape(-1)
        if flat.numel():
            yield flat.view(torch.uint8).numpy().data


@dataclass(frozen=True)
class StoredTensor:
    dtype: str
    global_shape: tuple[int, ...]
    pieces: tuple[tuple[BlockRange, str], ...]  # (piece, file)


class TensorIndex:
    def __init__(self, tensors: dict[str, StoredTensor]) -> None:
        self.tensors = tensors

    @classmethod
    def build(cls, pieces: Iterable[tuple[BlockRange, str, str]]) -> TensorIndex:
        """From (piece, name of its dtype, file) of all ranks. Raises CheckpointError: the pieces of
        a tensor leave a hole or lie on each other, so nothing could be restored."""
        by_key: dict[str, list[tuple[BlockRange, str, str]]] = defaultdict(list)
        for piece, dtype, file in pieces:
            by_key[piece.block.key].append((piece, dtype, file))
        tensors = {}
        for key, found in sorted(by_key.items()):
            dtypes, shapes = {d for _, d, _ in found}, {p.block.global_shape for p, _, _ in found}
            if len(dtypes) != 1 or len(shapes) != 1:
                raise CheckpointError(
                    f"the ranks disagree on {key}: dtypes {sorted(dtypes)}, shapes {sorted(shapes)}"
                )
            tensors[key] = StoredTensor(
                dtypes.pop(), shapes.pop(), tuple((p, file) for p, _, file in found)
            )
        for key, tensor in tensors.items():
            covered = sum(piece.end - piece.start for piece, _ in tensor.pieces)
            distinct = len({(piece.block, piece.start) for piece, _ in tensor.pieces})
            if covered != math.prod(tensor.global_shape) or distinct != len(tensor.pieces):
                raise CheckpointError(
                    f"the ranks hold {covered} elements in {distinct} distinct pieces of {key}, "
                    f"which has {math.prod(tensor.global_shape)} in {len(tensor.pieces)}"
                )
        return cls(tensors)

    def write(self, folder: Path, path: str) -> FileEntry:
        return write_plain(
            folder, path, {key: _stored_to_plain(t) for key, t in self.tensors.items()}
        )

    @classmethod
    def read(cls, path: Path) -> TensorIndex:
        """Reads what :meth:`write` wrote. Raises CheckpointError: it is not an index."""
        plain = read_plain(path)
        try:
            return cls({key: _stored_from_plain(key, value) for key, value in plain.items()})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is not an index of tensors: {error!r}") from error


def _stored_to_plain(tensor: StoredTensor) -> dict:
    pieces = [
        [list(p.block.offset), list(p.block.shape), p.start, p.end, file]
        for p, file in tensor.pieces
    ]
    return {"dtype": tensor.dtype, "shape": list(tensor.global_shape), "pieces": pieces}


def _stored_from_plain(key: str, value: dict) -> StoredTensor:
    shape = tuple(value["shape"])
    pieces = tuple(
        (
            BlockRange(Block(key, shape, tuple(offset), tuple(size)), int(start), int(end)),
            _inside(file),
        )
        for offset, size, start, end, file in value["pieces"]
    )
    return StoredTensor(str(value["dtype"]), shape, pieces)


def _inside(file: str) -> str:
    if not INNER_PATH.holds(file):
        raise ValueError(f"{shown(file)} must be {INNER_PATH.words}")
    return file


class TensorReader:
    """Reads any block of any layout from a checkpoint's tensors, whose files are named relative to
    ``folder``."""

    def __init__(self, folder: Path, index: TensorIndex) -> None:
        self.folder, self.index = folder, index
        self._open = lru_cache(maxsize=16)(
            lambda file: safe_open(folder / file, framework="pt", device="cpu")
        )
        self._block = lru_cache(maxsize=2)(self._assemble)
        self._by_block: dict[str, dict[Block, list[tuple[BlockRange, str]]]] = {}

    def read(self, piece: BlockRange, dtype: torch.dtype, *, padded: bool = False) -> Tensor:
        """The piece's elements, flat. ``padded``: the global shape may differ from the stored one
        (a padded vocabulary); elements that the checkpoint does not have are 0. Raises
        CheckpointError: the checkpoint has no such tensor, or one of another shape or type."""
        stored = self._stored(piece.block, dtype, padded)
        if piece.block in self._blocks(piece.block.key):
            return self._elements(piece.block, piece.start, piece.end, dtype)
        return self._from_other_blocks(piece.block, stored, dtype).reshape(-1)[
            piece.start : piece.end
        ]

    def _stored(self, block: Block, dtype: torch.dtype, padded: bool) -> StoredTensor:
        stored = self.index.tensors.get(block.key)
        if stored is None:
            raise CheckpointError(
                f"the checkpoint {self.folder} holds no tensor {block.key}: it is of another model"
            )
        same = stored.global_shape == block.global_shape
        if not same and not (padded and stored.global_shape[1:] == block.global_shape[1:]):
            raise CheckpointError(
                f"{block.key} has the shape {stored.global_shape} in the checkpoint "
                f"{self.folder}, the model needs {block.global_shape}: the checkpoint is of "
                "another model"
            )
        if stored.dtype != TYPE_NAMES[dtype]:
            raise CheckpointError(
                f"{block.key} has the type {stored.dtype} in the checkpoint {self.folder}, the "
                f"model needs {TYPE_NAMES[dtype]}: resume with the megatron.param_dtype of the "
                "run that wrote it"
            )
        return stored

    def _from_other_blocks(self, block: Block, stored: StoredTensor, dtype: torch.dtype) -> Tensor:
        target = torch.zeros(block.shape, dtype=dtype)
        covered = 0
        for source in self._blocks(block.key):
            if (box := block.overlap(source)) is not None:
                target[block.local(box)] = self._block(source, dtype)[source.local(box)]
                covered += math.prod(s.stop - s.start for s in box)
        there = Block(block.key, stored.global_shape, (0,) * len(block.shape), stored.global_shape)
        shared = block.overlap(there)
        expected = math.prod(s.stop - s.start for s in shared) if shared is not None else 0
        if covered != expected:
            raise CheckpointError(
                f"the checkpoint {self.folder} holds {covered} of {expected} elements of {block}"
            )
        return target

    def _blocks(self, key: str) -> dict[Block, list[tuple[BlockRange, str]]]:
        if key not in self._by_block:
            blocks = self._by_block[key] = {}
            for piece, file in self.index.tensors[key].pieces:
                blocks.setdefault(piece.block, []).append((piece, file))
        return self._by_block[key]

    def _assemble(self, block: Block, dtype: torch.dtype) -> Tensor:
        return self._elements(block, 0, block.numel, dtype).reshape(block.shape)

    def _elements(self, block: Block, start: int, end: int, dtype: torch.dtype) -> Tensor:
        flat, covered = torch.empty(end - start, dtype=dtype), 0
        for piece, file in self._blocks(block.key)[block]:
            low, high = max(piece.start, start), min(piece.end, end)
            if low < high:
                flat[low - start : high - start] = self._range(
                    file, piece, low - piece.start, high - piece.start
                )
                covered += high - low
        if covered != end - start:
            raise CheckpointError(
                f"the checkpoint {self.folder} holds {covered} of {end - start} elements of {block}"
            )
        return flat

    def _range(self, file: str, piece: BlockRange, low: int, high: int) -> Tensor:
        path = self.folder / file
        try:
            opened = self._open(file)
            if len(piece.stored_shape) == 1:
                return opened.get_slice(piece.name)[low:high]
            return opened.get_tensor(piece.name).reshape(-1)[low:high]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error


def digest(tensors: Iterable[Tensor]) -> str:
    """Hexadecimal digest of the bits of all tensors in order. Reads everything once through host
    memory."""
    state = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        state.update(
            tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8).numpy().data
        )
    return state.hexdigest()
