"""The declarative map between Hugging Face tensors and Megatron parameters; nothing here reads
files or talks to ranks.

A ``Rule`` of the family says which HF tensors make one Megatron parameter. How that is put together
and cut over the tensor-parallel ranks is a list of ``Run`` (consecutive rows of an HF tensor);
loading, exporting and the proof that every element has exactly one place (``tools.plan``) all read
the same runs. The experts of a mixture are dealt over ranks first, as many to each as come one
after the other, and each expert is cut over the ranks that share it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from typing import NamedTuple

from torch import Tensor

from openrlhf_ext.megatron.attentions import Attention
from openrlhf_ext.megatron.layout import ParallelLayout, RankPlace
from openrlhf_ext.megatron.model.adapter import Adapter, module_name
from openrlhf_ext.megatron.model.family import Rule, Size
from openrlhf_ext.megatron.model.shape import ModelShape


def value_head_rule(shape: ModelShape) -> Rule:
    return Rule(
        shape.family.output_rule.parameter,
        (f"{shape.value_head}.weight",),
        "replicated",
        ("one",),
        "hidden",
    )


# ---- adapters


def adapter_shape(base: ModelShape, adapter: Adapter) -> ModelShape:
    """Of the adapters of a model, as a model of its own."""
    return replace(base, adapter_rank=adapter.rank, adapter_targets=adapter.targets)


def is_of_adapter(parameter: str) -> bool:
    """Whether a parameter of a chunk is an adapter's."""
    return parameter.endswith((".lora_a", ".lora_b"))


def targeted(rule: Rule, targets: Collection[str]) -> list[int]:
    """Which of the Hugging Face tensors of a linear's weight have an adapter."""
    if not (rule.is_matrix and rule.parameter.startswith("decoder.layers.")):
        return []
    return [number for number, name in enumerate(rule.hf_names) if module_name(name) in targets]


def adapter_rules(rules: Iterable[Rule], targets: Collection[str]) -> Iterator[Rule]:
    """For every linear with an adapter how its two parameters (``layers.adapted``) are made of
    peft's tensors."""
    for rule in rules:
        chosen = targeted(rule, targets)
        if not chosen:
            continue
        linear = rule.parameter.removesuffix("weight")
        parameter_a = f"{linear}lora_a"
        parameter_b = f"{linear}lora_b"
        modules = [f"base_model.model.{name.removesuffix('weight')}" for name in rule.hf_names]
        of_a = tuple(f"{module}lora_A.weight" for module in modules)
        of_b = tuple(f"{module}lora_B.weight" for module in modules)
        if rule.split == "row":
            yield replace(rule, parameter=parameter_a, hf_names=of_a, rows=("adapter",))
            yield replace(
                rule, parameter=parameter_b, hf_names=of_b, split="replicated", columns="adapter"
            )
            continue

        named = tuple(of_a[number] for number in chosen)
        stacked: tuple[Size, ...] = ("adapter",) * len(named)
        yield Rule(parameter_a, named, "replicated", stacked, rule.columns)
        present = tuple(name if number in chosen else "" for number, name in enumerate(of_b))
        yield replace(rule, parameter=parameter_b, hf_names=present, columns="adapter")


def stage_rules(
    shape: ModelShape,
    layers: range,
    first: bool,
    last: bool,
    shares: int = 1,
    share: int | None = None,
) -> list[Rule]:
    """Rules of one model chunk that holds the global ``layers``; parameters named as in that
    chunk's model. Of the experts, dealt into ``shares``, those of one share, or of all, each as the
    rank names it that holds it."""
    if shape.adapter_rank:
        decoder = stage_rules(
            replace(shape, adapter_rank=0), layers, first=False, last=False, shares=shares
        )
        return list(adapter_rules(decoder, shape.adapter_targets))
    family = shape.family
    rules = [family.embedding_rule] if first else []
    of_kind = {
        kind: list(_layer_rules(shape, type(kind), shares, share))
        for kind in set(shape.attentions[layers.start : layers.stop])
    }
    for number, layer in enumerate(layers):
        rules += [rule.at_layer(number, layer) for rule in of_kind[shape.attentions[layer]]]
    if last:
        rules.append(family.final_norm_rule)
        if shape.value_head is not None:
            rules.append(value_head_rule(shape))
        elif not shape.tied_embeddings:
            rules.append(family.output_rule)
        elif not first:  # the last stage keeps its own copy of the shared embedding
            rules.append(replace(family.output_rule, hf_names=family.embedding_rule.hf_names))
    return rules


def _layer_rules(
    shape: ModelShape, attention: type[Attention], shares: int, share: int | None
) -> Iterator[Rule]:
    """Those of a decoder layer, for every expert one after the other."""
    per_share = shape.num_experts // shares
    numbers = range(shape.num_experts)
    if share is not None:
        numbers = range(share * per_share, (share + 1) * per_share)
    every = shape.family.layer_rules(attention)
    for of_experts, rules in groupby(every, key=lambda rule: rule.is_of_experts):
        if not of_experts:
            yield from rules
            continue
        together = list(rules)
        for number in numbers:
            for rule in together:
                yield rule.at_expert(number % per_share, number)


class Held(NamedTuple):
    """A parameter of a stage's model chunk: each rank of the stage that shares it holds a shard of
    it, and all copies hold the same shards. ``share``: which share of the experts it belongs to,
    None: none. ``gives``: this stage exports it (tied embeddings are on two stages, and the first
    one exports them)."""

    rule: Rule
    stage: int
    chunk: int
    share: int | None
    gives: bool


def parameters(shape: ModelShape, layout: ParallelLayout) -> Iterator[Held]:
    """All parameters of the model in HF order, each with the stage and chunk that hold it."""
    shares = layout.expert_parallel_size
    for (stage, chunk), layers in layout.chunk_layers(shape.num_layers).items():
        first = layers.start == 0
        last = layers.stop == shape.num_layers
        for rule in stage_rules(shape, layers, first, last, shares):
            share = None if rule.expert is None else rule.expert * shares // shape.num_experts
            yield Held(
                rule, stage, chunk, share, first or shape.family.embedding not in rule.hf_names
            )


class Cut(NamedTuple):
    """How many ranks share a parameter: ``tensor`` ranks, or ``expert_tensor`` one of an expert;
    experts are dealt into ``expert_shares``."""

    tensor: int
    expert_shares: int
    expert_tensor: int

    @classmethod
    def of(cls, layout: ParallelLayout) -> Cut:
        return cls(layout.tensor_parallel_size, layout.expert_parallel_size, layout.expert_tensor)


class RankParameter(NamedTuple):
    """A parameter as a rank holds it."""

    name: str
    shape: tuple[int, ...]
    of_expert: bool


@cache
def layer_shards(shape: ModelShape, cut: Cut, attention: Attention) -> tuple[RankParameter, ...]:
    """Parameters, or adapters, of a layer with this attention on one rank; parameters in the order
    in which Megatron builds them."""
    shares, number = cut.expert_shares, shape.attentions.index(attention)
    layer = stage_rules(shape, range(number, number + 1), False, False, shares, share=0)
    rules = {rule.parameter: rule for rule in layer}
    experts = range(max(1, shape.num_experts // shares))
    built = []
    for name in shape.family.parameters(type(attention)):
        numbers = experts if "{expert}" in name else range(1)
        name = f"decoder.layers.0.{name}"
        built += [name.replace("{expert}", str(number)) for number in numbers]
    held = [rules[name] for name in built if name in rules] or [*rules.values()]
    sizes = [cut.tensor if rule.expert is None else cut.expert_tensor for rule in held]
    return tuple(
        RankParameter(rule.parameter, shard_shape(rule, shape, size), rule.expert is not None)
        for rule, size in zip(held, sizes, strict=True)
    )


# ---- shapes and places


def hf_shapes(rule: Rule, shape: ModelShape) -> list[tuple[int, ...]]:
    sizes = shape.sizes
    rows = [0] * len(rule.hf_names)
    for tensor, part in zip(rule.places, rule.rows, strict=True):
        rows[tensor] += sizes[part]
    columns = (rule.columns,) if isinstance(rule.columns, str) else rule.columns or ()
    return [(count, *(sizes[size] for size in columns)) for count in rows]


@dataclass(frozen=True)
class HFTensor:
    name: str
    shape: tuple[int, ...]


def hf_tensors(shape: ModelShape) -> list[HFTensor]:
    """Every tensor of the HF checkpoint, in the order in which ``HFExporter.rows`` yields them."""
    rules = stage_rules(shape, range(shape.num_layers), first=True, last=True)
    tensors = []
    for rule in rules:
        for name, whole in zip(rule.hf_names, hf_shapes(rule, shape), strict=True):
            if name:  # else a module without an adapter
                tensors.append(HFTensor(name, whole))
    return tensors


@dataclass(frozen=True)
class Run:
    """Entries [start, stop) of HF tensor number ``tensor`` along the rule's axis; None stands for
    padding."""

    tensor: int | None
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def split(self, most: int) -> list[Run]:
        starts = range(self.start, self.stop, most)
        return [Run(self.tensor, start, min(start + most, self.stop)) for start in starts]


def parameter_runs(rule: Rule, shape: ModelShape, size: int) -> list[Run]:
    """The whole parameter, all ``size`` tensor-parallel shards one after the other, along the
    rule's axis."""
    rows = [shape.sizes[part] for part in rule.rows]
    of_parts = {
        "qkv": _qkv_runs(shape),
        "gated_qkv": _gated_qkv_runs(shape),
        "parts": _part_runs(rows, size),
    }
    if rule.split in of_parts:
        return [_in_stack(rule, run, rows) for run in of_parts[rule.split]]
    if rule.split == "replicated":
        return [Run(number, 0, rows) for number, (rows, *_) in enumerate(hf_shapes(rule, shape))]
    whole = Run(0, 0, hf_shapes(rule, shape)[0][rule.axis])
    padding = shape.padded_vocab_size(size) - shape.vocab_size if rule.split == "vocab" else 0
    return [whole, Run(None, 0, padding)] if padding else [whole]


def _qkv_runs(shape: ModelShape) -> Iterator[Run]:
    """Per group all its queries, then its key, its value."""
    queries = shape.num_heads // shape.num_kv_heads * shape.head_dim
    for group in range(shape.num_kv_heads):
        for tensor, rows in enumerate((queries, shape.head_dim, shape.head_dim)):
            yield Run(tensor, group * rows, (group + 1) * rows)


def _gated_qkv_runs(shape: ModelShape) -> Iterator[Run]:
    """Per group its queries, their gates, its key, its value; the first tensor has for every head
    its query, then its gate."""
    queries, head = shape.num_heads // shape.num_kv_heads, shape.head_dim
    for group in range(shape.num_kv_heads):
        for is_gate in (0, 1):
            for query in range(group * queries, (group + 1) * queries):
                start = (2 * query + is_gate) * head
                yield Run(0, start, start + head)
        for tensor in (1, 2):
            yield Run(tensor, group * head, (group + 1) * head)


def _part_runs(rows: Sequence[int], size: int) -> Iterator[Run]:
    """Per shard its piece of the first part, then of the next ones."""
    for rank in range(size):
        for part, count in enumerate(rows):
            yield Run(part, rank * count // size, (rank + 1) * count // size)


def _in_stack(rule: Rule, run: Run, rows: Sequence[int]) -> Run:
    """The run of a part as one of the tensor that it is in; ``rows``: of the parts."""
    assert run.tensor is not None, "padding is in no part"
    tensor = rule.places[run.tensor]
    if not rule.hf_names[tensor]:
        return replace(run, tensor=None)
    before = sum(
        count
        for count, place in zip(rows[: run.tensor], rule.places[: run.tensor], strict=True)
        if place == tensor
    )
    return Run(tensor, before + run.start, before + run.stop)


@dataclass(frozen=True)
class Shard:
    """Number ``tp`` of the ``tp_size`` shards of a parameter that tensor-parallel ranks hold, or
    those that share an expert."""

    tp: int = 0
    tp_size: int = 1

    @classmethod
    def of(cls, rule: Rule, layout: ParallelLayout, place: RankPlace) -> Shard:
        """The one that the rank at a place holds."""
        if rule.expert is None:
            return cls(place.tensor, layout.tensor_parallel_size)
        return cls(place.expert_tensor, layout.expert_tensor)


def shard_runs(rule: Rule, shape: ModelShape, shard: Shard) -> list[Run]:
    """The runs that a shard holds, in its own order."""
    runs = parameter_runs(rule, shape, shard.tp_size)
    if rule.split == "replicated":
        return runs
    length = sum(map(len, runs)) // shard.tp_size
    begin = shard.tp * length
    end = begin + length
    mine = []
    position = 0
    for run in runs:
        low = max(begin, position)
        high = min(end, position + len(run))
        if low < high:
            mine.append(Run(run.tensor, run.start + low - position, run.start + high - position))
        position += len(run)
    return mine


def shard_shape(rule: Rule, shape: ModelShape, size: int) -> tuple[int, ...]:
    whole = list(hf_shapes(rule, shape)[0])
    whole[rule.axis] = sum(map(len, shard_runs(rule, shape, Shard(0, size))))
    return tuple(whole)


# ---- one tensor, both directions


def fill_shard(
    shard: Tensor, rule: Rule, runs: Iterable[Run], read: Callable[[int, Run], Tensor]
) -> None:
    """Writes a shard run by run, so that only one run of an HF tensor is in memory beside it.
    ``read`` gives the entries of a run of HF tensor number ``i``, in the tensor's own dtype."""
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
    """``length`` rows (``dim`` 0) or columns (``dim`` 1) of a Megatron shard from ``source`` on,
    and their place in the rule's Hugging Face tensor number ``tensor``, from ``target`` on."""

    tensor: int
    dim: int
    target: int
    source: int
    length: int

    def of_shard(self, shard: Tensor) -> Tensor:
        return shard.narrow(self.dim, self.source, self.length)

    def of_tensor(self, tensor: Tensor) -> Tensor:
        return tensor.narrow(self.dim, self.target, self.length)

    def between(self, start: int, stop: int) -> Piece:
        """What of a run of rows lies in rows [start, stop) of the tensor, of which its place is
        then counted."""
        first = max(self.target, start)
        end = min(self.target + self.length, stop)
        source = self.source + first - self.target
        return replace(self, target=first - start, source=source, length=max(0, end - first))


@cache
def placement(rule: Rule, shape: ModelShape, shard: Shard) -> tuple[Piece, ...]:
    """What a shard gives of the rule's Hugging Face tensors; the first one gives those that all
    hold whole."""
    if rule.split == "replicated" and shard.tp != 0:
        return ()
    pieces = []
    position = 0
    for run in shard_runs(rule, shape, shard):
        if run.tensor is not None:
            pieces.append(Piece(run.tensor, rule.axis, run.start, position, len(run)))
        position += len(run)
    return tuple(pieces)
