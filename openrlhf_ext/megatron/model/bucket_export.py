"""The policy's weights as Hugging Face tensors, written into buffers that somebody else provides, many at a time.

``export.export_hf`` makes one tensor after the other: a TP gather and a pipeline send for each. Here a whole bucket of
tensors is made at once, and every rank knows from the weight map alone which rows of which tensor it holds:

- where all ranks of the replica see the buffer (one host), each copies its own rows to their place: nothing is sent;
- elsewhere each rank sends what it holds of the bucket to rank 0 as one message, which puts the rows in their place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from openrlhf_ext.megatron.model.build import HiddenStateGPTModel
from openrlhf_ext.megatron.model.load import model_rules
from openrlhf_ext.megatron.model.shape import ModelShape
from openrlhf_ext.megatron.model.weight_map import Piece, Rule, hf_shapes, placement


class BucketExporter:
    """One rank's part in exporting. Building it and ``gather`` are collectives of the exporting ranks.

    The exporting ranks are those of the first replica (data- and context-parallel rank 0): ``takes_part`` says whether
    this rank is one; global rank 0 always is, and its buffer is the one that gets filled.
    """

    def __init__(self, chunks: Sequence[HiddenStateGPTModel], shape: ModelShape) -> None:
        """A collective of all ranks.

        Args:
            chunks: this rank's model chunks; the exporter reads their parameters at every export.
            shape: the model.
        """
        self._shape = shape
        self._tp_rank = parallel_state.get_tensor_model_parallel_rank()
        self._tp_size = parallel_state.get_tensor_model_parallel_world_size()
        self._stage = parallel_state.get_pipeline_model_parallel_rank()
        self.takes_part = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        self._own: dict[str, tuple[Rule, torch.nn.Parameter]] = {}
        for chunk in chunks:
            parameters = dict(chunk.named_parameters())
            for rule in model_rules(chunk, shape):
                for name in rule.hf_names:
                    self._own.setdefault(name, (rule, parameters[rule.parameter]))
        self._agree_on_owners()

    def _agree_on_owners(self) -> None:
        """Which stage gives which tensor (the first that has it: tied embeddings exist twice), and who takes part."""
        mine = (self._stage, self._tp_rank, {name: rule for name, (rule, _) in self._own.items()})
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine if self.takes_part else None)
        self._rules: dict[str, tuple[int, Rule]] = {}
        for stage, _, rules in sorted((entry for entry in everyone if entry), key=lambda entry: entry[0]):
            for name, rule in rules.items():
                self._rules.setdefault(name, (stage, rule))
        self._members = {rank: entry[:2] for rank, entry in enumerate(everyone) if entry}
        self._own = {name: held for name, held in self._own.items() if self._rules[name][0] == self._stage}

    @property
    def members(self) -> list[int]:
        """Global ranks of the exporting ranks, ascending."""
        return sorted(self._members)

    # ---- on one host: everybody writes ------------------------------------------------------------------------------

    @torch.no_grad()
    def write(self, views: Mapping[str, Tensor]) -> None:
        """Copy what this rank holds of each named tensor to its place; not a collective.

        Args:
            views: the whole tensors, in memory that all exporting ranks see.
        """
        if not self.takes_part:
            return
        for name, view in views.items():
            for piece, shard in self._pieces(name):
                piece.of_tensor(view).copy_(piece.of_shard(shard))

    def _pieces(self, name: str) -> Iterator[tuple[Piece, Tensor]]:
        if name in self._own:
            rule, parameter = self._own[name]
            for piece in self._placed(name, rule, self._tp_rank):
                yield piece, parameter.detach()

    def _placed(self, name: str, rule: Rule, tp_rank: int) -> list[Piece]:
        which = rule.hf_names.index(name)
        return [p for p in placement(rule, self._shape, tp_rank, self._tp_size) if p.tensor == which]

    # ---- elsewhere: one message per rank ----------------------------------------------------------------------------

    @torch.no_grad()
    def gather(self, names: Sequence[str], views: Mapping[str, Tensor] | None, group: dist.ProcessGroup | None) -> None:
        """Bring the named tensors together on global rank 0; a collective of the exporting ranks.

        Args:
            names: the tensors, the same on every rank.
            views: rank 0: where the whole tensors go, on any device; None to drop them. Other ranks: ignored.
            group: the exporting ranks, with a backend for the parameters' device; None when there is only one.
        """
        if not self.takes_part:
            return
        if dist.get_rank() != 0:
            self._send(names, group)
            return
        messages = self._receive(names, group)
        if views is not None:
            self.write({name: views[name] for name in names})
            for rank, message in messages:
                self._unpack(names, rank, message, views)

    def _send(self, names: Sequence[str], group: dist.ProcessGroup | None) -> None:
        pieces = [piece.of_shard(shard).flatten() for name in names for piece, shard in self._pieces(name)]
        if pieces:
            _wait_all([dist.P2POp(dist.isend, torch.cat(pieces), 0, group)])

    def _receive(self, names: Sequence[str], group: dist.ProcessGroup | None) -> list[tuple[int, Tensor]]:
        like = next(iter(self._own.values()))[1]
        sizes = {rank: self._message_size(names, rank) for rank in self.members if rank != 0}
        messages = [(r, torch.empty(n, dtype=like.dtype, device=like.device)) for r, n in sizes.items() if n]
        _wait_all([dist.P2POp(dist.irecv, message, rank, group) for rank, message in messages])
        return messages

    def _message(self, names: Sequence[str], rank: int) -> Iterator[tuple[str, Piece, list[int]]]:
        """What the message of ``rank`` consists of: tensor, piece and the piece's shape."""
        stage, tp_rank = self._members[rank]
        for name in names:
            owner, rule = self._rules[name]
            if owner == stage:
                hf_shape = hf_shapes(rule, self._shape)[rule.hf_names.index(name)]
                for piece in self._placed(name, rule, tp_rank):
                    yield name, piece, [*hf_shape[: piece.dim], piece.length, *hf_shape[piece.dim + 1 :]]

    def _message_size(self, names: Sequence[str], rank: int) -> int:
        return sum(torch.Size(shape).numel() for _, _, shape in self._message(names, rank))

    def _unpack(self, names: Sequence[str], rank: int, message: Tensor, views: Mapping[str, Tensor]) -> None:
        start = 0
        for name, piece, shape in self._message(names, rank):
            end = start + torch.Size(shape).numel()
            piece.of_tensor(views[name]).copy_(message[start:end].view(shape))
            start = end


def _wait_all(operations: list[dist.P2POp]) -> None:
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
