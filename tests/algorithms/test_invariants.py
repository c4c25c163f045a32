"""What holds for every method, on random ragged groups: sums of shares, shifts, splits,
permutations."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf_ext.algorithms import RolloutBatch, algorithm_names, get_algorithm
from tests.algorithms.helpers import (
    assert_close,
    check_terms_add_up,
    padded,
    random_groups,
    to_batch,
)

SEEDS = st.integers(0, 2**32 - 1)
FEW = settings(max_examples=20, deadline=None, derandomize=True)
REQUIRED = {
    "gtpo_entropy": {"alpha1": 1.0, "alpha2": 0.1},
    "grpo_s": {"beta1": 1.0, "beta2": 0.1},
    "clip_cov": {"cov_lb": 0.02, "cov_ratio": 0.2},
    "kl_cov": {"cov_ratio": 0.2},
}
NAMES = [name for name in algorithm_names() if name != "gae"]
OF_THE_BATCH = (
    "gtpo_entropy",
    "grpo_s",
    "gtpo_conflict",
    "reinforce",
    "reinforce_baseline",
    "flash_reinforce",
)
"""Methods with statistics of the whole rollout batch."""
UNSCALED = ("dr_grpo", "rloo", "flash_reinforce", "reinforce", "reinforce_baseline", "group_norm")
"""Methods that do not divide by a standard deviation, or by at least an epsilon."""


def build(name: str, **options):
    return get_algorithm(name, **{**REQUIRED.get(name, {}), **options})


def run(algorithm, batch, new):
    shaped = algorithm.shape(batch)
    loss = algorithm.loss(new, shaped)
    (grad,) = torch.autograd.grad(loss.value, new)
    return shaped, loss.value.item(), grad


def mixed_groups(seed: int, **sizes) -> list:
    """Groups that each have a correct and a wrong completion."""
    rng = random.Random(seed)
    groups = random_groups(seed, **sizes)
    for group in groups:
        if len(group) == 1:
            group.append({**group[0]})
        for completion in group:
            completion["reward"] = rng.choice([0.0, 1.0])
        group[0]["reward"], group[1]["reward"] = 1.0, 0.0
    return groups


def in_order(batch, order: torch.Tensor):
    """The same completions in another order of rows."""
    tensors = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    moved = {
        name: tensor[order]
        if len(tensor) == len(batch.lengths)
        else batch.segments.take(tensor, order)
        for name, tensor in tensors.items()
        if isinstance(tensor, torch.Tensor)
    }
    return dataclasses.replace(batch, **moved)


def tokens_where(groups, correct: bool) -> int:
    return sum(len(c["tokens"]) for g in groups for c in g if (c["reward"] > 0.5) == correct)


CORRECTION = {"level": "token", "mode": "mask", "gating": "ratio", "threshold": [0.9, 1.2]}
KL = {"coef": 0.2, "estimator": "k3", "place": "loss", "unbiased_gradient": True}


@pytest.mark.parametrize("extra", [{}, {"correction": CORRECTION}, {"kl": KL}])
@pytest.mark.parametrize("name", NAMES)
def test_without_old_log_probs_the_loss_takes_its_own(name: str, extra: dict) -> None:
    """What a method that needs none before the loss computes is what it computes with the loss's
    own, token by token and as a whole; the others say why they need them."""
    if "kl" in extra and "loss" not in build(name).kl_places:
        return
    batch, new, _ = to_batch(mixed_groups(3))
    sampled = (
        new.detach() + 0.2 * torch.randn(new.shape, generator=torch.Generator().manual_seed(1))
    ).clamp(max=0)
    batch = dataclasses.replace(batch, rollout_logprobs=sampled.double(), old_logprobs=new.detach())
    algorithm = build(name, **extra)
    without = dataclasses.replace(batch, old_logprobs=None)
    assert (algorithm.why_old_logprobs() is None) <= ("entropies" not in algorithm.needs)
    if (why := algorithm.why_old_logprobs(entropies_are_there=True)) is not None:
        assert name in why and (algorithm.needs_prepare or algorithm.reads_old)
        with pytest.raises(ValueError, match="RolloutBatch.old_logprobs is needed"):
            algorithm.shape(without)
        return
    _, value, grad = run(algorithm, batch, new)
    shaped = algorithm.shape(without).mini_batch(slice(None)).lean()
    loss = algorithm.loss(new, shaped)
    assert (
        loss.value.item() == pytest.approx(value, abs=1e-12)
        and float(loss.metrics["abs_log_ratio"]) == 0
    )
    assert torch.allclose(torch.autograd.grad(loss.value, new)[0], grad, atol=1e-12)
    if algorithm.token_loss(shaped) is not None:
        check_terms_add_up(algorithm, shaped, new, value, grad, 1e-9)


@pytest.mark.parametrize("axis", ["column", "row", "matrix"])
@pytest.mark.parametrize("scope", ["group", "batch"])
@FEW
@given(seed=SEEDS)
def test_entropy_shares_conserve_mass(axis: str, scope: str, seed: int) -> None:
    groups = mixed_groups(seed)
    batch, _, _ = to_batch(groups, shuffle=seed)
    shape = {"entropy_axis": axis, "entropy_scope": scope}
    positive, negative = tokens_where(groups, True), tokens_where(groups, False)
    v1 = get_algorithm("gtpo_entropy", version="v1", alpha=0.3, **shape).shape(batch)
    assert_close(v1["Rpos"].sum().item(), 1.3 * positive, 1e-9, "v1 mass of R+")
    v2 = get_algorithm("gtpo_entropy", version="v2", alpha=0.3, **shape).shape(batch)
    assert_close(v2["Rneg"].sum().item(), -negative, 1e-9, "v2 mass of R-")
    v6 = get_algorithm("gtpo_entropy", version="v6", alpha1=0.9, alpha2=0.2, **shape).shape(batch)
    assert_close(v6["Rpos"].sum().item(), 1.1 * positive, 1e-9, "v6 mass of R+")
    assert_close(v6["Rneg"].sum().item(), -1.1 * negative, 1e-9, "v6 mass of R-")


@FEW
@given(seed=SEEDS)
def test_column_shares_conserve_mass_at_every_position(seed: int) -> None:
    groups = mixed_groups(seed)
    batch, _, _ = to_batch(groups)
    shaped = get_algorithm("gtpo_entropy", version="v1", alpha=0.25).shape(batch)
    for group_id in batch.group_ids.unique():
        rows = (batch.group_ids == group_id) & (batch.rewards > 0.5)
        alive = padded(torch.ones_like(shaped["Rpos"]), batch.lengths)[rows].sum(dim=0)
        mass = padded(shaped["Rpos"], batch.lengths)[rows].sum(dim=0)
        assert_close(mass.tolist(), (1.25 * alive).tolist(), 1e-9, "mass per position")


@FEW
@given(seed=SEEDS)
def test_grpo_s_conserves_mass(seed: int) -> None:
    groups = mixed_groups(seed)
    batch, _, _ = to_batch(groups)
    shaped = get_algorithm("grpo_s", version="v1", beta=0.4).shape(batch)
    n = sum(c["reward"] > 0.5 for group in groups for c in group)
    assert_close(shaped["Rpos"].sum().item(), 1.4 * n, 1e-9, "mass of r+")


@FEW
@given(seed=SEEDS, scope=st.sampled_from(["group", "batch"]))
def test_v1_advantages_sum_to_zero(seed: int, scope: str) -> None:
    batch, _, _ = to_batch(mixed_groups(seed))
    shaped = get_algorithm("gtpo_entropy", version="v1", norm_scope=scope, adv_pool="all").shape(
        batch
    )
    assert abs(shaped.advantages.sum().item()) < 1e-9


@pytest.mark.parametrize("name", ["gtpo_entropy", "grpo_s"])
@FEW
@given(seed=SEEDS, factor=st.floats(0.01, 100.0))
def test_scale_of_entropy_does_not_matter(name: str, seed: int, factor: float) -> None:
    groups = mixed_groups(seed)
    for group in groups:
        for completion in group:
            completion["H"] = [h + 0.05 for h in completion["H"]]
    batch, new, _ = to_batch(groups)
    scaled = dataclasses.replace(batch, entropies=batch.entropies * factor)
    algorithm = build(name, entropy_eps=0.0)
    first, value, grad = run(algorithm, batch, new)
    second, other_value, other_grad = run(algorithm, scaled, new)
    assert_close(second.advantages.tolist(), first.advantages.tolist(), 1e-9, "advantages")
    assert_close(other_value, value, 1e-9, "loss")
    assert_close(other_grad.tolist(), grad.tolist(), 1e-9, "grad")


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_order_of_rows_does_not_matter(name: str, seed: int) -> None:
    groups = random_groups(seed)
    if name in ("clip_cov", "kl_cov"):
        # Ties are broken in the batch order; without a limit on the number the order does not
        # matter.
        algorithm = build(name, cov_ratio=1.0)
    else:
        algorithm = build(name)
    batch, new, _ = to_batch(groups)
    order = torch.randperm(len(batch.rewards), generator=torch.Generator().manual_seed(seed % 1000))
    shuffled = in_order(batch, order)
    first, value, grad = run(algorithm, batch, new)
    moved = batch.segments.take(new.detach(), order).requires_grad_()
    second, other_value, other_grad = run(algorithm, shuffled, moved)
    assert_close(
        second.advantages.tolist(),
        batch.segments.take(first.advantages, order).tolist(),
        1e-9,
        "advantages",
    )
    assert_close(other_value, value, 1e-9, "loss")
    assert_close(other_grad.tolist(), batch.segments.take(grad, order).tolist(), 1e-9, "grad")


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(seed=SEEDS, data=st.data())
def test_any_split_into_micro_batches_adds_up(name: str, seed: int, data: st.DataObject) -> None:
    batch, new, _ = to_batch(random_groups(seed), shuffle=seed)
    algorithm = build(name)
    shaped, value, grad = run(algorithm, batch, new)
    prepared = algorithm.prepare(new.detach(), shaped)
    rows = data.draw(st.permutations(range(len(shaped))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    total, total_grad = 0.0, torch.zeros_like(new)
    for start, stop in zip([0, *cuts], [*cuts, len(rows)], strict=True):
        part = torch.tensor(rows[start:stop], dtype=torch.long)
        share = algorithm.loss(shaped.segments.take(new, part), prepared.select(part))
        total += share.value.item()
        total_grad += torch.autograd.grad(share.value, new)[0]
    assert_close(total, value, 1e-9, "loss")
    assert_close(total_grad.tolist(), grad.tolist(), 1e-9, "grad")


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_a_mini_batch_of_everything_is_the_whole(name: str, seed: int) -> None:
    batch, new, _ = to_batch(random_groups(seed))
    algorithm = build(name)
    shaped, value, _ = run(algorithm, batch, new)
    again = algorithm.loss(new, shaped.mini_batch(slice(None)))
    assert_close(again.value.item(), value, 1e-12, "loss")


@pytest.mark.parametrize("name", [n for n in NAMES if n not in OF_THE_BATCH])
@settings(max_examples=6, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_a_mini_batch_is_what_its_groups_alone_would_be(name: str, seed: int) -> None:
    """Advantages of group-scoped methods do not depend on other groups; denominators are the
    mini-batch's."""
    groups = random_groups(seed, groups=4)
    batch, new, _ = to_batch(groups)
    algorithm = build(name)
    keep = batch.group_ids != batch.group_ids.max()
    if not keep.any():
        return
    alone, alone_new, _ = to_batch(groups[:-1])
    _, value, grad = run(algorithm, alone, alone_new)
    rows = keep.nonzero().flatten()
    part = algorithm.shape(batch).mini_batch(rows)
    loss = algorithm.loss(batch.segments.take(new, rows), part)
    assert_close(loss.value.item(), value, 1e-9, "loss")
    (part_grad,) = torch.autograd.grad(loss.value, new)
    assert_close(batch.segments.take(part_grad, rows).tolist(), grad.tolist(), 1e-9, "grad")


def test_mini_batch_needs_whole_groups() -> None:
    batch, _, _ = to_batch(mixed_groups(1))
    shaped = build("dapo").shape(batch)
    with pytest.raises(ValueError, match="group 10 has 1 of its"):
        shaped.mini_batch([0])


@FEW
@given(seed=SEEDS)
def test_v6_without_entropy_has_the_advantages_of_v1_without_entropy(seed: int) -> None:
    """Invariant 7: alpha = 0 is a token-level standardization, which plain DAPO is not."""
    batch, _, _ = to_batch(mixed_groups(seed))
    v6 = get_algorithm("gtpo_entropy", version="v6", alpha1=1.0, alpha2=0.0, adv_eps=0.0).shape(
        batch
    )
    v1 = get_algorithm("gtpo_entropy", version="v1", alpha=0.0, adv_eps=0.0).shape(batch)
    assert_close(v6.advantages.tolist(), v1.advantages.tolist(), 1e-9, "advantages")


def test_gtpo_entropy_without_entropy_is_not_dapo_for_unequal_lengths() -> None:
    groups = mixed_groups(3)
    groups[0][0]["tokens"] = groups[0][0]["tokens"][:1]
    for key in ("H", "old", "new", "ref", "guide", "rollout"):
        groups[0][0][key] = groups[0][0][key][:1]
    batch, _, _ = to_batch(groups)
    shaped = get_algorithm("gtpo_entropy", version="v1", alpha=0.0, ddof_tok=1).shape(batch)
    assert (shaped.advantages - build("dapo").shape(batch).advantages).abs().max() > 1e-3


@FEW
@given(seed=SEEDS)
def test_grpo_s_without_entropy_is_grpo_and_gspo(seed: int) -> None:
    """Invariant 8."""
    batch, new, _ = to_batch(mixed_groups(seed))
    clip = {"clip_low": 0.1, "clip_high": 0.15}
    algorithm = get_algorithm(
        "grpo_s", beta1=1.0, beta2=0.0, adv_eps=0.0, w_hat="geometric", **clip
    )
    shaped, value, grad = run(algorithm, batch, new)
    grpo = get_algorithm("grpo", adv_eps=0.0).shape(batch)
    assert_close(shaped.seq_advantages.tolist(), grpo.seq_advantages.tolist(), 1e-9, "advantages")
    _, gspo_value, gspo_grad = run(get_algorithm("gspo", adv_eps=0.0, **clip), batch, new)
    assert_close(value, gspo_value, 1e-9, "loss")
    assert_close(grad.tolist(), gspo_grad.tolist(), 1e-9, "grad")


@FEW
@given(seed=SEEDS)
def test_arithmetic_and_geometric_ratio_have_the_same_gradient_on_policy(seed: int) -> None:
    batch, _, _ = to_batch(mixed_groups(seed))
    new = batch.old_logprobs.clone().requires_grad_()
    grads = [
        run(build("grpo_s", w_hat=kind), batch, new)[2] for kind in ("arithmetic", "geometric")
    ]
    assert_close(grads[0].tolist(), grads[1].tolist(), 1e-9, "grad")


@FEW
@given(seed=SEEDS)
def test_a_single_success_has_share_one_everywhere(seed: int) -> None:
    groups = mixed_groups(seed)
    for group in groups:
        for completion in group[1:]:
            completion["reward"] = 0.0
    batch, _, _ = to_batch(groups)
    shaped = build("gtpo_entropy").shape(batch)
    success = batch.segments.spread(batch.rewards > 0.5)
    assert (shaped["rho_pos"][success] - 1).abs().max() < 1e-12


@pytest.mark.parametrize("seed", range(12))
def test_shape_of_conflict_masks(seed: int) -> None:
    """Invariant 11: prefixes, suffixes, lambda in {0, 1, 2} by the sign of A."""
    batch, _, _ = to_batch(mixed_groups(seed, vocabulary=2, max_length=9))
    shaped = build("gtpo_conflict").shape(batch)
    lengths = batch.lengths
    everything = torch.ones_like(shaped["forward_mask"])
    fw, bw, mask = (
        padded(x, lengths) for x in (shaped["forward_mask"], shaped["backward_mask"], everything)
    )
    assert not (fw[:, 1:] & ~fw[:, :-1]).any()
    inner = mask[:, 1:]
    assert not (bw[:, :-1] & ~bw[:, 1:] & inner).any(), "a backward run reaches the last token"
    weight, sign = torch.where(mask, padded(shaped["lambda"], lengths), 1.0), shaped["A"].sign()
    assert set(weight[mask].tolist()) <= {0.0, 1.0, 2.0}
    assert (sign[(weight == 0).any(dim=1)] < 0).all()
    assert (sign[(weight == 2).any(dim=1)] > 0).all()


@FEW
@given(seed=SEEDS)
def test_without_conflicts_gtpo_conflict_is_unclipped_grpo(seed: int) -> None:
    groups = mixed_groups(seed)
    for group in groups:
        for number, completion in enumerate(group):
            completion["tokens"] = [100 * number + 7 for _ in completion["tokens"]]
    batch, new, _ = to_batch(groups)
    _, value, grad = run(build("gtpo_conflict", gamma=0.0, filter="off"), batch, new)
    _, grpo_value, grpo_grad = run(build("grpo", clip_low=None), batch, new)
    assert_close(value, grpo_value, 1e-9, "loss")
    assert_close(grad.tolist(), grpo_grad.tolist(), 1e-9, "grad")


@pytest.mark.parametrize("name", [n for n in NAMES if n not in UNSCALED])
@settings(max_examples=6, deadline=None, derandomize=True)
@given(seed=SEEDS, scale=st.floats(0.1, 10.0), shift=st.floats(-5.0, 5.0))
def test_affine_change_of_rewards_does_not_matter(
    name: str, seed: int, scale: float, shift: float
) -> None:
    """Invariant 12; the threshold moves along, so that the partition stays."""
    groups = mixed_groups(seed)
    batch, new, _ = to_batch(groups)
    moved = dataclasses.replace(batch, rewards=batch.rewards * scale + shift)
    threshold = {} if name == "gtpo_conflict" else {"success_threshold": 0.5 * scale + shift}
    eps = {"adv_eps": 0.0} if name not in ("gtpo_entropy", "grpo_s") else {}
    _, value, grad = run(build(name, **eps), batch, new)
    _, other, other_grad = run(build(name, **eps, **threshold), moved, new)
    assert_close(other, value, 1e-8, "loss")
    assert_close(other_grad.tolist(), grad.tolist(), 1e-8, "grad")


@pytest.mark.parametrize("name", NAMES)
def test_no_gradient_reaches_entropies_or_old_logprobs(name: str) -> None:
    batch, new, _ = to_batch(mixed_groups(4))
    leaves = {
        key: getattr(batch, key).clone().requires_grad_()
        for key in (
            "entropies",
            "old_logprobs",
            "ref_logprobs",
            "guide_logprobs",
            "rollout_logprobs",
        )
    }
    rewards = batch.rewards.clone().requires_grad_()
    algorithm = build(name)
    loss = algorithm.loss(
        new, algorithm.shape(dataclasses.replace(batch, rewards=rewards, **leaves))
    )
    loss.value.backward()
    assert new.grad is not None
    assert all(leaf.grad is None for leaf in (*leaves.values(), rewards))


@pytest.mark.parametrize("name", ["gtpo_entropy", "grpo_s", "gtpo_conflict", "dapo"])
def test_gradient_with_respect_to_logits(name: str) -> None:
    """Invariant 13: g_t (onehot - p)/temperature per token; nothing flows through the entropy."""
    groups = mixed_groups(6, groups=2, max_size=3, max_length=4)
    batch, _, _ = to_batch(groups)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(
        len(batch.tokens), 5, dtype=torch.float64, generator=generator
    ).requires_grad_()
    temperature, tokens = 0.7, batch.tokens.clamp(max=4)
    logp = (logits / temperature).log_softmax(dim=-1)
    new = logp.gather(-1, tokens[..., None]).squeeze(-1)
    entropies = -(logp.exp() * logp).sum(dim=-1)
    algorithm = build(name)
    loss = algorithm.loss(new, algorithm.shape(dataclasses.replace(batch, entropies=entropies)))
    token_grad, logit_grad = torch.autograd.grad(loss.value, [new, logits])
    onehot = torch.nn.functional.one_hot(tokens, 5).double()
    wanted = token_grad[..., None] * (onehot - logp.exp()) / temperature
    assert_close(logit_grad.tolist(), wanted.tolist(), 1e-9, "logit gradient")


def test_v6_failures_lose_when_they_are_few_enough() -> None:
    """Invariant 15: A < 0 on all failures if their share of tokens is below alpha1/(alpha1 +
    alpha2)."""
    drawn = [mixed_groups(seed, groups=1) for seed in range(12)]
    few = [
        g
        for g in drawn
        if tokens_where(g, False) / (tokens_where(g, False) + tokens_where(g, True)) < 1.0 / 1.1
    ]
    assert len(few) >= 8
    for groups in few:
        batch, _, _ = to_batch(groups)
        shaped = build("gtpo_entropy").shape(batch)
        failures = batch.segments.spread(batch.rewards <= 0.5)
        assert failures.any() and (shaped.advantages[failures] < 0).all()


def test_v6_failures_can_gain_when_they_are_many() -> None:
    def completion(reward, length, entropy):
        floats = dict.fromkeys(("old", "new", "ref", "guide", "rollout"), [-1.0] * length)
        return {
            "tokens": [0] * length,
            "reward": reward,
            "H": [entropy] * length,
            "truncated": False,
            "behavior": "old",
            **floats,
        }

    batch, _, _ = to_batch(
        [[completion(1.0, 1, 1.0), completion(0.0, 10, 0.01), completion(0.0, 10, 5.0)]]
    )
    shaped = build("gtpo_entropy", alpha2=0.5).shape(batch)
    _, first, second = shaped.advantages.split([1, 10, 10])
    assert (first < 0).all() and (second > 0).all()
    guarded = build("gtpo_entropy", alpha2=0.5, sign_guard=True).shape(batch)
    assert (guarded.advantages[1:] <= 0).all()


@FEW
@given(seed=SEEDS)
def test_reductions_to_dapo(seed: int) -> None:
    """Invariant 16."""
    groups = random_groups(seed)
    for group in groups:
        for completion in group:
            completion["behavior"] = "old"
    batch, new, _ = to_batch(groups)
    _, value, grad = run(build("dapo"), batch, new)
    _, unclipped, unclipped_grad = run(build("dapo", clip_low=None), batch, new)
    for name, options, wanted, wanted_grad in (
        ("high_entropy_tokens", {"top_rho": 1.0}, value, grad),
        ("mixed_policy_dapo", {}, value, grad),
        ("kl_cov", {"ppo_kl_coef": 0.0}, unclipped, unclipped_grad),
    ):
        _, got, got_grad = run(build(name, **options), batch, new)
        assert_close(got, wanted, 1e-9, name)
        assert_close(got_grad.tolist(), wanted_grad.tolist(), 1e-9, name)


@FEW
@given(seed=SEEDS)
def test_sequence_and_token_form_of_gspo_agree_on_policy(seed: int) -> None:
    """At w = 1 GSPO's gradient is that of unclipped GRPO."""
    batch, _, _ = to_batch(mixed_groups(seed))
    new = batch.old_logprobs.clone().requires_grad_()
    _, _, gspo = run(build("gspo"), batch, new)
    _, _, grpo = run(build("grpo"), batch, new)
    assert_close(gspo.tolist(), grpo.tolist(), 1e-9, "grad")


@pytest.mark.parametrize(("sigma", "share"), [(0.5, 0.47), (1.0, 0.59), (1.5, 0.65), (2.5, 0.72)])
def test_version_2_rewards_tokens_of_wrong_answers_as_the_documents_say(
    sigma: float, share: float
) -> None:
    """One right answer among eight of equal length, lognormal entropies: the hazard T-8 of
    docs/methods.md."""
    torch.manual_seed(0)
    groups, size, length = 60, 8, 40
    rewards = torch.zeros(groups, size)
    rewards[:, 0] = 1.0
    tokens = groups * size * length
    batch = RolloutBatch(
        tokens=torch.randint(0, 50, (tokens,)),
        lengths=torch.full((groups * size,), length),
        rewards=rewards.flatten(),
        group_ids=torch.arange(groups * size) // size,
        old_logprobs=torch.full((tokens,), -1.0),
        entropies=(sigma * torch.randn(tokens)).exp(),
        group_size=size,
    )
    shaped = get_algorithm("gtpo_entropy", version="v2").shape(batch)
    wrong = (torch.arange(tokens) // length) % size != 0
    assert (shaped.advantages[wrong] > 0).double().mean().item() == pytest.approx(share, abs=0.015)
