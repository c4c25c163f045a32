"""verl's ``core_algos`` as an oracle: values and gradients of what it and we share, on random
ragged float64 batches.

verl adds 1e-8 to the denominators of its means, which bounds the agreement.
"""

from __future__ import annotations

import importlib
import inspect
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from openrlhf_ext.algorithms import RolloutBatch, get_algorithm
from openrlhf_ext.algorithms.importance import Correction, factors
from openrlhf_ext.algorithms.kl import KLPenalty
from openrlhf_ext.algorithms.segments import Segments
from openrlhf_ext.algorithms.values import value_clip_fraction, value_loss
from tests.algorithms.helpers import padded
from tests.conformance.packages import Anything, importing, unpacked

pytestmark = pytest.mark.conformance
BATCHES = 40
CLOSE = {"rtol": 1e-6, "atol": 1e-7}


class ActorConfig(SimpleNamespace):
    """What the losses read of verl's class of this name, which needs OmegaConf."""

    def get(self, name: str, default: Any) -> Any:
        return getattr(self, name, default)


@pytest.fixture(scope="module")
def verl() -> Iterator[SimpleNamespace]:
    root = unpacked("verl==0.9.1")
    names = (
        "omegaconf",
        "tensordict",
        "verl.protocol",
        "verl.trainer.config",
        "verl.trainer.config.algorithm",
        "verl.workers.config",
        "verl.workers.config.actor",
    )
    stands_in: dict[str, ModuleType] = {name: Anything(name) for name in names}
    for name, used in (
        ("verl.workers.config", ActorConfig),
        ("verl.trainer.config", type("AlgoConfig", (), {})),
    ):
        setattr(stands_in[name], used.__name__, used)
    with importing(
        root, ("verl", "verl.utils", "verl.trainer", "verl.trainer.ppo", "verl.workers"), stands_in
    ):
        groupwise = importlib.import_module("verl.utils.groupwise")
        utils = importlib.import_module("verl.utils")
        utils.as_torch_index, utils.group_mean_std = (
            groupwise.as_torch_index,
            groupwise.group_mean_std,
        )
        yield SimpleNamespace(
            core=importlib.import_module("verl.trainer.ppo.core_algos"),
            correction=importlib.import_module("verl.trainer.ppo.rollout_corr_helper"),
        )


@dataclass
class Batch:
    """Groups of equal size, two to five completions of up to nine tokens, rows of a group behind
    one another; padded (B, T)."""

    mask: Tensor
    rewards: Tensor
    groups: Tensor
    old: Tensor
    new: Tensor
    ref: Tensor
    rollout: Tensor
    values: Tensor

    @classmethod
    def random(cls, seed: int) -> Batch:
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        sizes = [rng.randint(2, 5)] * rng.randint(1, 4)
        lengths = torch.tensor([rng.randint(1, 9) for _ in range(sum(sizes))])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]

        def noise(scale: float) -> Tensor:
            return torch.randn(mask.shape, generator=generator, dtype=torch.float64) * scale * mask

        old = -noise(1.0).abs()
        rewards = torch.tensor(
            [rng.choice([0.0, 1.0, 0.3, -2.0]) for _ in range(len(mask))], dtype=torch.float64
        )
        groups = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        new, ref, rollout = (-(old + noise(0.4)).abs() for _ in range(3))
        return cls(mask, rewards, groups, old, new, ref, rollout, noise(1.0))

    @property
    def token_rewards(self) -> Tensor:
        """(B, T) the reward on each completion's last token."""
        last = torch.arange(self.mask.shape[1]) == self.mask.sum(-1, keepdim=True) - 1
        return self.rewards[:, None] * last

    def ours(self, **more: Tensor) -> RolloutBatch:
        flat = {
            name: getattr(self, name)[self.mask] for name in ("old", "ref", "rollout", "values")
        }
        return RolloutBatch(
            tokens=torch.zeros(int(self.mask.sum()), dtype=torch.int64),
            lengths=self.mask.sum(-1),
            rewards=self.rewards,
            group_ids=self.groups,
            old_logprobs=flat["old"],
            ref_logprobs=flat["ref"],
            rollout_logprobs=flat["rollout"],
            values=flat["values"],
            **more,
        )


def of_each_batch(test: Callable[..., None]) -> Callable[..., None]:
    """The test, of every batch in place of its argument ``batch``."""

    def run(**arguments: Any) -> None:
        for seed in range(BATCHES):
            test(batch=Batch.random(seed), **arguments)

    signature = inspect.signature(test)
    parameters = [one for name, one in signature.parameters.items() if name != "batch"]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__name__ = test.__name__
    return run


# ---- advantages


def bessel(batch: Batch) -> float:
    """verl's whitening divides by n - 1 tokens, ours (and OpenRLHF's) by n."""
    tokens = int(batch.mask.sum())
    return math.sqrt((tokens - 1) / tokens)


def advantages(name: str, batch: Batch, **options: Any) -> Tensor:
    return padded(get_algorithm(name, **options).shape(batch.ours()).advantages, batch.mask.sum(-1))


@pytest.mark.parametrize(
    ("theirs", "ours", "options"),
    [
        ("grpo", "grpo", {}),
        ("grpo", "dapo", {"degenerate": "literal"}),
        ("grpo", "group_norm", {"adv_eps": 1e-6}),
        ("grpo without std", "dr_grpo", {}),
        ("grpo without std", "grpo", {"normalize_std": False}),
        ("rloo", "rloo", {}),
        ("rloo_vectorized", "rloo", {}),
    ],
)
@of_each_batch
def test_group_advantages(verl, batch, theirs, ours, options):
    estimate = verl.core.get_adv_estimator_fn(theirs.removesuffix(" without std"))
    arguments = {"token_level_rewards": batch.token_rewards, "response_mask": batch.mask.double()}
    more = {"norm_adv_by_std_in_grpo": False} if theirs.endswith("without std") else {}
    found, _ = estimate(**arguments, index=batch.groups.numpy(), **more)
    torch.testing.assert_close(advantages(ours, batch, **options), found, **CLOSE)


def whitened(name: str, batch: Batch, **options: Any) -> Tensor:
    return advantages(name, batch, adv_eps=1e-12, **options) * bessel(batch)


@of_each_batch
def test_reinforce_plus_plus(verl, batch):
    gamma = 0.9
    found, returns = verl.core.compute_reinforce_plus_plus_outcome_advantage(
        batch.token_rewards.clone(), batch.mask.double(), SimpleNamespace(gamma=gamma)
    )
    plain = advantages("reinforce", batch, gamma=gamma, whiten=False)
    torch.testing.assert_close(plain, returns, **CLOSE)
    if plain[batch.mask].var() > 1e-3:  # verl adds 1e-8 to the variance
        torch.testing.assert_close(
            whitened("reinforce", batch, gamma=gamma), found, rtol=1e-4, atol=1e-5
        )


@of_each_batch
def test_reinforce_plus_plus_baseline(verl, batch):
    found, _ = verl.core.compute_reinforce_plus_plus_baseline_outcome_advantage(
        batch.token_rewards, batch.mask.double(), batch.groups.numpy()
    )
    if advantages("reinforce_baseline", batch, whiten=False)[batch.mask].var() > 1e-3:
        torch.testing.assert_close(
            whitened("reinforce_baseline", batch), found, rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (0.9, 0.95)])
@of_each_batch
def test_gae(verl, batch, gamma, lambd):
    found, returns = verl.core.compute_gae_advantage_return(
        batch.token_rewards, batch.values, batch.mask.double(), gamma, lambd
    )
    ours = get_algorithm("gae", gamma=gamma, lambd=lambd, adv_eps=1e-12).shape(batch.ours())
    of_mask = returns * batch.mask  # verl writes returns behind the end too
    torch.testing.assert_close(padded(ours["returns"], batch.mask.sum(-1)), of_mask, **CLOSE)
    scaled = padded(ours.advantages, batch.mask.sum(-1)) * bessel(batch)
    torch.testing.assert_close(scaled, found * batch.mask, rtol=1e-5, atol=1e-6)


# ---- losses

AGGREGATIONS: dict[str, dict[str, Any]] = {
    "token-mean": {},
    "seq-mean-token-mean": {},
    "seq-mean-token-sum-norm": {"l_norm": 7.0},
}
CLIPS = {"clip_low": 0.1, "clip_high": 0.15}


def our_loss(
    name: str, batch: Batch, correction: Any = None, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Advantages (B, T), loss, and its gradient (B, T) in the new log-probs."""
    algorithm = get_algorithm(name, correction=correction, warn=False, **options)
    shaped, new_N = algorithm.shape(batch.ours()), batch.new[batch.mask].requires_grad_()
    loss = algorithm.loss(new_N, shaped).value
    (grad_N,) = torch.autograd.grad(loss, new_N)
    lengths = batch.mask.sum(-1)
    return padded(shaped.advantages, lengths), loss.detach(), padded(grad_N, lengths)


def their_loss(
    verl: Any,
    kind: str,
    batch: Batch,
    advantages: Tensor,
    agg: str,
    weights: Tensor | None = None,
    **config: Any,
) -> tuple[Tensor, Tensor]:
    new = batch.new.clone().requires_grad_()
    actor = ActorConfig(
        clip_ratio=0.2, global_batch_info={}, policy_loss=SimpleNamespace(**config), **config
    )
    if agg == "seq-mean-token-sum-norm":
        actor.global_batch_info["loss_scale_factor"] = AGGREGATIONS[agg]["l_norm"]
    loss, _ = verl.core.get_policy_loss_fn(kind)(
        batch.old, new, advantages, batch.mask.double(), agg, actor, weights
    )
    (grad,) = torch.autograd.grad(loss, new)
    return loss.detach(), grad * batch.mask


def agree(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


@pytest.mark.parametrize("agg", AGGREGATIONS)
@pytest.mark.parametrize(
    "name", ["grpo", "dapo", "dr_grpo", "rloo", "group_norm", "reinforce", "reinforce_baseline"]
)
@of_each_batch
def test_clipped_loss(verl, batch, name, agg):
    """With dual clip, which verl always has."""
    options = {"degenerate": "literal"} if name == "dapo" else {}
    shaped, *ours = our_loss(
        name, batch, agg=agg, **AGGREGATIONS[agg], **CLIPS, dual_clip=1.2, **options
    )
    theirs = their_loss(
        verl,
        "vanilla",
        batch,
        shaped,
        agg,
        clip_ratio_low=0.1,
        clip_ratio_high=0.15,
        clip_ratio_c=1.2,
    )
    agree(ours, theirs)


CORRECTIONS = {
    "truncated": ({"level": "token", "mode": "clip", "threshold": [0.0, 1.1]}, 1.1),
    "icepop": ({"level": "token", "mode": "mask", "threshold": [0.8, 1.2]}, "0.8_1.2"),
}
LOSSES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "vanilla": ("dapo", "token-mean", CLIPS | {"dual_clip": 3.0, "degenerate": "literal"}, {}),
    "gspo": ("group_norm", "seq-mean-token-mean", CLIPS | {"policy_loss_type": "gspo"}, {}),
    "cispo": ("cispo", "token-mean", CLIPS, {}),
    "sapo": ("sapo", "seq-mean-token-mean", {"tau_pos": 1.0, "tau_neg": 1.05}, {"tau_pos": 1.0, "tau_neg": 1.05}),
    "clip_cov": ("clip_cov", "token-mean", CLIPS | {"degenerate": "literal", "cov_ratio": 0.3, "cov_lb": 0.05},
        {"clip_cov_ratio": 0.3, "clip_cov_lb": 0.05, "clip_cov_ub": 5.0}),
    "kl_cov": ("kl_cov", "token-mean", {"degenerate": "literal", "cov_ratio": 0.3, "ppo_kl_coef": 0.7},
        {"kl_cov_ratio": 0.3, "ppo_kl_coef": 0.7}),
    "geo_mean": ("gmpo", "token-mean", {"log_clip": 0.2}, {}),
}  # fmt: skip


def of_loss(verl: Any, kind: str, batch: Batch, correction: str | None = None) -> None:
    name, agg, options, config = LOSSES[kind]
    weights, ours = None, None
    if correction is not None:
        ours, threshold = CORRECTIONS[correction]
        weights, _ = verl.correction.compute_rollout_correction_weights(
            batch.old - batch.rollout, batch.mask.double(), "token", threshold
        )
    clips = (
        {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
        if kind == "geo_mean"
        else {
            "clip_ratio_low": 0.1,
            "clip_ratio_high": 0.15,
        }
    )
    shaped, *found = our_loss(name, batch, ours, **options)
    # clip_cov's candidates in natural order, as ours without a seed
    with mock.patch("torch.randperm", torch.arange):
        theirs = their_loss(verl, kind, batch, shaped, agg, weights, **clips, **config)
    agree(found, theirs)


@pytest.mark.parametrize("kind", LOSSES)
@of_each_batch
def test_loss(verl, batch, kind):
    if kind == "kl_cov" and ties(batch):
        return  # verl takes any of equal tokens, we the first: docs/algorithms.md
    of_loss(verl, kind, batch)


def ties(batch: Batch) -> bool:
    """Tokens with equal covariances at the edge of the selection: advantages of exactly the
    mean."""
    shaped = get_algorithm("kl_cov", warn=False, degenerate="literal").shape(batch.ours())
    algorithm = get_algorithm("kl_cov", warn=False, degenerate="literal")
    cov_N = algorithm.prepare(batch.new[batch.mask], shaped)["cov"]
    return len(cov_N.unique()) < len(cov_N)


def test_few_batches_have_ties():
    assert sum(ties(Batch.random(seed)) for seed in range(BATCHES)) < BATCHES / 2


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("kind", ["vanilla", "sapo", "cispo", "clip_cov"])
@of_each_batch
def test_rollout_correction_in_the_loss(verl, batch, kind, correction):
    of_loss(verl, kind, batch, correction)


@of_each_batch
def test_gspo_of_its_paper(verl, batch):
    """Ours is one term for each completion, verl's one for each token with the same mean."""
    shaped, *ours = our_loss("gspo", batch, **CLIPS)
    agg = "seq-mean-token-mean"
    agree(
        ours, their_loss(verl, "gspo", batch, shaped, agg, clip_ratio_low=0.1, clip_ratio_high=0.15)
    )


@of_each_batch
def test_value_loss(verl, batch):
    values, old, returns = batch.new, batch.values, batch.ref
    mask = batch.mask.double()
    theirs = values.clone().requires_grad_()
    loss, fraction = verl.core.compute_value_loss(theirs, returns, old, mask, cliprange_value=0.3)
    ours = values[batch.mask].clone().requires_grad_()
    arguments = {"clip": 0.3, "tokens": mask.sum()}
    found = value_loss(ours, old[batch.mask], returns[batch.mask], **arguments)
    (their_grad,), (our_grad,) = torch.autograd.grad(loss, theirs), torch.autograd.grad(found, ours)
    agree((found.detach(), our_grad), (loss.detach(), their_grad[batch.mask]))
    share = value_clip_fraction(ours.detach(), old[batch.mask], returns[batch.mask], **arguments)
    torch.testing.assert_close(share.double(), fraction.double(), **CLOSE)


# ---- KL and rollout correction


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("kl", "k1"), ("k1", "k1"), ("mse", "k2"), ("k2", "k2"), ("low_var_kl", "k3"), ("k3", "k3")],
)
@of_each_batch
def test_kl_estimators(verl, batch, theirs, ours):
    new, mask = batch.new.clone().requires_grad_(), batch.mask
    found = verl.core.kl_penalty(new, batch.ref, theirs)
    penalty = KLPenalty(coef=1.0, estimator=ours)
    mine = batch.new[mask].clone().requires_grad_()
    everything = torch.ones_like(mine, dtype=torch.bool)
    estimates = penalty.in_loss(mine, batch.ref[mask], batch.old[mask], everything)
    (their_grad,) = torch.autograd.grad((found * mask).sum(), new)
    (our_grad,) = torch.autograd.grad(estimates.sum(), mine)
    agree((estimates.detach(), our_grad), (found[mask].detach(), their_grad[mask]))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@of_each_batch
def test_straight_through_kl_on_policy(verl, batch, estimator):
    """verl's ``k1+``: off the policy ours weighs the gradient by new / old, as OpenRLHF does."""
    new, mask = batch.new.clone().requires_grad_(), batch.mask
    found = verl.core.kl_penalty(new, batch.ref, f"{estimator}+")
    penalty = KLPenalty(coef=1.0, estimator=estimator, unbiased_gradient=True)
    mine = batch.new[mask].clone().requires_grad_()
    everything = torch.ones_like(mine, dtype=torch.bool)
    estimates = penalty.in_loss(mine, batch.ref[mask], mine.detach(), everything)
    (their_grad,) = torch.autograd.grad((found * mask).sum(), new)
    (our_grad,) = torch.autograd.grad(estimates.sum(), mine)
    agree((estimates.detach(), our_grad), (found[mask].detach(), their_grad[mask]))


def test_a_large_kl_is_bounded_alike(verl):
    """k3 within 10, as OpenRLHF's estimators have it; the papers' methods have no bound."""
    new, ref = (
        torch.tensor([-8.0, -1.0], dtype=torch.float64),
        torch.tensor([-1.0, -9.0], dtype=torch.float64),
    )
    theirs = verl.core.kl_penalty(new, ref, "k3")
    everything = torch.ones(2, dtype=torch.bool)
    bounded = KLPenalty(coef=1.0, estimator="k3").in_loss(new, ref, new, everything, most=10.0)
    torch.testing.assert_close(bounded, theirs, **CLOSE)
    assert theirs[0] == 10.0


@pytest.mark.parametrize("correction", CORRECTIONS)
@of_each_batch
def test_correction_weights(verl, batch, correction):
    ours, threshold = CORRECTIONS[correction]
    theirs, _ = verl.correction.compute_rollout_correction_weights(
        batch.old - batch.rollout, batch.mask.double(), "token", threshold
    )
    weights_N, _ = factors(Correction(**ours), batch.old[batch.mask], batch.rollout[batch.mask])
    torch.testing.assert_close(weights_N, theirs[batch.mask], **CLOSE)


@pytest.mark.parametrize(("level", "option"), [("seq", "seq_mean_k1"), ("token", "token_k1")])
@of_each_batch
def test_the_same_units_are_rejected(verl, batch, level, option):
    """verl's bounds are of rollout / old, ours of old / rollout; and it takes what it rejects out
    of the denominators, which we do not: compared is what is rejected."""
    mask = batch.mask.double()
    kept, _ = verl.correction.compute_rollout_rejection_mask(
        batch.old - batch.rollout, mask, option, "0.8_1.1"
    )
    correction = Correction(level=level, mode="mask", threshold=[1 / 1.1, 1 / 0.8])
    (block,) = Segments(batch.mask.sum(-1)).blocks()
    of_completions = block if level == "seq" else None
    _, outside_N = factors(
        correction, batch.old[batch.mask], batch.rollout[batch.mask], of_completions
    )
    assert torch.equal(outside_N, kept[batch.mask] == 0)


def test_the_batches_reach_every_branch():
    """Otherwise the comparisons would say little of clipping and correction."""
    batches = [Batch.random(seed) for seed in range(BATCHES)]
    ratios = torch.cat([(one.new - one.old)[one.mask].exp() for one in batches])
    weights = torch.cat([(one.old - one.rollout)[one.mask].exp() for one in batches])
    for values, bounds in ((ratios, (0.9, 1.15)), (weights, (0.8, 1.2))):
        shares = [(values < bounds[0]).double().mean(), (values > bounds[1]).double().mean()]
        assert min(shares) > 0.1 and sum(shares) < 0.9
    assert any(len(one.rewards[one.groups == 0].unique()) == 1 for one in batches), (
        "a group without a signal"
    )
