"""What the critic is trained on: shares that add up to whole mini-batches, and gauges of its values."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from openrlhf_ext.algorithms import RolloutBatch, get_algorithm
from openrlhf_ext.algorithms.gae import value_loss
from openrlhf_ext.driver.values import ValueTrainer, value_metrics, value_shards
from tests.megatron.test_policy import make_batch
from tests.ranks.helpers import LocalGroup


@pytest.fixture
def rollout():
    """(batch, rollout batch) of eight ragged completions, two per prompt."""
    batch, _ = make_batch(61)
    batch = batch.select([*range(7), 0])
    generator = torch.Generator().manual_seed(2)
    old_N, values_N = (torch.randn(batch.responses.tokens, generator=generator) for _ in range(2))
    return batch, RolloutBatch(
        tokens=batch.targets_N, lengths=batch.counts_B, rewards=torch.randn(8, generator=generator),
        group_ids=torch.arange(8) // 2, old_logprobs=-old_N.abs(), values=values_N, entropies=torch.ones_like(old_N),
        group_size=2,
    )  # fmt: skip


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
            new_N = mini.batch.targets_N / 61.0  # a critic that reads the tokens: rows must match their targets
            targets = mini.targets
            shares.append(value_loss(new_N, targets.old_values_N, targets.returns_N, clip=0.2, tokens=targets.tokens))
        tokens = batch.responses.span(slice(rows[0], rows[-1] + 1))
        wanted = value_loss(
            batch.targets_N[tokens] / 61.0, whole.values[tokens], shaped.returns[tokens].float(), clip=0.2,
            tokens=torch.tensor(tokens.stop - tokens.start),
        )  # fmt: skip
        assert sum(shares).item() == pytest.approx(wanted.item(), rel=1e-5)


def test_a_batch_is_trained_on_once(rollout):
    batch, whole = rollout
    group = LocalGroup(2, 1, fit=lambda mini_batches: {"updates": len(mini_batches)})
    trainer = ValueTrainer(group, replicas=2, group_size=2, mini_batch_size=4)
    with pytest.raises(RuntimeError, match=r"take\(\) comes before start_fit\(\)"):
        trainer.start_fit()
    trainer.take(batch, get_algorithm("gae").shape(whole))
    assert trainer.start_fit() == [[{"updates": 2}]] * 2
    with pytest.raises(RuntimeError, match="no batch"):
        trainer.start_fit()


def test_metrics_of_values(rollout):
    _, whole = rollout
    algorithm = get_algorithm("gae")
    shaped = algorithm.shape(whole)
    metrics = value_metrics(shaped)
    assert metrics["value/mean"] == pytest.approx(whole.values.mean().item(), rel=1e-5)
    assert metrics["value/return_mean"] == pytest.approx(shaped.returns.mean().item(), rel=1e-5)
    # a critic that is right everywhere explains all; one that knows only the mean explains nothing
    right = algorithm.shape(dataclasses.replace(whole, values=whole.segments.spread(whole.rewards)))
    assert value_metrics(right)["value/explained_variance"] == pytest.approx(1.0)
    mean = algorithm.shape(dataclasses.replace(whole, values=torch.full_like(whole.values, 0.3)))
    assert value_metrics(mean)["value/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    equal = algorithm.shape(dataclasses.replace(whole, rewards=torch.ones(8)))
    assert "value/explained_variance" not in value_metrics(equal)
