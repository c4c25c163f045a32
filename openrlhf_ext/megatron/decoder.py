"""A decoder that computes and is trained: a built model, its schedule, its optimizer's update, its layer converters.

What a policy and a critic have in common; what they compute from the hidden states is theirs. Every public method is a
collective over all ranks of the model unless it says otherwise.
"""

from __future__ import annotations

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from openrlhf_ext.megatron.built import BuiltModel
from openrlhf_ext.megatron.layers.converter import kept_bytes
from openrlhf_ext.megatron.settings import ModelSettings
from openrlhf_ext.megatron.step.batch import sequence_batch
from openrlhf_ext.megatron.step.optimizer import build_optimizer, build_scheduler
from openrlhf_ext.megatron.step.overlap import no_sync
from openrlhf_ext.megatron.step.packing import PackedBatch
from openrlhf_ext.megatron.step.schedule import Schedule, one

_FIXED_TOKENS = 128


class MegatronModel(BuiltModel):
    """This rank's share of a decoder with its optimizer.

    Attributes:
        schedule: computes micro-batches.
        optimizer, scheduler: None for a model that is never trained.
    """

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__(settings)
        self.schedule = Schedule(self)
        self.optimizer: MegatronOptimizer | None = None
        self.scheduler: OptimizerParamScheduler | None = None
        if settings.optimizer is not None:
            self.optimizer = build_optimizer(self.models, settings.optimizer, settings.megatron, self.dtype)
            self.scheduler = build_scheduler(self.optimizer, settings.optimizer, settings.updates)
            self.config.grad_scale_func = self.optimizer.scale_loss
            self.config.no_sync_func = no_sync(self.models)
            self.gather_parameters()
        self.config.finalize_model_grads_func = _add_up_grads
        for converter in settings.converters:
            converter.start(self.chunks, self.compute_once)

    # ---- layer converters -------------------------------------------------------------------------------------------

    def converter_state(self) -> dict[str, Tensor]:
        """The state of all converters by the names of checkpoints. Not a collective."""
        return {
            f"{converter.name}.{name}": tensor
            for converter in self.settings.converters
            for name, tensor in converter.state(self.chunks).items()
        }

    @property
    def kept_bytes(self) -> int:
        """Bytes that layers keep on this rank besides parameters while they compute. Not a collective."""
        return sum(kept_bytes(self.settings.converters, chunk.decoder) for chunk in self.chunks)

    def compute_once(self, training: bool) -> None:
        """A forward pass over a fixed sequence in every micro-batch that schedules want, for what layers make of it."""
        tokens = np.random.default_rng(0).integers(0, self.shape.vocab_size, _FIXED_TOKENS, np.int32)
        batch = sequence_batch([tokens], [((1, len(tokens)),)])

        def nothing(part: PackedBatch, hidden_NH: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            return hidden_NH.new_zeros(()), one(self.device), {}

        plan = [[0] for _ in self.schedule.plan(batch, forward_only=True)]
        self.schedule.run(batch, plan, nothing, forward_only=True, training=training)
        self.schedule.take_count()  # no tokens of the run's

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
        """One update with the gradients of a schedule; the schedule moves first, so that no update is lost to rate 0.

        Args:
            more: another train step follows. With ``megatron.overlap_param_gather`` its forward pass gathers the new
                parameters; until then only a schedule may read them. Without ``more`` they are complete
                when this returns.

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


def _add_up_grads(model: list[torch.nn.Module], num_tokens: Tensor | None = None, **kwargs) -> None:
    """Megatron's gradient reduction without its division by a token count: the shares carry their denominators."""
    finalize_model_grads(model, None, **kwargs)
