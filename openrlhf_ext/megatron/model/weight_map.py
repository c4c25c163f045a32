"""The declarative map between Hugging Face tensors and Megatron parameters; nothing here reads files or talks to ranks.

A ``Rule`` says which HF tensors make one Megatron parameter. How the parameter is put together and cut over the
tensor-parallel ranks is a list of ``Run`` (consecutive rows of an HF tensor); loading, exporting and the proof that
every element has exactly one place (``planning``) all read the same runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from torch import Tensor

from openrlhf_ext.megatron.model.shape import ModelShape

Split = Literal["replicated", "row", "vocab", "qkv", "gate_up"]


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter and the HF tensors it is made of.

    ``split``: 'replicated' is whole on every tensor-parallel rank, 'row' cuts dimension 1, 'vocab' cuts dimension 0
    after padding, 'qkv' interleaves query, key and value per group and cuts dimension 0 (a rank may get part of a
    group: with fewer key-value heads than ranks Megatron gathers the projections), 'gate_up' cuts gate and up
    separately and stacks the pieces.
    """

    parameter: str
    hf_names: tuple[str, ...]
    split: Split

    def at_layer(self, local: int, layer: int) -> Rule:
        names = tuple(name.format(layer=layer) for name in self.hf_names)
        return Rule(self.parameter.format(layer=local), names, self.split)

    @property
    def axis(self) -> int:
        """The dimension that is cut."""
        return 1 if self.split == "row" else 0


EMBEDDING = Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab")
FINAL_NORM = Rule("decoder.final_layernorm.weight", ("model.norm.weight",), "replicated")
OUTPUT = Rule("output_layer.weight", ("lm_head.weight",), "vocab")
_LAYER = "model.layers.{layer}."
_ATTENTION, _MLP = "decoder.layers.{layer}.self_attention.", "decoder.layers.{layer}.mlp."


def _attention_names(kind: str) -> tuple[str, ...]:
    return tuple(f"{_LAYER}self_attn.{x}_proj.{kind}" for x in "qkv")


def layer_rules(shape: ModelShape) -> list[Rule]:
    """Rules of one decoder layer; ``{layer}`` stands for its index (local in Megatron's names, global in HF's)."""
    rules = [
        Rule(_ATTENTION + "linear_qkv.layer_norm_weight", (_LAYER + "input_layernorm.weight",), "replicated"),
        Rule(_ATTENTION + "linear_qkv.weight", _attention_names("weight"), "qkv"),
        Rule(_ATTENTION + "linear_proj.weight", (_LAYER + "self_attn.o_proj.weight",), "row"),
        Rule(_MLP + "linear_fc1.layer_norm_weight", (_LAYER + "post_attention_layernorm.weight",), "replicated"),
        Rule(_MLP + "linear_fc1.weight", (_LAYER + "mlp.gate_proj.weight", _LAYER + "mlp.up_proj.weight"), "gate_up"),
        Rule(_MLP + "linear_fc2.weight", (_LAYER + "mlp.down_proj.weight",), "row"),
    ]
    if shape.qkv_bias:
        rules.append(Rule(_ATTENTION + "linear_qkv.bias", _attention_names("bias"), "qkv"))
    if shape.qk_norm:
        rules += [
            Rule(_ATTENTION + f"{x}_layernorm.weight", (f"{_LAYER}self_attn.{x}_norm.weight",), "replicated")
            for x in "qk"
        ]
    return rules


def value_head_rule(shape: ModelShape) -> Rule:
    """Rule of a critic's value head, which takes the place of the vocabulary projection."""
    return Rule(OUTPUT.parameter, (f"{shape.value_head}.weight",), "replicated")


def stage_rules(shape: ModelShape, layers: range, first: bool, last: bool) -> list[Rule]:
    """Rules of one model chunk that holds the global ``layers``; parameters named as in that chunk's model."""
    rules = [EMBEDDING] if first else []
    rules += [rule.at_layer(i, layer) for i, layer in enumerate(layers) for rule in layer_rules(shape)]
    if last:
        rules.append(FINAL_NORM)
        if shape.value_head is not None:
            rules.append(value_head_rule(shape))
        elif not shape.tied_embeddings:
            rules.append(OUTPUT)
        elif not first:  # the last stage keeps its own copy of the shared embedding
            rules.append(Rule(OUTPUT.parameter, EMBEDDING.hf_names, "vocab"))
    return rules


def chunk_layers(num_layers: int, stages: int, chunks: int = 1) -> dict[tuple[int, int], range]:
    """Global layers of every (pipeline stage, model chunk), as Megatron spreads them: evenly, chunks interleaved."""
    size = num_layers // (stages * chunks)
    return {
        (stage, chunk): range((chunk * stages + stage) * size, (chunk * stages + stage + 1) * size)
        for chunk in range(chunks)
        for stage in range(stages)
    }


def owned_rules(shape: ModelShape, stages: int, chunks: int = 1) -> Iterator[tuple[int, Rule]]:
    """(pipeline stage that exports it, rule) for the whole model, in HF order."""
    places = chunk_layers(shape.num_layers, stages, chunks)
    stage_of = {layer: stage for (stage, _), layers in places.items() for layer in layers}
    yield 0, EMBEDDING
    for layer in range(shape.num_layers):
        for rule in layer_rules(shape):
            yield stage_of[layer], rule.at_layer(layer, layer)
    yield stages - 1, FINAL_NORM
    if shape.value_head is not None:
        yield stages - 1, value_head_rule(shape)
    elif not shape.tied_embeddings:
        yield stages - 1, OUTPUT


# ---- shapes and places --------------------------------------------------------------------------------------------


def hf_shapes(rule: Rule, shape: ModelShape) -> list[tuple[int, ...]]:
    """Shapes of a rule's HF tensors, known from the configuration alone."""
    if shape.value_head is not None and rule == value_head_rule(shape):
        return [(1, shape.hidden_size)]
    h, q, kv = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    if rule.split == "vocab":
        return [(shape.vocab_size, h)]
    if rule.split == "gate_up":
        return [(shape.ffn_hidden_size, h)] * 2
    if rule.split == "qkv":
        return [(n, h) if rule.parameter.endswith("weight") else (n,) for n in (q, kv, kv)]
    if rule.split == "row":
        return [(h, q if "linear_proj" in rule.parameter else shape.ffn_hidden_size)]
    return [(shape.head_dim,)] if rule.parameter.endswith(("q_layernorm.weight", "k_layernorm.weight")) else [(h,)]


@dataclass(frozen=True)
class HFTensor:
    """Name and shape of one tensor of the HF checkpoint."""

    name: str
    shape: tuple[int, ...]


def hf_tensors(shape: ModelShape) -> list[HFTensor]:
    """Every tensor of the HF checkpoint, in the order in which ``HFExporter.rows`` yields them."""
    rules = stage_rules(shape, range(shape.num_layers), first=True, last=True)
    return [HFTensor(n, s) for rule in rules for n, s in zip(rule.hf_names, hf_shapes(rule, shape), strict=True)]


@dataclass(frozen=True)
class Run:
    """Entries [start, stop) of HF tensor number ``tensor`` along the rule's axis; None stands for padding."""

    tensor: int | None
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def split(self, most: int) -> list[Run]:
        """The same entries in runs of at most ``most``."""
        starts = range(self.start, self.stop, most)
        return [Run(self.tensor, start, min(start + most, self.stop)) for start in starts]


def parameter_runs(rule: Rule, shape: ModelShape, size: int) -> list[Run]:
    """The whole parameter, all ``size`` tensor-parallel shards one after the other, along the rule's axis."""
    lengths = [s[rule.axis] for s in hf_shapes(rule, shape)]
    if rule.split == "qkv":
        return list(_qkv_runs(shape))
    if rule.split == "gate_up":
        part = lengths[0] // size
        return [Run(t, rank * part, (rank + 1) * part) for rank in range(size) for t in (0, 1)]
    runs = [Run(0, 0, lengths[0])]
    padding = shape.padded_vocab_size(size) - shape.vocab_size if rule.split == "vocab" else 0
    return [*runs, Run(None, 0, padding)] if padding else runs


def _qkv_runs(shape: ModelShape) -> Iterator[Run]:
    """Per group all its queries, then its key, its value."""
    queries = shape.num_heads // shape.num_kv_heads * shape.head_dim
    for group in range(shape.num_kv_heads):
        for tensor, rows in enumerate((queries, shape.head_dim, shape.head_dim)):
            yield Run(tensor, group * rows, (group + 1) * rows)


def shard_runs(rule: Rule, shape: ModelShape, rank: int, size: int) -> list[Run]:
    """The runs that tensor-parallel rank ``rank`` of ``size`` holds, in the order in which its shard holds them."""
    runs = parameter_runs(rule, shape, size)
    if rule.split == "replicated":
        return runs
    length = sum(map(len, runs)) // size
    begin, end = rank * length, (rank + 1) * length
    mine, position = [], 0
    for run in runs:
        low, high = max(begin, position), min(end, position + len(run))
        if low < high:
            mine.append(Run(run.tensor, run.start + low - position, run.start + high - position))
        position += len(run)
    return mine


def shard_shape(rule: Rule, shape: ModelShape, size: int) -> tuple[int, ...]:
    """Shape of the parameter on one tensor-parallel rank."""
    whole = list(hf_shapes(rule, shape)[0])
    whole[rule.axis] = sum(map(len, shard_runs(rule, shape, 0, size)))
    return tuple(whole)


# ---- one tensor, both directions ----------------------------------------------------------------------------------


def fill_shard(shard: Tensor, rule: Rule, runs: Iterable[Run], read: Callable[[int, Run], Tensor]) -> None:
    """Writes a shard run by run, so that only one run of an HF tensor is in memory beside it.

    Args:
        read: the entries of a run of HF tensor number ``i``, in the tensor's own dtype.
    """
    position = 0
    for run in runs:
        target = shard.narrow(rule.axis, position, len(run))
        if run.tensor is None:
            target.zero_()
        else:
            target.copy_(read(run.tensor, run))
        position += len(run)


@dataclass(frozen=True)
class Piece:
    """A run of rows (``dim`` 0) or columns (``dim`` 1) of a Megatron shard and its place in a Hugging Face tensor.

    Attributes:
        tensor: which of the rule's Hugging Face tensors.
        target, source: first index in that tensor, and in the shard.
        length: number of rows or columns.
    """

    tensor: int
    dim: int
    target: int
    source: int
    length: int

    def of_shard(self, shard: Tensor) -> Tensor:
        """The run, as a view of the shard."""
        return shard.narrow(self.dim, self.source, self.length)

    def of_tensor(self, tensor: Tensor) -> Tensor:
        """Its place, as a view of the Hugging Face tensor."""
        return tensor.narrow(self.dim, self.target, self.length)

    def between(self, start: int, stop: int) -> Piece:
        """What of a run of rows lies in rows [start, stop) of the tensor, of which its place is then counted."""
        first, end = max(self.target, start), min(self.target + self.length, stop)
        source = self.source + first - self.target
        return replace(self, target=first - start, source=source, length=max(0, end - first))


@cache
def placement(rule: Rule, shape: ModelShape, rank: int, size: int) -> tuple[Piece, ...]:
    """What tensor-parallel rank ``rank`` of ``size`` gives of the rule's Hugging Face tensors.

    A tensor that every rank holds whole is given by the first.
    """
    if rule.split == "replicated" and rank != 0:
        return ()
    pieces, position = [], 0
    for run in shard_runs(rule, shape, rank, size):
        if run.tensor is not None:
            pieces.append(Piece(run.tensor, rule.axis, run.start, position, len(run)))
        position += len(run)
    return tuple(pieces)
