"""What one rank of the policy holds, in bytes, from ``config.json`` alone: states, and what a backward pass keeps.

States (parameters, fp32 gradients, Adam's) follow from the weight map and from how Megatron's DDP lays them out in its
gradient buffer; they are exact (tests/tools/plan/test_memory.py compares them with real ranks). Activations are
those that autograd saves, with the weights left out, by one of two sets of formulas:

* ``LOCAL``: our layers of ``megatron.model.spec`` on a CPU. Measured: within 5 % of what
  ``torch.autograd.graph.saved_tensors_hooks`` count in real passes.
* ``FLASH``: TransformerEngine's layers with flash attention in bf16, on a GPU. Read in the libraries, not measured: the
  usual count of 12.8 + 6 f/h bytes for each token and hidden entry of a layer, where attention is grouped 5 to 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

from openrlhf_ext.megatron.layers import LayerConverter
from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.megatron.model.family import Rule
from openrlhf_ext.megatron.model.shape import ModelShape
from openrlhf_ext.megatron.model.weight_map import chunk_layers, shard_shape, stage_rules
from openrlhf_ext.options.sections import Megatron

GIB = 1 << 30
_GRADIENT_BYTES = 4  # accumulated in fp32
_PARAMETER_UNIT, _BUCKET_UNIT = 64, 128
"""Where parameters begin in the distributed optimizer's buffer, and buckets end (megatron-core 0.16.1
distributed/param_and_grad_buffer.py:637, 647)."""
_BUILT = (
    "self_attention.linear_proj.weight", "self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias",
    "self_attention.linear_qkv.layer_norm_weight", "self_attention.q_layernorm.weight",
    "self_attention.k_layernorm.weight", "mlp.linear_fc1.weight", "mlp.linear_fc1.layer_norm_weight",
    "mlp.linear_fc2.weight",
)  # fmt: skip
"""Parameters of a layer in the order in which Megatron builds them, in which the buffer has them from its end."""

Kernels = Literal["local", "flash"]


# ---- states ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class States:
    """What a rank holds of the model and its optimizer, whatever is computed; bytes, but for ``parameters``."""

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    copies: int

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part, without those that are not there."""
        parts = {
            "weights": self.weights,
            "gradients (fp32)": self.gradients,
            "optimizer": self.optimizer,
            "FP8 copies of weights": self.copies,
        }
        return {name: size for name, size in parts.items() if size}


@dataclass(frozen=True)
class StateOptions:
    """What decides over a rank's states besides model and layout.

    Attributes:
        param_bytes: 2 (bf16, with fp32 master weights) or 4.
        distributed: Adam's states are divided over the data- and context-parallel ranks.
        bucket_size: parameters of a bucket where gradients are reduced during the backward pass; None = one bucket.
        converters: whose copies of weights are counted.
    """

    param_bytes: int = 2
    distributed: bool = True
    bucket_size: int | None = None
    converters: tuple[LayerConverter, ...] = ()


@cache
def chunk_parameters(
    shape: ModelShape, tensor_parallel_size: int, layers: int, first: bool, last: bool
) -> tuple[tuple[str, int], ...]:
    """(name, entries) of one tensor-parallel rank's parameters of a model chunk, in the order of construction.

    Args:
        first, last: whether the chunk begins with the embedding, and ends in the final norm and the head.
    """

    def entries(rule: Rule) -> int:
        return math.prod(shard_shape(rule, shape, tensor_parallel_size))

    one = {rule.parameter: entries(rule) for rule in stage_rules(shape, range(1), first, last)}
    names = [name for name in _BUILT if f"decoder.layers.0.{name}" in one]
    in_layers = [
        (f"decoder.layers.{i}.{name}", one[f"decoder.layers.0.{name}"]) for i in range(layers) for name in names
    ]
    before, after = "embedding.word_embeddings.weight", ("decoder.final_layernorm.weight", "output_layer.weight")
    return (
        *((name, one[name]) for name in (before,) if name in one),
        *in_layers,
        *((name, one[name]) for name in after if name in one),
    )


@cache
def rank_states(shape: ModelShape, layout: ParallelLayout, stage: int, options: StateOptions) -> States:
    """States of the ranks of a stage; where ranks share the optimizer's states, of the rank with the largest share."""
    shards = layout.data_parallel_size * layout.context_parallel_size if options.distributed else 1
    parameters, entries, owned = 0, 0, np.zeros(shards, dtype=np.int64)
    stages, chunks = layout.pipeline_parallel_size, layout.virtual_pipeline_size
    for chunk in range(chunks):
        first, last = stage == chunk == 0, stage == stages - 1 and chunk == chunks - 1
        layers = shape.num_layers // (stages * chunks)
        named = chunk_parameters(shape, layout.tensor_parallel_size, layers, first, last)
        tied = shape.tied_embeddings and layout.pipeline_parallel_size > 1
        bucket_size = options.bucket_size if stage == 0 else None
        size, own = _buffer(named, shards, options.distributed, bucket_size, tied)
        parameters += sum(count for _, count in named)
        entries, owned = entries + size, owned + own
    return States(
        parameters,
        entries * options.param_bytes,
        entries * _GRADIENT_BYTES,
        int(owned.max()) * (12 if options.param_bytes == 2 else 8),
        _copies(shape, layout, stage, options.converters),
    )


def _buffer(
    named: tuple[tuple[str, int], ...], shards: int, distributed: bool, bucket_size: int | None, tied: bool
) -> tuple[int, np.ndarray]:
    """Entries of a chunk's gradient buffer, and how many entries of parameters are in each rank's part of it.

    Parameters lie there in reverse order, in buckets of which every rank owns an equal part; a tied embedding that two
    stages hold has a bucket of its own (megatron-core 0.16.1 distributed/param_and_grad_buffer.py:645-737).
    """
    unit, bucket_unit = (_PARAMETER_UNIT, math.lcm(shards, _BUCKET_UNIT)) if distributed else (1, 1)
    places: list[tuple[int, int]] = []
    buckets: list[tuple[int, int]] = []
    start = position = 0

    def close(end: int) -> int:
        nonlocal start
        buckets.append((start, _up(end, bucket_unit)))
        start = buckets[-1][1]
        return start

    for name, count in reversed(named):
        position = _up(position, unit)
        alone = tied and distributed and name in ("embedding.word_embeddings.weight", "output_layer.weight")
        if alone and position > start:
            position = close(places[-1][1])
        places.append((position, position + count))
        position += count
        if alone or (bucket_size is not None and position - start >= bucket_size):
            position = close(position)
    if position > start:
        close(position)
    return buckets[-1][1], _owned(np.array(places), buckets, shards)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _owned(places: np.ndarray, buckets: list[tuple[int, int]], shards: int) -> np.ndarray:
    owned = np.zeros(shards, dtype=np.int64)
    for start, end in buckets:
        part = (end - start) // shards
        for rank in range(shards):
            low = start + rank * part
            overlap = np.minimum(places[:, 1], low + part) - np.maximum(places[:, 0], low)
            owned[rank] += overlap.clip(min=0).sum()
    return owned


def _copies(shape: ModelShape, layout: ParallelLayout, stage: int, converters: Sequence[LayerConverter]) -> int:
    """Of the linear layers' weights (two dimensions), which layers keep beside the weights themselves."""
    chunks = chunk_layers(shape.num_layers, layout.pipeline_parallel_size, layout.virtual_pipeline_size)
    numbers = [number for (at, _), range_ in chunks.items() if at == stage for number in range_]
    one = stage_rules(shape, range(1), first=False, last=False)
    weights = [shard_shape(rule, shape, layout.tensor_parallel_size) for rule in one]
    each = sum(c.kept_per_weight(number, shape.num_layers) for c in converters for number in numbers)
    return each * sum(math.prod(size) for size in weights if len(size) == 2)


# ---- activations -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerActivations:
    """Bytes that autograd keeps of one layer for one micro-batch.

    Attributes:
        input: the layer's input, which is all that recomputation of whole layers keeps.
        shares_input: whether the norms keep that tensor itself, and no copy of it.
        attention: everything up to attention and from it to the MLP, without what ``core`` is.
        core: what attention itself keeps: its operands, its result and their statistics.
        core_operands: what recomputation of attention (core_attn) keeps in the place of ``core``.
        mlp: norm and MLP; their recomputation keeps their input, as large as ``input``.
    """

    input: int
    shares_input: bool
    attention: int
    core: int
    core_operands: int
    mlp: int

    @property
    def total(self) -> int:
        return self.attention + self.core + self.mlp


@dataclass(frozen=True)
class Pass:
    """A micro-batch in training, and who computes it.

    Attributes:
        tokens: of a micro-batch on one rank, its context-parallel share.
        sequence: tokens of each of its sequences, all ranks together; they are taken to be equally long.
        kernels: which set of formulas holds.
        param_bytes: of an entry of parameters and activations.
        fp8: linear layers keep their inputs in FP8, one byte an entry (``flash`` only).
        megatron: what is computed again in the backward pass.
    """

    tokens: int
    sequence: int
    kernels: Kernels = "flash"
    param_bytes: int = 2
    fp8: bool = False
    megatron: Megatron = Megatron()


def layer_activations(shape: ModelShape, layout: ParallelLayout, work: Pass) -> LayerActivations:
    tokens = work.tokens
    tp, cp, e = layout.tensor_parallel_size, layout.context_parallel_size, work.param_bytes
    rows = tokens // tp if layout.sequence_parallel else tokens  # between tensor-parallel regions
    query, heads = tokens * shape.num_heads * shape.head_dim // tp, tokens * shape.num_heads // tp
    key = tokens * max(1, shape.num_kv_heads // tp) * shape.head_dim
    ffn, wide = tokens * shape.ffn_hidden_size // tp, rows * shape.hidden_size
    rope = tokens * 4 * e * shape.head_dim  # cosines and sines, for queries and for keys
    if work.kernels == "local":
        norm = wide * (4 + 2 * e) + 4 * rows  # its input in fp32, normalized, scaled
        qk_norm = ((query + key) * (4 + e) + 8 * heads) if shape.qk_norm else 0
        # values are a view of all that the projection made; context-parallel ranks gather keys and values
        operands = e * (2 * query + 3 * key)
        core = e * (2 * query + cp * 2 * key) + _masks(work, cp) if cp > 1 else operands + e * query
        core += 4 * heads
        return LayerActivations(wide * e, e == 4, norm + qk_norm + rope + e * query, core, operands, norm + 5 * e * ffn)
    linear_input = 1 if work.fp8 else e
    norm = wide * (e + linear_input) + 4 * rows
    qk_norm = (e * (query + key) + 8 * heads) if shape.qk_norm else 0
    operands = e * (query + 2 * key)
    # attention and the projection after it share the result of attention, unless FP8 makes a copy
    core = operands + e * query + 4 * heads
    attention = norm + qk_norm + rope + (query if work.fp8 else 0)
    return LayerActivations(wide * e, True, attention, core, operands, norm + ffn * (2 * e + linear_input))


@dataclass(frozen=True)
class Activations:
    """Bytes that autograd keeps on a rank.

    Attributes:
        micro_batch: of the rank's layers in one pass of one model chunk.
        in_flight: passes whose backward pass is still to come, at the most.
        recomputed: what the backward pass makes again at a time, besides.
        final: of the final norm and the hidden states that the head sees, on the last stage.
    """

    micro_batch: int
    in_flight: int
    recomputed: int
    final: int

    @property
    def peak(self) -> int:
        """The most at a time; what follows the layers is done with before anything is recomputed."""
        return self.micro_batch * self.in_flight + max(self.recomputed, self.final)


def activations(shape: ModelShape, layout: ParallelLayout, stage: int, work: Pass, micro_batches: int) -> Activations:
    """Of the ranks of a stage in training; the head's own workspace is not among them.

    Args:
        micro_batches: of a train step, on one data-parallel rank.
    """
    layer = layer_activations(shape, layout, work)
    layers = shape.num_layers // (layout.pipeline_parallel_size * layout.virtual_pipeline_size)
    kept, recomputed = _kept_and_recomputed(layer, layers, work.megatron)
    if work.megatron.recompute == "full":  # the checkpointed function takes the rotary table of the whole pack
        kept += 4 * work.tokens * layout.context_parallel_size * shape.head_dim
    rows = work.tokens // layout.tensor_parallel_size if layout.sequence_parallel else work.tokens
    last = stage == layout.pipeline_parallel_size - 1
    final = rows * (shape.hidden_size * (work.param_bytes + (4 if work.kernels == "local" else 0)) + 4)
    return Activations(kept, in_flight(layout, stage, micro_batches), recomputed, final if last else 0)


def _masks(work: Pass, ranks: int) -> int:
    """Masks that attention of a rank's second and later chunks materializes, on the rank that has most of them."""
    chunk = work.sequence // (2 * ranks)
    return work.tokens * ranks // work.sequence * chunk * chunk * (2 * ranks + 1) * work.param_bytes


def _kept_and_recomputed(layer: LayerActivations, layers: int, megatron: Megatron) -> tuple[int, int]:
    """Bytes that a chunk's layers keep of a micro-batch, and the most that their backward pass makes again at once."""
    again = layer.input if layer.shares_input else 0  # the recomputed pass saves the kept input itself
    if megatron.recompute == "full" and megatron.recompute_method == "uniform":
        return (
            layers // megatron.recompute_num_layers * layer.input,
            megatron.recompute_num_layers * layer.total - again,
        )
    if megatron.recompute == "full":
        some = min(megatron.recompute_num_layers, layers)
        kept = some * layer.input + (layers - some) * layer.total
        return kept, max(0, layer.total - again - (layers - some) * layer.total)
    if megatron.recompute == "none":
        return layers * layer.total, 0
    core = layer.core_operands if "core_attn" in megatron.recompute_modules else layer.core
    mlp = layer.input if "mlp" in megatron.recompute_modules else layer.mlp
    return layers * (layer.attention + core + mlp), layer.mlp - again if "mlp" in megatron.recompute_modules else 0


def in_flight(layout: ParallelLayout, stage: int, micro_batches: int) -> int:
    """Forward passes of model chunks that a stage has ahead of its backward passes (megatron-core 0.16.1
    pipeline_parallel/schedules.py: warm-up passes and the one of the steady state)."""
    stages, chunks = layout.pipeline_parallel_size, layout.virtual_pipeline_size
    if chunks == 1:
        return min(micro_batches, stages - stage)
    return min(micro_batches * chunks, (stages - stage - 1) * 2 + (chunks - 1) * stages + 1)
