"""The adaptive coefficient of the KL penalty."""

from __future__ import annotations

import pytest
import torch

from openrlhf_ext.algorithms import get_algorithm
from openrlhf_ext.driver.kl_control import KLCoefficient, reference_kl


def test_a_constant_coefficient_stays():
    kl = KLCoefficient(0.3)
    kl.update(5.0, 1000)
    assert kl.value == 0.3


@pytest.mark.parametrize(
    ("measured", "error"), [(0.1, 0.0), (0.11, 0.1), (0.092, -0.08), (5.0, 0.2), (0.0, -0.2), (-1.0, -0.2)]
)
def test_the_error_is_relative_to_the_target_and_clipped(measured, error):
    kl = KLCoefficient(0.5, target=0.1, horizon=100)
    kl.update(measured, samples=50)
    assert kl.value == pytest.approx(0.5 * (1 + error * 50 / 100))


def test_steers_a_policy_whose_distance_falls_with_the_coefficient():
    kl = KLCoefficient(1.0, target=0.05, horizon=100)
    for _ in range(300):
        kl.update(0.01 / kl.value, samples=50)
    assert 0.01 / kl.value == pytest.approx(0.05, rel=1e-2)


def test_continues_from_a_state():
    kl, again = (KLCoefficient(1.0, target=0.1, horizon=10) for _ in range(2))
    kl.update(1.0, 5)
    again.load_state_dict(kl.state_dict())
    assert again.value == kl.value != 1.0


def test_reference_kl_is_the_mean_of_k3_over_completion_tokens():
    old_N, ref_N = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -2.0, -2.0])
    x = torch.tensor([-0.5, 0.0, 1.0], dtype=torch.float64)
    assert reference_kl(old_N, ref_N) == pytest.approx((x.exp() - 1 - x).mean().item())


def test_the_algorithm_takes_the_coefficient_of_the_step():
    algorithm = get_algorithm("gae", kl={"coef": 0.1, "place": "reward", "estimator": "k1"})
    changed = algorithm.with_kl_coef(0.7)
    assert (algorithm.kl.coef, changed.kl.coef) == (0.1, 0.7)
    assert (changed.kl.place, changed.kl.estimator, changed.options) == ("reward", "k1", algorithm.options)
