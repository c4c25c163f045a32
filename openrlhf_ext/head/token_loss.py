"""Losses that are a sum of terms of one token's log-probability each, as ``linear_token_loss`` takes them.

Shape suffixes: T = tokens of the call, B = tokens of one block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# loss(logprob_B, rows) -> loss_B: the terms of the tokens at these places of the call, already divided by the global
# denominators. Term b may depend on log-probability b only.
TokenLoss = Callable[[Tensor, "slice | Tensor"], Tensor]


@dataclass(frozen=True)
class ClippedTokenLoss:
    """PPO's clipped surrogate with coefficients that are known before the forward pass.

    ``-weight * min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`` with ``r = exp(logprob - old_logprob)``, and with
    ``dual_clip = k`` the objective is at least ``k A`` where ``A < 0`` (Schulman et al. 2017; Ye et al. 2020).

    Attributes:
        advantage_T: A.
        weight_T: weight of each term over the global denominator; 0 for tokens without loss, whatever their ratio.
        old_logprob_T: log-probability under the policy that sampled.
        clip_low, clip_high: None for no clipping on that side.
    """

    advantage_T: Tensor
    weight_T: Tensor
    old_logprob_T: Tensor
    clip_low: float | None = 0.2
    clip_high: float | None = 0.2
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        shapes = {name: tuple(getattr(self, name).shape) for name in ("advantage_T", "weight_T", "old_logprob_T")}
        if len(set(shapes.values())) > 1:
            raise ValueError(f"expected one coefficient per token in each of {shapes}")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"dual_clip must be > 1, got {self.dual_clip}")

    def __call__(self, logprob_B: Tensor, rows: slice | Tensor) -> Tensor:
        advantage_B, weight_B = self.advantage_T[rows], self.weight_T[rows]
        # bounds of ln r, not of r: what is cut never overflows, neither in its value nor in its gradient
        up, down, dual = math.inf, -math.inf, math.inf
        if self.clip_high is not None:
            up = math.log1p(self.clip_high)
        if self.clip_low is not None and self.clip_low < 1:
            down = math.log1p(-self.clip_low)
        if self.dual_clip is not None:
            dual = math.log(self.dual_clip)
        most_B = torch.where(advantage_B > 0, up, dual).masked_fill((advantage_B == 0) | (weight_B == 0), 0.0)
        least_B = torch.where(advantage_B < 0, down, -math.inf).minimum(most_B)
        log_ratio_B = (logprob_B - self.old_logprob_T[rows]).clamp(least_B, most_B)
        return -weight_B * advantage_B * log_ratio_B.exp()


def loss_and_slope(token_loss: TokenLoss, logprob_B: Tensor, rows: slice | Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the terms, and the derivative of each by its log-probability, (B,).

    Raises:
        ValueError: the loss does not give one term per token.
    """
    with torch.enable_grad():
        variable_B = logprob_B.detach().requires_grad_()
        loss_B = token_loss(variable_B, rows)
        if loss_B.shape != variable_B.shape:
            raise ValueError(
                f"token_loss must return one term per token, elementwise: got {tuple(loss_B.shape)} for "
                f"{tuple(variable_B.shape)} log-probabilities"
            )
        total = loss_B.sum()
        if not total.requires_grad:  # constant terms, of tokens without loss
            return total, torch.zeros_like(variable_B)
        (slope_B,) = torch.autograd.grad(total, variable_B, allow_unused=True, materialize_grads=True)
    return total.detach(), slope_B
