"""GAE against the definition, and PPO with a critic as an algorithm."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from openrlhf_ext.algorithms import get_algorithm
from openrlhf_ext.algorithms.returns import gae, token_rewards
from openrlhf_ext.algorithms.values import value_clip_fraction, value_loss
from tests.algorithms.helpers import random_groups, to_batch


def ragged(seed: int):
    batch, new, _ = to_batch(random_groups(seed))
    values = torch.randn(
        batch.tokens.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    return dataclasses.replace(batch, values=values), new


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (0.9, 0.95), (0.99, 0.0)])
def test_gae_is_the_discounted_sum_of_deltas(seed: int, gamma: float, lambd: float) -> None:
    batch, _ = ragged(seed)
    rewards = token_rewards(batch.rewards, None, batch.segments)
    advantages, returns = gae(rewards, batch.values, batch.segments, gamma=gamma, lambd=lambd)
    for row, length in enumerate(batch.lengths.tolist()):
        tokens = batch.segments.span(slice(row, row + 1))
        v = [*batch.values[tokens].tolist(), 0.0]
        r = [0.0] * (length - 1) + [batch.rewards[row].item()]
        delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(length)]
        for t in range(length):
            wanted = sum((gamma * lambd) ** (s - t) * delta[s] for s in range(t, length))
            assert advantages[tokens][t].item() == pytest.approx(wanted)
            assert returns[tokens][t].item() == pytest.approx(wanted + v[t])


def test_gae_algorithm_whitens_over_all_tokens_and_exposes_returns() -> None:
    batch, new = ragged(1)
    algorithm = get_algorithm("gae", lambd=0.95)
    shaped = algorithm.shape(batch)
    tokens = shaped.advantages
    assert tokens.mean().item() == pytest.approx(0.0, abs=1e-12)
    assert tokens.std(unbiased=False).item() == pytest.approx(1.0, abs=1e-6)
    whole = algorithm.loss(new, shaped).value.item()
    halves = [
        algorithm.loss(batch.segments.take(new, rows), shaped.select(rows)).value.item()
        for rows in ([0], slice(1, None))
    ]
    assert sum(halves) == pytest.approx(whole)
    assert shaped["returns"].shape == batch.tokens.shape
    assert not shaped.lean().of_tokens, "returns and values are for the critic's ranks"


def test_gae_takes_a_length_penalty_on_the_terminal_reward() -> None:
    batch, _ = ragged(1)
    penalty = {"kind": "dapo", "l_max": 4, "l_cache": 3}
    shaped = get_algorithm("gae", length_penalty=penalty, whiten=False).shape(batch)
    lengths = batch.lengths
    rewards = batch.rewards - ((lengths - 1).clamp(min=0) / 3).clamp(max=1.0)
    wanted, _ = gae(
        token_rewards(rewards, None, batch.segments),
        batch.values,
        batch.segments,
        gamma=1.0,
        lambd=1.0,
    )
    assert lengths.max() > 1 and torch.allclose(shaped.advantages, wanted)
    assert torch.allclose(shaped.rewards, rewards)


def test_whitening_without_the_std_only_centers() -> None:
    batch, _ = ragged(1)
    plain, centered = (
        get_algorithm("gae", **o).shape(batch)
        for o in ({"whiten": False}, {"normalize_std": False})
    )
    mean = plain.advantages.mean()
    assert torch.allclose(centered.advantages, plain.advantages - mean)


def test_gae_takes_a_kl_penalty_in_the_token_rewards() -> None:
    batch, _ = ragged(2)
    shaped = get_algorithm(
        "gae", kl={"coef": 0.5, "estimator": "k1", "place": "reward"}, whiten=False
    ).shape(batch)
    kl = batch.old_logprobs - batch.ref_logprobs
    rewards = token_rewards(batch.rewards, None, batch.segments) - 0.5 * kl
    wanted, _ = gae(rewards, batch.values, batch.segments, gamma=1.0, lambd=1.0)
    assert torch.allclose(shaped.rewards, batch.segments.sums(rewards))
    assert torch.allclose(shaped.advantages, wanted)


def test_value_loss_shares_add_up_and_clip() -> None:
    generator = torch.Generator().manual_seed(0)
    values, old, returns = torch.randn(3, 11, dtype=torch.float64, generator=generator)
    tokens = torch.tensor(11)
    whole = value_loss(values, old, returns, clip=0.2, tokens=tokens)
    parts = [
        value_loss(values[r], old[r], returns[r], clip=0.2, tokens=tokens)
        for r in (slice(4), slice(4, None))
    ]
    assert sum(parts).item() == pytest.approx(whole.item())
    near = old + (values - old).clamp(-0.2, 0.2)
    cut = ((near - returns) ** 2 > (values - returns) ** 2).sum() / tokens
    assert value_clip_fraction(
        values, old, returns, clip=0.2, tokens=tokens
    ).item() == pytest.approx(cut.item())
    assert 0 < cut < 1
    wanted = 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2).mean()
    assert whole.item() == pytest.approx(wanted.item())


def test_gae_counts_rewards_above_one_half_as_successes() -> None:
    batch, _ = ragged(1)
    rewards = torch.full_like(batch.rewards, 0.5)
    rewards[0] = 0.6
    metrics = get_algorithm("gae").shape(dataclasses.replace(batch, rewards=rewards)).metrics
    assert metrics["success_rate"].item() == pytest.approx(1 / len(rewards))


def test_gae_needs_values() -> None:
    batch, _ = ragged(0)
    with pytest.raises(ValueError, match="needs RolloutBatch.values"):
        get_algorithm("gae").shape(dataclasses.replace(batch, values=None))


def test_a_value_inside_the_clip_range_is_not_counted_as_clipped():
    """Old value plus difference need not be the value again: its rounding is no clipping."""
    old, values, returns = torch.randn(3, 1000)
    assert value_clip_fraction(values, old, returns, clip=10.0, tokens=torch.tensor(1000)) == 0
