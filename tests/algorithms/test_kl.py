"""KL estimators and KL in the reward."""

from __future__ import annotations

import math

import pytest
import torch

from openrlhf_ext.algorithms import get_algorithm
from openrlhf_ext.algorithms.kl import KL_ESTIMATORS
from tests.algorithms import reference
from tests.algorithms.helpers import assert_close, by_place, random_groups, to_batch


@pytest.mark.parametrize(
    ("name", "wanted"), [("k1", -0.5), ("k2", 0.125), ("k3", math.exp(0.5) - 1.5)]
)
def test_estimators_by_hand(name: str, wanted: float) -> None:
    new, ref = torch.tensor(-2.0), torch.tensor(-1.5)
    assert KL_ESTIMATORS[name](new, ref).item() == pytest.approx(wanted)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_estimators_are_unbiased(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    new, ref = (
        torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(-1) for _ in range(2)
    )
    exact = (new.exp() * (new - ref)).sum()
    assert (new.exp() * KL_ESTIMATORS[name](new, ref)).sum().item() == pytest.approx(exact.item())


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "clip_cov"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_in_the_reward_lowers_the_terminal_reward(name: str, estimator: str) -> None:
    groups = random_groups(3)
    batch, _, places = to_batch(groups)
    kl = {"coef": 0.2, "estimator": estimator, "place": "reward"}
    shaped = get_algorithm(name, kl=kl, degenerate="literal").shape(batch)

    def total_kl(completion: dict) -> float:
        pairs = zip(completion["ref"], completion["old"], strict=True)
        return sum(reference.kl_term(estimator, ref, old)[0] for ref, old in pairs)

    wanted = [[c["reward"] - 0.2 * total_kl(c) for c in group] for group in groups]
    assert_close(by_place(shaped.rewards, places, groups), wanted, 1e-9, "rewards")
    for g, group in enumerate(groups):
        advantages = by_place(shaped.seq_advantages, places, groups)[g]
        spread = reference.std(wanted[g], 1) + 1e-6
        assert_close(
            advantages, [(r - reference.mean(wanted[g])) / spread for r in wanted[g]], 1e-8, "A"
        )
        assert len(group) == len(advantages)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_unbiased_gradient_is_that_of_the_kl_and_the_value_is_the_estimators(
    estimator: str,
) -> None:
    """Summed over all tokens of a vocabulary with the old policy's probabilities, against the exact
    KL."""
    generator = torch.Generator().manual_seed(1)
    logits, old, ref = (torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(3))
    old, ref = old.log_softmax(-1), ref.log_softmax(-1)
    logits.requires_grad_()
    new = logits.log_softmax(-1)
    mask = torch.ones(7, dtype=torch.bool)
    penalty = get_algorithm(
        "grpo", kl={"coef": 1.0, "estimator": estimator, "unbiased_gradient": True}
    ).kl
    value = penalty.in_loss(new, ref, old, mask)
    assert torch.allclose(value, KL_ESTIMATORS[estimator](new, ref))
    (wanted,) = torch.autograd.grad((new.exp() * (new - ref)).sum(), logits, retain_graph=True)
    (got,) = torch.autograd.grad((old.exp() * value).sum(), logits)
    assert torch.allclose(got, wanted)


@pytest.mark.parametrize(
    ("log_ratio", "weight"), [(math.log(9.0), 9.0), (math.log(11.0), 10.0), (200.0, 10.0)]
)
def test_the_weight_of_the_unbiased_gradient_is_at_most_10(log_ratio: float, weight: float) -> None:
    new = torch.tensor([-0.5], requires_grad=True)
    penalty = get_algorithm(
        "grpo", kl={"coef": 1.0, "estimator": "k2", "unbiased_gradient": True}
    ).kl
    value = penalty.in_loss(
        new, torch.tensor([-0.7]), new.detach() - log_ratio, torch.ones(1, dtype=torch.bool)
    )
    assert torch.autograd.grad(value.sum(), new)[0].item() == pytest.approx(weight * 0.2, rel=1e-5)


def test_unbiased_gradient_needs_a_penalty_in_the_loss() -> None:
    with pytest.raises(ValueError, match="needs place loss"):
        get_algorithm("gae", kl={"coef": 1.0, "place": "reward", "unbiased_gradient": True})


def test_coefficient_zero_needs_no_reference() -> None:
    assert get_algorithm("dapo", kl={"coef": 0.0}).kl is None
    assert get_algorithm("dapo").kl is None
