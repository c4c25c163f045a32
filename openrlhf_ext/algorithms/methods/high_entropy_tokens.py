"""`high_entropy_tokens`: DAPO on the tokens of highest entropy, the 80/20 rule.

S. Wang et al., arXiv 2506.01939.

Shape suffixes: B = completions, N = tokens of all completions.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor

from openrlhf_ext.algorithms import Inputs, LossBatch, TokenAlgorithm, option, register_algorithm
from openrlhf_ext.algorithms.base import Derived
from openrlhf_ext.algorithms.losses import GroupRelative
from openrlhf_ext.algorithms.option_blocks import (
    ClipOptions,
    Degenerate,
    GroupOptions,
    KLOptions,
    ScopeOptions,
    clip_high,
    degenerate,
)
from openrlhf_ext.algorithms.quantiles import upper_threshold
from openrlhf_ext.options import Float


class HighEntropyTokensOptions(GroupOptions, ClipOptions, KLOptions, ScopeOptions):
    top_rho: Float = option(0.2, "share of tokens kept", gt=0, le=1)
    mask_denominator: Literal["selected", "all"] = option(
        "selected", "denominators count the selected tokens, or all"
    )
    degenerate: Degenerate = degenerate("drop")
    clip_high: Float | None = clip_high(0.28)


@register_algorithm("high_entropy_tokens", HighEntropyTokensOptions)
class HighEntropyTokens(GroupRelative, TokenAlgorithm):
    """DAPO on the share `top_rho` of tokens with the highest entropy (Wang et al., arXiv
    2506.01939).

        tau = (1 - top_rho) quantile of H over all tokens of the mini-batch
        J = mean of f(w_it, A_i) over the tokens with H_it >= tau       eq. 6 of the final text

    With `mask_denominator: all` (first version of the paper) the sum is divided by all tokens.
    """

    needs = ("entropies",)

    def advantages(self, inputs: Inputs) -> dict[str, Any]:
        return {**super().advantages(inputs), "exposed": {"entropies": inputs.batch.entropies}}

    def loss_level(self, shaped: LossBatch) -> LossBatch:
        pool_N = None if bool(shaped.kept.all()) else shaped.segments.spread(shaped.kept)
        tau, cut = upper_threshold(shaped["entropies"], pool_N, self.options.top_rho)
        return super().loss_level(dataclasses.replace(shaped, pools={"tau": tau, "cut": cut}))

    def loss_mask(self, shaped: LossBatch) -> Tensor:
        return self._selected(shaped) & shaped.segments.spread(shaped.active)

    def loss_tokens(self, shaped: LossBatch, loss_mask_N: Tensor) -> Tensor:
        return shaped.segments.sums(loss_mask_N).long()

    def counted_tokens(self, shaped: LossBatch, loss_mask_N: Tensor) -> Tensor:
        if self.options.mask_denominator == "all":
            return torch.where(shaped.active, shaped.lengths, 0)
        return self.loss_tokens(shaped, loss_mask_N)

    def derived(self) -> Derived:
        return {"token_mask": self._selected}

    def _selected(self, shaped: LossBatch) -> Tensor:
        """(N,) tokens of the mini-batch with an entropy of at least tau, dropped groups
        included."""
        return shaped["entropies"] >= shaped["cut"]
