"""Resumable state of a Megatron model: weights, optimizer, schedule and random states, for any
layout to load.

Megatron's ``sharded_state_dict`` says which box of which global tensor a parameter is. The
optimizer's state is stored in the same coordinates: the distributed optimizer keeps a range of each
parameter's elements on each data-parallel rank, and every rank writes its own ranges. So nothing is
gathered to save (Megatron's ``fully_reshardable`` format gathers all optimizer states of a replica
in the host memory of each of its ranks), and nothing is exchanged to load.

    <folder>/index.json             which piece of which tensor is in which file
    <folder>/state.json             steps of optimizer and schedule, layout, shape of the model,
                                    sums of its tensors
    <folder>/rank00000.safetensors  what the rank holds: model.<name>, optimizer.<state>.<name>,
                                    average.<name>
    <folder>/rank00000.json         its random states

``<converter>.<name>`` is the state of a layer converter, which is the same on all ranks of a stage:
TransformerEngine's own (``_extra_state``) is a pickle, so its tensors are stored instead.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from torch import Tensor

from openrlhf_ext.checkpoints import (
    Block,
    BlockRange,
    CheckpointError,
    FileEntry,
    TensorIndex,
    TensorReader,
    write_pieces,
)
from openrlhf_ext.checkpoints.files import read_plain, write_plain
from openrlhf_ext.checkpoints.model_state import STATE, model_faults
from openrlhf_ext.checkpoints.tensors import TYPE_NAMES
from openrlhf_ext.groups.watchdog import wait_for_all
from openrlhf_ext.megatron.distributed import random_states, set_random_states
from openrlhf_ext.megatron.layers import LayerConverter
from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.megatron.model.build import HiddenStateGPTModel
from openrlhf_ext.megatron.policy import MegatronModel
from openrlhf_ext.megatron.settings import KNOWN
from openrlhf_ext.megatron.step.host_optimizer import HostOptimizer
from openrlhf_ext.megatron.step.optimizer import single_optimizers

logger = logging.getLogger(__name__)

INDEX = "index.json"
_AVERAGE = "average"
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SUMMED = 1 << 24  # entries at a time, of which torch makes a copy in int64


@dataclass(frozen=True)
class ParameterBlock:
    """A box of a global tensor that this rank holds: elements ``start`` to ``start + block.numel``
    of the local parameter (a gated MLP's first weight is two blocks)."""

    parameter: Tensor
    block: Block
    start: int
    padded: bool  # whether other layouts pad the global tensor to other sizes (the vocabulary)
    of_expert: bool  # held by the replicas of the rank's experts, not of all else
    copy_of: int  # 0 if no other model-parallel rank stores the block

    def elements(self, of: Tensor | None = None) -> Tensor:
        """Of the parameter, or of another tensor of its shape."""
        whole = self.parameter.detach() if of is None else of
        return whole.view(-1)[self.start : self.start + self.block.numel]


@dataclass(frozen=True)
class OptimizerRange:
    """Optimizer state of elements ``start`` to ``end`` of a local parameter: flat tensors of that
    length by name."""

    start: int
    end: int
    tensors: dict[str, Tensor]


# ---- what a rank holds


def parameter_blocks(model: MegatronModel) -> list[ParameterBlock]:
    """Every parameter of this rank that is saved, in global coordinates, in the same order on all
    data-parallel ranks."""
    is_saved = model.trained.is_saved
    blocks = []
    for chunk in model.chunks:
        for entry in _sharded_entries(chunk):
            blocks += [block for block in _blocks(entry) if is_saved(block.parameter)]

    known = {id(block.parameter) for block in blocks}
    names = []
    for chunk in model.chunks:
        for name, parameter in chunk.named_parameters():
            if id(parameter) not in known and is_saved(parameter):
                names.append(name)
    if names:
        raise CheckpointError(
            f"sharded_state_dict() leaves out these parameters, so they cannot be saved: {names}"
        )
    return blocks


def _sharded_entries(chunk: HiddenStateGPTModel) -> Iterator[ShardedTensor | ShardedTensorFactory]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = chunk.sharded_state_dict(metadata={"dp_cp_group": group})
    for entry in nested_values(state):
        if isinstance(entry, (ShardedTensor, ShardedTensorFactory)):
            yield entry


def _blocks(entry: ShardedTensor | ShardedTensorFactory) -> Iterator[ParameterBlock]:
    parts = [entry]
    if isinstance(entry, ShardedTensorFactory):
        parts = nested_values(entry.build())
    for part in parts:
        if not part.data.is_contiguous():
            raise CheckpointError(
                f"{part.key} is not a contiguous part of its parameter, so it cannot be saved"
            )
        shape = (1,) * part.prepend_axis_num + tuple(part.local_shape)
        yield ParameterBlock(
            entry.data,
            Block(part.key, tuple(part.global_shape), tuple(part.global_offset), shape),
            part.data.storage_offset() - entry.data.storage_offset(),
            part.allow_shape_mismatch,
            not getattr(entry.data, "allreduce", True),
            # (pipeline copy, tensor-parallel copy, data-parallel copy): the last is dealt with by
            # who writes what
            max(part.replica_id[:2]),
        )


def optimizer_ranges(optimizer: MegatronOptimizer | None) -> dict[int, OptimizerRange]:
    """State of the parameters that this rank updates, by ``id`` of the model's parameter; zeros
    before the first step. Names are those of the inner optimizer (``exp_avg``, ``exp_avg_sq``), and
    ``master`` for the fp32 copy of a parameter of less precision."""
    ranges = {}
    for part in single_optimizers(optimizer):
        for parameter, held in _ranges(part):
            ranges[id(parameter)] = held
    return ranges


def _ranges(optimizer: MegatronOptimizer) -> Iterator[tuple[Tensor, OptimizerRange]]:
    inner = optimizer.optimizer
    if inner is None:  # a rank without parameters of its kind
        return
    for parameter, main, start in _main_parameters(optimizer):
        if isinstance(inner, HostOptimizer):
            yield parameter, OptimizerRange(start, start + main.numel(), inner.tensors(main))
            continue
        state = _initialized(inner, main)
        tensors = {name: t.view(-1) for name, t in state.items() if name != "step"}
        if main.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
            tensors["master"] = main.detach().view(-1)
        yield parameter, OptimizerRange(start, start + main.numel(), tensors)


def _main_parameters(optimizer: MegatronOptimizer) -> Iterator[tuple[Tensor, Tensor, int]]:
    """(model's parameter, what the inner optimizer updates, where in the parameter that begins)."""
    inner = optimizer.optimizer
    if isinstance(optimizer, DistributedOptimizer):
        if optimizer.config.use_precision_aware_optimizer:
            raise CheckpointError(
                "checkpoints of the precision-aware optimizer are not built: switch it off"
            )
        for parameter, (group, order) in optimizer.model_param_group_index_map.items():
            start = optimizer._get_model_param_range_map(parameter)["param"].start
            yield parameter, inner.param_groups[group]["params"][order], start
    elif isinstance(optimizer, Float16OptimizerWithFloat16Params):
        for models, mains in (
            *zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True),
            *zip(optimizer.fp32_from_fp32_groups, optimizer.fp32_from_fp32_groups, strict=True),
        ):
            for parameter, main in zip(models, mains, strict=True):
                yield parameter, main, 0
    elif isinstance(optimizer, FP32Optimizer):
        for group in inner.param_groups:
            for parameter in group["params"]:
                yield parameter, parameter, 0
    else:
        raise CheckpointError(f"checkpoints of a {type(optimizer).__name__} are not built")


def _initialized(inner: torch.optim.Optimizer, main: Tensor) -> dict[str, Tensor]:
    """The inner optimizer's state of a parameter; before the first step the one that Adam would
    begin with."""
    state = inner.state[main]
    if not state:
        state |= {"exp_avg": torch.zeros_like(main), "exp_avg_sq": torch.zeros_like(main)}
        if _steps_in_state(inner):
            state["step"] = torch.tensor(0.0)
    return state


def _steps_in_state(inner: torch.optim.Optimizer) -> bool:
    """torch's Adam counts steps per parameter, TransformerEngine's and apex's per group."""
    return isinstance(inner, (torch.optim.Adam, torch.optim.AdamW))


def optimizer_step(optimizer: MegatronOptimizer | None) -> int:
    """Updates made so far. Raises CheckpointError: parameters differ in it."""
    steps = set()
    for part in single_optimizers(optimizer):
        inner = part.optimizer
        if inner is not None and _steps_in_state(inner):
            steps |= {int(state["step"]) for state in inner.state.values() if "step" in state}
        elif inner is not None:
            steps |= {int(group["step"]) for group in inner.param_groups if "step" in group}
    if len(steps) > 1:
        raise CheckpointError(
            f"the optimizer has made different numbers of steps for its parameters: {sorted(steps)}"
        )
    return steps.pop() if steps else 0


def set_optimizer_step(optimizer: MegatronOptimizer | None, step: int) -> None:
    for part in single_optimizers(optimizer):
        inner = part.optimizer
        if inner is not None and _steps_in_state(inner):
            for state in inner.state.values():
                # one each: torch advances them one by one
                state["step"] = torch.tensor(float(step))
        elif inner is not None:
            for group in inner.param_groups:
                group["step"] = step


# ---- save


@dataclass(frozen=True)
class Snapshot:
    """What one rank will write; its methods communicate with nobody and may run in a thread of
    their own."""

    rank: int
    pieces: list[tuple[BlockRange, Tensor]]
    random_states: dict[str, Any]
    index: TensorIndex | None  # on rank 0 only, as is
    state: dict[str, Any] | None

    def write(self, folder: Path, name: str) -> list[FileEntry]:
        """Writes this rank's files of ``folder/name`` and returns their entries, relative to
        ``folder``."""
        entries = [
            write_pieces(folder, f"{name}/{_rank_file(self.rank)}.safetensors", self.pieces),
            write_plain(folder, f"{name}/{_rank_file(self.rank)}.json", self.random_states),
        ]
        if self.index is not None:
            entries += [
                self.index.write(folder, f"{name}/{INDEX}"),
                write_plain(folder, f"{name}/{STATE}", self.state),
            ]
        return entries


def take_snapshot(
    model: MegatronModel, extra: dict[str, Any] | None = None, *, copy: bool
) -> Snapshot:
    """Everything this rank writes. A collective: the index is gathered on rank 0 and checked to be
    complete. ``extra``:
    plain values, rank 0's of which are kept. ``copy``: to host memory, so that training may go
    on."""
    rank = dist.get_rank()
    pieces = list(_own_pieces(model))
    sums = _sums(pieces)
    if copy:
        pieces = [(piece, tensor.to("cpu", copy=True)) for piece, tensor in pieces]

    file = f"{_rank_file(rank)}.safetensors"
    files = [(piece, TYPE_NAMES[tensor.dtype], file) for piece, tensor in pieces]
    everyone: list | None = [None] * dist.get_world_size() if rank == 0 else None
    dist.gather_object(files, everyone)
    index = None if everyone is None else TensorIndex.build(chain.from_iterable(everyone))

    state = {
        **_described(model),
        "layout": asdict(model.settings.layout),
        **_counts(model),
        "sums": sums,
        "extra": extra or {},
    }
    kept = state if rank == 0 else None
    return Snapshot(rank, pieces, random_states(), index, kept)


def _counts(model: MegatronModel) -> dict[str, int]:
    return {
        "optimizer_step": optimizer_step(model.optimizer),
        "scheduler_steps": model.scheduler.num_steps if model.scheduler is not None else 0,
    }


def _sums(pieces: list[tuple[BlockRange, Tensor]]) -> dict[str, int]:
    """Name and shape of every tensor -> the bits of its entries, read as integers, times a weight
    for each layer: exact in any order, so the same in all layouts. A collective."""
    own = Counter[str]()
    for piece, tensor in pieces:
        block = piece.block
        # layers, and experts, are the leading axes of their tensors, one in each block
        axes = [offset for offset, size in zip(block.offset, block.shape, strict=True) if size == 1]
        weight = math.prod(2 * offset + 1 for offset in axes)
        bits = tensor.reshape(-1).view(_INTEGERS[tensor.element_size()])
        total = sum(int(part.sum(dtype=torch.int64)) for part in bits.split(_SUMMED))
        name = f"{block.key} {'x'.join(map(str, block.global_shape))}"
        own[name] += weight * total
    everyone = [own] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    totals = Counter[str]()
    for part in everyone:
        totals.update(part)
    return {name: totals[name] % 2**64 for name in sorted(totals)}


def _own_pieces(model: MegatronModel) -> Iterator[tuple[BlockRange, Tensor]]:
    """The pieces this rank writes: copies on other ranks are left out, the ranks that hold one
    share it evenly."""
    layout = model.settings.layout
    rank = dist.get_rank()
    copy = layout.copy(rank)
    place = layout.place(rank)
    ranges = optimizer_ranges(model.optimizer)
    distributed = any(
        isinstance(part, DistributedOptimizer) for part in single_optimizers(model.optimizer)
    )
    if copy == place.tensor == 0:
        yield from _converter_pieces(model)
    for number, block in enumerate(parameter_blocks(model)):
        if block.copy_of:
            continue
        if block.of_expert:
            mine = number % layout.expert_copies == place.expert_replica
        else:
            mine = number % layout.copies == copy
        if mine:
            yield BlockRange.whole(_named(block.block, "model")), block.elements()
            if model.average is not None:
                yield (
                    BlockRange.whole(_named(block.block, _AVERAGE)),
                    block.elements(model.average.of(block.parameter)),
                )
        own_range = ranges.get(id(block.parameter))
        if own_range is not None and (mine or distributed):
            yield from _state_pieces(block, own_range)


def _converter_pieces(model: MegatronModel) -> Iterator[tuple[BlockRange, Tensor]]:
    for name, tensor in model.converter_state().items():
        shape = tuple(tensor.shape)
        yield BlockRange.whole(Block(name, shape, (0,) * len(shape), shape)), tensor


def _state_pieces(
    block: ParameterBlock, held: OptimizerRange
) -> Iterator[tuple[BlockRange, Tensor]]:
    """What is held of the optimizer's state of the block."""
    low = max(held.start, block.start)
    high = min(held.end, block.start + block.block.numel)
    if low < high:
        for name, tensor in sorted(held.tensors.items()):
            piece = BlockRange(
                _named(block.block, f"optimizer.{name}"), low - block.start, high - block.start
            )
            yield piece, tensor[low - held.start : high - held.start]


def _named(block: Block, prefix: str) -> Block:
    return Block(f"{prefix}.{block.key}", block.global_shape, block.offset, block.shape)


def _rank_file(rank: int) -> str:
    return f"rank{rank:05d}"


# ---- load


def load_checkpoint(model: MegatronModel, folder: Path) -> dict[str, Any]:
    """Overwrites the model's weights, optimizer and schedule with those of ``folder``, written in
    any layout.

    Learning rates and the like follow the present options; only the counts of steps are restored,
    and random states if the layout is the one that wrote them. A collective: no rank returns before
    all have loaded. Returns ``extra`` of :func:`take_snapshot`. Raises CheckpointError, on every
    rank: another model or type, or unreadable.
    """
    problem = None
    asked: set[str] = set()
    ours = _described(model)
    try:
        state = read_plain(folder / STATE)
        if faults := [*model_faults(folder, state, ours)]:
            raise CheckpointError("; ".join(faults))
        index = TensorIndex.read(folder / INDEX)
        reader = TensorReader(folder, index)
        asked = (
            _load_tensors(model, reader)
            | _load_average(model, reader)
            | _load_converters(model, reader)
        )
        _load_steps(model, state)
        _restore_random_states(model, state, folder)
    except CheckpointError as error:
        problem = str(error)

    wait_for_all()  # some may read for long
    everyone: list[tuple[str | None, set[str]]] = [(None, set())] * dist.get_world_size()
    dist.all_gather_object(everyone, (problem, asked))
    if problems := sorted({p for p, _ in everyone if p}):
        raise CheckpointError("; ".join(problems))
    if unused := sorted(set(index.tensors) - set().union(*(keys for _, keys in everyone))):
        raise CheckpointError(
            f"{folder} holds {len(unused)} tensors that the model has not, such as {unused[:3]}"
        )
    return state["extra"]


def check_loaded(model: MegatronModel, folder: Path) -> None:
    """The model holds what was saved in ``folder``, in whatever layout: call it when all is loaded,
    before the first step. A tensor that has another shape here (the vocabulary's padding) is not
    compared. A collective. Raises CheckpointError, on every rank, naming what differs."""
    state = read_plain(folder / STATE)
    sums = _sums(list(_own_pieces(model)))
    saved = state.get("sums", {})  # earlier releases wrote none
    other = [
        f"{name} {count}, saved {state[name]}"
        for name, count in _counts(model).items()
        if count != state[name]
    ]
    other += [name for name in sorted(sums) if saved.get(name, sums[name]) != sums[name]]
    if other:
        raise CheckpointError(
            f"what was loaded from {folder} is not what was saved: {len(other)} tensors or "
            f"counts differ, such as {'; '.join(other[:3])}. The files have their checksums, so "
            "loading is at fault: report it as a bug"
        )


def _load_tensors(model: MegatronModel, reader: TensorReader) -> set[str]:
    ranges = optimizer_ranges(model.optimizer)
    asked: set[str] = set()
    for block in parameter_blocks(model):
        pieces = [(BlockRange.whole(_named(block.block, "model")), block.elements())]
        held = ranges.get(id(block.parameter))
        if held is not None:
            pieces += _state_pieces(block, held)
        for piece, target in pieces:
            asked.add(piece.block.key)
            target.copy_(reader.read(piece, target.dtype, padded=block.padded))
    return asked


def _load_average(model: MegatronModel, reader: TensorReader) -> set[str]:
    """Fills the moving average of the weights; one that the checkpoint has not begins with its
    weights."""
    stored = {key for key in reader.index.tensors if key.startswith(f"{_AVERAGE}.")}
    if model.average is None or not stored:
        if (model.average is not None or stored) and dist.get_rank() == 0:
            what = "holds an average too"
            if model.average:
                what = "holds no moving average, which begins with its weights"
            logger.warning("%s %s (train.enable_ema)", reader.folder, what)
        if model.average is not None:
            model.average.restart()
        return stored
    for block in parameter_blocks(model):
        values = model.average.of(block.parameter)
        target = block.elements(values)
        piece = BlockRange.whole(_named(block.block, _AVERAGE))
        target.copy_(reader.read(piece, target.dtype, padded=block.padded))
        model.average.put(block.parameter, values)
    return stored


def _load_converters(model: MegatronModel, reader: TensorReader) -> set[str]:
    """Fills the state of layer converters, also of known ones that this run is without:
    ``_load_converter``."""
    converters: dict[str, LayerConverter | type[LayerConverter]] = {
        known.name: known for known in KNOWN
    }
    converters |= {own.name: own for own in model.settings.converters}
    pieces = {piece.block.key: (piece, tensor) for piece, tensor in _converter_pieces(model)}
    asked = [_load_converter(converter, pieces, reader) for converter in converters.values()]
    return set().union(*asked)


def _load_converter(
    converter: LayerConverter | type[LayerConverter],
    every: dict[str, tuple[BlockRange, Tensor]],
    reader: TensorReader,
) -> set[str]:
    """Fills a converter's state; returns the names of the tensors that were read, or are not
    needed."""
    stored = reader.index.tensors
    prefix = f"{converter.name}."
    pieces = {key: held for key, held in every.items() if key.startswith(prefix)}
    unread = {key for key in stored if key.startswith(prefix)}
    if not (pieces and unread):
        if (pieces or unread) and dist.get_rank() == 0:
            whose = "the checkpoint has none" if pieces else "the checkpoint's is left out"
            text = "%s: %s differs from the run that wrote it: %s"
            logger.warning(text, reader.folder, converter.state_title, whose)
        return unread
    shapes = {
        key: (tuple(tensor.shape), stored[key].global_shape if key in stored else None)
        for key, (_, tensor) in pieces.items()
    }
    for key, (ours, theirs) in shapes.items():
        if ours != theirs:
            raise CheckpointError(
                f"{key} has the shape {theirs or 'of nothing'} in {reader.folder}, here {ours}: "
                f"resume with the {converter.state_options} of the run that wrote it"
            )
    for piece, tensor in pieces.values():
        tensor.copy_(reader.read(piece, tensor.dtype).view(tensor.shape))
    return set(pieces)


def _load_steps(model: MegatronModel, state: dict[str, Any]) -> None:
    set_optimizer_step(model.optimizer, state["optimizer_step"])
    if model.scheduler is not None:
        model.scheduler.num_steps = state["scheduler_steps"]
        model.scheduler.step(0)  # the present schedule's rate at that step


def _described(model: MegatronModel) -> dict[str, Any]:
    """What has to be the same for a model to go on from a checkpoint. A collective."""
    precision = model.settings.megatron.param_dtype
    return {"shape": asdict(model.shape), "param_dtype": precision, **model.trained.facts()}


# ---- random states


def _restore_random_states(model: MegatronModel, state: dict[str, Any], folder: Path) -> None:
    path = folder / f"{_rank_file(dist.get_rank())}.json"
    if ParallelLayout(**state["layout"]) == model.settings.layout:
        set_random_states(read_plain(path))
    elif dist.get_rank() == 0:
        logger.info(
            "%s was written in another layout: random states of the ranks start anew", folder
        )
