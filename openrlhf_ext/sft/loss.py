"""The mean negative log-prob of the tokens that are trained on, as OpenRLHF and transformers have
it.

Shape suffixes: N = trained tokens of these rows, n = some of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openrlhf_ext.algorithms import Loss
from openrlhf_ext.algorithms.base import TokenLoss
from openrlhf_ext.algorithms.segments import RowSelection, Segments


@dataclass(frozen=True)
class Answers:
    """Rows of a mini-batch: how many tokens each is trained on, and ``tokens``, those of the whole
    mini-batch."""

    segments: Segments
    tokens: int

    def select(self, rows: RowSelection) -> Answers:
        return Answers(self.segments.select(rows), self.tokens)

    def to(self, device: torch.device) -> Answers:
        return self


class SupervisedLoss:
    """Minus the sum of the log-probs over the tokens of the whole mini-batch, so that the losses of
    its shares add up to the mean. The same number whatever the micro-batches and ranks:
    transformers' with ``num_items_in_batch``, OpenRLHF's SFTLoss with ``batch_num_tokens``."""

    def entropy_slope(self, shaped: Answers) -> None:
        return None

    def token_loss(self, shaped: Answers) -> TokenLoss:
        return lambda logprobs_n, index_n: logprobs_n / -shaped.tokens

    def loss(self, logprobs_N: Tensor, shaped: Answers) -> Loss:
        return Loss(logprobs_N.sum() / -shaped.tokens, {})
