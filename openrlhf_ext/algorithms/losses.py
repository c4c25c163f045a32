"""Policy losses and the group-relative advantage.

`TokenAlgorithm` has one ratio and advantage per token, `SequenceAlgorithm` one per completion. Most
methods start from the advantage of `GroupRelative`.

    J = sum_it omega_i (factor_it f(w_it, A_it) - kl_coef KL_it)        tokens
    J = 1/Q sum over prompts of 1/G sum_i f(s_i, A_i)                   completions
    s_i = exp(1/T_i sum_t log w_it)  (geometric)    or    1/T_i sum_t w_it  (arithmetic)

`f` is the clipped surrogate, `omega_i` the weight of completion i, and `factor` the product of
lambda (`token_weights`) and the importance correction. For completions, the correction is the mean
of their tokens' factors. The shared functions (ratios, surrogate, weights, metrics, the check for
overflow) come first.

    A_i = (r_i - mean r)/(std r + adv_eps)                  over the completions of one prompt

Shape suffixes: B = completions, N = tokens of all completions, n = some of them, Q = groups.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from openrlhf_ext.algorithms.base import Algorithm, Loss, LossBatch, TokenLoss
from openrlhf_ext.algorithms.batch import check_values
from openrlhf_ext.algorithms.groups import (
    Groups,
    Inputs,
    Moments,
    group_index,
    pool_moments,
    segment_sum,
)
from openrlhf_ext.algorithms.kl import reward_kl
from openrlhf_ext.algorithms.length_penalty import length_penalty


def promote(logprobs: Tensor) -> Tensor:
    """Log-probs promoted to at least float32, differentiable."""
    return logprobs.to(torch.promote_types(logprobs.dtype, torch.float32))


def masked_log_ratio(new_logprobs: Tensor, shaped: LossBatch) -> Tensor:
    """(N,) `log w = new - old` on loss tokens, 0 elsewhere."""
    old_N = shaped["old_logprobs"]
    if new_logprobs.shape != old_N.shape:
        raise ValueError(
            f"new_logprobs has shape {tuple(new_logprobs.shape)}, the shaped batch "
            f"{tuple(old_N.shape)}"
        )
    return torch.where(shaped.loss_mask, promote(new_logprobs) - old_N, 0.0)


def clipped_surrogate(
    log_ratio: Tensor,
    advantages: Tensor,
    clip_low: float | None,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    *,
    factor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """PPO's clipped objective, to be maximized.

    J. Schulman et al., arXiv 1707.06347, eq. 7; dual clip: D. Ye et al., arXiv 1912.09729, eq. 4.

    `min(w A, clip(w, 1 - clip_low, 1 + clip_high) A)` with `w = exp(log_ratio)`, and with
    `dual_clip = k` at least `k A` where `A < 0`. A tie between both terms keeps the gradient.

    The log-ratio is bounded before the exponential, so an overflowing ratio does no harm where it
    is clipped or multiplied by 0. Anywhere else it gives an infinite objective.

    Args:
        log_ratio: log w, the only differentiable input.
        advantages: A, broadcastable to `log_ratio`.
        clip_low: None for no clipping at all; the other bounds are then ignored.
        factor: constant that multiplies the objective, None for 1.
    Returns:
        The objective, and a bool tensor of the entries whose gradient was cut although `A != 0`.
    """
    scale = advantages if factor is None else advantages * factor
    clipped = torch.zeros_like(log_ratio, dtype=torch.bool)
    bound: Tensor | float = 0.0
    if clip_low is not None:
        high = math.inf if clip_high is None else math.log1p(clip_high)
        low = math.log1p(-clip_low) if clip_low < 1 else -math.inf
        positive = advantages > 0
        clipped = torch.where(positive, log_ratio > high, log_ratio < low)
        bound_like = torch.full_like(log_ratio, low).masked_fill_(positive, high)
        if dual_clip is not None:
            floored = ~positive & (log_ratio > math.log(dual_clip))
            clipped, bound_like = (
                clipped | floored,
                bound_like.masked_fill_(floored, math.log(dual_clip)),
            )
        clipped, bound = clipped & (advantages != 0), bound_like
    return torch.where(clipped | (scale == 0), bound, log_ratio).exp() * scale, clipped


def token_weights(
    shaped: LossBatch, counted_B: Tensor, *, agg: str, agg_scope: str, l_norm: float | None
) -> Tensor:
    """Weight omega of every token of a completion, float64, 0 for inactive completions.

    Args:
        counted_B: counted tokens c_i (0 for inactive completions).
    """
    counted_B = counted_B.to(torch.float64)
    if agg == "seq-mean-token-sum-norm":
        if l_norm is None:
            raise ValueError("agg seq-mean-token-sum-norm needs l_norm, the constant length")
        # n_seq l_norm
        return reciprocal(shaped.kept.sum(dtype=torch.float64) * l_norm, shaped.active)
    if agg == "seq-mean-token-mean":
        # Q G c_i
        return reciprocal(prompts(shaped) * shaped.group_sizes * counted_B, shaped.active)
    if agg_scope == "group":
        index_B = group_index(shaped.group_ids)
        in_group_B = segment_sum(counted_B, index_B, len(shaped))[index_B]
        return reciprocal(prompts(shaped) * in_group_B, shaped.active)
    return reciprocal(counted_B.sum(), shaped.active)


def prompts(shaped: LossBatch) -> Tensor:
    """Q, the number of groups in the mini-batch that were not dropped; float64, exact, no device
    sync."""
    return torch.where(shaped.kept, 1.0 / shaped.group_sizes.double(), 0.0).sum().round()


def reciprocal(denominator: Tensor, where_B: Tensor) -> Tensor:
    """(B,) 1/denominator in float64 where `where_B` is set and the denominator is positive, else
    0."""
    usable_B = where_B & (denominator > 0)
    return torch.where(usable_B, 1.0 / denominator.clamp(min=1e-300), 0.0)


def partial_mean(values_N: Tensor, shaped: LossBatch) -> Tensor:
    """This share's part of the mean over the loss tokens of the whole mini-batch."""
    return values_N.detach().sum(dtype=torch.float64) / shaped.denominators["tokens"].clamp(min=1.0)


def ratio_metrics(
    log_ratio_N: Tensor, clipped_N: Tensor | None, shaped: LossBatch
) -> dict[str, Tensor]:
    """Mean of `old - new` and of its absolute value, clip fractions, and `alignment`.

    The clip fractions are split by the sign of the advantage. `alignment` is the mean product of
    advantage and new log-prob; it changes if the two do not belong to the same tokens.
    """
    product_N = torch.where(
        shaped.loss_mask, (log_ratio_N + shaped["old_logprobs"]) * shaped.advantages, 0.0
    )
    metrics = {
        "alignment": partial_mean(product_N, shaped),
        "policy_kl": -partial_mean(log_ratio_N, shaped),
        "abs_log_ratio": partial_mean(log_ratio_N.abs(), shaped),
    }
    if clipped_N is not None:
        up_N = clipped_N & (shaped.advantages > 0)
        metrics["clip_fraction"] = partial_mean(clipped_N, shaped)
        metrics["clip_fraction_high"] = partial_mean(up_N, shaped)
        metrics["clip_fraction_low"] = metrics["clip_fraction"] - metrics["clip_fraction_high"]
    return metrics


def checked(
    loss: Loss,
    terms: Sequence[Tensor],
    new_logprobs: Tensor,
    log_ratio_N: Tensor,
    shaped: LossBatch,
) -> Loss:
    """Return the loss. On the CPU, raise ValueError if the loss or a log-ratio is infinite or NaN.

    The message names the row and position of the cause.

    Args:
        terms: (N,) or (B,) terms whose sum is the loss.
    """
    if loss.value.device.type != "cpu" or bool(
        torch.isfinite(loss.value.detach() + log_ratio_N.detach().sum())
    ):
        return loss
    check_values("new_logprobs", new_logprobs, shaped.segments)
    worst = max(
        (term.detach().abs().nan_to_num(nan=torch.inf) for term in terms),
        key=lambda term: float(term.max()),
    )
    token = int(worst.argmax())
    if len(worst) < len(log_ratio_N):  # one term per completion
        span = shaped.segments.span(slice(token, token + 1))
        token = span.start + int(log_ratio_N.detach()[span].abs().argmax())
    row, position = shaped.segments.place(token)
    old = float(shaped["old_logprobs"][token])
    raise ValueError(
        f"the loss is {float(loss.value.detach())}: at row {row}, position {position} (new "
        f"log-prob {float(new_logprobs.detach()[token])}, old {old}) a ratio or KL term "
        f"overflows {log_ratio_N.dtype} that neither clipping nor a zero advantage silences. "
        "Bound the ratios of negative advantages by dual_clip, or look for log-probs of other "
        "weights or of another tokenization"
    )


_LOSS_HOOKS = ("loss", "objective", "surrogate", "factor", "extra_objective", "extra_terms")


class TokenAlgorithm(Algorithm):
    """One ratio and one advantage per token; clipped surrogate, optional KL, token-level
    aggregation.

    Class attributes:
        tokenwise: `loss` is a sum of per-token terms, so `token_loss` can compute it. A subclass
            that defines `loss`, `objective`, `surrogate`, `factor`, `extra_objective` or
            `extra_terms` must set `tokenwise = True` again if its hooks treat every token
            separately. Without it the loss is still correct, but the fused output layer is not
            used.
        kl_is_token_mean: a KL in the loss is averaged over all tokens, whatever `agg` is.
        most_kl: upper bound of a token's KL; None for no bound.
    """

    kl_places: ClassVar[tuple[str, ...]] = ("loss",)
    tokenwise: ClassVar[bool] = True
    kl_is_token_mean: ClassVar[bool] = False
    most_kl: ClassVar[float | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "tokenwise" not in vars(cls) and any(name in vars(cls) for name in _LOSS_HOOKS):
            cls.tokenwise = False

    # ---- denominators of the mini-batch ----

    def loss_level(self, shaped: LossBatch) -> LossBatch:
        loss_mask_N = self.loss_mask(shaped)
        weights_B = token_weights(
            shaped,
            self.counted_tokens(shaped, loss_mask_N),
            agg=self.agg,
            agg_scope=getattr(self.options, "agg_scope", "batch"),
            l_norm=getattr(self.options, "l_norm", None),
        )
        tokens = self.loss_tokens(shaped, loss_mask_N).sum().to(torch.float64)
        return dataclasses.replace(
            shaped,
            loss_mask=loss_mask_N,
            weights=weights_B,
            denominators={"tokens": tokens},
            complete=True,
        )

    @property
    def agg(self) -> str:
        """How token objectives are averaged."""
        return str(getattr(self.options, "agg", "token-mean"))

    def loss_mask(self, shaped: LossBatch) -> Tensor:
        """(N,) tokens that carry loss."""
        return shaped.segments.spread(shaped.active)

    def loss_tokens(self, shaped: LossBatch, loss_mask_N: Tensor) -> Tensor:
        """(B,) tokens of each completion that carry loss."""
        return torch.where(shaped.active, shaped.lengths, 0)

    def counted_tokens(self, shaped: LossBatch, loss_mask_N: Tensor) -> Tensor:
        """(B,) counted tokens c_i, the denominators of `agg`."""
        return self.loss_tokens(shaped, loss_mask_N)

    # ---- the loss, of rows and of single tokens ----

    def loss(self, new_logprobs: Tensor, shaped: LossBatch) -> Loss:
        shaped = self._prepared(new_logprobs, shaped).with_old(promote(new_logprobs))
        log_ratio_N = masked_log_ratio(new_logprobs, shaped)
        terms_N, clipped_N, kl_N = self._terms(promote(new_logprobs), log_ratio_N, shaped)
        value = terms_N.sum()
        metrics = {"policy_loss": value.detach(), **ratio_metrics(log_ratio_N, clipped_N, shaped)}
        if kl_N is not None:
            metrics["ref_kl"] = partial_mean(kl_N, shaped)
        extra = self.extra_terms(promote(new_logprobs), shaped)
        for name, terms_N in extra.items():
            total = terms_N.sum()
            value = value + total
            metrics[name] = total.detach()
        loss = Loss(value, metrics, {"clipped": clipped_N})
        return checked(loss, (terms_N, *extra.values()), new_logprobs, log_ratio_N, shaped)

    def _terms(
        self, new_N: Tensor, log_ratio_N: Tensor, shaped: LossBatch
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(N,) loss terms, the mask of clipped tokens, and the reference KL."""
        objective_N, clipped_N, kl_N = self.objective(new_N, log_ratio_N, shaped)
        terms_N = -objective_N * shaped.segments.spread(shaped.weights.to(objective_N.dtype))
        if kl_N is not None and self.kl_is_token_mean:
            terms_N = terms_N + kl_N * (
                self.penalty.coef / shaped.denominators["tokens"].clamp(min=1.0)
            ).to(kl_N.dtype)
        return terms_N, clipped_N, kl_N

    def token_loss(self, shaped: LossBatch) -> TokenLoss | None:
        if not self.tokenwise:
            return None
        if self.needs_prepare and shaped.selection is None:
            raise self._unprepared("`token_loss`")
        return functools.partial(self._terms_of_tokens, shaped.lean())

    def _terms_of_tokens(
        self, shaped: LossBatch, new_logprobs_n: Tensor, index_n: Tensor
    ) -> Tensor:
        """(n,) loss terms: the loss of n rows of one token each."""
        new_n = promote(new_logprobs_n)
        part = shaped.tokens_at(index_n).with_old(new_n)
        loss_n, _, _ = self._terms(new_n, masked_log_ratio(new_n, part), part)
        for terms_n in self.extra_terms(new_n, part).values():
            loss_n = loss_n + terms_n
        return loss_n

    def _prepared(self, new_logprobs: Tensor, shaped: LossBatch) -> LossBatch:
        """The batch with its tokens selected, if `needs_prepare`.

        Raises ValueError for a share that was made before `prepare`.
        """
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

    # ---- hooks for methods ----

    def objective(
        self, new_N: Tensor, log_ratio_N: Tensor, shaped: LossBatch
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Objective to maximize per token, before aggregation weights; the mask of clipped tokens;
        the reference KL."""
        objective_N, clipped_N = self.surrogate(log_ratio_N, shaped)
        kl_N = None
        if shaped.ref_logprobs is not None:
            mask_N, most = shaped.loss_mask, self.most_kl
            kl_N = self.penalty.in_loss(
                new_N, shaped.ref_logprobs, shaped["old_logprobs"], mask_N, most
            )
            if not self.kl_is_token_mean:
                objective_N = objective_N - self.penalty.coef * kl_N
        return self.extra_objective(objective_N, log_ratio_N, shaped), clipped_N, kl_N

    def surrogate(self, log_ratio_N: Tensor, shaped: LossBatch) -> tuple[Tensor, Tensor]:
        """Objective per token times `factor`, 0 outside the loss mask, and the mask of clipped
        tokens."""
        options = self.options
        value_N, clipped_N = clipped_surrogate(
            log_ratio_N,
            shaped.advantages,
            options.clip_low,
            options.clip_high,
            getattr(options, "dual_clip", None),
            factor=self.factor(shaped),
        )
        return torch.where(shaped.loss_mask, value_N, 0.0), clipped_N & shaped.loss_mask

    def factor(self, shaped: LossBatch) -> Tensor | None:
        """(N,) constant factor on each token's surrogate, None for 1."""
        factors = [f for f in (shaped.token_weights, shaped.correction) if f is not None]
        return functools.reduce(torch.mul, factors) if factors else None

    def extra_objective(
        self, objective_N: Tensor, log_ratio_N: Tensor, shaped: LossBatch
    ) -> Tensor:
        """Hook for terms beyond the surrogate and the reference KL."""
        return objective_N

    def extra_terms(self, new_N: Tensor, shaped: LossBatch) -> dict[str, Tensor]:
        """Hook for loss terms (N,) with their own normalization; each is a metric under its
        name."""
        return {}


class SequenceAlgorithm(Algorithm):
    """One ratio and one advantage per completion."""

    main_field = "seq_advantages"

    @property
    def ratio_kind(self) -> str:
        """ "geometric" or "arithmetic" mean of the token ratios."""
        return "geometric"

    def loss_level(self, shaped: LossBatch) -> LossBatch:
        denominators = {
            "tokens": torch.where(shaped.active, shaped.lengths, 0).sum().to(torch.float64),
            "sequences": shaped.active.sum().to(torch.float64),
        }
        return dataclasses.replace(
            shaped,
            # Completions masked as truncated keep a ratio for inspection, but have weight 0.
            loss_mask=shaped.segments.spread(shaped.kept),
            # 1/(Q G)
            weights=reciprocal(
                prompts(shaped) * shaped.group_sizes.to(torch.float64), shaped.active
            ),
            denominators=denominators,
            complete=True,
        )

    def loss(self, new_logprobs: Tensor, shaped: LossBatch) -> Loss:
        shaped = shaped.with_old(promote(new_logprobs))
        log_ratio_N = masked_log_ratio(new_logprobs, shaped)
        objective_B, clipped_B, log_ratio_B = self.objective(log_ratio_N, shaped)
        value = -objective_B.sum()
        clipped_B = clipped_B * shaped.active
        active_N = shaped.segments.spread(shaped.active)
        metrics = ratio_metrics(torch.where(active_N, log_ratio_N.detach(), 0.0), None, shaped)
        sequences = shaped.denominators["sequences"].clamp(min=1.0)
        metrics["clip_fraction"] = clipped_B.sum(dtype=torch.float64) / sequences
        details = {"clipped": clipped_B, "ratios": log_ratio_B.detach().exp()}
        loss = Loss(value, {"policy_loss": value.detach(), **metrics}, details)
        return checked(loss, (objective_B,), new_logprobs, log_ratio_N, shaped)

    def objective(self, log_ratio_N: Tensor, shaped: LossBatch) -> tuple[Tensor, Tensor, Tensor]:
        """(B,) weighted objectives; which completions, or what fraction of their tokens, were
        clipped; log s."""
        options = self.options
        log_ratio_B = self.sequence_log_ratio(log_ratio_N, shaped)
        objective_B, clipped_B = clipped_surrogate(
            log_ratio_B,
            shaped["seq_advantages"].to(log_ratio_B.dtype),
            options.clip_low,
            options.clip_high,
            options.dual_clip,
            factor=self.factor(shaped).to(log_ratio_B.dtype),
        )
        return objective_B, clipped_B, log_ratio_B

    def sequence_log_ratio(self, log_ratio_N: Tensor, shaped: LossBatch) -> Tensor:
        """(B,) log s_i, 0 in dropped groups."""
        segments = shaped.segments
        if self.ratio_kind == "geometric" or len(shaped) == 0:
            return (segments.sums(log_ratio_N) / shaped.lengths).to(log_ratio_N.dtype)
        # Scale by the largest token ratio, so that nothing overflows.
        largest_B = segments.maxima(log_ratio_N.detach())
        mean_B = segments.sums((log_ratio_N - segments.spread(largest_B)).exp()) / shaped.lengths
        return largest_B + mean_B.to(log_ratio_N.dtype).log()

    def factor(self, shaped: LossBatch) -> Tensor:
        """(B,) 1/(Q G), times the importance correction."""
        if shaped.correction is None:
            return shaped.weights
        return shaped.weights * (shaped.segments.sums(shaped.correction) / shaped.lengths)


# ---- the group-relative advantage


class GroupRelative(Algorithm):
    """Base of methods with the group-relative advantage; a KL penalty is in the loss or in the
    reward."""

    kl_places: ClassVar[tuple[str, ...]] = ("loss", "reward")

    def advantages(self, inputs: Inputs) -> dict[str, Any]:
        """The LossBatch fields `rewards` and `seq_advantages`, (B,) float64, and `advantages`,
        (N,).

        r_i is the raw reward plus the length penalty, minus a KL placed in the reward. A is 0 in
        dropped or zeroed groups. All tokens of a completion have the same A.
        """
        batch = inputs.batch
        rewards_B = batch.rewards + length_penalty(inputs, self.options)
        if self.kl is not None and self.kl.place == "reward":
            rewards_B = rewards_B - batch.segments.sums(reward_kl(self.kl, batch))
        a_B = group_advantages(rewards_B, inputs.groups, self.options, inputs.part.live_B)
        a_N = batch.segments.spread(a_B.to(batch.float_dtype))
        return {"rewards": rewards_B, "seq_advantages": a_B, "advantages": a_N}


def group_advantages(rewards_B: Tensor, groups: Groups, options: Any, live_B: Tensor) -> Tensor:
    """(B,) float64 A_i, 0 where not `live_B`. Every completion counts in mean and std.

    Args:
        rewards_B: (B,) float64.
        options: reads `normalize_std`, `ddof_seq`, `adv_eps`, and `baseline` where there is one.
    """
    moments = pool_moments(Moments.of_values(rewards_B), groups.index_B, len(groups))
    center_Q = moments.mean
    if getattr(options, "baseline", "seq") == "token":
        lengths_B = groups.lengths_B.to(torch.float64)
        # Computed relative to the mean, so that equal rewards give exactly the mean.
        shift_Q = groups.sum(lengths_B * (rewards_B - center_Q[groups.index_B])) / groups.sum(
            lengths_B
        )
        center_Q = center_Q + shift_Q
    centered_B = rewards_B - center_Q[groups.index_B]
    if options.normalize_std:
        std_B = moments.std(options.ddof_seq)[groups.index_B]
        centered_B = divide_by_std(
            centered_B, std_B, options.adv_eps, live_B, groups.ids_Q[groups.index_B]
        )
    return torch.where(live_B, centered_B, 0.0)


def divide_by_std(
    centered_B: Tensor, std_B: Tensor, adv_eps: float, live_B: Tensor, group_ids_B: Tensor
) -> Tensor:
    """`centered / (std + adv_eps)`. Raises ValueError with the group if that would be 0/0."""
    if adv_eps == 0.0:
        require_positive_std(std_B, live_B, group_ids_B)
    return centered_B / torch.where(live_B, std_B + adv_eps, 1.0)


def require_positive_std(std_B: Tensor, live_B: Tensor, group_ids_B: Tensor) -> None:
    """Raise ValueError if a standard deviation that divides is 0; `adv_eps: 0` requires this
    check."""
    flat = (live_B & (std_B == 0)).nonzero().flatten()
    if len(flat):
        group = int(group_ids_B[flat[0]])
        raise ValueError(
            f"adv_eps = 0 needs positive standard deviations, that of group {group} is 0; set "
            "adv_eps > 0"
        )
