"""`kl_cov`: G. Cui et al., "The Entropy Mechanism of Reinforcement Learning for Reasoning Language
Models", arXiv 2505.22617.

Shape suffixes: N = tokens of all completions.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from openrlhf_ext.algorithms import LossBatch, option, register_algorithm
from openrlhf_ext.algorithms.base import Total
from openrlhf_ext.algorithms.covariance import CovarianceControl, CovarianceOptions, FlaggedTokens
from openrlhf_ext.algorithms.losses import clipped_surrogate
from openrlhf_ext.algorithms.option_blocks import KLOptions
from openrlhf_ext.algorithms.quantiles import order_statistic
from openrlhf_ext.options import Float, Violation, no_effect


class KLCovOptions(CovarianceOptions, KLOptions):
    cov_ratio: Float = option(
        2e-3, "share of tokens penalized (2e-3 for 7B, 2e-4 for 32B)", ge=0, le=1
    )
    ppo_kl_coef: Float = option(1.0, "coefficient of |new - old| on the chosen tokens", ge=0)
    clip_low: Float | None = option(None, "accepted, without effect", ge=0)
    clip_high: Float | None = option(None, "accepted, without effect", ge=0)
    dual_clip: Float | None = option(None, "accepted, without effect", gt=1)

    def interval_violations(self) -> Iterator[Violation]:
        """None: nothing is clipped, so the clip keys need not agree."""
        return iter(())

    def cautions(self) -> Iterator[str]:
        yield from super().cautions()
        for name in ("clip_low", "clip_high", "dual_clip"):
            if getattr(self, name) is not None:
                yield no_effect(name, getattr(self, name), "kl_cov clips nothing")


@register_algorithm("kl_cov", KLCovOptions)
class KLCov(CovarianceControl):
    """KL-Cov: the tokens with the highest covariance are held back; nothing is clipped.

        J = 1/N (sum over all tokens of w_it A_i - ppo_kl_coef sum over the chosen ones of |new_it -
        old_it|)

    Of the N tokens, k = max(1, int(cov_ratio N)) are chosen.
    """

    tokenwise = True

    def choose(
        self, cov_N: Tensor, log_ratio_N: Tensor, shaped: LossBatch, seed: int | None, total: Total
    ) -> tuple[Tensor, dict[str, Tensor]]:
        selection_N = torch.zeros_like(shaped.loss_mask)
        if count := self.number_chosen(shaped):
            tokens = int(shaped.denominators["tokens"])
            least, up_to_least = order_statistic(cov_N, shaped.loss_mask, tokens - count, total)
            selection_N = (cov_N > least) & shaped.loss_mask
            # of equal ones the first in natural order
            ties = FlaggedTokens.of((cov_N == least) & shaped.loss_mask, shaped, total)
            selection_N[ties.index_n[ties.number_n < count - (tokens - up_to_least)]] = True
        return selection_N, {"chosen": FlaggedTokens.of(selection_N, shaped, total).token_n3}

    def surrogate(self, log_ratio_N: Tensor, shaped: LossBatch) -> tuple[Tensor, Tensor]:
        objective_N, clipped_N = clipped_surrogate(
            log_ratio_N, shaped.advantages, None, factor=self.factor(shaped)
        )
        return torch.where(shaped.loss_mask, objective_N, 0.0), clipped_N

    def extra_objective(
        self, objective_N: Tensor, log_ratio_N: Tensor, shaped: LossBatch
    ) -> Tensor:
        penalty_N = torch.where(shaped["selection"], log_ratio_N.abs(), 0.0)
        return objective_N - self.options.ppo_kl_coef * penalty_N
