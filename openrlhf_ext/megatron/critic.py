"""The critic of one rank: values of the states before each response token, and its train step.

A decoder whose vocabulary projection is replaced by one linear output, on the last stage of any layout. Every public
method is a collective over all ranks of the critic unless it says otherwise. Shape suffixes as in ``base``: B =
sequences, T = response tokens, N = response tokens of a micro-batch, H = hidden size.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from openrlhf_ext.algorithms.gae import value_clip_fraction, value_loss
from openrlhf_ext.megatron.base import MegatronModel, NonFiniteUpdateError, PolicySettings, one
from openrlhf_ext.megatron.batch import SequenceBatch
from openrlhf_ext.megatron.hf_config import ModelShape, read_value_shape
from openrlhf_ext.megatron.hf_files import HFCheckpoint, save_hf
from openrlhf_ext.megatron.packing import PackedBatch
from openrlhf_ext.megatron.weights import export_hf, new_value_head

logger = logging.getLogger(__name__)

_CLASSIFIERS = {
    "qwen2": "Qwen2ForSequenceClassification",
    "qwen3": "Qwen3ForSequenceClassification",
    "llama": "LlamaForSequenceClassification",
}


@dataclass(frozen=True)
class CriticSettings:
    """What a critic rank needs to know; plain values, so that it travels to Ray workers.

    Attributes:
        model: checkpoint, layout, micro-batches, optimizer.
        value_clip: half-width of the interval around the old value in the value loss; None for no clipping.
        value_head: HF name of the value head; an entry ``value_head_prefix`` of the checkpoint's config.json wins.
    """

    model: PolicySettings
    value_clip: float | None = 0.5
    value_head: str = "score"


@dataclass(frozen=True)
class ValueTargets:
    """What the values of a mini-batch are trained towards.

    Attributes:
        old_values_BT: fp32 values of the rollout, around which new values are clipped.
        returns_BT: fp32 advantages plus old values.
        tokens: response tokens of the whole mini-batch, of which these rows may be a share.
    """

    old_values_BT: Tensor
    returns_BT: Tensor
    tokens: Tensor

    def select(self, rows: Tensor | Sequence[int]) -> ValueTargets:
        """These rows, with the denominator of the whole mini-batch."""
        index = torch.as_tensor(rows, dtype=torch.long, device=self.old_values_BT.device)
        return dataclasses.replace(self, old_values_BT=self.old_values_BT[index], returns_BT=self.returns_BT[index])

    def to(self, device: torch.device) -> ValueTargets:
        """A copy on ``device``."""
        return ValueTargets(*(tensor.to(device) for tensor in vars(self).values()))


class MegatronCritic(MegatronModel):
    """A value model on Megatron-core, this rank's share of it."""

    def __init__(self, settings: CriticSettings) -> None:
        self.critic = settings
        super().__init__(settings.model)

    def read_shape(self) -> ModelShape:
        """The checkpoint's decoder with a value head."""
        return read_value_shape(self.settings.model_path, self.critic.value_head)

    def load_weights(self) -> None:
        """Fills the chunks; a value head that the checkpoint lacks starts as OpenRLHF's: normal, std 1 / (H + 1)."""
        super().load_weights()
        if not new_value_head(self.shape, HFCheckpoint(self.settings.model_path)):
            return
        if dist.get_rank() == 0:
            logger.info("%s has no value head: a new one is trained from scratch", self.settings.model_path)
        if self.on_last_stage:
            weight_1H = self.last_chunk.output_embedding()
            same_on_all_ranks = torch.Generator().manual_seed(self.settings.seed)
            std = 1 / (self.shape.hidden_size + 1)
            with torch.no_grad():
                weight_1H.copy_(torch.empty(weight_1H.shape).normal_(0.0, std, generator=same_on_all_ranks))

    # ---- forward ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def values(self, batch: SequenceBatch) -> Tensor:
        """fp32 (B, T) values of this data-parallel rank's sequences, 0 outside the mask, on every rank of the replica.

        Entry (b, t) is the value of the state before response token t: the prompt and the response up to t - 1.
        """
        out_BT = torch.zeros(batch.mask_BT.shape, device=self.device)

        def collect(part: PackedBatch, hidden_NH: Tensor) -> tuple[Tensor, Tensor, dict]:
            out_BT[part.rows_B] = self.gather_tokens(self._head(hidden_NH), part)
            return hidden_NH.new_zeros(()), one(self.device), {}

        self.run(batch, self.plan(batch, forward_only=True), collect, forward_only=True)
        self.broadcast_from_last_stage(out_BT)
        return out_BT.cpu()

    def _head(self, hidden_NH: Tensor) -> Tensor:
        """fp32 (N,) values; in fp32 also for a bf16 model, whose eight bits are too coarse for returns near 1."""
        return F.linear(hidden_NH.float(), self.last_chunk.output_embedding().float()).squeeze(-1)

    # ---- training -----------------------------------------------------------------------------------------------

    def train_step(self, batch: SequenceBatch, targets: ValueTargets) -> dict[str, float]:
        """One optimizer step on the mini-batch of which this data-parallel rank holds ``batch`` and ``targets``.

        Returns:
            ``loss/value``, ``value/clip_fraction``, ``value/grad_norm`` and ``value/lr`` of the whole mini-batch, the
            same on every rank.

        Raises:
            NonFiniteUpdateError: the loss or the gradient norm is not finite.
        """
        metrics = self.accumulate_gradients(batch, targets)
        if not math.isfinite(metrics["loss/value"]):
            raise NonFiniteUpdateError(f"the critic's train step gave the loss {metrics['loss/value']}")
        return metrics | {f"value/{name}": number for name, number in self.optimizer_step().items()}

    def accumulate_gradients(self, batch: SequenceBatch, targets: ValueTargets) -> dict[str, float]:
        """Forward and backward over all micro-batches and the gradient reduction, without the optimizer step."""
        self.zero_grad()
        clip, targets = self.critic.value_clip, targets.to(self.device)

        def share(part: PackedBatch, hidden_NH: Tensor) -> tuple[Tensor, Tensor, dict]:
            values_BT = self.gather_tokens(self._head(hidden_NH), part)
            mine = targets.select(part.rows_B)
            arguments = (values_BT, mine.old_values_BT, mine.returns_BT, part.mask_BT)
            loss = value_loss(*arguments, clip=clip, tokens=mine.tokens)
            metrics = {"loss/value": loss.detach()}
            if clip is not None:
                metrics["value/clip_fraction"] = value_clip_fraction(*arguments, clip=clip, tokens=mine.tokens)
            return loss, one(self.device), metrics

        shares = self.run(batch, self.plan(batch, forward_only=False), share, forward_only=False)
        return {"loss/value": 0.0} | self.sum_metrics(shares)

    # ---- weights ------------------------------------------------------------------------------------------------

    def export(self, value: Callable[[torch.nn.Parameter], Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        """HF tensors on global rank 0 (see ``weights.export_hf``); all ranks must exhaust the iterator."""
        return export_hf(self.chunks, self.shape, value)

    def save_hf(self, target: str | Path) -> dict[str, int]:
        """Writes an HF checkpoint: OpenRLHF's and ours read it as a critic, transformers as a sequence classifier.

        transformers finds the value head under the name ``score`` only. Returns what ``MegatronPolicy.save_hf`` does.
        """
        if dist.get_rank() == 0:
            return save_hf(self.export(), self.settings.model_path, target, config_changes=self._hf_config_changes())
        for _ in self.export():
            pass
        return {}

    def _hf_config_changes(self) -> dict[str, Any]:
        return {
            "architectures": [_CLASSIFIERS[self.shape.model_type]],
            "id2label": {"0": "value"},  # one label: transformers derives num_labels from it
            "label2id": {"value": 0},
            "value_head_prefix": self.shape.value_head,
        }
