"""`clip_cov`: G. Cui et al., "The Entropy Mechanism of Reinforcement Learning for Reasoning
Language Models", arXiv 2505.22617.

Shape suffixes: B = completions, N = tokens of all completions, n = candidates.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import torch
from pydantic import AfterValidator
from torch import Tensor

from openrlhf_ext.algorithms import LossBatch, option, register_algorithm
from openrlhf_ext.algorithms.base import Total
from openrlhf_ext.algorithms.covariance import CovarianceControl, CovarianceOptions, FlaggedTokens
from openrlhf_ext.algorithms.option_blocks import clip_high, clip_low
from openrlhf_ext.options import Float, Int, Violation, Words


def _distinct(indices: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(indices)) < len(indices) or min(indices, default=0) < 0:
        raise ValueError("distinct indices, 0 or more")
    return indices


Indices = Annotated[
    tuple[Int, ...], AfterValidator(_distinct), Words("list of distinct integers >= 0")
]


class ClipCovOptions(CovarianceOptions):
    cov_ratio: Float = option(2e-4, "share of tokens removed", ge=0, le=1)
    cov_lb: Float = option(1.0, "lower end of the candidate band, exclusive")
    cov_ub: Float = option(5.0, "upper end of the candidate band, exclusive")
    perm: Indices | None = option(None, "selection order of the candidates; null: natural order")
    kl_coef: Float = option(0.0, "not defined here: a non-zero value is rejected")
    clip_low: Float | None = clip_low(1.0)
    clip_high: Float | None = clip_high(1.0)

    def violations(self) -> Iterator[Violation]:
        yield from super().violations()
        if self.kl_coef != 0:
            yield Violation(
                ("kl_coef",), f"kl_coef = {self.kl_coef} is not defined for clip_cov; leave it 0"
            )
        if not self.cov_lb < self.cov_ub:
            message = (
                f"the band of candidates is empty: cov_lb = {self.cov_lb} must be below cov_ub = "
                f"{self.cov_ub}"
            )
            yield Violation(("cov_lb", "cov_ub"), message)


@register_algorithm("clip_cov", ClipCovOptions)
class ClipCov(CovarianceControl):
    """Clip-Cov: a few tokens with a high covariance lose their loss term.

        J = 1/N sum over all but the chosen tokens of f(w_it, A_i)

    Of the N tokens, k = max(1, int(cov_ratio N)) unclipped ones with cov_lb < cov_it < cov_ub are
    chosen at random.
    """

    kl_places = ("reward",)
    tokenwise = True

    def choose(
        self, cov_N: Tensor, log_ratio_N: Tensor, shaped: LossBatch, seed: int | None, total: Total
    ) -> tuple[Tensor, dict[str, Tensor]]:
        _, clipped_N = self.surrogate(log_ratio_N, shaped)
        in_band_N = (cov_N > self.options.cov_lb) & (cov_N < self.options.cov_ub)
        candidates = FlaggedTokens.of(in_band_N & ~clipped_N & shaped.loss_mask, shaped, total)
        order = self._selection_order(candidates.count, seed)[: self.number_chosen(shaped)]
        chosen_n = torch.isin(candidates.number_n, order.to(cov_N.device))
        selection_N = torch.zeros_like(shaped.loss_mask)
        selection_N[candidates.index_n[chosen_n]] = True
        return selection_N, {
            "candidates": candidates.token_n3,
            "chosen": candidates.token_n3[chosen_n],
        }

    def _selection_order(self, candidates: int, seed: int | None) -> Tensor:
        """Indices into the candidate list: `perm`, a seeded permutation, or natural order."""
        if self.options.perm is not None:
            order = torch.tensor(self.options.perm, dtype=torch.long)
            if len(order.unique()) != len(order) or not bool(
                ((order >= 0) & (order < candidates)).all()
            ):
                raise ValueError(
                    f"perm must hold distinct indices into {candidates} candidates, got "
                    f"{order.tolist()}"
                )
            return order
        if seed is not None:
            # Drawn on the CPU, so that all ranks and devices draw alike.
            return torch.randperm(candidates, generator=torch.Generator().manual_seed(seed))
        return torch.arange(candidates)

    def factor(self, shaped: LossBatch) -> Tensor | None:
        factor_N = super().factor(shaped)
        if shaped.selection is None:
            return factor_N
        kept_N = (~shaped.selection).to(shaped.advantages.dtype)
        return kept_N if factor_N is None else factor_N * kept_N
