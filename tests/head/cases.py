"""Problems for the head, and what is right for them in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from openrlhf_ext.algorithms.losses import clipped_surrogate
from openrlhf_ext.head import TokenLoss


@dataclass(frozen=True)
class ClippedLoss:
    """The algorithms' clipped surrogate, weighted, as terms of single tokens; travels to other
    processes."""

    advantage: Tensor
    weight: Tensor
    old: Tensor
    dual_clip: float | None = None

    def __call__(self, logprob: Tensor, rows: slice | Tensor) -> Tensor:
        log_ratio = logprob - self.old[rows]
        objective, _ = clipped_surrogate(log_ratio, self.advantage[rows], 0.2, 0.28, self.dual_clip)
        return -self.weight[rows] * objective


@dataclass(frozen=True)
class Case:
    """Operands of one call; ``slope`` and ``entropy_slope`` make a scalar of its outputs."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    temperature: float | Tensor
    slope: Tensor
    entropy_slope: Tensor
    loss: TokenLoss

    def leaves(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Fresh copies of hidden states and weight that require gradients."""
        return tuple(
            t.to(dtype or t.dtype).clone().requires_grad_() for t in (self.hidden, self.weight)
        )

    def double(self) -> Case:
        return replace(self, hidden=self.hidden.double(), weight=self.weight.double())


def make_case(
    tokens: int = 17,
    vocab: int = 37,
    width: int = 8,
    scale: float = 1.0,
    temperature: float | str = 0.7,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Random operands; temperature 'per token' draws one for each token."""
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *s: torch.randn(*s, generator=generator)  # noqa: E731
    hidden, weight = randn(tokens, width).to(dtype), (randn(vocab, width) * scale).to(dtype)
    target = torch.randint(0, vocab, (tokens,), generator=generator)
    if temperature == "per token":
        temperature = torch.rand(tokens, generator=generator) + 0.5
    logprob, _ = reference(hidden, weight, target, temperature)
    old = (logprob + 0.3 * randn(tokens)).float()
    weights = (
        torch.rand(tokens, generator=generator)
        * (torch.rand(tokens, generator=generator) > 0.2)
        / tokens
    )
    loss = ClippedLoss(randn(tokens), weights, old, dual_clip=3.0)
    return Case(hidden, weight, target, temperature, randn(tokens), randn(tokens), loss)


def reference(
    hidden: Tensor, weight: Tensor, target: Tensor, temperature: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy by a full log-softmax in float64."""
    scale = temperature.double()[:, None] if isinstance(temperature, Tensor) else temperature
    log_p = (hidden.double() @ weight.double().t() / scale).log_softmax(-1)
    return log_p.gather(1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@dataclass(frozen=True)
class Expected:
    """Values in float64, and the gradients by hidden states and weight of two scalars."""

    logprob: Tensor
    entropy: Tensor
    output_grads: tuple[Tensor, Tensor]  # of slope . logprob
    both_grads: tuple[Tensor, Tensor]  # of slope . logprob + entropy_slope . entropy
    loss: Tensor
    loss_grads: tuple[Tensor, Tensor]


def expected(case: Case) -> Expected:
    """What every implementation must give for a case."""
    leaves = case.leaves(torch.float64)
    logprob, entropy = reference(*leaves, case.target, case.temperature)
    loss = case.loss(logprob, slice(0, len(case.target))).sum()
    outputs = (logprob * case.slope).sum()
    grads = lambda value: torch.autograd.grad(value, leaves, retain_graph=True)  # noqa: E731
    both = outputs + (entropy * case.entropy_slope).sum()
    return Expected(
        logprob.detach(), entropy.detach(), grads(outputs), grads(both), loss.detach(), grads(loss)
    )


def assert_near(got: Tensor, want: Tensor, tolerance: float = 1e-5) -> None:
    """Equal to a tolerance relative to the largest entry."""
    error = (got.double() - want.double()).abs().max().item() if want.numel() else 0.0
    limit = tolerance * max(1e-3, want.abs().max().item() if want.numel() else 0.0)
    assert error <= limit, f"error {error:.3e}, limit {limit:.3e}"
