"""Numbers about a rollout batch by hand, and that every number an algorithm reports is documented."""

from __future__ import annotations

import pytest
import torch

from openrlhf_ext.algorithms import RolloutBatch, get_algorithm
from openrlhf_ext.reporting import METRICS
from tests.algorithms.test_batch import simple_batch
from tests.algorithms.test_invariants import NAMES, build, mixed_groups, to_batch

ENTROPIES = torch.tensor([[0.1, 0.9, 0.0], [0.2, 0.4, 0.6], [0.3, 0.5, 0.0], [0.8, 0.7, 0.0]], dtype=torch.float64)


def batch(rewards: tuple[float, ...] = (1.0, 0.0, 1.0, 1.0)) -> RolloutBatch:
    """Two groups of two; lengths 2, 3, 2, 2."""
    mask = torch.tensor([[True, True, False], [True, True, True], [True, True, False], [True, True, False]])
    return RolloutBatch(
        tokens=torch.arange(12).view(4, 3),
        mask=mask,
        rewards=torch.tensor(rewards),
        group_ids=torch.tensor([0, 0, 1, 1]),
        old_logprobs=torch.full((4, 3), -1.0, dtype=torch.float64),
        entropies=torch.where(mask, ENTROPIES, float("nan")),
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


def test_advantage_mass_by_hand() -> None:
    """Nine tokens in fifths of 2, 2, 2, 2, 1 by entropy; all of the first group have |A| = 0.707, the others 0."""
    found = metrics()
    # 1: a token of the first group; entropies from 0.1 to 0.9
    by_entropy = [1, 1, 0, 1, 0, 1, 0, 0, 1]
    wanted = [sum(by_entropy[i] for i in fifth) / 5 for fifth in ((0, 1), (2, 3), (4, 5), (6, 7), (8,))]
    assert [found[f"advantage_mass_q{i}"] for i in range(1, 6)] == pytest.approx(wanted)


def test_numbers_that_do_not_exist_are_left_out() -> None:
    found = metrics((0.0, 0.0, 0.0, 0.0))
    assert "entropy_correct" not in found and "entropy_wrong" in found
    assert not any(name.startswith("advantage_mass") for name in found)
    assert found["degenerate_groups"] == 1.0


@pytest.mark.parametrize("name", NAMES)
def test_every_metric_is_documented_by_name(name: str) -> None:
    documented = {metric.name for metric in METRICS}
    groups, _, _ = to_batch(mixed_groups(4), garbage=False)
    correction = {"level": "token"}
    options = {"zero_batch": True} if name == "mixed_policy_dapo" else {}
    algorithm = get_algorithm(name, correction=correction, **{**vars(build(name).options), **options})
    shaped = algorithm.shape(groups)
    new = groups.old_logprobs.clone()
    loss = algorithm.loss(new, algorithm.prepare(new, shaped))
    reported = {*shaped.metrics, *(set(loss.metrics) - {"policy_loss", "clip_fraction"})}
    assert {f"algorithm/{metric}" for metric in reported} <= documented
    assert {"groups", "degenerate_groups", "entropy_correct", "entropy_wrong", "advantage_mass_q5"} <= reported
    assert "clip_fraction" in loss.metrics
    if name == "gtpo_conflict":
        assert {"conflict_forward", "conflict_backward", "filtered_completions"} <= reported


def test_the_kl_in_the_loss_is_documented() -> None:
    algorithm = get_algorithm("grpo", kl={"coef": 0.1})
    rollout = simple_batch(ref_logprobs=torch.zeros(4, 4))
    loss = algorithm.loss(rollout.old_logprobs, algorithm.shape(rollout))
    assert {"ref_kl", "policy_kl", "clip_fraction_high", "clip_fraction_low"} <= set(loss.metrics)
    assert {f"algorithm/{name}" for name in ("ref_kl", "policy_kl")} <= {metric.name for metric in METRICS}
