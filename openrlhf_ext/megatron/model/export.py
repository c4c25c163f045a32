"""The parameters of all ranks as Hugging Face tensors on rank 0, some rows at a time.

Exporting streams along the declarative map (``weight_map``), one tensor after the other and large tensors in pieces of
consecutive rows, so that no rank holds more than one bucket above its own shard, however large an embedding is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from openrlhf_ext.megatron.deadlines.gate import Gate
from openrlhf_ext.megatron.deadlines.watchdog import phase
from openrlhf_ext.megatron.model.hf_files import HFRows
from openrlhf_ext.megatron.model.load import BUCKET_BYTES, Chunks, chunk_list, model_rules
from openrlhf_ext.megatron.model.shape import ModelShape
from openrlhf_ext.megatron.model.weight_map import Piece, Rule, hf_shapes, hf_tensors, owned_rules, placement


def export_hf(
    model: Chunks,
    shape: ModelShape,
    value: Callable[[torch.nn.Parameter], Tensor] | None = None,
    dtype: torch.dtype | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[HFRows]:
    """Yields all rows of every HF tensor on rank 0, in the order of ``hf_tensors``; nothing on other ranks.

    All ranks have to exhaust the iterator. Only global rank 0 receives rows, from the ranks of the first data-parallel
    replica (and there of the first context-parallel rank); these wait for rank 0 to ask for the next ones in no
    collective (``deadlines.gate``), so rank 0 may do with them what it likes, for as long as it likes.

    Args:
        model: the model, or this rank's chunks of it.
        value: what to export of a parameter (default: its data; tests export gradients).
        dtype: dtype of what ``value`` returns (default: that of the parameters).
        bucket_bytes: what a rank may hold above its shard: some rows, and what another rank sends of them.
    """
    gate = Gate()
    if parallel_state.get_data_parallel_rank(with_context_parallel=True) != 0:
        return
    chunks = chunk_list(model)
    value = value or (lambda p: p.detach())
    own = _own_parameters(chunks, shape)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    gatherer = _Gatherer(dtype or chunks[0].config.params_dtype)
    for owner, rule in owned_rules(shape, stages, chunks[0].config.virtual_pipeline_model_parallel_size or 1):
        shard = value(own[rule.hf_names]) if stage == owner else None
        for part in _parts(rule, shape, bucket_bytes // 2 // gatherer.dtype.itemsize):
            with phase("exporting the weights"):
                gate.next()
                values = gatherer.to_rank_0(part, shard, owner)
            if values is not None:
                yield HFRows(part.name, part.start, values)


def whole_tensors(rows: Iterable[HFRows], shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the tensors that ``export_hf`` yields in rows, of which a caller can hold the largest.

    A tensor may be memory that is used again for the next: copy what has to last.
    """
    shapes = {tensor.name: tensor.shape for tensor in hf_tensors(shape)}
    whole: Tensor | None = None
    for part in rows:
        end = part.start + len(part.values)
        wanted = shapes[part.name]
        if len(part.values) == wanted[0]:
            yield part.name, part.values
            continue
        if part.start == 0:
            whole = part.values.new_empty(wanted)
        whole[part.start : end] = part.values
        if end == wanted[0]:
            yield part.name, whole


def _own_parameters(chunks: Sequence[torch.nn.Module], shape: ModelShape) -> dict[tuple[str, ...], torch.nn.Parameter]:
    """This rank's parameters by the HF tensors they are made of."""
    own: dict[tuple[str, ...], torch.nn.Parameter] = {}
    for chunk in chunks:
        parameters = dict(chunk.named_parameters())
        own |= {rule.hf_names: parameters[rule.parameter] for rule in model_rules(chunk, shape)}
    return own


@dataclass(frozen=True)
class _Part:
    """Rows [start, stop) of HF tensor number ``tensor`` of a rule."""

    rule: Rule
    model: ModelShape
    tensor: int
    start: int
    stop: int

    @property
    def name(self) -> str:
        return self.rule.hf_names[self.tensor]

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.stop - self.start, *hf_shapes(self.rule, self.model)[self.tensor][1:])

    def pieces(self, rank: int, size: int) -> list[Piece]:
        """What tensor-parallel rank ``rank`` gives of the rows, to be cut out of ``rows_of`` its shard."""
        found = [p for p in placement(self.rule, self.model, rank, size) if p.tensor == self.tensor]
        if self.rule.axis == 0:
            found = [p.between(self.start, self.stop) for p in found]
        return [p for p in found if p.length]

    def rows_of(self, shard: Tensor) -> Tensor:
        """The shard, of one that is cut by columns only the part's rows."""
        return shard if self.rule.axis == 0 else shard[self.start : self.stop]

    def piece_shape(self, piece: Piece) -> list[int]:
        shape = list(self.shape)
        shape[piece.dim] = piece.length
        return shape


def _parts(rule: Rule, model: ModelShape, most_entries: int) -> Iterator[_Part]:
    for tensor, whole in enumerate(hf_shapes(rule, model)):
        rows = max(1, most_entries // math.prod(whole[1:]))
        for start in range(0, whole[0], rows):
            yield _Part(rule, model, tensor, start, min(start + rows, whole[0]))


class _Gatherer:
    """This rank's share in bringing rows to rank 0, in two pieces of memory that are used again and again."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._rank = parallel_state.get_tensor_model_parallel_rank()
        self._size = parallel_state.get_tensor_model_parallel_world_size()
        self._stage = parallel_state.get_pipeline_model_parallel_rank()
        self._memory: dict[str, Tensor] = {}

    def to_rank_0(self, part: _Part, shard: Tensor | None, owner: int) -> Tensor | None:
        """The rows on global rank 0, None elsewhere.

        Args:
            shard: this rank's shard of the rule's parameter, on the ranks of the pipeline stage ``owner``.
        """
        values = self._gather(part, shard) if self._stage == owner else None
        if owner != 0 and self._rank == 0:
            values = self._to_first_stage(part, values, owner)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # NCCL's calls return before the peer has arrived
        return values

    def _gather(self, part: _Part, shard: Tensor) -> Tensor | None:
        """The rows on tensor-parallel rank 0 of the stage, None on its others."""
        group = parallel_state.get_tensor_model_parallel_group()
        rows, own = part.rows_of(shard), part.pieces(self._rank, self._size)
        if self._rank != 0:
            if own:
                message = torch.cat([piece.of_shard(rows).flatten() for piece in own])
                dist.send(message, dst=dist.get_global_rank(group, 0), group=group)
            return None
        if len(own) == 1 and own[0].length == part.shape[own[0].dim]:
            return own[0].of_shard(rows)  # all of it is here
        values = self._take("rows", math.prod(part.shape)).view(part.shape)
        for piece in own:
            piece.of_tensor(values).copy_(piece.of_shard(rows))
        for rank in range(1, self._size):
            self._receive(part, rank, values, group)
        return values

    def _receive(self, part: _Part, rank: int, values: Tensor, group: dist.ProcessGroup) -> None:
        """Puts into ``values`` what another tensor-parallel rank gives of the rows."""
        pieces = part.pieces(rank, self._size)
        if not pieces:
            return
        lengths = [math.prod(part.piece_shape(piece)) for piece in pieces]
        message = self._take("message", sum(lengths))
        dist.recv(message, src=dist.get_global_rank(group, rank), group=group)
        for piece, received in zip(pieces, message.split(lengths), strict=True):
            piece.of_tensor(values).copy_(received.view(part.piece_shape(piece)))

    def _to_first_stage(self, part: _Part, values: Tensor | None, owner: int) -> Tensor | None:
        """From the first rank of the stage ``owner`` to global rank 0."""
        group = parallel_state.get_pipeline_model_parallel_group()
        if self._stage == owner:
            dist.send(values.contiguous(), dst=dist.get_global_rank(group, 0), group=group)
        if self._stage != 0:
            return None
        received = self._take("rows", math.prod(part.shape)).view(part.shape)
        dist.recv(received, src=dist.get_global_rank(group, owner), group=group)
        return received

    def _take(self, what: str, entries: int) -> Tensor:
        """(entries,) memory; what was taken before under this name is lost."""
        if what not in self._memory or self._memory[what].numel() < entries:
            self._memory[what] = torch.empty(0)  # gives the smaller one back first
            self._memory[what] = torch.empty(entries, dtype=self.dtype, device=self._device)
        return self._memory[what][:entries]
