"""Where a vLLM worker holds the tensors that a policy sends, to sum their bits after an update.

vLLM fuses tensors into one parameter (q, k and v; gate and up), cuts parameters into shards, holds keys and values
several times where there are more workers than heads, and pads vocabularies. What is held in the tensor's own data type
and in rows is found and summed in place; for the rest, quantized or packed weights, the sum is that of what arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from openrlhf_ext.rollout.sync.checksum import bit_sum, words
from openrlhf_ext.rollout.sync.plan import BucketPlan, Spec


class _Rows(NamedTuple):
    """Rows [start, stop) of a parameter; None: to its end."""

    module: torch.nn.Module
    parameter: str
    start: int
    stop: int | None

    @property
    def values(self) -> Tensor:
        """As they are now; a reload may replace the parameter."""
        return getattr(self.module, self.parameter).detach()[self.start : self.stop]


class HeldWeights:
    """The tensors of a plan in one worker's model."""

    def __init__(self, model: torch.nn.Module, plan: BucketPlan, workers: int) -> None:
        self._tensors, self._workers = plan.tensors, workers
        self._modules = dict(model.named_modules())
        self._fused = {
            part: (fused, parts.index(part), len(parts))
            for fused, parts in getattr(model, "packed_modules_mapping", {}).items()
            for part in parts
        }
        self._rows = {spec[0]: rows for spec in plan.tensors if (rows := self._find(spec)) is not None}
        self._arrived: dict[str, Tensor] = {}

    def watch(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass an update on; sum those of its tensors that will be held in another form."""
        self._arrived.clear()
        shapes = {name: shape for name, shape, _ in self._tensors}
        for name, tensor in stream:
            if name not in self._rows:
                whole = words(tensor, shapes[name], self._workers)
                assert whole is not None, "whole tensors arrive contiguous"
                self._arrived[name] = bit_sum(whole)
            yield name, tensor

    def sums(self) -> list[tuple[int, int, bool]]:
        """(sum of the bits, number of entries, whether as received) of every tensor, in the plan's order."""
        found = []
        for name, shape, _ in self._tensors:
            if name in self._rows:
                values = self._rows[name].values
                held = words(values, shape, self._workers)
                assert held is not None, f"vLLM moved the values of {name}"
                found.append((bit_sum(held), values.numel(), False))
            else:
                found.append((self._arrived[name], torch.Size(shape).numel(), True))
        sums = torch.stack([total for total, _, _ in found]).tolist()
        return [(total, entries, received) for total, (_, entries, received) in zip(sums, found, strict=True)]

    def _find(self, spec: Spec) -> _Rows | None:
        """Where the tensor is, if it is held as it is sent."""
        name, shape, dtype = spec
        path, _, parameter = name.rpartition(".")
        rows = self._direct(path, parameter) or self._part_of_fused(path, parameter)
        if rows is None:
            return None
        values = rows.values
        fits = values.dtype == dtype and values.dim() == len(shape) and not values.is_meta and values.numel()
        return rows if fits and words(values, shape, self._workers) is not None else None

    def _direct(self, path: str, parameter: str) -> _Rows | None:
        module: Any = self._modules.get(path)
        if not isinstance(getattr(module, parameter, None), Tensor):
            return None
        if isinstance(module, VocabParallelEmbedding):
            return _Rows(module, parameter, 0, module.shard_indices.num_org_elements)
        if getattr(module, "num_kv_head_replicas", 1) > 1:  # one tensor, of which only some rows are held several times
            return None
        return _Rows(module, parameter, 0, None)

    def _part_of_fused(self, path: str, parameter: str) -> _Rows | None:
        parent, _, leaf = path.rpartition(".")
        fused, number, parts = self._fused.get(leaf, ("", 0, 0))
        module: Any = self._modules.get(f"{parent}.{fused}")
        sizes = getattr(module, "output_partition_sizes", [])
        if len(sizes) != parts or not isinstance(getattr(module, parameter, None), Tensor):
            return None
        start = sum(sizes[:number])
        return _Rows(module, parameter, start, start + sizes[number])
