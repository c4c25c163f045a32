"""Batches of sequences for tests, from masks, and row by row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from openrlhf_ext.megatron.step.batch import SequenceBatch, sequence_batch


def masked_batch(sequences: Sequence[Tensor], masks: Sequence[Tensor]) -> SequenceBatch:
    """A batch of int64 rows; entry p of a mask says that token p + 1 is a response token."""
    return sequence_batch(
        [tokens.int().numpy() for tokens in sequences], [ranges_of(mask) for mask in masks]
    )


def grouped(groups: Sequence[tuple[int, Sequence[int]]]) -> SequenceBatch:
    """Rows of a prompt of so many tokens and responses of so many; every token is different, but
    for the prompts of a group, which are the same."""
    start, sequences, masks = 1, [], []
    for prompt, responses in groups:
        tokens, start = torch.arange(start, start + prompt), start + prompt
        for response in responses:
            sequences.append(torch.cat([tokens, torch.arange(start, start + response)]))
            masks.append(torch.tensor([0] * (prompt - 1) + [1] * response))
            start += response
    return masked_batch(sequences, masks)


def ranges_of(mask: Tensor) -> list[tuple[int, int]]:
    edges = torch.diff(mask.long(), prepend=torch.zeros(1).long(), append=torch.zeros(1).long())
    starts, stops = ((edges == step).nonzero().flatten() + 1 for step in (1, -1))
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


def plain_rows(batch: SequenceBatch) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each row its int64 tokens, and the positions that predict its response tokens."""
    tokens, predict = batch.tokens_M.long().split(batch.lengths_B.tolist()), batch.predict_N
    yield from zip(tokens, predict.split(batch.counts_B.tolist()), strict=True)
