"""`Algorithm.token_loss` beyond the agreement with `loss`, which test_against_reference.py checks
for every option."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import pytest
import torch

from openrlhf_ext.algorithms import get_algorithm
from openrlhf_ext.algorithms.methods.grpo import Grpo
from tests.algorithms.helpers import check_terms_add_up, random_groups, to_batch
from tests.algorithms.test_batch import simple_batch
from tests.algorithms.test_invariants import NAMES, build, mixed_groups


def test_only_sequence_ratios_have_no_terms() -> None:
    batch, new, _ = to_batch(mixed_groups(1))
    without = set()
    for name in NAMES:
        algorithm = build(name)
        shaped = algorithm.prepare(new.detach(), algorithm.shape(batch))
        if algorithm.token_loss(shaped) is None:
            without.add(name)
    assert without == {"gspo", "grpo_s", "gmpo"}


@pytest.mark.parametrize("kl", [None, {"coef": 0.2, "estimator": "k2"}])
def test_ppo_has_terms(kl: dict | None) -> None:
    batch, new, _ = to_batch(random_groups(4))
    batch = dataclasses.replace(batch, values=torch.randn(batch.tokens.shape, dtype=torch.float64))
    algorithm = get_algorithm("gae", kl=kl)
    shaped = algorithm.shape(batch)
    loss = algorithm.loss(new, shaped)
    check_terms_add_up(
        algorithm, shaped, new, loss.value.item(), torch.autograd.grad(loss.value, new)[0], 1e-9
    )


@pytest.mark.parametrize("name", ["dapo", "high_entropy_tokens", "kl_cov", "gtpo_conflict"])
def test_a_share_has_the_terms_of_its_rows(name: str) -> None:
    """Shares that were slimmed for the workers too; positions count in the share."""
    batch, new, _ = to_batch(mixed_groups(6))
    algorithm = build(name)
    prepared = algorithm.prepare(new.detach(), algorithm.shape(batch))
    rows = list(range(0, len(prepared), 2))
    part = prepared.lean().select(rows)
    own = batch.segments.take(new.detach(), rows).requires_grad_()
    loss = algorithm.loss(own, part)
    (grad,) = torch.autograd.grad(loss.value, own)
    tokens = torch.arange(len(own)).flip(0)
    new_N = own.detach()[tokens].requires_grad_()
    terms_N = algorithm.token_loss(part)(new_N, tokens)
    terms_N.sum().backward()
    assert terms_N.sum().item() == pytest.approx(loss.value.item(), abs=1e-12)
    assert torch.allclose(new_N.grad, grad[tokens], atol=1e-12)


def test_tokens_without_loss_have_zero_terms() -> None:
    batch, new, _ = to_batch(mixed_groups(2, max_length=20))
    algorithm = build("high_entropy_tokens", top_rho=0.3)
    shaped = algorithm.shape(batch)
    idle = (~shaped.loss_mask).nonzero().flatten()
    terms = algorithm.token_loss(shaped)(new.detach()[idle], idle)
    assert len(idle) > 0 and not terms.any()


def test_terms_are_at_least_float32() -> None:
    batch = simple_batch()
    algorithm = build("dapo")
    index = torch.arange(3)
    terms = algorithm.token_loss(algorithm.shape(batch))(batch.old_logprobs[:3].bfloat16(), index)
    assert terms.dtype == torch.float32


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_covariance_methods_want_a_prepared_batch(name: str) -> None:
    algorithm = build(name)
    with pytest.raises(ValueError, match="prepare.* before `token_loss`"):
        algorithm.token_loss(algorithm.shape(simple_batch()))


class Entangled(Grpo):
    """Every token's objective contains the row's mean: not a sum of terms of single tokens."""

    def extra_objective(self, objective_N, log_ratio_N, shaped):
        return objective_N + shaped.segments.spread(
            shaped.segments.sums(log_ratio_N) / shaped.lengths
        )


class Separate(Grpo):
    tokenwise: ClassVar[bool] = True

    def extra_objective(self, objective_N, log_ratio_N, shaped):
        return objective_N - log_ratio_N.abs()


class Inherits(Entangled):
    pass


def test_a_users_hooks_get_terms_only_when_declared_tokenwise() -> None:
    options = get_algorithm("grpo").options
    batch, new, _ = to_batch(mixed_groups(3))
    shaped = Separate(options).shape(batch)
    assert Entangled(options).token_loss(shaped) is None
    assert Inherits(options).token_loss(shaped) is None
    algorithm = Separate(options)
    loss = algorithm.loss(new, shaped)
    check_terms_add_up(
        algorithm, shaped, new, loss.value.item(), torch.autograd.grad(loss.value, new)[0], 1e-9
    )
