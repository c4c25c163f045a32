"""Rows that were dealt to replicas come back in their places; what the critic is trained on; the KL
coefficient."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import pytest
import torch

from openrlhf_ext.algorithms import RolloutBatch, get_algorithm
from openrlhf_ext.algorithms.kl import KLCoefficient
from openrlhf_ext.algorithms.segments import Segments
from openrlhf_ext.algorithms.values import value_loss
from openrlhf_ext.driver.critic import ValueTrainer, value_shards
from openrlhf_ext.driver.description import reference_kl, value_metrics
from openrlhf_ext.driver.scoring import Scorer
from tests.megatron.reference import make_batch
from tests.ranks.helpers import LocalGroup, get


@pytest.mark.parametrize(("replicas", "ranks"), [(1, 1), (2, 3), (9, 1)])
def test_scores_are_those_of_their_rows(replicas, ranks):
    batch, _ = make_batch(61)  # seven rows: with nine replicas two have none

    def token_ids(batch):
        return batch.targets_N.float().numpy()

    group = LocalGroup(replicas, ranks, forward=token_ids)
    scores_N = Scorer(group, "forward").start_scores(batch).result(get)
    assert torch.equal(scores_N, batch.targets_N.float())
    assert scores_N.dtype == torch.float32 and batch.targets_N.any()


# ---- critic


@pytest.fixture
def rollout():
    """(batch, rollout batch) of eight ragged completions, two per prompt."""
    batch, _ = make_batch(61)
    batch = batch.select([*range(7), 0])
    generator = torch.Generator().manual_seed(2)
    old_N, values_N = (torch.randn(batch.responses.tokens, generator=generator) for _ in range(2))
    return batch, RolloutBatch(
        tokens=batch.targets_N,
        lengths=batch.counts_B,
        rewards=torch.randn(8, generator=generator),
        group_ids=torch.arange(8) // 2,
        old_logprobs=-old_N.abs(),
        values=values_N,
        entropies=torch.ones_like(old_N),
        group_size=2,
    )


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_shares_of_the_replicas_add_up_to_the_loss_of_each_mini_batch(rollout, replicas):
    batch, whole = rollout
    shaped = get_algorithm("gae", lambd=0.9).shape(whole)
    shards = value_shards(batch, shaped, group_size=2, mini_batch_size=4, replicas=replicas)
    assert len(shards) == replicas and {len(shard) for shard in shards} == {2}
    for step, rows in enumerate(([0, 1, 2, 3], [4, 5, 6, 7])):
        shares = []
        for shard in shards:
            mini = shard[step]
            # a critic that reads the tokens: rows must match their targets
            new_N = mini.batch.targets_N / 61.0
            targets = mini.targets
            shares.append(
                value_loss(
                    new_N, targets.old_values_N, targets.returns_N, clip=0.2, tokens=targets.tokens
                )
            )
        tokens = batch.responses.span(slice(rows[0], rows[-1] + 1))
        wanted = value_loss(
            batch.targets_N[tokens] / 61.0,
            whole.values[tokens],
            shaped["returns"][tokens].float(),
            clip=0.2,
            tokens=torch.tensor(tokens.stop - tokens.start),
        )
        assert sum(shares).item() == pytest.approx(wanted.item(), rel=1e-5)


def test_a_batch_is_trained_on_once(rollout):
    batch, whole = rollout
    group = LocalGroup(2, 1, fit=lambda mini_batches, *shares: {"updates": len(mini_batches)})
    trainer = ValueTrainer(group, group_size=2, mini_batch_size=4)
    with pytest.raises(RuntimeError, match=r"take\(\) comes before start_fit\(\)"):
        trainer.start_fit(Fraction(0), Fraction(1))
    trainer.take(batch, get_algorithm("gae").shape(whole))
    assert trainer.start_fit(Fraction(0), Fraction(1)) == [{"updates": 2}] * 2
    with pytest.raises(RuntimeError, match="no batch"):
        trainer.start_fit(Fraction(0), Fraction(1))


def test_metrics_of_values(rollout):
    _, whole = rollout
    algorithm = get_algorithm("gae")
    shaped = algorithm.shape(whole)
    metrics = value_metrics(shaped)
    assert metrics["value/mean"] == pytest.approx(whole.values.mean().item(), rel=1e-5)
    assert metrics["value/return_mean"] == pytest.approx(shaped["returns"].mean().item(), rel=1e-5)
    # a critic that is right everywhere explains all; one that knows only the mean explains nothing
    right = algorithm.shape(dataclasses.replace(whole, values=whole.segments.spread(whole.rewards)))
    assert value_metrics(right)["value/explained_variance"] == pytest.approx(1.0)
    mean = algorithm.shape(dataclasses.replace(whole, values=torch.full_like(whole.values, 0.3)))
    assert value_metrics(mean)["value/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    equal = algorithm.shape(dataclasses.replace(whole, rewards=torch.ones(8)))
    assert "value/explained_variance" not in value_metrics(equal)


# ---- KL penalty


def test_a_constant_coefficient_stays():
    kl = KLCoefficient(0.3)
    kl.update(5.0, 1000)
    assert kl.value == 0.3


@pytest.mark.parametrize(
    ("measured", "error"),
    [(0.1, 0.0), (0.11, 0.1), (0.092, -0.08), (5.0, 0.2), (0.0, -0.2), (-1.0, -0.2)],
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


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_the_controller_is_told_the_estimate_of_the_run_as_openrlhf_averages_it(place):
    old_N, ref_N = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -2.0, -40.0])
    penalty = get_algorithm("gae", kl={"coef": 0.1, "place": place, "estimator": "k1"}).penalty
    wanted = (0.5 + 0 + 10) / 3 if place == "loss" else ((0.5 + 0) / 2 + 10) / 2
    assert penalty.mean(old_N, ref_N, Segments(torch.tensor([2, 1]))) == pytest.approx(wanted)


def test_the_algorithm_takes_the_coefficient_of_the_step():
    algorithm = get_algorithm("gae", kl={"coef": 0.1, "place": "reward", "estimator": "k1"})
    changed = algorithm.with_kl_coef(0.7)
    assert (algorithm.kl.coef, changed.kl.coef) == (0.1, 0.7)
    assert (changed.kl.place, changed.kl.estimator, changed.options) == (
        "reward",
        "k1",
        algorithm.options,
    )
