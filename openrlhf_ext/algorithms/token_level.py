"""`TokenAlgorithm`: the loss of methods with one ratio and one advantage per token (specification 2.7 - 2.9).

    J = sum_it omega_i (factor_it f(w_it, A_it) - kl_coef KL_it)            omega: aggregation weight of completion i

`f` is the clipped surrogate, `factor` the product of lambda (`token_weights`) and the importance correction.

Shape suffixes: B = completions, T = positions, N = single tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import torch
from torch import Tensor

from openrlhf_ext.algorithms import losses
from openrlhf_ext.algorithms.base import Algorithm, TokenLoss, tokens_of
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
        loss_mask_BT = self.loss_mask(shaped)
        weights_B = losses.token_weights(
            shaped,
            self.counted_tokens(shaped, loss_mask_BT),
            agg=getattr(self.options, "agg", "token-mean"),
            agg_scope=getattr(self.options, "agg_scope", "batch"),
            l_norm=getattr(self.options, "l_norm", None),
        )
        tokens = self.loss_tokens(shaped, loss_mask_BT).sum().to(torch.float64)
        return dataclasses.replace(
            shaped, loss_mask=loss_mask_BT, weights=weights_B, denominators={"tokens": tokens}, complete=True
        )

    def loss_mask(self, shaped: ShapedBatch) -> Tensor:
        """(B, T) tokens that carry loss."""
        return tokens_of(shaped.mask, shaped.active)

    def loss_tokens(self, shaped: ShapedBatch, loss_mask_BT: Tensor) -> Tensor:
        """(B,) tokens of each completion that carry loss."""
        return torch.where(shaped.active, shaped.lengths, 0)

    def counted_tokens(self, shaped: ShapedBatch, loss_mask_BT: Tensor) -> Tensor:
        """(B,) counted tokens c_i of specification 2.9."""
        return self.loss_tokens(shaped, loss_mask_BT)

    # ---- the loss, of rows and of single tokens ----

    def loss(self, new_logprobs: Tensor, shaped: ShapedBatch) -> Loss:
        shaped = self._prepared(new_logprobs, shaped)
        log_ratio_BT = masked_log_ratio(new_logprobs, shaped)
        objective_BT, clipped_BT, kl_BT = self.objective(promote(new_logprobs), log_ratio_BT, shaped)
        value = -(objective_BT.sum(dim=1) * shaped.weights.to(objective_BT.dtype)).sum()
        metrics = {"policy_loss": value.detach(), **losses.ratio_metrics(log_ratio_BT, clipped_BT, shaped)}
        if kl_BT is not None:
            metrics["ref_kl"] = losses.share(kl_BT, shaped)
        extra = self.extra_terms(promote(new_logprobs), shaped)
        for name, terms_BT in extra.items():
            total = terms_BT.sum()
            value = value + total
            metrics[name] = total.detach()
        loss = Loss(value, metrics, {"clipped": clipped_BT})
        return losses.checked(loss, (objective_BT, *extra.values()), new_logprobs, log_ratio_BT, shaped)

    def token_loss(self, shaped: ShapedBatch) -> TokenLoss | None:
        if not self.tokenwise:
            return None
        if self.needs_prepare and shaped.selection is None:
            raise self._unprepared("`token_loss`")
        return functools.partial(self._terms_of_tokens, shaped.lean())

    def _terms_of_tokens(self, shaped: ShapedBatch, new_logprobs_N: Tensor, index_N: Tensor) -> Tensor:
        """(N,) loss terms: the loss of N rows of one position each."""
        part = shaped.tokens_at(index_N)
        new_N1 = promote(new_logprobs_N)[:, None]
        objective_N1, _, _ = self.objective(new_N1, masked_log_ratio(new_N1, part), part)
        loss_N1 = -objective_N1 * part.weights.to(objective_N1.dtype)[:, None]
        for terms_N1 in self.extra_terms(new_N1, part).values():
            loss_N1 = loss_N1 + terms_N1
        return loss_N1[:, 0]

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
        self, new_BT: Tensor, log_ratio_BT: Tensor, shaped: ShapedBatch
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Objective to maximise per token, before aggregation weights; which tokens were clipped; reference KL."""
        objective_BT, clipped_BT = self.surrogate(log_ratio_BT, shaped)
        kl_BT = None
        if shaped.ref_logprobs is not None:
            kl_BT = self.kl.in_loss(new_BT, shaped.ref_logprobs, shaped.old_logprobs, shaped.loss_mask)
            objective_BT = objective_BT - self.kl.coef * kl_BT
        return self.extra_objective(objective_BT, log_ratio_BT, shaped), clipped_BT, kl_BT

    def surrogate(self, log_ratio_BT: Tensor, shaped: ShapedBatch) -> tuple[Tensor, Tensor]:
        """Objective per token times `factor`, 0 outside the loss mask, and which tokens were clipped."""
        options = self.options
        value_BT, clipped_BT = losses.clipped_surrogate(
            log_ratio_BT,
            shaped.advantages,
            options.clip_low,
            options.clip_high,
            getattr(options, "dual_clip", None),
            factor=self.factor(shaped),
        )
        return torch.where(shaped.loss_mask, value_BT, 0.0), clipped_BT & shaped.loss_mask

    def factor(self, shaped: ShapedBatch) -> Tensor | None:
        """(B, T) constant factor on each token's surrogate, None for 1."""
        factors = [f for f in (shaped.token_weights, shaped.correction) if f is not None]
        return functools.reduce(torch.mul, factors) if factors else None

    def extra_objective(self, objective_BT: Tensor, log_ratio_BT: Tensor, shaped: ShapedBatch) -> Tensor:
        """Hook for terms beyond the surrogate and the reference KL."""
        return objective_BT

    def extra_terms(self, new_BT: Tensor, shaped: ShapedBatch) -> dict[str, Tensor]:
        """Hook for loss terms (B, T) with a normalisation of their own; each is a metric by its name."""
        return {}
