"""One rank's share of a decoder on Megatron-core: building, one pipeline schedule, the optimizer step.

What a policy and a critic have in common; what they compute from the hidden states is theirs. One code path for CPU
(gloo) and GPU (NCCL). Every public method is a collective over all ranks of the model unless it says otherwise.

Shape suffixes: B = sequences, T = response tokens of a sequence, N = response tokens of a micro-batch that this rank
predicts, L = tokens of a micro-batch on this rank, H = hidden size.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from openrlhf_ext.fp8.recipe import Recipe
from openrlhf_ext.megatron.deadlines.watchdog import progress
from openrlhf_ext.megatron.fp8.state import ScalingState
from openrlhf_ext.megatron.fp8.transformer_engine import copy_bytes, prove, require
from openrlhf_ext.megatron.model.build import (
    HiddenStateGPTModel,
    build_model,
    packed_sequences,
    transformer_config,
)
from openrlhf_ext.megatron.model.context_parallel import sum_ranks
from openrlhf_ext.megatron.model.export import HFExporter, whole_tensors
from openrlhf_ext.megatron.model.hf_files import HFRows, read_side_files, save_hf
from openrlhf_ext.megatron.model.load import load_hf
from openrlhf_ext.megatron.model.shape import ModelShape, read_model_shape
from openrlhf_ext.megatron.model.weight_map import hf_tensors
from openrlhf_ext.megatron.settings import PolicySettings
from openrlhf_ext.megatron.step.batch import SequenceBatch, micro_batches, sequence_batch, sequence_costs
from openrlhf_ext.megatron.step.optimizer import build_optimizer, build_scheduler
from openrlhf_ext.megatron.step.overlap import TrainedChunk, no_sync
from openrlhf_ext.megatron.step.packing import PackedBatch, PackShape, TokenCount, fp8_piece_unit, pack
from openrlhf_ext.megatron.step.pipeline import pipeline_arguments

logger = logging.getLogger(__name__)

_CALIBRATION_TOKENS = 128

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# loss(part, hidden_NH) -> value to differentiate, number of tokens (unused, int), metrics to add up
LossFunction = Callable[[PackedBatch, Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]


class MegatronModel:
    """This rank's share of a decoder with its optimizer.

    Attributes:
        chunks: the unwrapped model chunks of this rank (one without virtual pipeline stages), in the order of
            Megatron's schedules; the last one of the last stage makes hidden states.
        models: the chunks as Megatron's schedules and optimizer see them: DDP-wrapped when the model is trained.
        optimizer, scheduler: None for a model that is never trained.
        counted: tokens of this replica's packs since ``take_count``.
    """

    def __init__(self, settings: PolicySettings) -> None:
        self.settings = settings
        self.counted = TokenCount()
        self.shape = self.read_shape()
        self.dtype = DTYPES[settings.param_dtype]
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        )
        if settings.fp8 is not None and not settings.fp8.emulate:
            require(settings.fp8)
        self.config = transformer_config(
            self.shape, settings.layout, self.dtype, settings.recompute, settings.rope_fusion, settings.fp8
        )
        self.chunks = self.build_chunks()
        self.load_weights()
        self.side_files = read_side_files(settings.model_path) if dist.get_rank() == 0 else {}
        self.models = [self._wrap(chunk) for chunk in self.chunks]
        self.scaling_state = ScalingState(self.chunks)
        self.optimizer: MegatronOptimizer | None = None
        self.scheduler: OptimizerParamScheduler | None = None
        if settings.optimizer is not None:
            self.optimizer = build_optimizer(self.models, settings.optimizer, self.dtype)
            self.scheduler = build_scheduler(self.optimizer, settings.optimizer)
            self.config.grad_scale_func = self.optimizer.scale_loss
            self.config.no_sync_func = no_sync(self.models)
            self.gather_parameters()
        self.config.finalize_model_grads_func = _add_up_grads
        if settings.fp8 is not None:
            self.start_fp8(settings.fp8)

    # ---- building; a subclass with other parameters overrides these --------------------------------------------

    def read_shape(self) -> ModelShape:
        """What ``config.json`` says of the model."""
        return read_model_shape(self.settings.model_path)

    def build_chunks(self) -> list[HiddenStateGPTModel]:
        """This rank's model chunks, on its device, parameters not yet loaded."""
        chunks = self.settings.layout.virtual_pipeline_size
        stages = [None] if chunks == 1 else range(chunks)
        return [build_model(self.shape, self.config, stage, fp8=self.settings.fp8) for stage in stages]

    def load_weights(self) -> None:
        """Fills the chunks from the Hugging Face checkpoint."""
        load_hf(self.chunks, self.shape, self.settings.model_path)

    def _wrap(self, chunk: HiddenStateGPTModel) -> torch.nn.Module:
        module = Float16Module(self.config, chunk) if self.dtype != torch.float32 else chunk
        optimizer = self.settings.optimizer
        if optimizer is None:
            return module.requires_grad_(False)
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=optimizer.overlap.grad_reduce,
            overlap_param_gather=optimizer.overlap.param_gather,
            bucket_size=optimizer.overlap.bucket_size,
            use_distributed_optimizer=optimizer.distributed,
            check_for_nan_in_grad=False,  # checked once per step, on the gradient norm
        )
        return TrainedChunk(self.config, ddp, module)

    @property
    def on_last_stage(self) -> bool:
        """Whether this rank's last chunk makes the hidden states that the head needs. Not a collective."""
        return parallel_state.is_pipeline_last_stage(ignore_virtual=True)

    @property
    def last_chunk(self) -> HiddenStateGPTModel:
        """The chunk that ends in hidden states; on the last stage only. Not a collective."""
        return self.chunks[-1]

    def output_embedding(self) -> Tensor:
        """This rank's shard of the head's weight (last stage only), complete.

        In a train step the head must ask for it here: it is read by no forward pass of a module, so no hook of
        Megatron's waits until it is gathered.
        """
        weight, chunk = self.last_chunk.output_embedding(), self.models[-1]
        if isinstance(chunk, TrainedChunk):
            chunk.await_parameter(weight)
        return weight

    def gather_parameters(self) -> None:
        """Completes what the last update left to the next forward pass; a no-op if it left nothing."""
        for chunk in self.models:
            if isinstance(chunk, TrainedChunk):
                chunk.gather_parameters()

    # ---- FP8 --------------------------------------------------------------------------------------------------------

    def start_fp8(self, recipe: Recipe) -> None:
        """Proves that the recipe is what runs, and gives delayed scales their first values.

        Raises:
            FP8Unavailable: a layer computes in another precision.
        """
        if recipe.delayed:
            self.calibrate()
        elif not recipe.emulate:
            self._compute_once(training=False)
        for chunk in self.chunks:
            first = chunk.decoder.layers[0].layer_number - 1
            prove(chunk.decoder, recipe, first, self.shape.num_layers)

    @property
    def fp8_copy_bytes(self) -> int:
        """Bytes of the FP8 copies of weights that this rank keeps while it computes. Not a collective."""
        return sum(copy_bytes(chunk.decoder, self.shape.num_layers, self.settings.fp8) for chunk in self.chunks)

    def calibrate(self) -> None:
        """Sets the delayed scales of inputs and weights by what the present weights make of a fixed sequence.

        Without it the first pass would run at scale 1, where most weights are too small for FP8; forward-only passes,
        of which a probe or a frozen model sees no others, never move a scale. Emulated layers multiply without rounding
        meanwhile; TransformerEngine's cannot, so that only their second pass has scales that fit. A collective.
        """
        self.scaling_state.reset()
        with torch.enable_grad(), self.scaling_state.calibrating():  # TransformerEngine's move only with gradients
            self._compute_once(training=True)
            if self.config.fp8 is not None:
                self._compute_once(training=True)

    def _compute_once(self, training: bool) -> None:
        """A forward pass over a fixed sequence in every micro-batch that schedules want, for what layers make of it."""
        tokens = np.random.default_rng(0).integers(0, self.shape.vocab_size, _CALIBRATION_TOKENS, np.int32)
        batch = sequence_batch([tokens], [((1, len(tokens)),)])

        def nothing(part: PackedBatch, hidden_NH: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            return hidden_NH.new_zeros(()), one(self.device), {}

        plan = [[0] for _ in self.plan(batch, forward_only=True)]
        self.run(batch, plan, nothing, forward_only=True, training=training)
        self.take_count()  # no tokens of the run's

    # ---- one pipeline schedule --------------------------------------------------------------------------------------

    def plan(self, batch: SequenceBatch, *, forward_only: bool) -> list[list[int]]:
        """Rows of each micro-batch of this data-parallel rank.

        Micro-batches hold a fixed number of sequences, or as many as fit a budget of tokens; either way their costs are
        about equal. Every data-parallel rank gets as many of them, so some may be empty.
        """
        lengths = batch.lengths_B.tolist()
        costs = sequence_costs(lengths, self.shape.attention_length)
        sizes, capacity = self._capacity(lengths, forward_only)
        # interleaved schedules want whole rounds of micro-batches
        multiple = parallel_state.get_pipeline_model_parallel_world_size() if len(self.chunks) > 1 else 1
        wanted = multiple
        while True:  # usually twice: what every rank wants alone, then the most that any of them needs
            plan = micro_batches(costs, sizes, capacity, wanted)
            most = -(-self._most(len(plan)) // multiple) * multiple
            if most == wanted:
                return plan
            wanted = most

    def _capacity(self, lengths: list[int], forward_only: bool) -> tuple[list[int], int]:
        """What each sequence takes of a micro-batch, and how much of that a micro-batch holds."""
        settings = self.settings
        tokens = settings.forward_max_tokens_per_gpu if forward_only else settings.max_tokens_per_gpu
        if tokens is None:
            return [1] * len(lengths), settings.forward_micro_batch_size if forward_only else settings.micro_batch_size
        shape = self._pack_shape
        slots = PackShape(shape.context_parallel_size)  # sequences share what the end of a pack takes
        capacity = tokens * shape.context_parallel_size // shape.pack_unit * shape.pack_unit
        return [slots.slots([length])[0] for length in lengths], max(capacity, shape.pack_unit)

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
    ) -> list[dict[str, Tensor]]:
        """One pipeline schedule over all micro-batches: forward, and unless ``forward_only`` backward too.

        Args:
            plan: rows of ``batch`` in each micro-batch; a micro-batch without rows computes a dummy and no loss.
            loss: called on the last stage for every micro-batch that has response tokens, with its pack (on this
                rank's device) and ``hidden_NH``: the hidden states that predict its response tokens on this rank.
                Context-parallel ranks share them, and one may have none of them (``part.places_N``). It should read
                nothing back from the device: the host queues the next micro-batch meanwhile.
            training: whether modules are in training mode; None: unless ``forward_only``.

        Returns:
            The metrics of each micro-batch on the last stage, nothing elsewhere.
        """

        numbers = itertools.count(1)  # each model chunk of this stage counts its own

        def step(parts: Iterator[PackedBatch], model: torch.nn.Module) -> tuple[Tensor, Callable]:
            part = next(parts)
            progress(f"micro-batch {next(numbers)} of {len(plan) * len(self.models)}")
            return self._hidden_states(model, part), partial(self._finish, loss, part)

        if forward_only:
            self.gather_parameters()
        lengths = self._message_lengths(batch, plan)
        self._count_tokens(batch, plan, lengths)
        parts = itertools.tee(self._parts(batch, plan), len(self.models))  # each chunk goes through all of them
        with self._training(not forward_only if training is None else training):
            return get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=list(parts),
                model=self.models,
                num_microbatches=len(plan),
                seq_length=1,  # not used: micro-batches differ in length
                micro_batch_size=1,
                forward_only=forward_only,
                **pipeline_arguments(self.config, lengths, len(self.models)),
            )

    def _parts(self, batch: SequenceBatch, plan: Sequence[list[int]]) -> Iterator[PackedBatch]:
        rank, row, token = parallel_state.get_context_parallel_rank(), 0, 0
        for rows in plan:
            part = batch.select(rows) if rows else SequenceBatch.padding_row()
            place = {"first_row": row, "first_token": token, "context_parallel_rank": rank}
            yield pack(part, self._pack_shape, **place).to(self.device)
            row, token = row + len(rows), token + part.responses.tokens

    @property
    def _pack_shape(self) -> PackShape:
        pieces = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        return PackShape(self.config.context_parallel_size, pieces, fp8_piece_unit(self.settings.fp8, pieces))

    def _message_lengths(self, batch: SequenceBatch, plan: Sequence[list[int]]) -> list[int]:
        """Tokens of each micro-batch that this rank exchanges with the neighboring pipeline stages."""
        padding_row = [2]
        lengths = [batch.lengths_B[rows].tolist() if rows else padding_row for rows in plan]
        return [self._pack_shape.tokens_per_rank(part) for part in lengths]

    def _count_tokens(self, batch: SequenceBatch, plan: Sequence[list[int]], piece_lengths: Sequence[int]) -> None:
        shape = self._pack_shape
        self.counted.real += int(batch.lengths_B[planned_rows(plan)].sum())
        self.counted.packed += sum(piece_lengths) * shape.context_parallel_size * shape.pieces

    def take_count(self) -> TokenCount:
        """Tokens of this replica's packs since the last call. Not a collective."""
        counted, self.counted = self.counted, TokenCount()
        return counted

    def _hidden_states(self, model: torch.nn.Module, part: PackedBatch) -> Tensor:
        """(L, 1, H) the model's output for a pack."""
        # Float16Module would hand out the last stage's bf16 result in fp32, twice the memory for nothing
        dtype = {} if self.dtype == torch.float32 else {"fp32_output": False}
        tokens, positions = part.packed_L[None], part.positions_L[None]
        return model(
            tokens, positions, None, packed_seq_params=packed_sequences(part, self.config.apply_rope_fusion), **dtype
        )

    def _finish(
        self, loss: LossFunction, part: PackedBatch, hidden: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        if not part.response_tokens:
            return self._nothing(hidden), one(self.device), {}
        return loss(part, self.response_states(hidden.squeeze(1), part))

    def _nothing(self, hidden: Tensor) -> Tensor:
        """The loss of a micro-batch without response tokens."""
        optimizer = self.settings.optimizer
        if optimizer is None or not optimizer.overlap.grad_reduce:
            return hidden[:0].sum()
        # a bucket is reduced when the last micro-batch has given a gradient to all of its parameters, to the head's too
        return hidden[:0].sum() + self.output_embedding()[:0].sum()

    def response_states(self, hidden_LH: Tensor, part: PackedBatch) -> Tensor:
        """(N, H) what ``loss`` gets of the model's output.

        Args:
            hidden_LH: final hidden states of this rank's tokens, or of its piece of them under sequence parallelism.
        """
        if self.config.sequence_parallel:
            # every tensor-parallel rank then computes the same with them: the backward pass only splits
            hidden_LH = gather_from_sequence_parallel_region(hidden_LH, tensor_parallel_output_grad=False)
        return hidden_LH[part.hidden_N]

    @contextmanager
    def _training(self, training: bool) -> Iterator[None]:
        """Megatron recomputes activations only in training mode, in which alone delayed FP8 scales move."""
        for model in self.models:
            model.train(training)
        try:
            yield
        finally:
            for model in self.models:
                model.train(True)

    def gather_tokens(self, values_N: Tensor, part: PackedBatch) -> Tensor:
        """The values of all response tokens of this micro-batch, one row behind the other; differentiable.

        A collective of the context-parallel ranks: each gives the values of its own response tokens and gets all. When
        all of them go on to compute the same loss, the gradient of each entry goes to the rank that gave it.
        """
        mine = values_N.new_zeros(part.response_tokens).scatter(0, part.places_N, values_N)
        return sum_ranks(mine, parallel_state.get_context_parallel_group())

    def collect(
        self, batch: SequenceBatch, values: Callable[[PackedBatch, Tensor], Sequence[Tensor]], count: int
    ) -> list[Tensor]:
        """(N,) fp32 values of the response tokens of this data-parallel rank, on every rank of its replica.

        Args:
            values: gives the ``count`` values of the response tokens that a rank predicts, from the pack and what
                ``response_states`` gives.
        """
        plan = self.plan(batch, forward_only=True)
        planned = [torch.zeros(batch.responses.tokens, device=self.device) for _ in range(count)]

        def keep(part: PackedBatch, states: Tensor) -> tuple[Tensor, Tensor, dict]:
            for planned_N, mine_N in zip(planned, values(part, states), strict=True):
                planned_N[part.tokens] = self.gather_tokens(mine_N.float(), part)
            return states.new_zeros(()), one(self.device), {}

        self.run(batch, plan, keep, forward_only=True)
        order = planned_rows(plan)
        segments, inverse = batch.responses.select(order), np.argsort(order).tolist()
        for planned_N in planned:
            self.broadcast_from_last_stage(planned_N)
        return [segments.take(planned_N, inverse).cpu() for planned_N in planned]

    def broadcast_from_last_stage(self, tensor: Tensor) -> None:
        """Overwrites ``tensor`` (any device) with what the last pipeline stage holds."""
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            on_device = tensor.to(self.device)
            dist.broadcast(
                on_device,
                src=parallel_state.get_pipeline_model_parallel_last_rank(),
                group=parallel_state.get_pipeline_model_parallel_group(),
            )
            tensor.copy_(on_device)

    # ---- what data-parallel ranks agree on --------------------------------------------------------------------------

    def agreed(self, tensor: Tensor) -> Tensor:
        """What the first tensor-parallel rank has, on the CPU: the others' copies may differ in the last bit."""
        on_device = tensor.to(self.device)
        group = parallel_state.get_tensor_model_parallel_group()
        dist.broadcast(on_device, parallel_state.get_tensor_model_parallel_src_rank(), group=group)
        return on_device.cpu()

    def sum_over_replicas(self, tensor: Tensor) -> Tensor:
        """Sum over the data-parallel ranks, the same bits on every rank if those of each replica agree."""
        group, on_device = parallel_state.get_data_parallel_group(), tensor.to(self.device)
        if not tensor.is_floating_point():
            dist.all_reduce(on_device, group=group)
            return on_device.to(tensor.device)
        # in the order of the ranks: what a reduction adds first is its own business, and may differ between groups
        parts = [torch.empty_like(on_device) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, on_device, group=group)
        return torch.stack(parts).sum(0).to(tensor.device)

    # ---- weights out ------------------------------------------------------------------------------------------------

    def export(self, value: Callable[[torch.nn.Parameter], Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Whole HF tensors on global rank 0 (``export.whole_tensors``); all ranks must exhaust the iterator."""
        return whole_tensors(self.export_rows(value), self.shape)

    def export_rows(self, value: Callable[[torch.nn.Parameter], Tensor] | None = None) -> Iterator[HFRows]:
        """The same some rows at a time (``HFExporter.rows``)."""
        return HFExporter(self.chunks, self.shape, value).rows()

    def write_hf(self, target: str | Path, config_changes: Mapping[str, Any] | None = None) -> dict[str, int]:
        """Writes an HF checkpoint (``hf_files.save_hf``) from rank 0; none of the others waits for the disk.

        Returns:
            On rank 0 size in bytes of every file by its name; on the others, which may return long before, nothing.
        """
        rows = self.export_rows()
        if dist.get_rank() == 0:
            tensors = hf_tensors(self.shape)
            return save_hf(rows, tensors, self.dtype, self.side_files, target, config_changes=config_changes)
        for _ in rows:
            pass
        return {}

    # ---- training ---------------------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Clears gradients before the micro-batches of a step. Not a collective."""
        optimizer, _ = self._training_parts()
        for model in self.models:
            if isinstance(model, DistributedDataParallel):
                model.zero_grad_buffer()
        optimizer.zero_grad()

    def _training_parts(self) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
        if self.optimizer is None or self.scheduler is None:
            raise ValueError(f"{self.settings.model_path} was built without an optimizer, so it cannot be trained")
        return self.optimizer, self.scheduler

    def optimizer_step(self, more: bool = False) -> dict[str, float]:
        """One update with the gradients of ``run``; the schedule moves first, so that no update is lost to rate 0.

        Args:
            more: another train step follows. With ``Overlap.param_gather`` its forward pass gathers the new parameters;
                until then only ``run`` may read them. Without ``more`` they are complete when this returns.

        Returns:
            ``grad_norm`` (before clipping) and ``lr``.

        Raises:
            NonFiniteUpdateError: the gradient norm is not finite; no parameter has moved.
        """
        optimizer, scheduler = self._training_parts()
        scheduler.step(1)
        _, grad_norm, _ = optimizer.step()
        metrics = {"grad_norm": float(grad_norm or 0.0), "lr": optimizer.param_groups[0]["lr"]}
        if not more:
            self.gather_parameters()
        return metrics

    def sum_metrics(self, shares: Sequence[dict[str, Tensor]]) -> dict[str, float]:
        """Adds the shares of all micro-batches and data-parallel ranks; identical on every rank."""
        totals: dict[str, float] = {}
        numbers = [item for share in shares for item in share.items()] if self._counts_metrics() else []
        values = [torch.as_tensor(value, dtype=torch.float64, device=self.device) for _, value in numbers]
        # all numbers of a schedule leave the device at once, and are added in its order
        for (name, _), value in zip(numbers, torch.stack(values).tolist() if values else [], strict=True):
            totals[name] = totals.get(name, 0.0) + value
        everyone: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, totals)
        names = sorted({name for part in everyone for name in part})
        return {name: sum(part.get(name, 0.0) for part in everyone) for name in names}

    def _counts_metrics(self) -> bool:
        """True on one rank of each replica: the others of the last stage hold copies."""
        first = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0
        return self.on_last_stage and first


def _add_up_grads(model: list[torch.nn.Module], num_tokens: Tensor | None = None, **kwargs) -> None:
    """Megatron's gradient reduction without its division by a token count: the shares carry their denominators."""
    finalize_model_grads(model, None, **kwargs)


def planned_rows(plan: Sequence[list[int]]) -> list[int]:
    """Rows in the order in which a plan computes them."""
    return [row for rows in plan for row in rows]


def one(device: torch.device) -> Tensor:
    """The token count that Megatron's schedules ask for and that nothing here divides by."""
    return torch.ones((), dtype=torch.int, device=device)
