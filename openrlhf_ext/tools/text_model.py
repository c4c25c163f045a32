"""The text model of a published checkpoint of images and text: a checkpoint of its own, written in
one process, some rows at a time."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openrlhf_ext.inputs import MAP, InputError, check, reading
from openrlhf_ext.megatron.families import TEXT_CLASSES
from openrlhf_ext.megatron.model.hf_files import (
    FLOAT_DTYPES,
    HFCheckpoint,
    HFRows,
    WeightMapError,
    describe,
    read_side_files,
    save_hf,
    unaccounted_tensors,
)
from openrlhf_ext.megatron.model.shape import read_config, read_model_shape
from openrlhf_ext.megatron.model.weight_map import HFTensor, hf_tensors

_ENTRIES_AT_ONCE = 1 << 26
_TEXT_PREFIX = "model.language_model."
_LEFT_OUT = {"model.visual.": "vision", "mtp.": "multi-token prediction"}
# a tensor of all experts -> the matrices that each has in it, one below the other
_STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def write_text_model(source: str | Path, target: str | Path) -> tuple[dict[str, int], list[str]]:
    """Writes text model, configuration, and tokenizer of the checkpoint in ``source``, in the type
    of its embedding; returns the size of every file in bytes, and what to tell the user. Raises
    InputError, WeightMapError: it is not such a checkpoint, or its tensors are not those of
    ``config.json``."""
    config = _text_config(source)
    shape = read_model_shape(source, **config)
    checkpoint = _TextPart(source)
    if shape.tied_embeddings and shape.family.output in checkpoint.names:
        raise InputError(
            f"{source}: config.json says tie_word_embeddings, and there is a "
            f"{shape.family.output}: set it to false if this head was trained, or remove the head"
        )
    if problems := unaccounted_tensors(checkpoint, shape):
        raise WeightMapError(f"{source}: {describe(problems)}")
    tensors = hf_tensors(shape)
    _, type_name = checkpoint.header(shape.family.embedding)
    dtype = FLOAT_DTYPES[type_name]
    rounded: Counter[str] = Counter()
    for tensor in tensors:
        found = FLOAT_DTYPES[checkpoint.header(tensor.name)[1]]
        if torch.promote_types(found, dtype) != dtype:
            rounded[re.sub(r"model\.layers\.\d+\.", "", tensor.name)] += 1
    config["dtype"] = str(dtype).removeprefix("torch.")
    files = read_side_files(source) | {
        "config.json": json.dumps(config, indent=2, sort_keys=True).encode()
    }
    rows = (part for tensor in tensors for part in _rows(tensor, checkpoint, dtype))
    sizes = save_hf(rows, tensors, dtype, files, target)
    lines = [f"a model of type {shape.model_type}"]
    for what, numbers in {
        "left out": checkpoint.left_out,
        f"rounded to {type_name}": rounded,
    }.items():
        if numbers:
            counted = ", ".join(f"{name} {number}" for name, number in numbers.items())
            lines.append(f"{what} (numbers of tensors): {counted}")
    return sizes, lines


def _text_config(source: str | Path) -> dict[str, Any]:
    """The ``config.json`` of the text model."""
    whole, path = read_config(source), Path(source) / "config.json"
    kind = whole["model_type"]
    published = kind.removesuffix("_text")
    if published not in TEXT_CLASSES:
        raise InputError(
            f"{path}: --text_only takes a checkpoint of images and text with model_type "
            f"{' or '.join(TEXT_CLASSES)}, got {kind!r}"
        )
    if kind == published:
        text = check(whole, str(path), {"text_config": MAP})["text_config"]
    elif _TextPart(source).is_nested:  # transformers' text class saves under the names that it read
        text = whole
    else:
        raise InputError(
            f"{path}: a checkpoint with model_type {kind} is a text model already: use it as it is"
        )
    text = {
        name: value
        for name, value in text.items()
        if name != "torch_dtype" and not name.startswith("mtp_")
    }
    shared = {name: whole[name] for name in _TOKEN_IDS if name in whole}
    tied = whole.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    own = {
        "model_type": f"{published}_text",
        "architectures": [TEXT_CLASSES[published]],
        "tie_word_embeddings": tied,
    }
    return shared | text | own


class _Place(NamedTuple):
    """Where a tensor of the text model is: a whole tensor of the checkpoint, or ``rows`` from
    ``start`` on of matrix ``number`` of a stack."""

    name: str
    number: int | None = None
    start: int = 0
    rows: int = 0


class _TextPart(HFCheckpoint):
    """The text model's tensors in a published checkpoint, by their names in a checkpoint of their
    own; ``left_out``: number of the others, by what they are of."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.left_out: Counter[str] = Counter()
        self._places: dict[str, _Place] = {}
        for name in sorted(super().names):
            other = [what for prefix, what in _LEFT_OUT.items() if name.startswith(prefix)]
            self.left_out.update(other)
            for own, place in () if other else self._found(name):
                if own in self._places:
                    raise WeightMapError(
                        f"{path} holds {own} twice: in {self._places[own].name} and in {name}"
                    )
                self._places[own] = place

    @property
    def names(self) -> set[str]:
        return set(self._places)

    @property
    def is_nested(self) -> bool:
        """Whether the names are those of a part of a larger model."""
        return any(place.name.startswith(_TEXT_PREFIX) for place in self._places.values())

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        place = self._places[name]
        shape, dtype = super().header(place.name)
        return (shape if place.number is None else (place.rows, *shape[2:])), dtype

    def read(self, name: str, axis: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        place = self._places[name]
        if place.number is None:
            return super().read(place.name, axis, start, stop)
        end = place.rows if stop is None else min(stop, place.rows)
        view = self._view(place.name)
        with reading(self._file_of[place.name], "as safetensors"):
            return view[place.number, place.start + start : place.start + end]

    def _found(self, name: str) -> Iterator[tuple[str, _Place]]:
        """The text model's tensors that a tensor of the checkpoint holds."""
        own = name
        if name.startswith(_TEXT_PREFIX):
            own = f"model.{name.removeprefix(_TEXT_PREFIX)}"
        block, _, kind = own.rpartition(".experts.")
        shape, _ = super().header(name)
        parts = _STACKED.get(kind, ())
        if not parts or len(shape) != 3 or shape[1] % len(parts):
            yield own, _Place(name)
            return
        rows = shape[1] // len(parts)
        for number in range(shape[0]):
            for at, part in enumerate(parts):
                single = f"{block}.experts.{number}.{part}.weight"
                yield single, _Place(name, number, at * rows, rows)


def _rows(tensor: HFTensor, checkpoint: HFCheckpoint, dtype: torch.dtype) -> Iterator[HFRows]:
    step = max(1, _ENTRIES_AT_ONCE // math.prod(tensor.shape[1:]))
    for start in range(0, tensor.shape[0], step):
        values = checkpoint.read(tensor.name, 0, start, start + step)
        yield HFRows(tensor.name, start, values.to(dtype))
