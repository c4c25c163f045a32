"""Trainable decoder models: the base class of policy and critic, and the policy (log-probs, train
step).

Every public method is a collective over all ranks of the model unless it says otherwise. Shape
suffixes as in ``step.schedule``: B = sequences, N = response tokens, H = hidden size.
"""

from __future__ import annotations

import math
from collections import deque
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from openrlhf_ext.algorithms import Loss
from openrlhf_ext.head import HeadOutput, linear_logprob_entropy, linear_token_loss
from openrlhf_ext.megatron.built import BuiltModel, no_sync
from openrlhf_ext.megatron.distributed import random_states, set_random_states
from openrlhf_ext.megatron.frozen import FrozenCopy
from openrlhf_ext.megatron.layers import kept_bytes
from openrlhf_ext.megatron.model.experts import routing_metrics, take_routing
from openrlhf_ext.megatron.model.hf_weights import load_hf
from openrlhf_ext.megatron.moving_average import MovingAverage
from openrlhf_ext.megatron.settings import ModelSettings
from openrlhf_ext.megatron.step import NonFiniteUpdateError
from openrlhf_ext.megatron.step.batch import (
    LogprobEntropy,
    PackedBatch,
    SequenceBatch,
    sequence_batch,
)
from openrlhf_ext.megatron.step.optimizer import (
    advance,
    build_optimizer,
    build_scheduler,
    gradient_norms,
    gradient_squares,
    host_optimizers,
)
from openrlhf_ext.megatron.step.schedule import (
    PackLoss,
    Schedule,
    TokenValues,
    gather_tokens,
    one,
    planned_rows,
)

if TYPE_CHECKING:
    from openrlhf_ext.algorithms.base import TokenLoss
    from openrlhf_ext.algorithms.segments import RowSelection

_FIXED_TOKENS = 128


class Share(Protocol):
    """Rows of a mini-batch, with the whole mini-batch's loss denominators (``LossBatch``)."""

    def select(self, rows: RowSelection) -> Any:
        """These rows."""

    def to(self, device: torch.device) -> Any:
        """A copy on the device."""


class Objective(Protocol):
    """A loss on log-probs; the losses of shares add up (``Algorithm``)."""

    def entropy_slope(self, shaped: Any) -> Tensor | None:
        """(N,) factor on the entropy of each token in the loss; None: the loss contains no
        entropy."""

    def token_loss(self, shaped: Any) -> TokenLoss | None:
        """The loss as per-token terms; None: it has no such form."""

    def loss(self, logprobs_N: Tensor, shaped: Any, /) -> Loss:
        """The loss of a share."""


class _Nothing:
    """A loss of zero, and its shares."""

    def select(self, rows: RowSelection) -> _Nothing:
        return self

    def to(self, device: torch.device) -> _Nothing:
        return self

    def entropy_slope(self, shaped: _Nothing) -> None:
        return None

    def token_loss(self, shaped: _Nothing) -> TokenLoss:
        return lambda logprob_B, rows: 0.0 * logprob_B

    def loss(self, logprobs_N: Tensor, shaped: _Nothing) -> Loss:
        return Loss(0.0 * logprobs_N.sum(), {})


class MegatronModel(BuiltModel):
    """This rank's share of a decoder, with its schedule and its optimizer (None for a model that is
    never trained)."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__(settings)
        self.schedule = Schedule(self)
        self.optimizer: MegatronOptimizer | None = None
        self.scheduler: OptimizerParamScheduler | None = None
        # Fractions of the run that are complete after each of the next updates.
        self._shares: deque[Fraction] = deque()
        if settings.optimizer is not None:
            self.optimizer = build_optimizer(
                self.models,
                settings.optimizer,
                settings.megatron,
                self.dtype,
                settings.adam_offload,
            )
            self.scheduler = build_scheduler(self.optimizer, settings.optimizer, settings.updates)
            self.config.grad_scale_func = self.optimizer.scale_loss
            self.config.no_sync_func = no_sync(self.models)
            self.gather_parameters()
        self.average: MovingAverage | None = None
        self.config.finalize_model_grads_func = _add_up_grads
        for converter in settings.converters:
            converter.start(self.chunks, self.compute_once)

    # ---- layer converters

    def converter_state(self) -> dict[str, Tensor]:
        return {
            f"{converter.name}.{name}": tensor
            for converter in self.settings.converters
            for name, tensor in converter.state(self.chunks).items()
        }

    @property
    def kept_bytes(self) -> int:
        """Bytes that layers keep on this rank besides parameters while the model computes. Not a
        collective."""
        return sum(kept_bytes(self.settings.converters, chunk.decoder) for chunk in self.chunks)

    def _fixed_batch(self) -> SequenceBatch:
        tokens = np.random.default_rng(0).integers(
            0, self.shape.vocab_size, _FIXED_TOKENS, np.int32
        )
        return sequence_batch([tokens], [((1, len(tokens)),)])

    def compute_once(self, training: bool) -> None:
        """Runs a forward pass over a fixed sequence, for layer converters that need one.

        The sequence is in every micro-batch that the schedule requires.
        """
        batch = self._fixed_batch()

        def nothing(part: PackedBatch, hidden_NH: Tensor) -> PackLoss:
            return hidden_NH.new_zeros(()), one(self.device), {}

        plan = [[0] for _ in self.schedule.plan(batch, forward_only=True)]
        self.schedule.run(batch, plan, nothing, forward_only=True, training=training)
        self.schedule.take_count()  # discards the count: these are not tokens of the run

    # ---- training

    def zero_grad(self) -> None:
        """Clears the gradients before the micro-batches of a step. Not a collective."""
        optimizer, _ = self._training_parts()
        for model in self.models:
            if isinstance(model, DistributedDataParallel):
                model.zero_grad_buffer()
        optimizer.zero_grad()

    def _training_parts(self) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
        if self.optimizer is None or self.scheduler is None:
            raise ValueError(
                f"{self.settings.model_path} was built without an optimizer, so it cannot be "
                "trained"
            )
        return self.optimizer, self.scheduler

    def plan_rates(self, before: Fraction, after: Fraction, updates: int) -> None:
        """Plans the learning rates of the next ``updates`` updates, which take the run from
        fraction ``before`` to ``after``.

        Without a plan, each update is one step of the schedule.
        """
        self._shares = deque(
            before + (after - before) * Fraction(n, updates) for n in range(1, updates + 1)
        )

    def optimizer_step(self, more: bool = False) -> dict[str, float]:
        """Runs one update with the accumulated gradients.

        The learning-rate schedule moves first, so that no update is lost to rate 0. Returns
        ``grad_norm`` (before clipping), ``lr`` and, if Adam's states are in host memory, this
        rank's ``update/stream_seconds``. ``more``: another train step follows. With
        ``megatron.overlap_param_gather`` its forward pass gathers the new parameters; until then
        only a schedule may read them. Raises NonFiniteUpdateError if the gradient norm is not
        finite; no parameter has changed then.
        """
        optimizer, scheduler = self._training_parts()
        assert self.settings.optimizer is not None, "there is a scheduler"
        share = self._shares.popleft() if self._shares else None
        advance(scheduler, self.settings.optimizer, self.settings.updates, share)
        _, grad_norm, _ = optimizer.step()
        metrics = {"grad_norm": float(grad_norm or 0.0), "lr": optimizer.param_groups[0]["lr"]}
        if not more or self.average is not None:
            self.gather_parameters()
        if self.average is not None:
            self.average.update()
        if on_host := host_optimizers(optimizer):
            metrics["update/stream_seconds"] = sum(each.take_seconds() for each in on_host)
        return metrics


def _add_up_grads(model: list[torch.nn.Module], num_tokens: Tensor | None = None, **kwargs) -> None:
    """Reduces gradients as Megatron does, but without the division by a token count: the shares
    carry their denominators."""
    finalize_model_grads(model, None, **kwargs)


class MegatronPolicy(MegatronModel):
    def __init__(self, settings: ModelSettings) -> None:
        super().__init__(settings)
        if settings.optimizer is not None and settings.train.enable_ema:
            self.average = MovingAverage(self.chunks, settings.train.ema_beta)

    def warm_up(self) -> None:
        """Runs a forward and a backward pass over a fixed sequence, and keeps none of its results.

        Libraries load and kernels compile before the first step (a process's first pack took 2.9 s
        on an H200, docs/status.md).
        """
        drawn, kept = (
            random_states(),
            {name: tensor.clone() for name, tensor in self.converter_state().items()},
        )
        self.accumulate_gradients(self._fixed_batch(), _Nothing(), _Nothing())
        self.zero_grad()
        self.schedule.take_count()  # discards the count: these are not tokens of the run
        for name, tensor in self.converter_state().items():
            tensor.copy_(kept[name])
        set_random_states(drawn)

    # ---- forward

    @torch.no_grad()
    def logprobs(
        self,
        batch: SequenceBatch,
        temperature: float | None = None,
        routed: list[SequenceBatch] | None = None,
    ) -> LogprobEntropy:
        """Returns log-probs and entropies of this data-parallel rank's sequences, on every rank of
        the replica.

        ``routed``: see ``Schedule.collect``.
        """
        temperature = self.settings.rollout.temperature if temperature is None else temperature
        return LogprobEntropy(
            *self.schedule.collect(
                batch, lambda part, states: self._head(part, states, temperature), 2, routed
            )
        )

    def response_states(self, hidden_LH: Tensor, part: PackedBatch) -> Tensor:
        """Under sequence parallelism the head itself gathers the rows it needs, overlapped with
        computation."""
        if self.config.sequence_parallel:
            return hidden_LH
        return super().response_states(hidden_LH, part)

    def _head(
        self, part: PackedBatch, states: Tensor, temperature: float, *, entropy_grad: bool = False
    ) -> HeadOutput:
        return linear_logprob_entropy(
            states, entropy_grad=entropy_grad, **self._head_arguments(part, temperature)
        )

    def _head_arguments(self, part: PackedBatch, temperature: float) -> dict[str, Any]:
        gathers = self.config.sequence_parallel
        weight_VH = self.output_embedding()
        heads = [each.head(self.last_chunk, weight_VH) for each in self.settings.converters]
        return {
            "weight_VH": weight_VH,
            "target_T": part.targets_N,
            "temperature": temperature * self.shape.logits_divisor,
            "vocab_size": self.shape.vocab_size,
            "process_group": parallel_state.get_tensor_model_parallel_group(),
            "workspace_bytes": self.settings.megatron.head_workspace_mib << 20,
            "sequence_rows": part.hidden_N if gathers else None,
            "rows_per_rank": part.piece_counts if gathers else None,
            "implementation": self.settings.megatron.head_kernels,
            "whole_rows": next((head for head in heads if head is not None), None),
        }

    # ---- training

    def train_step(
        self,
        batch: SequenceBatch,
        shaped: Share,
        algorithm: Objective,
        more: bool = False,
        seen: list[LogprobEntropy] | None = None,
    ) -> dict[str, float]:
        """Runs one optimizer step on a mini-batch.

        This data-parallel rank holds the share ``batch`` and ``shaped`` of it. ``shaped`` carries
        the whole mini-batch's denominators, so the shares of all micro-batches and ranks add up.
        Returns the metrics of the mini-batch, the same on every rank. ``more``: see
        ``optimizer_step``. ``seen`` receives the log-probs and entropies of ``batch`` from the loss
        computation. Raises NonFiniteUpdateError if the loss, a metric or the gradient norm is not
        finite.
        """
        metrics = self.accumulate_gradients(batch, shaped, algorithm, seen)
        # On a GPU the micro-batch losses skip this check to avoid a synchronization.
        if wrong := {name: value for name, value in metrics.items() if not math.isfinite(value)}:
            found = ", ".join(f"{name} = {value}" for name, value in wrong.items())
            raise NonFiniteUpdateError(f"the train step gave values that are not finite: {found}")
        return metrics | self.optimizer_step(more)

    def accumulate_gradients(
        self,
        batch: SequenceBatch,
        shaped: Share,
        algorithm: Objective,
        seen: list[LogprobEntropy] | None = None,
    ) -> dict[str, float]:
        """Runs a train step without the update."""
        self.zero_grad()
        plan = self.schedule.plan(batch, forward_only=False)
        kept = None if seen is None else TokenValues(batch, plan, 2, self.device)
        # One transfer, while the device is idle anyway; micro-batches are then slices of the
        # result.
        shaped = shaped.select(planned_rows(plan)).to(self.device)

        def pack_loss(part: PackedBatch, states: Tensor) -> PackLoss:
            value, loss, head = self._loss(part, states, shaped.select(part.rows), algorithm)
            if kept is not None:
                kept.keep(part, (head.logprob_T.detach(), head.entropy_T.detach()))
            metrics = {name: value for name, value in loss.metrics.items() if name != "policy_loss"}
            return value, one(self.device), {"loss/policy": loss.value.detach(), **metrics}

        losses = self.schedule.run(batch, plan, pack_loss, forward_only=False)
        if seen is not None and kept is not None:
            seen.append(LogprobEntropy(*kept.in_order()))
        # One read from the device for the metrics and the group norms, which must be taken before
        # the optimizer clips in place.
        sums = [
            *gradient_squares(self.models, self.settings.layout, dist.get_rank()),
            *self._take_routing(),
        ]
        metrics, (squares, present, *routing) = self.schedule.sum_metrics(losses, sums)
        for each in routing:
            metrics |= routing_metrics(each, self.shape.num_experts, self.settings.aux_loss_coef)
        return {"loss/policy": 0.0} | metrics | gradient_norms(squares, present)

    def gradient_square(self) -> float:
        """Returns the squared norm of this rank's share of the last update's gradient, after
        clipping. Not a collective."""
        return float(gradient_squares(self.models, self.settings.layout, dist.get_rank())[0].sum())

    def _take_routing(self) -> list[Tensor]:
        """Returns the router counts since the last call (``experts.take_routing``); an empty list
        for a dense model. Not a collective."""
        if not self.shape.num_experts:
            return []
        return [
            take_routing(self.chunks, self.shape.num_layers, self.shape.num_experts, self.device)
        ]

    def _loss(
        self, part: PackedBatch, states: Tensor, shaped: Share, algorithm: Objective
    ) -> tuple[Tensor, Loss, HeadOutput]:
        """Returns the value to differentiate on this rank, the loss of the micro-batch with its
        metrics, and the head's output.

        If the loss is a sum of per-token terms, the head computes its gradient together with the
        tokens' logits. A context-parallel rank then differentiates only the terms of its own
        tokens. Otherwise it differentiates the whole loss, in which only its own log-probs depend
        on its hidden states.
        """
        temperature = self.settings.rollout.temperature
        slope_N = algorithm.entropy_slope(shaped)
        slope_T = None if slope_N is None else slope_N[part.places_N]
        terms = algorithm.token_loss(shaped) if self.settings.megatron.head == "fused" else None
        if terms is None:
            head = self._head(part, states, temperature, entropy_grad=slope_T is not None)
            loss = algorithm.loss(gather_tokens(head.logprob_T, part), shaped)
            return (
                loss.value if slope_T is None else loss.value + (slope_T * head.entropy_T).sum(),
                loss,
                head,
            )
        fused = linear_token_loss(
            states,
            token_loss=lambda logprob_B, rows: terms(logprob_B, part.places_N[rows]),
            entropy_slope_T=slope_T,
            **self._head_arguments(part, temperature),
        )
        head = HeadOutput(fused.logprob_T, fused.entropy_T)
        return fused.value, algorithm.loss(gather_tokens(head.logprob_T, part), shaped), head

    # ---- weights

    def host_copy(self, path: str) -> FrozenCopy | None:
        """Returns a host-memory copy of a checkpoint of this shape, with the converters' state.

        Call it before the first train step. Returns None if ``trained.as_loaded`` provides the
        weights without a copy.
        """
        state = self.converter_state().values()
        if path == self.settings.model_path:
            return self.trained.reference(state)
        return FrozenCopy(self.chunks, lambda: self._load_other(path), state)

    def _load_other(self, path: str) -> None:
        load_hf(self.chunks, self.shape, path)
        for converter in self.settings.converters:
            converter.loaded(self.chunks, self.compute_once)

    def save_hf(self, target: str | Path) -> dict[str, int]:
        """Writes the trained weights, or their moving average if there is one, as an HF checkpoint
        with the converters' entries; see ``write_rows``."""
        entries = {
            name: value for c in self.settings.converters for name, value in c.hf_config().items()
        }
        average = self.average
        value = (
            None
            if average is None
            else lambda weight: average.of(weight).to(weight.device, weight.dtype)
        )
        return self.trained.write(target, entries or None, value)
