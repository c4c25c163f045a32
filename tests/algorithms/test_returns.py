"""Upstream's estimators: advantages, loss and gradient of OpenRLHF's own code on random ragged
batches."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from openrlhf_ext.algorithms import RolloutBatch, get_algorithm
from tests.algorithms.helpers import check_against_reference, padded, random_groups, to_batch
from tests.algorithms.upstream import upstreams

ESTIMATORS = [
    "reinforce",
    "reinforce_baseline",
    "rloo",
    "group_norm",
    "flash_reinforce",
    "dr_grpo",
    "gae",
]
CASES = 60
ALONE = ("reinforce", "flash_reinforce", "gae")
"""Estimators for which one completion per prompt is enough."""


def random_case(estimator: str, seed: int) -> dict[str, Any]:
    """Options and a batch, float32 as upstream keeps it; every option takes each of its values in
    some case."""
    rng = random.Random(f"{estimator} {seed}")
    generator = torch.Generator().manual_seed(seed)
    samples = rng.choice([1, 2, 4] if estimator in ALONE else [2, 3, 4])
    rows = samples * rng.randint(1, 4)
    lengths = torch.tensor([rng.randint(1, 9) for _ in range(rows)])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    wide = rng.random() < 0.2  # log-ratios and KL beyond every bound

    def logprobs(scale: float, around: torch.Tensor | None = None) -> torch.Tensor:
        noise = torch.randn(mask.shape, generator=generator) * (30 if wide else scale)
        return -(noise.abs() if around is None else (noise - around).abs()) * mask

    old = logprobs(1.0)
    correction = rng.choice(["off", "off", "token", "seq"])
    loss = {
        "clip_eps_low": 0.2,
        "clip_eps_high": rng.choice([0.2, 0.28]),
        "dual_clip": rng.choice([None, 3.0]),
        "token_level_loss": rng.random() < 0.7,
        "policy_loss_type": rng.choice(["ppo", "ppo", "gspo"]),
        "is_correction_level": correction,
        "is_correction_mode": rng.choice(["mask", "clip"]) if correction == "token" else "mask",
        "is_correction_threshold": [0.5, 5.0],
    }
    return {
        "estimator": estimator,
        "samples": samples,
        "mask": mask,
        "rewards": torch.tensor([rng.choice([0.0, 1.0, 0.3, -2.0]) for _ in range(rows)]),
        "truncated": torch.tensor([rng.random() < 0.3 for _ in range(rows)]),
        "old": old,
        "new": logprobs(0.3, old),
        "ref": logprobs(0.4, old),
        "rollout": logprobs(0.3, old),
        "values": torch.randn(mask.shape, generator=generator) * mask,
        "gamma": rng.choice([1.0, 0.9]) if estimator in ("reinforce", "gae") else 1.0,
        "lambd": rng.choice([1.0, 0.95]),
        "no_std_norm": rng.random() < 0.3,
        "reward_clip": rng.choice([None, (-10.0, 10.0), (-0.4, 0.6)]),
        "stop_properly": rng.choice([None, None, 0.0, 0.5, -0.5]),
        "overlong": rng.choice([None, 3]),
        "max_new_tokens": 9,
        "kl_coef": rng.choice([0.0, 0.1]),
        "kl_estimator": rng.choice(["k1", "k2", "k3"]),
        "use_loss": rng.random() < 0.5,
        "unbiased_gradient": rng.random() < 0.3,
        "loss": loss,
    }


def ours(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The same by our algorithm, in our names."""
    mask, estimator, loss = case["mask"], case["estimator"], case["loss"]
    rows = torch.arange(len(mask))
    names = ("old", "ref", "rollout", "values")
    old, ref, rollout, values = (case[name][mask] for name in names)
    batch = RolloutBatch(
        tokens=torch.zeros(len(old), dtype=torch.int64),
        lengths=mask.sum(-1),
        rewards=case["rewards"],
        group_ids=rows // case["samples"],
        old_logprobs=old,
        ref_logprobs=ref,
        rollout_logprobs=rollout,
        values=values,
        truncated=case["truncated"],
    )
    options: dict[str, Any] = {
        "clip_low": loss["clip_eps_low"],
        "clip_high": loss["clip_eps_high"],
        "dual_clip": loss["dual_clip"],
        "agg": "token-mean" if loss["token_level_loss"] else "seq-mean-token-mean",
        "policy_loss_type": loss["policy_loss_type"],
        "reward_clip": case["reward_clip"],
        "stop_properly": case["stop_properly"],
    }
    if case["overlong"]:
        options["length_penalty"] = {
            "kind": "dapo",
            "l_max": case["max_new_tokens"],
            "l_cache": case["overlong"],
        }
    if estimator in ("reinforce", "reinforce_baseline", "gae"):
        options["normalize_std"] = not case["no_std_norm"]
    if estimator in ("reinforce", "gae"):
        options["gamma"] = case["gamma"]
    if estimator == "gae":
        options["lambd"] = case["lambd"]
    if case["kl_coef"]:
        place = "loss" if case["use_loss"] else "reward"
        options["kl"] = {"coef": case["kl_coef"], "estimator": case["kl_estimator"], "place": place}
        if case["use_loss"]:
            options["kl"]["unbiased_gradient"] = case["unbiased_gradient"]
    correction = {
        "level": loss["is_correction_level"],
        "mode": loss["is_correction_mode"],
        "threshold": loss["is_correction_threshold"],
    }
    algorithm = get_algorithm(estimator, correction=correction, **options)
    shaped = algorithm.shape(batch)
    new = case["new"][mask].requires_grad_()
    value = algorithm.loss(new, shaped).value
    (grad,) = torch.autograd.grad(value, new)
    terms = algorithm.token_loss(shaped)
    assert (terms is None) == (loss["policy_loss_type"] == "gspo")
    if terms is not None:
        assert terms(new, torch.arange(len(new))).sum().item() == pytest.approx(
            value.item(), rel=1e-4, abs=1e-5
        )
    found = {"advantages": shaped.advantages, "grad": grad}
    return {name: padded(tensor, batch.lengths) for name, tensor in found.items()} | {
        "loss": value.detach()
    }


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> dict[str, list[tuple[dict, dict, dict]]]:
    """Per estimator what upstream and we make of its cases; upstream runs once for all."""
    cases = [random_case(estimator, seed) for estimator in ESTIMATORS for seed in range(CASES)]
    theirs = upstreams(cases, tmp_path_factory.mktemp("upstream"))
    assert len(theirs) == len(cases) == CASES * len(ESTIMATORS)
    found: dict[str, list] = {}
    for case, result in zip(cases, theirs, strict=True):
        found.setdefault(case["estimator"], []).append((case, result, ours(case)))
    return found


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_estimator_and_loss_are_upstreams(compared, estimator: str) -> None:
    for case, theirs, mine in compared[estimator]:
        told = {name: value for name, value in case.items() if not isinstance(value, torch.Tensor)}
        if not case["no_std_norm"] and mine["advantages"].abs().max() < 1e-2:
            # equal rewards: what rounding leaves of them is multiplied by 1/sqrt(1e-8), upstream's
            # in float32
            assert theirs["advantages"].abs().max() < 1e-2
            continue
        torch.testing.assert_close(
            mine["advantages"], theirs["advantages"], rtol=1e-5, atol=1e-5, msg=str(told)
        )
        torch.testing.assert_close(
            mine["loss"], theirs["loss"], rtol=1e-4, atol=1e-5, msg=str(told)
        )
        # what a ratio makes of the rounding of its advantage
        scale = (case["new"] - case["old"]).clamp(0, 20).exp()
        torch.testing.assert_close(
            mine["grad"] / scale, theirs["grad"] / scale, rtol=1e-4, atol=1e-5, msg=str(told)
        )


def test_the_cases_reach_what_bounds_ratios_and_kl(compared) -> None:
    """Otherwise the comparison would say nothing of the bounds 20 and 10."""
    cases = [case for found in compared.values() for case, _, _ in found]
    ratios = [
        case["new"] - case["old"] for case in cases if case["loss"]["policy_loss_type"] == "ppo"
    ]
    assert any((ratio.abs() > 20).any() for ratio in ratios)
    penalized = [case for case in cases if case["kl_coef"]]
    for use_loss in (True, False):
        assert any(
            ((c["new"] - c["ref"]).abs() > 10).any() for c in penalized if c["use_loss"] == use_loss
        )


OPTIONS = [
    {},
    {"policy_loss_type": "gspo"},
    {"reward_clip": [-0.3, 0.4]},
    {"agg": "seq-mean-token-mean"},
    {"agg": "seq-mean-token-sum-norm", "l_norm": 7.0},
    {"agg_scope": "group"},
    {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.1},
    {"kl_coef": 0.3},
    {"stop_properly": 0.5, "length_penalty": {"kind": "dapo", "l_max": 5, "l_cache": 3}},
    {"stop_properly": -0.5},
]


@pytest.mark.parametrize("estimator", [name for name in ESTIMATORS if name != "gae"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_against_plain_loops(estimator: str, options: dict) -> None:
    for seed in range(6):
        check_against_reference(estimator, options, random_groups(seed), shuffle=seed)


@pytest.mark.parametrize(
    "options", [{"gamma": 0.9}, {"whiten": False}, {"normalize_std": False}, {"adv_eps": 0.5}]
)
def test_discount_and_whitening_against_plain_loops(options: dict) -> None:
    for seed in range(6):
        check_against_reference("reinforce", options, random_groups(seed), shuffle=seed)


@pytest.mark.parametrize("policy_loss_type", ["ppo", "gspo"])
def test_correction_against_plain_loops(policy_loss_type: str) -> None:
    correction = {"level": "token", "mode": "mask", "threshold": [0.8, 1.3]}
    options = {"policy_loss_type": policy_loss_type}
    for seed in range(6):
        check_against_reference(
            "rloo", options, random_groups(seed), shuffle=seed, correction=correction
        )


def test_stop_properly_needs_to_know_who_was_truncated() -> None:
    import dataclasses

    batch, _, _ = to_batch(random_groups(1))
    with pytest.raises(ValueError, match=r"stop_properly needs RolloutBatch.truncated"):
        get_algorithm("rloo", stop_properly=0.5).shape(dataclasses.replace(batch, truncated=None))


def test_a_clip_of_rewards_has_its_ends_in_order() -> None:
    with pytest.raises(ValueError, match=r"reward_clip must be LOW HIGH with LOW <= HIGH, got 2 1"):
        get_algorithm("rloo", reward_clip=[2, 1])
