"""A peft adapter added to the weights of its base: a whole checkpoint, in one process, some rows at
a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from openrlhf_ext.megatron.model.adapter import WEIGHTS, Adapter, base_of, module_name, read_adapter
from openrlhf_ext.megatron.model.hf_files import (
    FLOAT_DTYPES,
    HFCheckpoint,
    HFRows,
    WeightMapError,
    describe,
    read_side_files,
    save_hf,
    tokenizer_files,
    unaccounted_tensors,
)
from openrlhf_ext.megatron.model.shape import read_model_shape
from openrlhf_ext.megatron.model.weight_map import HFTensor, adapter_shape, hf_tensors

_ENTRIES_AT_ONCE = 1 << 26


def merge(
    adapter: str | Path, target: str | Path, base: str | Path | None = None
) -> dict[str, int]:
    """Writes W + alpha / r B A, computed in fp32, with the base's (widest) dtype and configuration,
    and the adapter's tokenizer; returns the size of every file in bytes. ``base``: None: the one
    that the adapter names. Raises InputError, WeightMapError: a folder lacks something, or the
    adapter is another model's."""
    base = base_of(adapter) if base is None else base
    shape = read_model_shape(base)
    found = read_adapter(adapter, shape.family)
    weights, low_rank = HFCheckpoint(base), HFCheckpoint(adapter, WEIGHTS)
    for path, problems in (
        (base, unaccounted_tensors(weights, shape)),
        (adapter, unaccounted_tensors(low_rank, adapter_shape(shape, found))),
    ):
        if problems:
            raise WeightMapError(f"{path}: {describe(problems)}")
    tensors = hf_tensors(shape)
    # a checkpoint that is written has one
    dtype = max(
        (FLOAT_DTYPES[weights.header(tensor.name)[1]] for tensor in tensors),
        key=lambda one: one.itemsize,
    )
    rows = (part for tensor in tensors for part in _merged(tensor, weights, low_rank, found, dtype))
    # the adapter's folder has the tokenizer that it was trained with, unless another program wrote
    # it
    files, own = read_side_files(base), tokenizer_files(adapter)
    of_base = tokenizer_files(base).keys() if own else ()
    kept = {name: content for name, content in files.items() if name not in of_base}
    return save_hf(rows, tensors, dtype, kept | own, target)


def _merged(
    tensor: HFTensor,
    weights: HFCheckpoint,
    low_rank: HFCheckpoint,
    adapter: Adapter,
    dtype: torch.dtype,
) -> Iterator[HFRows]:
    module, _, kind = tensor.name.rpartition(".")
    has_adapter = kind == "weight" and f"base_model.model.{module}.lora_A.weight" in low_rank.names
    assert not has_adapter or module_name(tensor.name) in adapter.targets
    a_RK = (
        low_rank.read(f"base_model.model.{module}.lora_A.weight").float() if has_adapter else None
    )
    width = tensor.shape[1] if len(tensor.shape) > 1 else 1
    step = max(1, _ENTRIES_AT_ONCE // width)
    for start in range(0, tensor.shape[0], step):
        values: Tensor = weights.read(tensor.name, 0, start, start + step)
        if a_RK is not None:
            b_NR = low_rank.read(
                f"base_model.model.{module}.lora_B.weight", 0, start, start + step
            ).float()
            values = values.float() + adapter.scale * (b_NR @ a_RK)
        yield HFRows(tensor.name, start, values.to(dtype))
