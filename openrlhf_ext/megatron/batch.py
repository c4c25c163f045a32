"""Sequences as the policy sees them: whole token rows and the positions whose hidden states predict response tokens.

Shape suffixes: B = sequences, S = tokens of a sequence (prompt and response), T = response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SequenceBatch:
    """Right-padded sequences and where their response tokens are.

    ``predict_BT[b, t]`` is the position whose hidden state predicts response token t of sequence b, which is
    ``tokens_BS[b, predict_BT[b, t] + 1]``. Responses may be interrupted (several turns); only ``mask_BT`` says which
    entries exist.
    """

    tokens_BS: Tensor  # int64
    lengths_B: Tensor  # int64, tokens of each sequence without padding
    predict_BT: Tensor  # int64
    mask_BT: Tensor  # bool

    def __len__(self) -> int:
        return self.tokens_BS.shape[0]

    @property
    def targets_BT(self) -> Tensor:
        """(B, T) int64 response tokens; 0 where ``mask_BT`` is false."""
        return self.tokens_BS.gather(1, (self.predict_BT + 1).clamp(max=self.tokens_BS.shape[1] - 1)) * self.mask_BT

    def select(self, rows: Tensor | Sequence[int]) -> SequenceBatch:
        """These rows, without the padding that only longer sequences needed (the width T is kept)."""
        index = torch.as_tensor(rows, dtype=torch.long)
        lengths_B = self.lengths_B[index]
        width = max(int(lengths_B.max()), 2) if len(index) else 2
        return SequenceBatch(self.tokens_BS[index, :width], lengths_B, self.predict_BT[index], self.mask_BT[index])

    @classmethod
    def padding_row(cls, response_width: int) -> SequenceBatch:
        """One row without response tokens: what a data-parallel rank runs when it got no sequence of its own."""
        return cls(
            torch.zeros(1, 2, dtype=torch.long),
            torch.full((1,), 2, dtype=torch.long),
            torch.zeros(1, response_width, dtype=torch.long),
            torch.zeros(1, response_width, dtype=torch.bool),
        )


def sequence_batch(sequences: Sequence[Tensor], action_masks: Sequence[Tensor]) -> SequenceBatch:
    """Builds a batch from unpadded rows.

    Args:
        sequences: (S_i,) int64 token rows, prompt and response.
        action_masks: (S_i - 1,) 0/1 rows in OpenRLHF's convention: entry p says that token p + 1 is a response token.
    """
    positions = [torch.nonzero(mask).squeeze(1) for mask in action_masks]
    width_S = max(len(s) for s in sequences)
    width_T = max(1, *(len(p) for p in positions)) if len(positions) > 1 else max(1, len(positions[0]))
    tokens_BS = torch.zeros(len(sequences), width_S, dtype=torch.long)
    predict_BT = torch.zeros(len(sequences), width_T, dtype=torch.long)
    mask_BT = torch.zeros(len(sequences), width_T, dtype=torch.bool)
    for row, (sequence, position) in enumerate(zip(sequences, positions, strict=True)):
        tokens_BS[row, : len(sequence)] = sequence
        predict_BT[row, : len(position)] = position
        mask_BT[row, : len(position)] = True
    return SequenceBatch(tokens_BS, torch.tensor([len(s) for s in sequences]), predict_BT, mask_BT)


def micro_batches(lengths_B: Tensor, micro_batch_size: int) -> list[list[int]]:
    """Row indices of each micro-batch: similar lengths together, so that little padding is computed."""
    order = torch.argsort(lengths_B, descending=True, stable=True).tolist()
    return [order[i : i + micro_batch_size] for i in range(0, len(order), micro_batch_size)]


def balance_rows(lengths_B: Tensor, parts: int) -> list[list[int]]:
    """Deals rows to ``parts`` data-parallel ranks, longest first and back and forth, so that token counts are close."""
    order = torch.argsort(lengths_B, descending=True, stable=True).tolist()
    dealt: list[list[int]] = [[] for _ in range(parts)]
    for i, row in enumerate(order):
        turn, place = divmod(i, parts)
        dealt[place if turn % 2 == 0 else parts - 1 - place].append(row)
    return [sorted(part) for part in dealt]
