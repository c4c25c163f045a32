"""Sampling with a plain transformers model: every prompt is read once, and completions that have
ended leave the batch.

``generate`` keeps every row until the last one has ended, and says nothing of entropies.

Shape suffixes: Q = prompts, B = completions, A = those that go on, P = longest prompt, T = longest
completion, V = vocabulary, N = tokens of all completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from openrlhf_ext.algorithms.segments import Segments


@dataclass(frozen=True)
class Sampled:
    """Completions, on the host.

    Attributes:
        rows: token ids of each, its end of text included.
        entropies_N: nats, of the distribution that each token was drawn from.
        truncated_B: reached the limit without an end of text.
    """

    rows: list[list[int]]
    entropies_N: Tensor
    truncated_B: Tensor

    @cached_property
    def segments(self) -> Segments:
        """Which of the N tokens are whose."""
        return Segments(torch.tensor([len(row) for row in self.rows]))

    @classmethod
    def joined(cls, parts: Sequence[Sampled]) -> Sampled:
        """Those of several batches, concatenated."""
        return cls(
            [row for part in parts for row in part.rows],
            torch.cat([part.entropies_N for part in parts]),
            torch.cat([part.truncated_B for part in parts]),
        )


@torch.no_grad()
def decode(
    model: Any,
    prompts: Sequence[list[int]],
    *,
    samples: int,
    max_new_tokens: int,
    temperature: float,
    eos: int,
    seed: int,
) -> Sampled:
    """``samples`` completions of each prompt, those of a prompt next to each other.

    Args:
        model: a causal language model of transformers, in evaluation mode.
        prompts: token ids.
        temperature: of the softmax; 0 takes the most likely token.
        eos: ends a completion.
        seed: the same gives the same completions on the same device.
    """
    device = model.device
    generator = torch.Generator(device).manual_seed(seed)
    cache = DynamicCache(config=model.config)
    logits_AV, mask_AP = _read(model, prompts, cache)
    cache.batch_repeat_interleave(samples)
    logits_AV, mask_AP = (
        logits_AV.repeat_interleave(samples, 0),
        mask_AP.repeat_interleave(samples, 0),
    )
    place_A = mask_AP.sum(1)
    tokens_BT = torch.full((len(logits_AV), max_new_tokens), eos, device=device)
    entropies_BT = torch.zeros(tokens_BT.shape, device=device)
    lengths_B = torch.full((len(tokens_BT),), max_new_tokens, device=device)
    truncated_B = torch.ones_like(lengths_B, dtype=torch.bool)
    alive_A = torch.arange(len(tokens_BT), device=device)
    mask_AL = torch.cat([mask_AP, mask_AP.new_ones(len(mask_AP), max_new_tokens)], 1)
    longest = mask_AP.shape[1]
    for t in range(max_new_tokens):
        logprobs_AV = (logits_AV.float() / (temperature or 1.0)).log_softmax(-1)
        chances_AV = logprobs_AV.exp()
        drawn_A = (
            chances_AV.argmax(-1)
            if temperature == 0
            else torch.multinomial(chances_AV, 1, generator=generator)[:, 0]
        )
        tokens_BT[alive_A, t] = drawn_A
        entropies_BT[alive_A, t] = -(chances_AV * logprobs_AV).sum(-1).clamp(max=0.0)
        ended_A = drawn_A == eos
        lengths_B[alive_A[ended_A]] = t + 1
        truncated_B[alive_A[ended_A]] = False
        kept = (~ended_A).nonzero()[:, 0]
        if t == max_new_tokens - 1 or not len(kept):
            break
        if len(kept) < len(alive_A):
            cache.batch_select_indices(kept)
            alive_A, drawn_A, place_A, mask_AL = (
                alive_A[kept],
                drawn_A[kept],
                place_A[kept],
                mask_AL[kept],
            )
        logits_AV = model(
            input_ids=drawn_A[:, None],
            position_ids=place_A[:, None],
            past_key_values=cache,
            use_cache=True,
            attention_mask=mask_AL[:, : longest + t + 1],
        ).logits[:, -1]
        place_A = place_A + 1
    drawn_BT = torch.arange(max_new_tokens, device=device) < lengths_B[:, None]
    rows = [
        row[:length] for row, length in zip(tokens_BT.tolist(), lengths_B.tolist(), strict=True)
    ]
    return Sampled(rows, entropies_BT[drawn_BT].cpu(), truncated_B.cpu())


def _read(model: Any, prompts: Sequence[list[int]], cache: DynamicCache) -> tuple[Tensor, Tensor]:
    """Fills the cache: (Q, V) logits behind each prompt, and the (Q, P) mask of its tokens, which
    stand right."""
    longest = max(map(len, prompts))
    ids_QP = torch.tensor(
        [[0] * (longest - len(ids)) + ids for ids in prompts], device=model.device
    )
    mask_QP = torch.tensor(
        [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts], device=model.device
    )
    places_QP = (mask_QP.cumsum(1) - 1).clamp(min=0)
    output = model(
        input_ids=ids_QP,
        attention_mask=mask_QP,
        position_ids=places_QP,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return output.logits[:, -1], mask_QP
