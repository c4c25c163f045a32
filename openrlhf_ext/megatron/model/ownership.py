"""Which rank gives which slice of which Hugging Face tensor: export, weight sync and files ask here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.megatron.model.shape import ModelShape
from openrlhf_ext.megatron.model.weight_map import Piece, Rule, Shard, hf_shapes, owned_rules, placement


class OwnedTensor(NamedTuple):
    """A Hugging Face tensor, ``number`` of those of its ``rule``, and what each global rank gives of it."""

    rule: Rule
    number: int
    shape: tuple[int, ...]
    slices: Mapping[int, tuple[Piece, ...]]


class Ownership:
    """Every entry of every tensor is given by exactly one rank.

    Attributes:
        tensors: by name, in the order of ``hf_tensors``.
        ranks: global ranks that give something, ascending; rank 0 is one.
    """

    def __init__(self, shape: ModelShape, layout: ParallelLayout) -> None:
        self.tensors: dict[str, OwnedTensor] = {}
        size, stages = layout.tensor_parallel_size, range(layout.pipeline_parallel_size)
        # context- and data-parallel ranks hold the same: the first of them gives it
        shards = {
            stage: {
                rank: Shard(layout.place(rank).tensor, size) for rank in layout.ranks(stage=stage, context=0, replica=0)
            }
            for stage in stages
        }
        for stage, rule in owned_rules(shape, len(stages), layout.virtual_pipeline_size):
            given = {rank: placement(rule, shape, shard) for rank, shard in shards[stage].items()}
            for number, (name, whole) in enumerate(zip(rule.hf_names, hf_shapes(rule, shape), strict=True)):
                found = {rank: tuple(p for p in pieces if p.tensor == number) for rank, pieces in given.items()}
                slices = {rank: pieces for rank, pieces in found.items() if pieces}
                self.tensors[name] = OwnedTensor(rule, number, whole, slices)
        self.ranks = tuple(sorted({rank for tensor in self.tensors.values() for rank in tensor.slices}))
