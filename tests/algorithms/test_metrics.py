"""Numbers about a rollout batch by hand, and that every number an algorithm reports is
documented."""

from __future__ import annotations

import pytest
import torch

from openrlhf_ext.algorithms import RolloutBatch, get_algorithm
from openrlhf_ext.algorithms.metrics import SAMPLE
from openrlhf_ext.reporting import METRICS
from tests.algorithms.test_batch import simple_batch
from tests.algorithms.test_invariants import NAMES, build, mixed_groups, to_batch

ENTROPIES = torch.tensor([0.1, 0.9, 0.2, 0.4, 0.6, 0.3, 0.5, 0.8, 0.7], dtype=torch.float64)


def batch(rewards: tuple[float, ...] = (1.0, 0.0, 1.0, 1.0)) -> RolloutBatch:
    """Two groups of two; lengths 2, 3, 2, 2."""
    return RolloutBatch(
        tokens=torch.arange(9),
        lengths=torch.tensor([2, 3, 2, 2]),
        rewards=torch.tensor(rewards),
        group_ids=torch.tensor([0, 0, 1, 1]),
        old_logprobs=torch.full((9,), -1.0, dtype=torch.float64),
        entropies=ENTROPIES,
    )


def metrics(rewards: tuple[float, ...] = (1.0, 0.0, 1.0, 1.0), **options) -> dict[str, float]:
    shaped = get_algorithm("grpo", **options).shape(batch(rewards))
    return {name: value.item() for name, value in shaped.metrics.items()}


def test_classes_groups_and_entropies_by_hand() -> None:
    found = metrics(degenerate="drop")
    assert found["groups"] == 2 and found["degenerate_groups"] == 0.5
    assert found["kept_completions"] == 0.5 and found["active_completions"] == 0.5
    assert found["success_rate"] == 0.75
    assert found["entropy_correct"] == pytest.approx((0.1 + 0.9 + 0.3 + 0.5 + 0.8 + 0.7) / 6)
    assert found["entropy_wrong"] == pytest.approx((0.2 + 0.4 + 0.6) / 3)


def test_shares_of_the_right_are_of_groups_that_have_both() -> None:
    """One of two completions, with two of five tokens; the second group is all right."""
    found = metrics()
    assert (found["right_completions"], found["right_tokens"]) == (0.5, pytest.approx(2 / 5))
    assert "right_tokens" not in metrics((1.0, 1.0, 0.0, 0.0)), "no group has both"


def test_advantage_mass_by_hand() -> None:
    """Nine tokens in fifths of 2, 2, 2, 2, 1 by entropy; all of the first group have |A| = 0.707,
    the others 0."""
    found = metrics()
    # 1: a token of the first group; entropies from 0.1 to 0.9
    by_entropy = [1, 1, 0, 1, 0, 1, 0, 0, 1]
    wanted = [
        sum(by_entropy[i] for i in fifth) / 5 for fifth in ((0, 1), (2, 3), (4, 5), (6, 7), (8,))
    ]
    assert [found[f"advantage_mass_q{i}"] for i in range(1, 6)] == pytest.approx(wanted)


@pytest.mark.parametrize("every", [2, 3, 64])
@pytest.mark.parametrize("full", [True, False])
def test_advantage_mass_of_a_large_batch_is_that_of_all_its_tokens(every: int, full: bool) -> None:
    """Every n-th position of half of the rows has an advantage, and an entropy above all others."""
    rows, width = 256, 1024
    assert rows * width // 2 > SAMPLE
    generator = torch.Generator().manual_seed(0)
    lengths = (
        torch.full((rows,), width // 2)
        if full
        else torch.randint(1, width, (rows,), generator=generator)
    )
    table = (torch.arange(width) % every == 0) & (torch.arange(rows) >= rows // 2)[:, None]
    loud = table[torch.arange(width) < lengths[:, None]]
    rollout = RolloutBatch(
        tokens=torch.zeros(len(loud), dtype=torch.long),
        lengths=lengths,
        rewards=torch.zeros(rows),
        group_ids=torch.arange(rows) // 4,
        old_logprobs=torch.full(loud.shape, -1.0),
        entropies=torch.rand(loud.shape, generator=generator) + loud,
        values=loud.float(),
    )
    # With gamma = 0 and no reward, A = -V.
    found = get_algorithm("gae", gamma=0.0, lambd=0.0, whiten=False).shape(rollout).metrics
    share = loud.double().mean().item()
    for i in range(1, 6):
        wanted = min(max(share - (5 - i) / 5, 0.0), 0.2) / share
        assert found[f"advantage_mass_q{i}"].item() == pytest.approx(wanted, abs=0.01), f"fifth {i}"


def test_numbers_that_do_not_exist_are_left_out() -> None:
    found = metrics((0.0, 0.0, 0.0, 0.0))
    assert "entropy_correct" not in found and "entropy_wrong" in found
    assert not any(name.startswith("advantage_mass") for name in found)
    assert found["degenerate_groups"] == 1.0


@pytest.mark.parametrize("name", NAMES)
def test_every_metric_is_documented_by_name(name: str) -> None:
    documented = {metric.name for metric in METRICS}
    groups, _, _ = to_batch(mixed_groups(4))
    correction = {"level": "token"}
    options = {"zero_batch": True} if name == "mixed_policy_dapo" else {}
    algorithm = get_algorithm(
        name, correction=correction, **{**vars(build(name).options), **options}
    )
    shaped = algorithm.shape(groups)
    new = groups.old_logprobs.clone()
    loss = algorithm.loss(new, algorithm.prepare(new, shaped))
    reported = {
        *shaped.metrics,
        *(set(loss.metrics) - {"policy_loss", "clip_fraction", "alignment"}),
    }
    assert {f"algorithm/{metric}" for metric in reported} <= documented
    assert {
        "groups",
        "degenerate_groups",
        "entropy_correct",
        "entropy_wrong",
        "advantage_mass_q5",
    } <= reported
    assert "clip_fraction" in loss.metrics
    if name == "gtpo_conflict":
        assert {"conflict_forward", "conflict_backward", "filtered_completions"} <= reported


@pytest.mark.parametrize("name", ["gspo", "grpo_s"])
def test_sequence_methods_count_clipped_completions(name: str) -> None:
    rollout = simple_batch()
    algorithm = build(name, clip_low=0.2, clip_high=0.2)
    shaped = algorithm.shape(rollout)
    new = rollout.old_logprobs + torch.where(shaped.advantages > 0, 1.0, 0.0)
    new[:4] = rollout.old_logprobs[:4]
    loss = algorithm.loss(new, shaped)
    assert loss.details["clipped"].tolist() == [False, False, True, False]
    assert loss.metrics["clip_fraction"].item() == 1 / 4


def test_the_kl_in_the_loss_is_documented() -> None:
    algorithm = get_algorithm("grpo", kl={"coef": 0.1})
    rollout = simple_batch(ref_logprobs=torch.zeros(16))
    loss = algorithm.loss(rollout.old_logprobs, algorithm.shape(rollout))
    assert {"ref_kl", "policy_kl", "clip_fraction_high", "clip_fraction_low"} <= set(loss.metrics)
    assert {f"algorithm/{name}" for name in ("ref_kl", "policy_kl")} <= {
        metric.name for metric in METRICS
    }
