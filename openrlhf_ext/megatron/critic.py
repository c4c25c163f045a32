"""Decoders with one linear output in the place of the vocabulary projection, on the last stage of
any layout: a reward model's scores, and the critic: values of the states before each response
token, and its train step.

Every public method is a collective over all ranks of the model unless it says otherwise. Shape
suffixes as in ``policy``.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from openrlhf_ext.algorithms.values import value_clip_fraction, value_loss
from openrlhf_ext.megatron.model.hf_files import HFCheckpoint, new_value_head, require_value_head
from openrlhf_ext.megatron.model.shape import ModelShape, read_value_scale, read_value_shape
from openrlhf_ext.megatron.policy import MegatronModel
from openrlhf_ext.megatron.settings import ModelSettings
from openrlhf_ext.megatron.step import NonFiniteUpdateError
from openrlhf_ext.megatron.step.batch import PackedBatch, SequenceBatch, ValueTargets
from openrlhf_ext.megatron.step.schedule import PackLoss, gather_tokens, one, planned_rows
from openrlhf_ext.options.sections import Critic

logger = logging.getLogger(__name__)


class ValueDecoder(MegatronModel):
    """A decoder with a value head. A reward model is one that is never trained: its score of a
    sequence is the value of the state at the last token, which is the state before a token that is
    added (``driver.scoring.with_end``)."""

    def __init__(self, settings: ModelSettings) -> None:
        self._scale = read_value_scale(settings.model_path) if settings.normalize_values else None
        super().__init__(settings)

    def read_shape(self) -> ModelShape:
        return read_value_shape(self.settings.model_path, self.settings.value_head)

    def load_weights(self) -> None:
        """Fills the chunks. Raises InputError: what is never trained has no value head."""
        if self.settings.optimizer is None:
            require_value_head(self.shape, HFCheckpoint(self.settings.model_path))
        super().load_weights()

    @torch.no_grad()
    def values(self, batch: SequenceBatch) -> Tensor:
        """fp32 (N,) values at this data-parallel rank's response tokens, of the states before them,
        on every rank."""
        (values_N,) = self.schedule.collect(
            batch, lambda part, hidden_NH: [self._head(hidden_NH)], 1
        )
        return values_N

    def _head(self, hidden_NH: Tensor) -> Tensor:
        """fp32 (N,) values; in fp32 also for a bf16 model, whose eight bits are too coarse for
        returns near 1."""
        values_N = F.linear(hidden_NH.float(), self.output_embedding().float()).squeeze(-1)
        if self._scale is None:
            return values_N
        mean, std = self._scale
        return (values_N - mean) / std


class MegatronCritic(ValueDecoder):
    def load_weights(self) -> None:
        """Fills the chunks; a value head that the checkpoint lacks starts as OpenRLHF's: normal,
        std 1 / (H + 1)."""
        super().load_weights()
        if not new_value_head(self.shape, HFCheckpoint(self.settings.model_path)):
            return
        if dist.get_rank() == 0:
            logger.info(
                "%s has no value head: a new one is trained from scratch", self.settings.model_path
            )
        if self.on_last_stage:
            weight_1H = self.last_chunk.output_embedding()
            same_on_all_ranks = torch.Generator().manual_seed(self.settings.train.seed)
            std = 1 / (self.shape.hidden_size + 1)
            with torch.no_grad():
                weight_1H.copy_(
                    torch.empty(weight_1H.shape).normal_(0.0, std, generator=same_on_all_ranks)
                )

    @property
    def value_clip(self) -> float | None:
        """Half-width of the interval around the old value in the value loss; None for no
        clipping."""
        options = self.settings.optimizer
        if not isinstance(options, Critic):
            raise TypeError(f"a critic is trained with critic.*, got {options!r}")
        return options.value_clip

    # ---- training

    def train_step(
        self, batch: SequenceBatch, targets: ValueTargets, more: bool = False
    ) -> dict[str, float]:
        """One optimizer step on the mini-batch of which this data-parallel rank holds ``batch`` and
        ``targets``. Returns ``loss/value``, ``value/clip_fraction``, ``value/grad_norm`` and
        ``value/lr`` of all of it, the same on every rank. ``more``: see ``optimizer_step``. Raises
        NonFiniteUpdateError."""
        metrics = self.accumulate_gradients(batch, targets)
        if not math.isfinite(metrics["loss/value"]):
            raise NonFiniteUpdateError(
                f"the critic's train step gave the loss {metrics['loss/value']}"
            )
        step = self.optimizer_step(more).items()
        return metrics | {f"value/{name.removeprefix('update/')}": number for name, number in step}

    def accumulate_gradients(self, batch: SequenceBatch, targets: ValueTargets) -> dict[str, float]:
        self.zero_grad()
        plan = self.schedule.plan(batch, forward_only=False)
        clip, targets = self.value_clip, targets.select(planned_rows(plan)).to(self.device)

        def pack_loss(part: PackedBatch, hidden_NH: Tensor) -> PackLoss:
            mine = targets.select(part.rows)
            arguments = (
                gather_tokens(self._head(hidden_NH), part),
                mine.old_values_N,
                mine.returns_N,
            )
            loss = value_loss(*arguments, clip=clip, tokens=mine.tokens)
            metrics = {"loss/value": loss.detach()}
            if clip is not None:
                metrics["value/clip_fraction"] = value_clip_fraction(
                    *arguments, clip=clip, tokens=mine.tokens
                )
            return loss, one(self.device), metrics

        losses = self.schedule.run(batch, plan, pack_loss, forward_only=False)
        metrics, _ = self.schedule.sum_metrics(losses)
        return {"loss/value": 0.0} | metrics

    # ---- weights

    def save_hf(self, target: str | Path) -> dict[str, int]:
        """Writes an HF checkpoint: OpenRLHF's and ours read it as a critic, transformers as a
        sequence classifier, which finds the value head under the name ``score`` only. Returns what
        ``write_hf`` does."""
        changes = {
            "architectures": [self.shape.family.critic_class],
            "id2label": {"0": "value"},  # one label: transformers derives num_labels from it
            "label2id": {"value": 0},
            "value_head_prefix": self.shape.value_head,
        }
        return self.write_hf(target, changes)
