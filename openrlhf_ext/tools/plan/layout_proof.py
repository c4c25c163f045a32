"""Builds the model of every distinct rank of a layout on the meta device and proves the weight map
on it.

Needs ``config.json`` only. Proved are: every parameter of every rank is filled by exactly one rule
and has the shape that the rule makes; every entry of every HF tensor has exactly one place among
the tensor-parallel ranks of the stage that holds it, one of an expert among the ranks that share
this expert, and no other ranks hold it; and names and shapes of the HF tensors are those of
transformers' model class, built from the same file by other people's code.

Ranks that differ only in their data- or context-parallel coordinate hold the same model, those of a
mixture if they hold the same share of the same experts too: one of them is built.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from openrlhf_ext.inputs import reading
from openrlhf_ext.megatron.distributed import fake_rank
from openrlhf_ext.megatron.layers import LayerConverter, kept_bytes
from openrlhf_ext.megatron.layers.adapted import adapter_parameters, add_zeros
from openrlhf_ext.megatron.layers.lora import LoRALayers, adapters_of
from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.megatron.model.build import HiddenStateGPTModel, build_model, transformer_config
from openrlhf_ext.megatron.model.hf_files import unaccounted_parameters
from openrlhf_ext.megatron.model.hf_weights import model_rules, own_shard, parameters_of
from openrlhf_ext.megatron.model.shape import ModelShape, read_model_shape, read_value_shape
from openrlhf_ext.megatron.model.weight_map import (
    HFTensor,
    Rule,
    Shard,
    hf_shapes,
    hf_tensors,
    shard_runs,
)
from openrlhf_ext.options.sections import Megatron
from openrlhf_ext.outputs import aligned
from openrlhf_ext.planning.memory import COPIES, GIB, GRADIENT_BYTES, States

_RANKS_SHOWN = 6


class LayoutProofError(ValueError):
    """The model cannot be laid out as asked, or its weights do not all have exactly one place."""


@dataclass(frozen=True)
class RankShare:
    """What the ranks with one (tensor, pipeline) coordinate hold, in a mixture those with one share
    of the same experts among them; ``layers``: global layers of each model chunk. The first of
    these ranks was built; its states are without the gaps of a gradient buffer."""

    ranks: tuple[int, ...]
    tensor: int
    pipeline: int
    layers: tuple[range, ...]
    states: States
    expert: int = 0
    expert_tensor: int = 0


@dataclass(frozen=True)
class LayoutProof:
    """The share of every rank, and on how many HF tensors it was proved."""

    layout: ParallelLayout
    shares: tuple[RankShare, ...]
    hf_tensors: int
    hf_parameters: int
    seconds: float


@dataclass(frozen=True)
class _Holder:
    """A parameter of a built rank: where a rule was met."""

    rule: Rule
    shape: ModelShape
    rank: int
    stage: int
    expert: int  # which share of the experts the rank holds
    shard: Shard


def prove_layout(
    model_path: str | Path,
    layout: ParallelLayout,
    dtype: torch.dtype,
    distributed_optimizer: bool,
    value_head: str | None = None,
    converters: Sequence[LayerConverter] = (),
    on_host: bool = False,
) -> LayoutProof:
    """Builds every distinct rank of the layout and checks the weight map on it.

    ``value_head``: HF name of a critic's; ``converters``: whose copies of weights are counted;
    ``on_host``: where Adam's states wait. LayoutProofError lists everything that does not fit;
    RuntimeError: this process has a process group.
    """
    started = time.perf_counter()
    shape = (
        read_model_shape(model_path)
        if value_head is None
        else read_value_shape(model_path, value_head)
    )
    shares, holders, problems = [], [], []
    for ranks in _alike(shape, layout):
        rank = ranks[0]
        try:
            share, held, found = _build(
                shape, layout, ranks, dtype, distributed_optimizer, converters
            )
        except (AssertionError, RuntimeError, ValueError) as error:  # how Megatron refuses a layout
            raise LayoutProofError(f"rank {rank} cannot be built: {error}") from error
        shares.append(
            dataclasses.replace(share, states=share.states.with_optimizer_on_host)
            if on_host
            else share
        )
        holders += held
        problems += [f"rank {rank}: {problem}" for problem in found]
    lora = adapters_of(converters)
    tensors = [*hf_tensors(shape), *(hf_tensors(lora.shape(shape)) if lora else ())]
    problems += [*_places(shape, tensors, holders)]
    problems += _transformers_differences(model_path, shape)
    if problems:
        raise LayoutProofError(
            "the weights do not all have exactly one place:\n" + "\n".join(problems)
        )
    entries = sum(math.prod(t.shape) for t in tensors)
    return LayoutProof(layout, tuple(shares), len(tensors), entries, time.perf_counter() - started)


def _alike(shape: ModelShape, layout: ParallelLayout) -> list[tuple[int, ...]]:
    """The ranks by what they hold of the model; those that hold the same together."""
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, place in enumerate(layout.places):
        of_experts = (place.expert_tensor, place.expert) if shape.num_experts else ()
        alike[(place.tensor, place.stage, *of_experts)].append(rank)
    return [tuple(ranks) for ranks in alike.values()]


def _build(
    shape: ModelShape,
    layout: ParallelLayout,
    ranks: tuple[int, ...],
    dtype: torch.dtype,
    distributed_optimizer: bool,
    converters: Sequence[LayerConverter],
) -> tuple[RankShare, list[_Holder], list[str]]:
    """The first of these ranks."""
    rank, place = ranks[0], layout.place(ranks[0])
    holders, problems, layers, parameters, of_experts, adapters, copies = [], [], [], 0, 0, 0, 0
    lora = adapters_of(converters)
    with fake_rank(layout, rank):
        for chunk in _meta_chunks(shape, layout, dtype, lora):
            for model in (shape, *((lora.shape(shape),) if lora else ())):
                rules, named = model_rules(chunk, model), parameters_of(chunk, model)
                found = unaccounted_parameters(rules, model, named, own_shard)
                problems += [f"{what}: {sorted(names)}" for what, names in found.items()]
                wanted = torch.float32 if model.adapter_rank else dtype
                problems += [
                    f"{name} is {p.dtype}, not {wanted}"
                    for name, p in named.items()
                    if p.dtype != wanted
                ]
                holders += [
                    _Holder(rule, model, rank, place.stage, place.expert, own_shard(rule))
                    for rule in rules
                ]
            first = chunk.decoder.layers[0].layer_number - 1
            layers.append(range(first, first + len(chunk.decoder.layers)))
            parameters += sum(p.numel() for p in chunk.parameters())
            # as Megatron's DDP tells them apart (megatron-core 0.19.2
            # distributed/param_and_grad_buffer.py:918)
            of_experts += sum(
                p.numel() for p in chunk.parameters() if not getattr(p, "allreduce", True)
            )
            adapters += sum(p.numel() for p in adapter_parameters([chunk]))
            copies += kept_bytes(converters, chunk.decoder)
    trained, per_parameter = (
        (adapters, 8) if lora else (parameters, 8 if dtype == torch.float32 else 12)
    )
    shared = [(trained, layout.copies)]
    if of_experts and not lora:
        shared = [(trained - of_experts, layout.copies), (of_experts, layout.expert_copies)]
    optimizer = sum(
        -(-count * per_parameter // (held if distributed_optimizer else 1))
        for count, held in shared
    )
    weights = (parameters - adapters) * dtype.itemsize + adapters * torch.float32.itemsize
    states = States(parameters, weights, trained * GRADIENT_BYTES, optimizer, copies)
    share = RankShare(
        ranks, place.tensor, place.stage, tuple(layers), states, place.expert, place.expert_tensor
    )
    return share, holders, problems


def _places(
    shape: ModelShape, tensors: Sequence[HFTensor], holders: Sequence[_Holder]
) -> Iterator[str]:
    """HF tensors without exactly one place for every entry. A tied embedding is on the first stage
    and on the last."""
    stages: dict[str, dict[int, list[_Holder]]] = defaultdict(lambda: defaultdict(list))
    ranks: dict[tuple[int, int | None], set[int]] = defaultdict(set)
    for holder in holders:
        ranks[holder.stage, None].add(holder.rank)
        ranks[holder.stage, holder.expert].add(holder.rank)
        for name in filter(None, holder.rule.hf_names):
            stages[name][holder.stage].append(holder)
    for name in (tensor.name for tensor in tensors):
        at = stages.pop(name, {})
        copies = 2 if shape.tied_embeddings and name == shape.family.embedding else 1
        if not 1 <= len(at) <= copies:
            yield f"{name} is held by the pipeline stages {sorted(at)}, one is right"
        for stage, held in at.items():
            yield from _holder_problems(name, stage, held, ranks)
        for one in [held[0] for held in at.values()][:1]:
            yield from _gaps(name, one.rule, one.shape, one.shard.tp_size)
    yield from (f"{name} is no tensor of the checkpoint" for name in stages)


def _holder_problems(
    name: str, stage: int, held: Sequence[_Holder], ranks: Mapping[tuple[int, int | None], set[int]]
) -> Iterator[str]:
    """``ranks``: the built ones of every stage, all and by their share of the experts."""
    first, holding = held[0], Counter(holder.rank for holder in held)
    twice = [rank for rank, times in holding.items() if times > 1]
    if twice:
        yield f"{name} is held twice by rank {twice[0]} of stage {stage}"
    wanted = ranks[stage, None if first.rule.expert is None else first.expert]
    if holding.keys() != wanted:
        yield (
            f"{name}: stage {stage} has it on the ranks {sorted(holding)}, right is "
            f"{sorted(wanted)}"
        )
    shards = {holder.shard.tp for holder in held}
    if len(shards) != first.shard.tp_size:
        yield f"{name}: stage {stage} has shards {sorted(shards)} of {first.shard.tp_size}"


def _gaps(name: str, rule: Rule, shape: ModelShape, size: int) -> Iterator[str]:
    """Entries of an HF tensor that no rank holds, or several; replicated tensors are whole on every
    rank."""
    number = rule.hf_names.index(name)
    length = hf_shapes(rule, shape)[number][rule.axis]
    for ranks in (
        [[rank] for rank in range(size)] if rule.split == "replicated" else [list(range(size))]
    ):
        runs = [
            run
            for rank in ranks
            for run in shard_runs(rule, shape, Shard(rank, size))
            if run.tensor == number
        ]
        position = 0
        for run in sorted(runs, key=lambda run: run.start):
            if run.start != position:
                yield (
                    f"{name}: entries {sorted((position, run.start))} along axis {rule.axis} "
                    "have no place, or two"
                )
            position = run.stop
        if position != length:
            yield f"{name}: {length} entries along axis {rule.axis}, {position} have a place"


def _transformers_differences(model_path: str | Path, shape: ModelShape) -> Iterator[str]:
    """Names and shapes in which our list of HF tensors differs from transformers' model class,
    which knows no critic's value head: it stands in the place of the vocabulary projection."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with reading(Path(model_path) / "config.json", "by transformers"), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(model_path, local_files_only=True)
        )
    theirs = dict(_one_by_one((name, tuple(p.shape)) for name, p in model.named_parameters()))
    ours = {t.name: t.shape for t in hf_tensors(shape)}
    if shape.value_head is not None:
        theirs.pop(shape.family.output, None)
        ours.pop(f"{shape.value_head}.weight")
    for name in sorted(theirs.keys() | ours.keys()):
        if theirs.get(name) != ours.get(name):
            yield f"{name}: transformers has {theirs.get(name)}, the weight map {ours.get(name)}"


def _one_by_one(
    named: Iterable[tuple[str, tuple[int, ...]]],
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors as transformers saves them: of each expert, gate and up apart; its class has one
    of all experts."""
    for name, shape in named:
        path, _, stacked = name.rpartition(".experts.")
        parts = (
            {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(stacked)
            if path
            else None
        )
        if parts is None:
            yield name, shape
            continue
        experts, rows, columns = shape
        for expert, part in itertools.product(range(experts), parts):
            yield f"{path}.experts.{expert}.{part}.weight", (rows // len(parts), columns)


def _meta_chunks(
    shape: ModelShape, layout: ParallelLayout, dtype: torch.dtype, lora: LoRALayers | None = None
) -> list[HiddenStateGPTModel]:
    config = transformer_config(shape, layout, dtype, Megatron())
    config.use_cpu_initialization = True  # on a GPU machine Megatron would name the device itself
    stages = [None] if layout.virtual_pipeline_size == 1 else range(layout.virtual_pipeline_size)
    with torch.device("meta"):
        layers = () if lora is None else (lora,)
        chunks = [
            build_model(shape, config, stage, meta=True, converters=layers) for stage in stages
        ]
    for chunk in chunks:
        if lora is not None:
            add_zeros(chunk, shape, lora.adapter)
    return chunks


# ---- as text
# --------------------------------------------------------------------------------------------------


def format_proof(proof: LayoutProof) -> str:
    """One row for all ranks that hold as much of the same layers, and what was proved."""
    heaviest = max(proof.shares, key=lambda share: share.states.total)
    copies = any(share.states.copies for share in proof.shares)
    experts = any(share.expert for share in proof.shares)
    alike: dict[tuple[Any, ...], list[RankShare]] = defaultdict(list)
    for share in proof.shares:
        same = dataclasses.replace(share, ranks=(), tensor=0, expert=0, expert_tensor=0)
        alike[dataclasses.astuple(same)].append(share)
    on_host = heaviest.states.on_host > 0
    rows = [
        _header(copies, experts, on_host),
        *(_row(shares, copies, experts, on_host) for shares in alike.values()),
    ]
    table = [f"  {line}" for line in aligned(rows)]
    what = (
        "weights, fp32 gradients"
        + ("" if on_host else ", optimizer")
        + (f", {COPIES} of weights" if copies else "")
    )
    title = f"memory per rank before activations ({what}), GiB:"
    return "\n".join([title, *table, *_conclusions(proof, heaviest)]) + "\n"


def _header(copies: bool, experts: bool, on_host: bool) -> tuple[str, ...]:
    share = ("tp", *(["ep"] if experts else []), "pp", "layers", "parameters")
    memory = (
        "weights",
        "gradients",
        *([] if on_host else ["optimizer"]),
        *([COPIES] if copies else []),
    )
    return (
        *share,
        *memory,
        "GiB together",
        *(["optimizer, in host memory"] if on_host else []),
        "ranks",
    )


def _row(
    shares: Sequence[RankShare], copies: bool, experts: bool, on_host: bool
) -> tuple[str, ...]:
    share, states = shares[0], shares[0].states
    place = [
        _span(one.tensor for one in shares),
        *([_span(one.expert for one in shares)] if experts else []),
    ]
    ranks = tuple(sorted(rank for one in shares for rank in one.ranks))
    optimizer, there = ((), (states.on_host,)) if on_host else ((states.optimizer,), ())
    own = (states.weights, states.gradients, *optimizer, *((states.copies,) if copies else ()))
    layers = " ".join(f"{layers[0]}-{layers[-1]}" for layers in share.layers)
    memory = [f"{size / GIB:.3f}" for size in (*own, states.total, *there)]
    shown = " ".join(map(str, ranks[:_RANKS_SHOWN])) + (
        f" ... ({len(ranks)})" if len(ranks) > _RANKS_SHOWN else ""
    )
    return *place, str(share.pipeline), layers, f"{states.parameters:,}", *memory, shown


def _span(numbers: Iterable[int]) -> str:
    found = sorted(set(numbers))
    return f"{found[0]}" if len(found) == 1 else f"{found[0]}-{found[-1]}"


def _conclusions(proof: LayoutProof, heaviest: RankShare) -> list[str]:
    return [
        f"built {len(proof.shares)} of {proof.layout.world_size} ranks on the meta device in "
        f"{proof.seconds:.1f} s; those that differ in their data- or context-parallel coordinate "
        "only hold the same",
        f"{proof.hf_tensors} HF tensors, {proof.hf_parameters:,} parameters: names and shapes "
        "are those of transformers' model, every entry has exactly one place, every parameter "
        "of every rank is filled exactly once",
        f"the heaviest rank is {heaviest.ranks[0]}: {heaviest.states.total / GIB:.2f} GiB before "
        "activations",
    ]
