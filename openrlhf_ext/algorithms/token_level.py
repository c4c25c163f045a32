"""`TokenAlgorithm`: the loss of methods with one ratio and one advantage per token (specification 2.7 - 2.9).

    J = sum_it omega_i (factor_it f(w_it, A_it) - kl_coef KL_it)            omega: aggregation weight of completion i

`f` is the clipped surrogate, `factor` the product of lambda (`token_weights`) and the importance correction.

Shape suffixes: B = completions, N = tokens of all completions, n = some of them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import torch
from torch import Tensor

from openrlhf_ext.algorithms import losses
from openrlhf_ext.algorithms.base import Algorithm, TokenLoss
from openrlhf_ext.algorithms.losses import masked_log_ratio, promote
from openrlhf_ext.algorithms.shaped import Loss, ShapedBatch

_LOSS_HOOKS = ("loss", "objective", "surrogate", "factor", "extra_objective", "extra_terms")


class TokenAlgorithm(Algorithm):
    """One ratio and one advantage per token; clipped surrogate, optional KL, token-level aggregation.

    Class attributes:
        tokenwise: `loss` is a sum of terms of single tokens, so that `token_loss` can compute it. A class that defines
            `loss`, `objective`, `surrogate`, `factor`, `extra_objective` or `extra_terms` must say so again by
            `tokenwise = True`: its hooks then must treat every token alone. The loss is right either way; without it
            the fused output layer is not used.
    """

    kl_places: ClassVar[tuple[str, ...]] = ("loss",)
    tokenwise: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "tokenwise" not in vars(cls) and any(name in vars(cls) for name in _LOSS_HOOKS):
            cls.tokenwise = False

    # ---- denominators of the mini-batch ----

    def loss_level(self, shaped: ShapedBatch) -> ShapedBatch:
        loss_mask_N = self.loss_mask(shaped)
        weights_B = losses.token_weights(
            shaped,
            self.counted_tokens(shaped, loss_mask_N),
            agg=getattr(self.options, "agg", "token-mean"),
            agg_scope=getattr(self.options, "agg_scope", "batch"),
            l_norm=getattr(self.options, "l_norm", None),
        )
        tokens = self.loss_tokens(shaped, loss_mask_N).sum().to(torch.float64)
        return dataclasses.replace(
            shaped, loss_mask=loss_mask_N, weights=weights_B, denominators={"tokens": tokens}, complete=True
        )

    def loss_mask(self, shaped: ShapedBatch) -> Tensor:
        """(N,) tokens that carry loss."""
        return shaped.segments.spread(shaped.active)

    def loss_tokens(self, shaped: ShapedBatch, loss_mask_N: Tensor) -> Tensor:
        """(B,) tokens of each completion that carry loss."""
        return torch.where(shaped.active, shaped.lengths, 0)

    def counted_tokens(self, shaped: ShapedBatch, loss_mask_N: Tensor) -> Tensor:
        """(B,) counted tokens c_i of specification 2.9."""
        return self.loss_tokens(shaped, loss_mask_N)

    # ---- the loss, of rows and of single tokens ----

    def loss(self, new_logprobs: Tensor, shaped: ShapedBatch) -> Loss:
        shaped = self._prepared(new_logprobs, shaped)
        log_ratio_N = masked_log_ratio(new_logprobs, shaped)
        objective_N, clipped_N, kl_N = self.objective(promote(new_logprobs), log_ratio_N, shaped)
        value = -(objective_N * shaped.segments.spread(shaped.weights.to(objective_N.dtype))).sum()
        metrics = {"policy_loss": value.detach(), **losses.ratio_metrics(log_ratio_N, clipped_N, shaped)}
        if kl_N is not None:
            metrics["ref_kl"] = losses.share(kl_N, shaped)
        extra = self.extra_terms(promote(new_logprobs), shaped)
        for name, terms_N in extra.items():
            total = terms_N.sum()
            value = value + total
            metrics[name] = total.detach()
        loss = Loss(value, metrics, {"clipped": clipped_N})
        return losses.checked(loss, (objective_N, *extra.values()), new_logprobs, log_ratio_N, shaped)

    def token_loss(self, shaped: ShapedBatch) -> TokenLoss | None:
        if not self.tokenwise:
            return None
        if self.needs_prepare and shaped.selection is None:
            raise self._unprepared("`token_loss`")
        return functools.partial(self._terms_of_tokens, shaped.lean())

    def _terms_of_tokens(self, shaped: ShapedBatch, new_logprobs_n: Tensor, index_n: Tensor) -> Tensor:
        """(n,) loss terms: the loss of n rows of one token each."""
        part = shaped.tokens_at(index_n)
        new_n = promote(new_logprobs_n)
        objective_n, _, _ = self.objective(new_n, masked_log_ratio(new_n, part), part)
        loss_n = -objective_n * part.weights.to(objective_n.dtype)
        for terms_n in self.extra_terms(new_n, part).values():
            loss_n = loss_n + terms_n
        return loss_n

    def _prepared(self, new_logprobs: Tensor, shaped: ShapedBatch) -> ShapedBatch:
        """The batch with its tokens chosen, where `needs_prepare`; refuses a share for which nobody chose them."""
        if not self.needs_prepare or shaped.selection is not None:
            return shaped
        if not shaped.complete:
            raise self._unprepared("`shaped.select(rows)`")
        return self.prepare(new_logprobs, shaped)

    def _unprepared(self, step: str) -> ValueError:
        return ValueError(
            f"{self.name} chooses tokens over the whole mini-batch: call "
            f"`shaped = algorithm.prepare(new_logprobs, shaped)` before {step}"
        )

    # ---- what a method may change ----

    def objective(
        self, new_N: Tensor, log_ratio_N: Tensor, shaped: ShapedBatch
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Objective to maximise per token, before aggregation weights; which tokens were clipped; reference KL."""
        objective_N, clipped_N = self.surrogate(log_ratio_N, shaped)
        kl_N = None
        if shaped.ref_logprobs is not None:
            kl_N = self.kl.in_loss(new_N, shaped.ref_logprobs, shaped.old_logprobs, shaped.loss_mask)
            objective_N = objective_N - self.kl.coef * kl_N
        return self.extra_objective(objective_N, log_ratio_N, shaped), clipped_N, kl_N

    def surrogate(self, log_ratio_N: Tensor, shaped: ShapedBatch) -> tuple[Tensor, Tensor]:
        """Objective per token times `factor`, 0 outside the loss mask, and which tokens were clipped."""
        options = self.options
        value_N, clipped_N = losses.clipped_surrogate(
            log_ratio_N,
            shaped.advantages,
            options.clip_low,
            options.clip_high,
            getattr(options, "dual_clip", None),
            factor=self.factor(shaped),
        )
        return torch.where(shaped.loss_mask, value_N, 0.0), clipped_N & shaped.loss_mask

    def factor(self, shaped: ShapedBatch) -> Tensor | None:
        """(N,) constant factor on each token's surrogate, None for 1."""
        factors = [f for f in (shaped.token_weights, shaped.correction) if f is not None]
        return functools.reduce(torch.mul, factors) if factors else None

    def extra_objective(self, objective_N: Tensor, log_ratio_N: Tensor, shaped: ShapedBatch) -> Tensor:
        """Hook for terms beyond the surrogate and the reference KL."""
        return objective_N

    def extra_terms(self, new_N: Tensor, shaped: ShapedBatch) -> dict[str, Tensor]:
        """Hook for loss terms (N,) with a normalisation of their own; each is a metric by its name."""
        return {}
