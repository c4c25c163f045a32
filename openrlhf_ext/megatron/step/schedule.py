"""Runs the micro-batches of a built model through Megatron's pipeline schedules, and exchanges
values between its ranks.

Every stage knows every micro-batch, and so the shape of everything it will receive: shapes are
never sent. Every public method of ``Schedule`` is a collective over all ranks of the model unless
it says otherwise. Shape suffixes: B = sequences, N = response tokens of a micro-batch that this
rank predicts, L = its tokens on this rank, H = hidden size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from openrlhf_ext.groups.watchdog import progress
from openrlhf_ext.megatron.built import BuiltModel
from openrlhf_ext.megatron.model.build import packed_sequences
from openrlhf_ext.megatron.model.experts import TakenExperts
from openrlhf_ext.megatron.model.spec import sum_ranks
from openrlhf_ext.megatron.settings import row_costs
from openrlhf_ext.megatron.step.batch import (
    PackedBatch,
    PackShape,
    SequenceBatch,
    TokenCount,
    pack,
)
from openrlhf_ext.megatron.step.dealing import Sizes, plan_micro_batches


class StageCommunicator(P2PCommunicator):
    """Exchanges activations and gradients of micro-batches of different lengths with the
    neighboring stages.

    Megatron-core 0.19.2 sends the shapes first and posts its operations in the order (send to
    previous, receive from previous, send to next, receive from next). With two stages both
    neighbors are the same rank, and messages between two ranks match in the order in which they are
    posted. Under the interleaved schedule a gradient then arrives where an activation is expected,
    silently if both have the same shape (pipeline_parallel/p2p_communication.py:18, 213). Here
    every rank posts its receives in the order in which its neighbor posts the matching sends.
    ``lengths``: tokens of each micro-batch in a message (those of one rank), in the order of the
    schedule.
    """

    def __init__(
        self,
        pp_group: dist.ProcessGroup,
        config: TransformerConfig,
        lengths: Sequence[int],
        chunks: int,
    ) -> None:
        super().__init__(pp_group, config)
        rank, last = pp_group.rank(), pp_group.size() - 1
        order = schedule_order(len(lengths), chunks, pp_group.size())
        # The first chunk of the first stage receives no activations, and the last chunk of the last
        # stage no gradients.
        self._from_prev = self._shapes(lengths, order, skip_first_chunk=rank == 0)
        self._from_next = self._shapes(lengths, order, skip_first_chunk=rank == last)

    def _shapes(
        self, lengths: Sequence[int], order: Sequence[tuple[int, int]], skip_first_chunk: bool
    ) -> Iterator[tuple[int, int, int]]:
        for micro_batch, chunk in order:
            if not (skip_first_chunk and chunk == 0):
                yield lengths[micro_batch], 1, self.config.hidden_size

    def _communicate(
        self,
        *,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        **_,
    ) -> tuple[Tensor | None, Tensor | None, None]:
        """Returns (received from previous, received from next, no request to wait for); ignores
        Megatron's single shape."""
        from_prev = self._empty(self._from_prev) if recv_prev else None
        from_next = self._empty(self._from_next) if recv_next else None
        operations = [
            dist.P2POp(operation, tensor, peer, self.pp_group)
            for operation, tensor, peer in (
                (dist.isend, tensor_send_prev, self.prev_rank),
                (dist.irecv, from_next, self.next_rank),
                (dist.isend, tensor_send_next, self.next_rank),
                (dist.irecv, from_prev, self.prev_rank),
            )
            if tensor is not None
        ]
        for request in dist.batch_isend_irecv(operations) if operations else []:
            request.wait()
        return from_prev, from_next, None

    def _empty(self, shapes: Iterator[tuple[int, int, int]]) -> Tensor:
        device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
        return torch.empty(
            next(shapes), device=device, dtype=self.config.pipeline_dtype, requires_grad=True
        )


def schedule_order(micro_batches: int, chunks: int, stages: int) -> list[tuple[int, int]]:
    """(micro-batch, chunk) in the order in which a stage computes them forward; backward, chunks
    count from the end."""
    if chunks == 1:
        return [(micro_batch, 0) for micro_batch in range(micro_batches)]
    return get_schedule_table(micro_batches, chunks, stages)


def pipeline_arguments(
    config: TransformerConfig, lengths: Sequence[int], chunks: int
) -> dict[str, Any]:
    """Returns arguments that make Megatron's pipeline schedules use ``StageCommunicator``, with all
    groups; {} without PP."""
    stages = parallel_state.get_pipeline_model_parallel_group()
    if stages.size() == 1:
        return {}
    groups = ProcessGroupCollection(
        pp=stages,
        tp=parallel_state.get_tensor_model_parallel_group(),
        cp=parallel_state.get_context_parallel_group(),
        dp_cp=parallel_state.get_data_parallel_group(with_context_parallel=True),
        embd=parallel_state.get_embedding_group(check_initialized=False),
        pos_embd=parallel_state.get_position_embedding_group(check_initialized=False),
    )
    return {
        "p2p_communicator": StageCommunicator(stages, config, lengths, chunks),
        "pg_collection": groups,
    }


def agreed(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns the first tensor-parallel rank's tensor, on the CPU: the other ranks' copies may
    differ in the last bit."""
    on_device = tensor.to(device)
    group = parallel_state.get_tensor_model_parallel_group()
    dist.broadcast(on_device, parallel_state.get_tensor_model_parallel_src_rank(), group=group)
    return on_device.cpu()


def sum_over_replicas(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns the sum over the data-parallel ranks, bitwise the same on every rank if each
    replica's ranks agree."""
    group, on_device = parallel_state.get_data_parallel_group(), tensor.to(device)
    if not tensor.is_floating_point():
        dist.all_reduce(on_device, group=group)
        return on_device.to(tensor.device)
    # Sum in the order of the ranks: an all-reduce does not guarantee an order of summation, which
    # may differ between groups.
    parts = [torch.empty_like(on_device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, on_device, group=group)
    return torch.stack(parts).sum(0).to(tensor.device)


def broadcast_from_last_stage(tensor: Tensor, device: torch.device) -> None:
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        on_device = tensor.to(device)
        dist.broadcast(
            on_device,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
        tensor.copy_(on_device)


def gather_tokens(values_N: Tensor, part: PackedBatch) -> Tensor:
    """Returns the values of all response tokens of this micro-batch in order; differentiable.

    A collective of the context-parallel ranks; each contributes the values of its own tokens. If
    all ranks then compute the same loss, the gradient of each entry goes to the rank that
    contributed it.
    """
    mine = values_N.new_zeros(part.response_tokens).scatter(0, part.places_N, values_N)
    return sum_ranks(mine, parallel_state.get_context_parallel_group())


class TokenValues:
    """``count`` fp32 values of every response token of a batch, collected micro-batch by
    micro-batch."""

    def __init__(
        self, batch: SequenceBatch, plan: Sequence[list[int]], count: int, device: torch.device
    ) -> None:
        self._responses, self._order, self._device = batch.responses, planned_rows(plan), device
        self._planned = torch.zeros(count, batch.responses.tokens, device=device)

    def keep(self, part: PackedBatch, values: Sequence[Tensor]) -> None:
        """Stores the values of the tokens that this rank predicts; they are zeros on the other
        context-parallel ranks."""
        mine = torch.stack([value.float() for value in values])
        self._planned[:, part.tokens].scatter_(1, part.places_N.expand_as(mine), mine)

    def in_order(self) -> list[Tensor]:
        """Returns (N,) values on the CPU in the order of the batch, on every rank of the replica. A
        collective of its ranks."""
        planned = sum_ranks(self._planned, parallel_state.get_context_parallel_group())
        broadcast_from_last_stage(planned, self._device)
        segments, inverse = self._responses.select(self._order), np.argsort(self._order).tolist()
        return [segments.take(planned_N, inverse) for planned_N in planned.cpu()]


# loss(part, hidden_NH) -> value to differentiate, number of tokens (unused, int), metrics to add up
PackLoss = tuple[Tensor, Tensor, dict[str, Tensor]]
LossFunction = Callable[[PackedBatch, Tensor], PackLoss]


class Schedule:
    """Pipeline schedules over the micro-batches of batches; ``counted``: pack tokens since
    ``take_count``."""

    def __init__(self, model: BuiltModel) -> None:
        self._model, self.device, self.config = model, model.device, model.config
        self.counted = TokenCount()
        settings = model.settings
        self._costs = row_costs(model.shape, settings.megatron, settings.layout)
        self._names: list[str] = []  # names of the metrics that any rank has reported so far

    def plan(self, batch: SequenceBatch, *, forward_only: bool) -> list[list[int]]:
        """Returns the rows of each micro-batch of this data-parallel rank, at about equal costs.

        A micro-batch has a fixed number of rows, or as many as fit a token budget. Every
        data-parallel rank gets the same number of micro-batches, so some may be empty.
        """
        costs, sizes = self._costs, self._sizes(batch, forward_only)
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        # Interleaved schedules require whole rounds of micro-batches.
        multiple = stages if len(self._model.chunks) > 1 else 1
        fewest = plan_micro_batches(batch, sizes, multiple, costs, stages)
        most = -(-self._most(len(fewest)) // multiple) * multiple
        # Dealt to that many micro-batches, the rows are about balanced. If rows are hard to fit,
        # that fails; the fewest micro-batches are then filled up with empty ones.
        plan = (
            fewest if len(fewest) == most else plan_micro_batches(batch, sizes, most, costs, stages)
        )
        return plan if len(plan) == most else [*fewest, *([] for _ in range(most - len(fewest)))]

    def _sizes(self, batch: SequenceBatch, forward_only: bool) -> Sizes:
        settings, rows = self._model.settings, len(batch)
        tokens = settings.tokens_per_micro_batch(forward_only)
        if tokens is None:
            capacity = (settings.rollout if forward_only else settings.train).micro_batch_size
            return Sizes([1] * rows, [0] * rows, capacity)
        shape = self._pack_shape
        # Padding at the end of a pack is shared by its sequences, so a single row does not count
        # it.
        slots = PackShape(shape.context_parallel_size)
        capacity = tokens * shape.context_parallel_size // shape.pack_unit * shape.pack_unit
        sizes = [slots.slots([length])[0] for length in batch.lengths_B.tolist()]
        # A shared prompt token is assumed to save half of its memory: attention keeps its input and
        # output for whole sequences, less than a quarter of the bytes that a layer keeps of a
        # token, or less than half if it keeps nothing of the MLP (recompute_modules mlp).
        return Sizes(sizes, (batch.prompts.tokens_B // 2).tolist(), max(capacity, shape.pack_unit))

    def _most(self, count: int) -> int:
        most = torch.tensor(count, device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group())
        return int(most)

    def run(
        self,
        batch: SequenceBatch,
        plan: Sequence[list[int]],
        loss: LossFunction,
        *,
        forward_only: bool,
        training: bool | None = None,
        taken: TakenExperts | None = None,
    ) -> list[dict[str, Tensor]]:
        """Runs one pipeline schedule over all micro-batches: forward, and unless ``forward_only``
        backward too.

        Returns the metrics of each micro-batch on the last stage, an empty list elsewhere.

        ``plan``: rows of each micro-batch; a micro-batch without rows computes a dummy and no loss.
        ``loss`` is called on the last stage for every micro-batch with response tokens, with its
        pack (on this rank's device) and the hidden states that predict its response tokens on this
        rank; a context-parallel rank may have none (``part.places_N``). ``loss`` should not
        synchronize with the device, because the host queues the next micro-batch meanwhile.
        ``training``: whether modules are in training mode; None: unless ``forward_only``. ``taken``
        receives the experts of a mixture.
        """

        numbers = itertools.count(1)  # counts the micro-batches of all model chunks of this stage

        def step(parts: Iterator[PackedBatch], model: torch.nn.Module) -> tuple[Tensor, Callable]:
            part = next(parts)
            progress(f"micro-batch {next(numbers)} of {len(plan) * len(self._model.models)}")
            hidden = self._hidden_states(model, part)
            if taken is not None and part.rows.start < part.rows.stop:
                taken.keep(part, self._model.chunks[self._model.models.index(model)])
            return hidden, partial(self._finish, loss, part)

        for converter in self._model.settings.converters:
            converter.begin_schedule(self._model.chunks)
        if forward_only:
            self._model.gather_parameters()
        lengths = self._count_pieces(batch, plan)
        weight = 0.0 if forward_only else self._balance_weight(batch)
        # Each chunk runs all micro-batches.
        parts = itertools.tee(self._parts(batch, plan, weight), len(self._model.models))
        with self._training(not forward_only if training is None else training):
            return get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=list(parts),
                model=self._model.models,
                num_microbatches=len(plan),
                seq_length=1,  # not used: micro-batches differ in length
                micro_batch_size=1,
                forward_only=forward_only,
                **pipeline_arguments(self.config, lengths, len(self._model.models)),
            )

    def _balance_weight(self, batch: SequenceBatch) -> float:
        """Returns the weight of each token in the load-balancing loss, a mean over the mini-batch's
        tokens and the layers.

        0 if there is no such loss; otherwise a collective of the replicas.
        """
        coef = self._model.settings.aux_loss_coef
        if not coef or not self._model.shape.is_mixture:
            return 0.0
        tokens = int(sum_over_replicas(batch.lengths_B.sum(), self.device))
        return coef / (self._model.shape.num_layers * max(1, tokens))

    def _parts(
        self, batch: SequenceBatch, plan: Sequence[list[int]], weight: float = 0.0
    ) -> Iterator[PackedBatch]:
        rank, row, token = parallel_state.get_context_parallel_rank(), 0, 0
        piece = (
            parallel_state.get_tensor_model_parallel_rank() if self.config.sequence_parallel else 0
        )
        for rows in plan:
            part = batch.select(rows) if rows else SequenceBatch.padding_row()
            place = {
                "first_row": row,
                "first_token": token,
                "context_parallel_rank": rank,
                "piece": piece,
            }
            packed = pack(part, self._pack_shape, **place)
            if not rows:
                packed = replace(packed, rows=slice(row, row))
            elif weight and packed.routing is not None:
                packed = replace(
                    packed,
                    routing=packed.routing._replace(weight_B=weight / part.lengths_B.double()),
                )
            yield packed.to(self.device)
            row, token = row + len(rows), token + part.responses.tokens

    @property
    def _pack_shape(self) -> PackShape:
        pieces = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        unit = math.lcm(
            *(converter.piece_unit(pieces) for converter in self._model.settings.converters)
        )
        shares, is_mixture = self._costs.shares_prompts, self._model.shape.is_mixture
        return PackShape(self.config.context_parallel_size, pieces, unit, shares, is_mixture)

    def _count_pieces(self, batch: SequenceBatch, plan: Sequence[list[int]]) -> list[int]:
        """Returns the tokens of every micro-batch on one rank, and adds the totals to
        ``counted``."""
        shape, padding_row, pieces = self._pack_shape, [2], []
        for rows in plan:
            lengths, repeated = batch.lengths_B[rows].tolist(), sum(shape.repeated(batch, rows))
            pieces.append(shape.tokens_per_rank(lengths or padding_row, repeated))
            self.counted.real += sum(lengths) - repeated
            self.counted.repeated += repeated
            self.counted.packed += pieces[-1] * shape.context_parallel_size * shape.pieces
        return pieces

    def take_count(self) -> TokenCount:
        """Returns the token counts of this replica's packs since the last call. Not a
        collective."""
        counted, self.counted = self.counted, TokenCount()
        return counted

    def _hidden_states(self, model: torch.nn.Module, part: PackedBatch) -> Tensor:
        # Float16Module would return the last stage's bf16 result in fp32, with twice the memory and
        # no benefit.
        dtype = {} if self._model.dtype == torch.float32 else {"fp32_output": False}
        tokens, positions = part.packed_L[None], part.positions_L[None]
        return model(
            tokens,
            positions,
            None,
            packed_seq_params=packed_sequences(part, self.config.apply_rope_fusion),
            **dtype,
        )

    def _finish(self, loss: LossFunction, part: PackedBatch, hidden: Tensor) -> PackLoss:
        if not part.response_tokens:
            return self._nothing(hidden), one(self.device), {}
        return loss(part, self._model.response_states(hidden.squeeze(1), part))

    def _nothing(self, hidden: Tensor) -> Tensor:
        if (
            self._model.settings.optimizer is None
            or not self._model.settings.megatron.overlap_grad_reduce
        ):
            return hidden[:0].sum()
        # A bucket is reduced after the last micro-batch has given a gradient to all of its
        # parameters, including the head's.
        return hidden[:0].sum() + self._model.output_embedding()[:0].sum()

    @contextmanager
    def _training(self, training: bool) -> Iterator[None]:
        """Sets the training mode: Megatron recomputes activations, and converters change their
        state, only in that mode."""
        for model in self._model.models:
            model.train(training)
        try:
            yield
        finally:
            for model in self._model.models:
                model.train(True)

    def collect(
        self,
        batch: SequenceBatch,
        values: Callable[[PackedBatch, Tensor], Sequence[Tensor]],
        count: int,
        routed: list[SequenceBatch] | None = None,
    ) -> list[Tensor]:
        """Returns (N,) fp32 values of this data-parallel rank's response tokens, on every rank of
        its replica.

        ``values`` computes the ``count`` values of the tokens that a rank predicts, from the pack
        and the result of ``response_states``. ``routed`` receives the batch with the experts that a
        mixture's routers chose.
        """
        plan = self.plan(batch, forward_only=True)
        kept = TokenValues(batch, plan, count, self.device)
        taken = (
            None
            if routed is None
            else TakenExperts(batch, planned_rows(plan), self.config, self.device)
        )

        def keep(part: PackedBatch, states: Tensor) -> tuple[Tensor, Tensor, dict]:
            kept.keep(part, values(part, states))
            return states.new_zeros(()), one(self.device), {}

        self.run(batch, plan, keep, forward_only=True, taken=taken)
        if routed is not None and taken is not None:
            routed.append(taken.of_batch())
        return kept.in_order()

    def sum_metrics(
        self, shares: Sequence[dict[str, Tensor]], more: Sequence[Tensor] = ()
    ) -> tuple[dict[str, float], list[list[float]]]:
        """Returns the sums of all micro-batches' and data-parallel ranks' shares, and of ``more``:
        fp64 vectors of every rank.

        The result is identical on every rank. It takes one read from the device if an earlier call
        had the same names.
        """
        numbers = (
            [item for share in shares for item in share.items()] if self._counts_metrics() else []
        )
        sums = self._sum(numbers, more)
        if sums is not None:
            return sums
        everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, [name for name, _ in numbers])
        self._names = sorted(set(self._names).union(*everyone))
        sums = self._sum(numbers, more)
        assert sums is not None, "every rank has every name now"
        return sums

    def _sum(
        self, numbers: Sequence[tuple[str, Tensor]], more: Sequence[Tensor]
    ) -> tuple[dict[str, float], list[list[float]]] | None:
        """Returns None if any rank has a number with a new name."""
        known = {name: place for place, name in enumerate(self._names)}
        new = any(name not in known for name, _ in numbers)
        named = [] if new else numbers
        places = torch.tensor([known[name] for name, _ in named], dtype=torch.long)
        counts = torch.bincount(places, minlength=len(known))
        heads = torch.cat([torch.tensor([float(new)]), counts]).double().to(self.device)
        sums = torch.zeros(len(known), dtype=torch.float64, device=self.device)
        if named:
            values = [
                torch.as_tensor(value, dtype=torch.float64, device=self.device)
                for _, value in named
            ]
            sums.index_add_(0, places.to(self.device), torch.stack(values))
        parts = [heads, sums, *more]
        total = torch.cat(parts)
        dist.all_reduce(total)
        (anywhere, *present), totals, *others = (
            part.tolist() for part in total.cpu().split([len(p) for p in parts])
        )
        if anywhere:
            return None
        return {name: totals[place] for name, place in known.items() if present[place]}, others

    def _counts_metrics(self) -> bool:
        """True on one rank of each replica: the others of the last stage hold copies."""
        first = (
            parallel_state.get_tensor_model_parallel_rank()
            == parallel_state.get_context_parallel_rank()
            == 0
        )
        return self._model.on_last_stage and first


def planned_rows(plan: Sequence[list[int]]) -> list[int]:
    return [row for rows in plan for row in rows]


def one(device: torch.device) -> Tensor:
    """Returns the token count that Megatron's schedules require; nothing here divides by it."""
    return torch.ones((), dtype=torch.int, device=device)
