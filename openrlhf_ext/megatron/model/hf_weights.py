"""A Hugging Face checkpoint into this rank's parameters, and the parameters of all ranks out as
Hugging Face tensors.

Loading streams along the declarative map (``weight_map``), some rows after the others from the
mapped files. Exporting goes by ``Part``, consecutive rows of a tensor. Every rank knows from the
map alone which entries of which part it holds, so that many parts travel together and no rank holds
more above its own shard than what travels:

- where all ranks of the replica see the memory that the parts go to (one host), each copies its own
  entries to their place (``HFExporter.write``): nothing is sent;
- elsewhere each rank sends what it holds of the parts to rank 0 as one message
  (``HFExporter.gather``).

Weights for engines may leave from several ranks at a time: then the ranks of a tensor-parallel
group are among themselves, and their first one is what rank 0 is otherwise (``Ownership.streams``).
Those of a mixture leave by rank 0
alone: its experts are held by ranks of other groups than all else.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from openrlhf_ext.groups.watchdog import Gate, phase
from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.megatron.model.adapter import WEIGHTS
from openrlhf_ext.megatron.model.build import HiddenStateGPTModel
from openrlhf_ext.megatron.model.hf_files import (
    SINGLE,
    HFCheckpoint,
    HFRows,
    WeightMapError,
    describe,
    new_value_head,
    unaccounted_parameters,
    unaccounted_tensors,
)
from openrlhf_ext.megatron.model.shape import ModelShape
from openrlhf_ext.megatron.model.weight_map import (
    Piece,
    Rule,
    Run,
    Shard,
    fill_shard,
    hf_shapes,
    is_of_adapter,
    parameters,
    placement,
    shard_runs,
    stage_rules,
)

Value = Callable[[torch.nn.Parameter], Tensor]
Reader = Callable[[int, Run], Tensor]
_SUMMED_AT_ONCE = 1 << 22
BUCKET_BYTES = 256 << 20
"""What a rank may hold above its shard while weights are loaded or exported."""


class OwnedTensor(NamedTuple):
    """A Hugging Face tensor, ``number`` of those of a parameter of a chunk, what each global rank
    gives of it, and in which stream."""

    rule: Rule
    chunk: int
    number: int
    shape: tuple[int, ...]
    slices: Mapping[int, tuple[Piece, ...]]
    stream: int = 0


class Ownership:
    """Which rank gives which slice of which Hugging Face tensor; every entry is given by exactly
    one.

    ``tensors`` are in the order of ``hf_tensors``; ``streams``: the ranks that give something,
    ascending, of each set of tensors that leaves by itself. There is one, with the ranks of the
    first replica and the first copies of experts, if at most one is asked for or the model is a
    mixture; otherwise one for every pipeline stage, and for as many data- and context-parallel
    copies of it as ``most_streams`` allows, each with a share of the stage's tensors. Rank 0 is the
    first of stream 0.
    """

    def __init__(self, shape: ModelShape, layout: ParallelLayout, most_streams: int = 1) -> None:
        stages = layout.pipeline_parallel_size
        most_streams = 1 if shape.num_experts else most_streams
        owned = [held for held in parameters(shape, layout) if held.gives]

        # (stage, copy) of every rule: an equal share of the stage's entries for each copy
        copies = max(1, min(most_streams // stages, layout.copies))
        totals = Counter[int]()
        places = []
        for held in owned:
            places.append((held.stage, totals[held.stage]))
            totals[held.stage] += sum(map(math.prod, hf_shapes(held.rule, shape)))
        places = [(stage, copies * before // totals[stage]) for stage, before in places]
        used = sorted(set(places), key=lambda place: place[::-1]) if most_streams > 1 else []

        self.tensors: dict[str, OwnedTensor] = {}
        for held, (stage, copy) in zip(owned, places, strict=True):
            rule = held.rule
            ranks = _holders(layout, stage, copy, held.share)
            given = {
                rank: placement(rule, shape, Shard.of(rule, layout, layout.place(rank)))
                for rank in ranks
            }
            shapes = hf_shapes(rule, shape)
            for number, (name, whole) in enumerate(zip(rule.hf_names, shapes, strict=True)):
                if not name:
                    continue  # a module without an adapter
                slices = {}
                for rank, pieces in given.items():
                    if own := tuple(piece for piece in pieces if piece.tensor == number):
                        slices[rank] = own
                stream = used.index((stage, copy)) if used else 0
                self.tensors[name] = OwnedTensor(rule, held.chunk, number, whole, slices, stream)

        givers: list[set[int]] = [set() for _ in range(max(1, len(used)))]
        for tensor in self.tensors.values():
            givers[tensor.stream].update(tensor.slices)
        self.streams = tuple(tuple(sorted(ranks)) for ranks in givers)
        # the givers' group: those of experts are in no other one together
        self.is_of_all_ranks = bool(shape.num_experts)


@cache
def _holders(layout: ParallelLayout, stage: int, copy: int, share: int | None) -> tuple[int, ...]:
    """Ranks that hold copy number ``copy`` of a parameter of the stage: of a share of the experts,
    or of none."""
    if share is not None:
        return layout.ranks(stage=stage, expert=share, expert_replica=copy)
    context, replica = divmod(copy, layout.data_parallel_size)
    return layout.ranks(stage=stage, context=context, replica=replica)


def own_shard(rule: Rule) -> Shard:
    if rule.expert is not None:
        group = parallel_state.get_expert_tensor_parallel_group()
        return Shard(group.rank(), group.size())
    return Shard(
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )


def model_rules(model: HiddenStateGPTModel, shape: ModelShape) -> list[Rule]:
    offset = get_transformer_layer_offset(model.config, getattr(model, "vp_stage", None))
    layers = range(offset, offset + len(model.decoder.layers))
    experts = parallel_state.get_expert_model_parallel_group()
    return stage_rules(
        shape, layers, model.pre_process, model.post_process, experts.size(), experts.rank()
    )


def load_hf(chunks: Sequence[HiddenStateGPTModel], shape: ModelShape, path: str | Path) -> None:
    """Fills this rank's parameters from an HF checkpoint, reading only its own part of every
    tensor. Not a collective. Those of adapters are filled from a peft checkpoint if the ``shape``
    is that of adapters, else they stay.

    The checkpoint may be fp32, bf16 or fp16 whatever the parameters are: values are then rounded.
    The value head of a critic stays as it is if the checkpoint has none. Raises WeightMapError,
    which lists what does not fit.
    """
    file = WEIGHTS if shape.adapter_rank else SINGLE
    checkpoint = HFCheckpoint(path, file)
    new_head = new_value_head(shape, checkpoint)
    problems = unaccounted_tensors(checkpoint, shape)
    for chunk in chunks:
        rules = model_rules(chunk, shape)
        named = parameters_of(chunk, shape)
        for what, names in unaccounted_parameters(rules, shape, named, own_shard).items():
            problems.setdefault(what, []).extend(names)
    if problems:
        raise WeightMapError(f"{path}: {describe(problems)}")

    def values(rule: Rule) -> Reader | None:
        if not new_head.isdisjoint(rule.hf_names):
            return None
        return lambda tensor, run: checkpoint.read(
            rule.hf_names[tensor], rule.axis, run.start, run.stop
        )

    fill_rules(chunks, shape, values)


def fill_rules(
    chunks: Sequence[HiddenStateGPTModel],
    shape: ModelShape,
    values: Callable[[Rule], Reader | None],
) -> None:
    """Fills this rank's parameters with what ``values(rule)`` gives for entries of its HF tensors
    (``fill_shard``);
    None: the parameter stays."""
    for chunk in chunks:
        named = parameters_of(chunk, shape)
        for rule in model_rules(chunk, shape):
            if (read := values(rule)) is None:
                continue
            parameter = named[rule.parameter]
            # files hold at most fp32
            most = max(1, BUCKET_BYTES * parameter.shape[rule.axis] // (4 * parameter.numel()))
            parts = []
            for run in shard_runs(rule, shape, own_shard(rule)):
                parts += run.split(most)
            fill_shard(parameter.detach(), rule, parts, read)


def parameters_of(chunk: HiddenStateGPTModel, shape: ModelShape) -> dict[str, torch.nn.Parameter]:
    """Those of adapters, or all others."""
    wanted = bool(shape.adapter_rank)
    return {
        name: parameter
        for name, parameter in chunk.named_parameters()
        if is_of_adapter(name) == wanted
    }


class Part(NamedTuple):
    """Rows [start, stop) of the Hugging Face tensor ``name``; entries of a vector count as rows."""

    name: str
    start: int
    stop: int


class TensorMeta(NamedTuple):
    """What is known of an exported tensor before it is (vLLM's ``ParamMeta``)."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class HFExporter:
    """One rank's part in exporting a model. Nothing here is a collective but ``gather``, ``rows``
    and iteration.

    ``stream``: the one in which this rank gives something, None: it gives nothing; ``root``: the
    first rank of the stream, where what is gathered comes together. ``rows`` and iteration are of
    ownerships with one stream, whose root is rank 0. ``metadata`` and iteration are those of a vLLM
    ``WeightSource`` (vllm 0.32.0 distributed/weight_transfer/base.py:110) whose sender is rank 0.
    """

    def __init__(
        self,
        chunks: Sequence[HiddenStateGPTModel],
        ownership: Ownership,
        value: Value | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """The parameters of ``chunks`` are read at every export. ``value``: what to export of a
        parameter, of its shape (its gradient, say); None: its data. ``dtype`` is that of values,
        None: that of the model's parameters."""
        self._value = value or torch.Tensor.detach
        self._rank = dist.get_rank()
        self._dtype = dtype or next(chunks[0].parameters()).dtype
        self._tensors = ownership.tensors
        self.streams = ownership.streams
        self.stream = next(
            (number for number, ranks in enumerate(self.streams) if self._rank in ranks), None
        )
        self._givers = self.streams[self.stream or 0]
        self.root = self._givers[0]
        if ownership.is_of_all_ranks:
            self._group = dist.group.WORLD
        elif len(self.streams) == 1:
            self._group = parallel_state.get_model_parallel_group()
        else:
            self._group = parallel_state.get_tensor_model_parallel_group()
        # the group of all ranks has had its first call long ago
        self._is_connected = len(self._givers) == 1 or ownership.is_of_all_ranks
        self._known_pieces: dict[tuple[Part, int], list[Piece]] = {}
        held = [dict(chunk.named_parameters()) for chunk in chunks]
        self._own: dict[str, torch.nn.Parameter] = {
            name: held[tensor.chunk][tensor.rule.parameter]
            for name, tensor in self._tensors.items()
            if self._rank in tensor.slices
        }

    def metadata(self) -> list[TensorMeta]:
        """Of all tensors of the model, in the order of iteration; the same on every rank."""
        return [
            TensorMeta(name, self._dtype, tensor.shape) for name, tensor in self._tensors.items()
        ]

    def streams_of_tensors(self) -> list[int]:
        """In the order of ``metadata``."""
        return [tensor.stream for tensor in self._tensors.values()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors on rank 0 (a caller can hold the largest), nothing elsewhere; all ranks
        must exhaust it. A tensor may be memory that is used again for the next: copy what has to
        last."""
        whole: Tensor | None = None
        for part in self.rows():
            wanted = self._tensors[part.name].shape
            if len(part.values) == wanted[0]:
                yield part.name, part.values
                continue
            if whole is None or part.start == 0:
                whole = part.values.new_empty(wanted)
            end = part.start + len(part.values)
            whole[part.start : end] = part.values
            if end == wanted[0]:
                yield part.name, whole

    # ---- everybody writes

    @torch.no_grad()
    def write(self, parts: Sequence[Part], targets: Sequence[Tensor]) -> None:
        """Copies what this rank holds of each part to its place in ``targets``: memory that all
        ranks of the stream see."""
        for part, target in zip(parts, targets, strict=True):
            for piece, values in self._held(part):
                piece.of_tensor(target).copy_(values)

    def _held(self, part: Part) -> Iterator[tuple[Piece, Tensor]]:
        """What this rank gives of the rows: its place in them, and the values."""
        if part.name in self._own:
            shard = self._value(self._own[part.name])
            if self._tensors[part.name].rule.axis == 1:
                shard = shard[part.start : part.stop]
            for piece in self._pieces(part, self._rank):
                yield piece, piece.of_shard(shard)

    def _pieces(self, part: Part, rank: int) -> list[Piece]:
        # an update asks for the same ones again and again
        if (part, rank) not in self._known_pieces:
            tensor = self._tensors[part.name]
            pieces = list(tensor.slices.get(rank, ()))
            if tensor.rule.axis == 0:
                pieces = [
                    cut for piece in pieces if (cut := piece.between(part.start, part.stop)).length
                ]
            self._known_pieces[part, rank] = pieces
        return self._known_pieces[part, rank]

    @torch.no_grad()
    def fingerprint(self) -> str:
        """Of the bits of all tensors, the same in every layout: a sum over their entries, each
        multiplied by a number of its tensor's and mixed. A collective of all ranks."""
        total: Tensor | int = 0
        for name, parameter in self._own.items():
            digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
            number = int.from_bytes(digest, "little") >> 1 | 1
            values = self._value(parameter)
            integers = {2: torch.int16, 4: torch.int32}[values.element_size()]
            for piece in self._tensors[name].slices[self._rank]:
                bits = piece.of_shard(values).contiguous().view(-1).view(integers)
                for part in bits.split(_SUMMED_AT_ONCE):
                    mixed = part.long() * number
                    total = total + (mixed ^ (mixed >> 32)).sum()
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
        found = torch.as_tensor(total, dtype=torch.int64, device=device)
        dist.all_reduce(found)
        return f"{found.item() % (1 << 64):016x}"

    # ---- one message per rank

    @torch.no_grad()
    def gather(self, parts: Sequence[Part], targets: Sequence[Tensor] | None) -> None:
        """Brings the parts, the same on every rank, together in the root's ``targets`` on any
        device (None to drop them); a collective of the stream's ranks."""
        if self.stream is None:
            return
        self._connect()
        if self._rank != self.root:
            self._send(parts)
            return
        messages = self._receive(parts)
        if targets is not None:
            self.write(parts, targets)
            for rank, message in messages:
                self._unpack(parts, rank, message, targets)

    def _connect(self) -> None:
        """All ranks of a group have to take part in its first call, and of some parts one may have
        nothing to send (NCCL; torch/distributed/distributed_c10d.py, ``batch_isend_irecv``)."""
        if not self._is_connected:
            like = next(iter(self._own.values()))
            dist.all_reduce(torch.zeros(1, device=like.device), group=self._group)
            self._is_connected = True

    def _send(self, parts: Sequence[Part]) -> None:
        pieces = []
        for part in parts:
            pieces += [values.flatten() for _, values in self._held(part)]
        if pieces:
            _wait_all([dist.P2POp(dist.isend, torch.cat(pieces), self.root, self._group)])

    def _receive(self, parts: Sequence[Part]) -> list[tuple[int, Tensor]]:
        like = self._value(next(iter(self._own.values())))
        messages = []
        operations = []
        for rank in self._givers:
            size = sum(math.prod(shape) for _, _, shape in self._contents(parts, rank))
            if rank != self.root and size:
                message = torch.empty(size, dtype=like.dtype, device=like.device)
                messages.append((rank, message))
                operations.append(dist.P2POp(dist.irecv, message, rank, self._group))
        _wait_all(operations)
        return messages

    def _contents(self, parts: Sequence[Part], rank: int) -> Iterator[tuple[int, Piece, list[int]]]:
        """(number of the part, piece, the piece's shape) of a rank's message."""
        for number, part in enumerate(parts):
            for piece in self._pieces(part, rank):
                shape = list(self._shape_of(part))
                shape[piece.dim] = piece.length
                yield number, piece, shape

    def _unpack(
        self, parts: Sequence[Part], rank: int, message: Tensor, targets: Sequence[Tensor]
    ) -> None:
        start = 0
        for number, piece, shape in self._contents(parts, rank):
            end = start + math.prod(shape)
            piece.of_tensor(targets[number]).copy_(message[start:end].view(shape))
            start = end

    # ---- all rows, one after the other

    def rows(self, bucket_bytes: int = BUCKET_BYTES) -> Iterator[HFRows]:
        """Yields all rows of every HF tensor on rank 0, in the order of ``hf_tensors``; nothing on
        other ranks.

        All ranks have to exhaust the iterator. The others wait for rank 0 to ask for the next rows
        in no collective (``watchdog.Gate``), so that it may take as long as it likes over them.
        ``bucket_bytes``: what a rank may hold above its shard: some rows, and what other ranks send
        of them.
        """
        gate = Gate()
        if self.stream is None:
            return
        like = self._value(next(iter(self._own.values())))
        memory = like.new_empty(0)
        for parts in self._batches(bucket_bytes // 2 // like.itemsize):
            targets: dict[Part, Tensor] = {}
            with phase("exporting the weights"):
                gate.next()
                travelling = [part for part in parts if not self._is_whole_on_rank_0(part)]
                if self._rank == 0:
                    sizes = [math.prod(self._shape_of(part)) for part in travelling]
                    if memory.numel() < sum(sizes):
                        memory = like.new_empty(sum(sizes))
                    places = memory[: sum(sizes)].split(sizes)
                    targets = {
                        part: at.view(self._shape_of(part))
                        for part, at in zip(travelling, places, strict=True)
                    }
                self.gather(travelling, list(targets.values()))
                if like.is_cuda:
                    # NCCL's calls return before the peer has arrived
                    torch.cuda.current_stream().synchronize()
            for part in parts if self._rank == 0 else []:
                values = targets.get(part)
                if values is None:  # it did not travel
                    _, values = next(self._held(part))
                yield HFRows(part.name, part.start, values)

    def _is_whole_on_rank_0(self, part: Part) -> bool:
        pieces = self._pieces(part, 0)
        return len(pieces) == 1 and pieces[0].length == self._shape_of(part)[pieces[0].dim]

    def _shape_of(self, part: Part) -> tuple[int, ...]:
        return (part.stop - part.start, *self._tensors[part.name].shape[1:])

    def _batches(self, most_entries: int) -> Iterator[list[Part]]:
        """All parts in order, as many at a time as have ``most_entries`` together, at least one
        row."""
        batch: list[Part] = []
        room = most_entries
        for part in self._parts(most_entries):
            entries = math.prod(self._shape_of(part))
            if batch and entries > room:
                yield batch
                batch = []
                room = most_entries
            batch.append(part)
            room -= entries
        yield batch

    def _parts(self, most_entries: int) -> Iterator[Part]:
        for name, tensor in self._tensors.items():
            step = max(1, most_entries // math.prod(tensor.shape[1:]))
            for start in range(0, tensor.shape[0], step):
                yield Part(name, start, min(start + step, tensor.shape[0]))


def _wait_all(operations: list[dist.P2POp]) -> None:
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
