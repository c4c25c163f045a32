"""Entropy of a policy at its own completions, and its divergence from a reference: forward passes of plain models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from openrlhf_ext.tools.evaluate.sampling import Completion, left_padded, threads_for

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MOST_LOGITS = 1 << 27  # of one forward pass: 512 MiB in fp32, of which there are a few at a time

# Shape suffixes: B = sequences in a batch, S = longest of them, T = longest completion, V = vocabulary.


class Measures:
    """Measures completions token by token, over the whole vocabulary at the temperature they were sampled with.

    Distributions are those from which the completions' tokens were drawn, the end-of-sequence token's included, before
    any nucleus is cut out of them; logits are taken to fp32.

    Args:
        reference: what it is compared with, of the same vocabulary; ``None``: nothing.
        temperature: above 0.
        batch_size: most sequences of a forward pass; fewer where their logits would be too large.
        device: where to run; both models are moved there.
    """

    def __init__(
        self, policy: PreTrainedModel, reference: PreTrainedModel | None, temperature: float, batch_size: int,
        device: str,
    ) -> None:  # fmt: skip
        self._policy, self._reference = policy, reference
        self._temperature, self._batch_size, self._device = temperature, batch_size, device

    @torch.inference_mode()
    def __call__(self, completions: Sequence[Completion]) -> list[Completion]:
        """The completions with their ``entropy``, and with a reference their ``kl``: means over their tokens, in nats.

        Args:
            completions: with ``ids``.

        Raises:
            ValueError: a number is not finite, since a model's logits are not.
        """
        for model in filter(None, (self._policy, self._reference)):
            nn.Module.to(model, self._device)  # transformers' own wrapper of it has no type
        measured = list(completions)
        with threads_for(self._policy):
            for rows in self._batches(completions):
                for row, (entropy, kl) in zip(rows, self._means([completions[row] for row in rows]), strict=True):
                    measured[row] = replace(measured[row], entropy=entropy, kl=kl)
        return measured

    def _batches(self, completions: Sequence[Completion]) -> Iterator[list[int]]:
        """Places of the sequences of each forward pass, longest first."""
        order = sorted(range(len(completions)), key=lambda row: len(_ids(completions[row])), reverse=True)
        longest = max(map(_length, completions))
        vocabulary = self._policy.config.get_text_config().vocab_size
        size = max(1, min(self._batch_size, _MOST_LOGITS // ((longest + 1) * vocabulary)))
        return (order[start : start + size] for start in range(0, len(order), size))

    def _means(self, batch: Sequence[Completion]) -> list[tuple[float, float | None]]:
        ids_BS, mask_BS = (tensor.to(self._device) for tensor in left_padded([_ids(each) for each in batch], pad=0))
        lengths_B1 = torch.tensor([[_length(each)] for each in batch], device=self._device)
        longest = int(lengths_B1.max())
        sampled_BT = torch.arange(longest, device=self._device) >= longest - lengths_B1
        logp_BTV = self._log_probs(self._policy, ids_BS, mask_BS, longest)
        p_BTV = logp_BTV.exp()
        entropies = _row_means(-(p_BTV * logp_BTV).sum(-1), sampled_BT)
        if self._reference is None:
            return [(entropy, None) for entropy in entropies]
        reference_BTV = self._log_probs(self._reference, ids_BS, mask_BS, longest)
        divergences = _row_means((p_BTV * (logp_BTV - reference_BTV)).sum(-1), sampled_BT)
        return list(zip(entropies, divergences, strict=True))

    def _log_probs(self, model: PreTrainedModel, ids_BS: Tensor, mask_BS: Tensor, longest: int) -> Tensor:
        """Log-probabilities of every token at the last ``longest`` places of the sequences, (B, T, V) fp32."""
        forward: Any = model
        logits_BTV = forward(
            input_ids=ids_BS, attention_mask=mask_BS, position_ids=(mask_BS.cumsum(1) - 1).clamp(min=0),
            logits_to_keep=longest + 1, use_cache=False,
        ).logits[:, :-1]  # fmt: skip
        return (logits_BTV.float() / self._temperature).log_softmax(-1)


def _row_means(value_BT: Tensor, sampled_BT: Tensor) -> list[float]:
    mean_B = value_BT.double().where(sampled_BT, 0.0).sum(1) / sampled_BT.sum(1)
    if not bool(mean_B.isfinite().all()):
        raise ValueError("entropies or divergences are not finite, since a model's logits are not: try --dtype float32")
    return mean_B.tolist()


def _ids(completion: Completion) -> tuple[int, ...]:
    assert completion.ids is not None
    return completion.ids


def _length(completion: Completion) -> int:
    assert completion.tokens is not None
    return completion.tokens
