"""Log-ratios far beyond what the exponential of a float32 holds: exact where nothing reads them, an
error elsewhere."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from openrlhf_ext.algorithms import get_algorithm
from openrlhf_ext.algorithms.losses import clipped_surrogate
from tests.algorithms import reference
from tests.algorithms.helpers import check_against_reference, random_groups, rounded
from tests.algorithms.test_batch import simple_batch
from tests.algorithms.test_invariants import NAMES, REQUIRED, SEEDS, build

VARIANTS = {
    "gtpo_conflict": {"clip_low": 0.2, "clip_high": 0.2},
    "mixed_policy_dapo": {"zero_batch": True},
    "kl_cov": {"cov_ratio": 0.5},
}


@pytest.mark.parametrize(
    "correction", [None, {"level": "token", "mode": "mask"}], ids=["plain", "corrected"]
)
@pytest.mark.parametrize("variant", [False, True])
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(seed=SEEDS, up=st.booleans())
@example(seed=4096, up=True)
def test_log_ratios_of_100(
    name: str, variant: bool, correction: dict | None, seed: int, up: bool
) -> None:
    """Value, gradient, shares and single terms are the reference's; in float32 too, unless the loss
    overflows."""
    rng = random.Random(seed)
    groups = random_groups(seed, vocabulary=2)
    completion = rng.choice(rng.choice(groups))
    position = rng.randrange(len(completion["tokens"]))
    for key in ("old", "guide") if up else ("new",):
        # Equal completions share their lists; two terms of e^100 that cancel would leave a rest of
        # rounding only.
        completion[key] = [*completion[key][:position], -100.0, *completion[key][position + 1 :]]
    options = {
        **REQUIRED.get(name, {}),
        **(VARIANTS.get(name, {"dual_clip": 3.0}) if variant else {}),
    }
    check_against_reference(name, options, groups, correction=correction)
    groups = rounded(groups, torch.float32)
    if abs(reference.run(name, options, groups, correction=correction)["loss"]) < 1e30:
        check_against_reference(
            name, options, groups, dtype=torch.float32, tolerance=1e-5, correction=correction
        )
    else:
        with pytest.raises(ValueError, match="overflows torch.float32"):
            check_against_reference(
                name, options, groups, dtype=torch.float32, correction=correction
            )


@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("log_ratio", [100.0, -100.0])
@pytest.mark.parametrize("factor", [None, 0.0])
def test_the_surrogate_and_its_slope_by_hand(
    advantage: float, log_ratio: float, factor: float | None
) -> None:
    log_w = torch.tensor([log_ratio], requires_grad=True)
    factor_1 = None if factor is None else torch.tensor([factor])
    value, clipped = clipped_surrogate(
        log_w, torch.tensor([advantage]), 0.2, 0.28, 3.0, factor=factor_1
    )
    (slope,) = torch.autograd.grad(value.sum(), log_w)
    ratio = {100.0: {1.0: 1.28, -1.0: 3.0}, -100.0: {1.0: 0.0, -1.0: 0.8}}[log_ratio].get(
        advantage, 0.0
    )
    assert value.item() == pytest.approx(ratio * advantage * (1.0 if factor is None else 0.0))
    assert slope.abs().item() < 1e-30
    assert clipped.item() is (advantage != 0 and (log_ratio, advantage) != (-100.0, 1.0))


def test_a_tie_keeps_the_gradient() -> None:
    log_w = torch.zeros(2, requires_grad=True)
    value, clipped = clipped_surrogate(log_w, torch.tensor([2.0, -2.0]), 0.0, 0.0)
    assert torch.autograd.grad(value.sum(), log_w)[0].tolist() == [2.0, -2.0] and not clipped.any()


def test_a_negative_token_in_conflict_may_have_any_ratio() -> None:
    """lambda is 0 there, and gtpo_conflict does not clip."""
    batch = simple_batch(
        (1.0, 0.0), tokens=torch.full((8,), 7), group_ids=torch.zeros(2, dtype=torch.long)
    )
    new = batch.old_logprobs.clone()
    new[4:], batch.old_logprobs[4:] = -0.1, -100.0
    new.requires_grad_()
    algorithm = build("gtpo_conflict", filter="off")
    shaped = algorithm.shape(batch)
    assert not shaped["lambda"][4:].any()
    loss = algorithm.loss(new, shaped)
    (grad,) = torch.autograd.grad(loss.value, new)
    assert (
        torch.isfinite(loss.value)
        and torch.isfinite(grad).all()
        and grad[:4].any()
        and not grad[4:].any()
    )


def test_a_token_removed_by_clip_cov_may_have_any_ratio() -> None:
    batch = simple_batch()
    batch.old_logprobs[4 + 2] = -100.0
    new = (-torch.rand(16)).requires_grad_()
    algorithm = get_algorithm("clip_cov", cov_lb=-1e3, cov_ub=1e3, cov_ratio=1.0, clip_low=None)
    shaped = algorithm.prepare(new.detach(), algorithm.shape(batch))
    assert shaped.selection.all() and (shaped.advantages[4:8] < 0).all()
    loss = algorithm.loss(new, shaped)
    assert loss.value.item() == 0.0 and not torch.autograd.grad(loss.value, new)[0].any()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dapo", {}),
        ("gspo", {}),
        ("grpo_s", {}),
        ("kl_cov", {"cov_ratio": 0.1}),
        ("grpo", {"kl_coef": 0.1, "dual_clip": 3.0}),
        ("mixed_policy_dapo", {"zero_batch": True, "degenerate": "drop"}),
    ],
)
def test_an_overflow_that_nothing_silences_is_named(name: str, options: dict) -> None:
    rewards = (1.0, 0.0, 0.0, 0.0) if name == "mixed_policy_dapo" else (1.0, 0.0, 1.0, 0.0)
    batch = simple_batch(rewards, ref_logprobs=-torch.rand(16))
    new = batch.old_logprobs.clone()
    if options.get("kl_coef"):
        new[3 * 4 + 2] = -120.0
    else:
        for base in (batch.old_logprobs, batch.guide_logprobs):
            base[3 * 4 + 2] = -1000.0
    algorithm = build(name, **options)
    with pytest.raises(
        ValueError, match="the loss is (inf|nan): at row 3, position 2 .new log-prob .*dual_clip"
    ):
        algorithm.loss(new, algorithm.prepare(new, algorithm.shape(batch)))


def test_a_kl_penalty_in_the_reward_that_overflows_is_named() -> None:
    batch = simple_batch(ref_logprobs=-torch.rand(16))
    batch.old_logprobs[2 * 4 + 1] = -100.0
    with pytest.raises(
        ValueError, match="KL penalty k3 .* must be finite .*: row 2, position 1 is inf"
    ):
        get_algorithm("grpo", kl={"coef": 0.1, "place": "reward"}).shape(batch)


def test_a_kl_of_upstreams_estimators_is_at_most_10_per_token() -> None:
    batch = simple_batch(ref_logprobs=-torch.rand(16), values=torch.zeros(16))
    ref = batch.old_logprobs.clone()
    batch.old_logprobs[2 * 4 + 1] = -100.0
    shaped = get_algorithm("gae", kl={"coef": 0.1, "place": "reward"}, whiten=False).shape(
        dataclasses.replace(batch, ref_logprobs=ref)
    )
    assert (batch.rewards - shaped.rewards).tolist() == pytest.approx([0.0, 0.0, 1.0, 0.0])


def test_an_importance_weight_that_overflows_is_named() -> None:
    batch = simple_batch(rollout_logprobs=-torch.rand(16))
    batch.rollout_logprobs[2 * 4 + 1] = -100.0
    correction = {"level": "token", "gating": "tv", "threshold": 1.0}
    with pytest.raises(ValueError, match="importance correction .*: row 2, position 1 is inf"):
        get_algorithm("dapo", correction=correction).shape(batch)
