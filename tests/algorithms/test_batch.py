"""What `shape` and `loss` accept, refuse and survive."""

from __future__ import annotations

import dataclasses
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from openrlhf_ext.algorithms import RolloutBatch, algorithm_names, get_algorithm
from tests.algorithms.helpers import random_groups, to_batch
from tests.algorithms.test_invariants import NAMES, build, mixed_groups
from tests.patience import PATIENCE_S


def simple_batch(rewards=(1.0, 0.0, 1.0, 0.0), positions: int = 4, **fields) -> RolloutBatch:
    rows = len(rewards)
    generator = torch.Generator().manual_seed(1)
    return RolloutBatch(
        **{
            "tokens": torch.arange(rows * positions) % 3,
            "lengths": torch.full((rows,), positions),
            "rewards": torch.tensor(rewards),
            "group_ids": torch.arange(rows) // 2,
            "old_logprobs": -torch.rand(rows * positions, generator=generator),
            "entropies": torch.rand(rows * positions, generator=generator),
            "guide_logprobs": -torch.rand(rows * positions, generator=generator),
            **fields,
        }
    )


def finite(algorithm, batch: RolloutBatch):
    new = batch.old_logprobs.float().clone().requires_grad_()
    loss = algorithm.loss(new, algorithm.shape(batch))
    (grad,) = torch.autograd.grad(loss.value, new)
    assert torch.isfinite(loss.value) and torch.isfinite(grad).all()
    return loss, grad


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("rewards", "change"),
    [
        ((1.0, 1.0, 1.0, 1.0), {}),
        ((0.0, 0.0, 0.0, 0.0), {}),
        ((0.3, 0.3, 0.3, 0.3), {}),
        ((1.0, 0.0, 1.0, 0.0), {"entropies": torch.zeros(16)}),
        ((1.0, 0.0, 1.0, 0.0), {"positions": 1}),
        ((1.0, 0.0, 1.0, 0.0), {"tokens": torch.full((16,), 7)}),
        ((1.0, 0.0, 1.0, 0.0), {"group_ids": torch.arange(4)}),
        ((1.0,), {"group_ids": torch.tensor([-5])}),
    ],
    ids=[
        "all correct",
        "all wrong",
        "equal",
        "zero entropy",
        "one token",
        "full cover",
        "G = 1",
        "B = 1",
    ],
)
@pytest.mark.parametrize("degenerate", ["drop", "zero", "literal"])
def test_nasty_batches_give_finite_numbers(
    name: str, rewards: tuple, change: dict, degenerate: str
) -> None:
    options = {} if name == "gtpo_conflict" else {"degenerate": degenerate}
    finite(build(name, **options), simple_batch(rewards, **change))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "on_policy_distillation"])
def test_no_signal_means_no_gradient(name: str) -> None:
    if name == "gtpo_conflict":
        options = {"gamma": 0.0}
    else:
        options = {"degenerate": "drop"}
    loss, grad = finite(build(name, **options), simple_batch((1.0, 1.0, 1.0, 1.0)))
    assert loss.value.item() == 0.0 and not grad.any()


@pytest.mark.parametrize("name", algorithm_names())
def test_an_empty_batch_has_loss_zero(name: str) -> None:
    empty = torch.zeros(0)
    batch = RolloutBatch(
        tokens=empty.long(),
        lengths=empty.long(),
        rewards=torch.zeros(0),
        group_ids=torch.zeros(0, dtype=torch.long),
        old_logprobs=empty,
        entropies=empty,
        values=empty,
        guide_logprobs=empty,
    )
    algorithm = build(name)
    new = empty.clone().requires_grad_()
    shaped = algorithm.shape(batch)
    assert algorithm.loss(new, shaped).value.item() == 0.0
    assert len(shaped.select([])) == 0


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_logprobs_are_promoted(name: str) -> None:
    batch = simple_batch()
    half = dataclasses.replace(
        batch,
        old_logprobs=batch.old_logprobs.bfloat16(),
        entropies=batch.entropies.bfloat16(),
        guide_logprobs=batch.guide_logprobs.bfloat16(),
    )
    wide = dataclasses.replace(
        batch,
        old_logprobs=half.old_logprobs.float(),
        entropies=half.entropies.float(),
        guide_logprobs=half.guide_logprobs.float(),
    )
    new = half.old_logprobs.clone().requires_grad_()
    algorithm = build(name)
    shaped = algorithm.shape(half)
    assert shaped.advantages.dtype == torch.float32
    loss = algorithm.loss(new, shaped)
    assert loss.value.dtype == torch.float32
    loss.value.backward()
    assert new.grad.dtype == torch.bfloat16
    assert torch.equal(
        loss.value.detach(), algorithm.loss(new.detach().float(), algorithm.shape(wide)).value
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_dtype_is_kept(dtype: torch.dtype) -> None:
    batch = simple_batch()
    batch = dataclasses.replace(
        batch, old_logprobs=batch.old_logprobs.to(dtype), entropies=batch.entropies.to(dtype)
    )
    shaped = build("gtpo_entropy").shape(batch)
    assert {shaped.advantages.dtype, shaped["rho_pos"].dtype, shaped["Rpos"].dtype} == {dtype}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    ("tensor", "name", "options"),
    [
        ("old_logprobs", "dapo", {}),
        ("entropies", "gtpo_entropy", {}),
        ("ref_logprobs", "dapo", {"kl_coef": 0.1}),
        ("rollout_logprobs", "dapo", {"correction": {"level": "token"}}),
        ("guide_logprobs", "mixed_policy_dapo", {"zero_batch": True}),
    ],
)
def test_infinite_values_are_named(bad: float, tensor: str, name: str, options: dict) -> None:
    values = torch.rand(16) if tensor == "entropies" else -torch.rand(16)
    values[2 * 4 + 1] = bad
    batch = simple_batch(**{tensor: values})
    with pytest.raises(ValueError, match=rf"{tensor} must be finite .* row 2, position 1 is"):
        build(name, **options).shape(batch)


@pytest.mark.parametrize(
    ("tensor", "value", "options", "rule"),
    [
        ("entropies", -1.1e-4, {}, "at least -0.0001"),
        ("old_logprobs", 1.1e-3, {}, "at most 0.001"),
        ("ref_logprobs", 1.1e-3, {"kl_coef": 0.1}, "at most 0.001"),
        ("rollout_logprobs", 1.1e-3, {"correction": {"level": "token"}}, "at most 0.001"),
        ("guide_logprobs", 1.1e-3, {}, "at most 0.001"),
    ],
)
def test_values_that_no_distribution_has_are_named(
    tensor: str, value: float, options: dict, rule: str
) -> None:
    values, lengths = torch.zeros(16), torch.tensor([4, 5, 3, 4])
    algorithm = build("mixed_policy_dapo", **options)
    algorithm.shape(simple_batch(lengths=lengths, **{tensor: values}))
    values[4 + 5 + 1] = value
    with pytest.raises(
        ValueError, match=f"{tensor} must be {rule} on completion tokens: row 2, position 1 is"
    ):
        algorithm.shape(simple_batch(lengths=lengths, **{tensor: values}))


@pytest.mark.parametrize("name", ["gtpo_entropy", "grpo_s"])
def test_entropies_below_zero_by_rounding_count_as_zero(name: str) -> None:
    entropies = torch.rand(16)
    entropies[1] = -9e-5
    algorithm = build(name)
    below = algorithm.shape(simple_batch(entropies=entropies))
    assert torch.equal(
        below.advantages, algorithm.shape(simple_batch(entropies=entropies.clamp(min=0))).advantages
    )
    assert entropies[1] < 0, "the caller's tensor is left alone"


def test_infinite_rewards_are_named() -> None:
    with pytest.raises(ValueError, match="rewards must be finite: row 1 is nan"):
        build("dapo").shape(simple_batch((1.0, float("nan"), 0.0, 0.0)))


@pytest.mark.parametrize("name", ["dapo", "gspo", "kl_cov", "mixed_policy_dapo"])
def test_infinite_new_logprobs_are_named(name: str) -> None:
    batch = simple_batch()
    new = batch.old_logprobs.clone()
    new[3 * 4 + 2] = float("nan")
    algorithm = build(name)
    with pytest.raises(ValueError, match="new_logprobs must be finite .* row 3, position 2 is nan"):
        algorithm.loss(new, algorithm.shape(batch))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"lengths": torch.tensor([4, 4, 8, 0])},
            "row 3 has 0 completion tokens; every completion needs one",
        ),
        (
            {"lengths": torch.tensor([4, 4, 4, 3])},
            "lengths add up to 15 tokens, the tensors hold 16",
        ),
        ({"entropies": None}, "needs RolloutBatch.entropies"),
        ({"group_size": 3}, "group 0 has 2 completions, declared group size is 3"),
        ({"group_size": {0: 2, 1: 4}}, "group 1 has 2 completions, declared group size is 4"),
        ({"group_size": {0: 2}}, "group 1 is in the batch but not in group_size"),
    ],
)
def test_illegal_contents_are_refused_by_shape(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build("gtpo_entropy").shape(simple_batch(**change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"entropies": torch.zeros(4, 4)}, r"entropies must have shape \(16,\), got \(4, 4\)"),
        ({"truncated": torch.zeros(3, dtype=torch.bool)}, r"truncated must have shape \(4,\)"),
        ({"lengths": torch.full((4,), 4.0)}, "lengths must be integer"),
        ({"old_logprobs": torch.zeros(16).long()}, "old_logprobs must be floating point"),
        ({"group_ids": torch.zeros(4)}, "group_ids must be integer"),
        (
            {"tokens": torch.zeros(4, 4, dtype=torch.long)},
            r"tokens and lengths must have shapes \(N,\) and \(B,\)",
        ),
    ],
)
def test_illegal_tensors_are_refused_at_once(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simple_batch(**change)


def test_masking_needs_to_know_what_was_truncated() -> None:
    with pytest.raises(ValueError, match="needs RolloutBatch.truncated"):
        build("dapo", mask_truncated=True).shape(simple_batch())


@pytest.mark.parametrize("name", ["gtpo_entropy", "grpo_s"])
def test_zero_entropy_without_eps_is_refused_by_name(name: str) -> None:
    entropies = torch.rand(16) + 0.1
    entropies[4:8] = 0.0
    with pytest.raises(ValueError, match="row 1"):
        build(name, entropy_eps=0.0).shape(simple_batch(entropies=entropies))


def test_zero_std_without_eps_is_refused_by_name() -> None:
    batch = simple_batch((1.0, 0.0, 1.0, 1.0))
    with pytest.raises(
        ValueError, match="adv_eps = 0 needs positive standard deviations, that of group 1 is 0"
    ):
        build("grpo", adv_eps=0.0).shape(batch)


def test_tensors_travel_out_of_band() -> None:
    shaped = build("grpo").shape(simple_batch(positions=5000)).lean()
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(shaped, protocol=5, buffer_callback=buffers.append)
    per_token = [
        tensor for tensor in vars(shaped).values() if getattr(tensor, "shape", 0) == (20_000,)
    ]
    sizes = sorted(len(buffer.raw()) for buffer in buffers)
    assert sizes[-len(per_token) :] == sorted(tensor.nbytes for tensor in per_token)
    assert len(data) < 10_000
    copy = pickle.loads(data, buffers=[bytes(buffer) for buffer in buffers])
    copy.advantages += 1.0  # what came in a read-only buffer can be written to


@pytest.mark.parametrize("name", NAMES)
def test_a_shaped_batch_pickles(name: str) -> None:
    batch, new, _ = to_batch(mixed_groups(2))
    algorithm = build(name)
    shaped = algorithm.shape(batch)
    copy = pickle.loads(pickle.dumps(shaped))
    for field in dataclasses.fields(shaped):
        one, other = (getattr(of, field.name) for of in (shaped, copy))
        if torch.is_tensor(one):
            assert other.dtype == one.dtype and torch.equal(other, one), field.name
    assert copy.names() == shaped.names()
    assert torch.equal(copy.algorithm.loss(new, copy).value, algorithm.loss(new, shaped).value)
    lean = pickle.loads(pickle.dumps(algorithm.prepare(new.detach(), shaped).lean()))
    assert torch.equal(algorithm.loss(new, lean).value, algorithm.loss(new, shaped).value)
    with pytest.raises(ValueError, match="call mini_batch before lean"):
        lean.mini_batch(slice(None))


def test_selections_take_indices_slices_and_masks() -> None:
    shaped = build("dapo").shape(simple_batch((0.0, 1.0, 2.0, 3.0)))
    assert shaped.select([3, 0]).rewards.tolist() == [3, 0]
    assert shaped.select(slice(1, 3)).rewards.tolist() == [1, 2]
    assert shaped.select(torch.tensor([True, False, True, False])).rewards.tolist() == [0, 2]
    assert shaped.select([3, 0]).select([1]).rewards.tolist() == [0]


@pytest.mark.parametrize("take", ["select", "mini_batch"])
@pytest.mark.parametrize("rows", [[0, 0], [0, 1, 0], [0, -4], torch.tensor([1, 1])])
def test_a_row_cannot_be_selected_twice(take: str, rows) -> None:
    with pytest.raises(ValueError, match=f"row {int(rows[0])} is selected more than once"):
        getattr(build("dapo").shape(simple_batch()), take)(rows)


@pytest.mark.parametrize("name", algorithm_names())
def test_shares_carry_what_the_loss_reads_and_nothing_else(name: str) -> None:
    """No entropies, candidates, values or returns; of floats per token the advantages and old
    log-probs, and lambda."""
    batch = simple_batch(values=torch.zeros(16))
    algorithm = build(name)
    mini_batch = algorithm.prepare(
        batch.old_logprobs[:8], algorithm.shape(batch).mini_batch([0, 1])
    )
    part = mini_batch.lean().select([1])
    assert not part.pools and not part.metrics and set(part.of_rows) <= {"order"}
    assert not part.of_tokens
    shipped = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    floats = {
        n
        for n, t in shipped.items()
        if isinstance(t, torch.Tensor) and t.is_floating_point() and len(t) == 4
    }
    more = {"gtpo_conflict": {"token_weights"}}.get(name, set())
    assert floats == {"advantages", "old_logprobs"} | more
    new = torch.full((4,), -0.3)
    assert torch.equal(
        algorithm.loss(new, part).value, algorithm.loss(new, mini_batch.select([1])).value
    )


def test_loss_refuses_logprobs_of_another_shape() -> None:
    algorithm = build("dapo")
    shaped = algorithm.shape(simple_batch())
    with pytest.raises(
        ValueError, match=r"new_logprobs has shape \(16,\), the shaped batch \(8,\)"
    ):
        algorithm.loss(torch.zeros(16), shaped.select([0, 1]))


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_covariance_methods_refuse_to_guess_on_a_share(name: str) -> None:
    algorithm, batch = build(name), simple_batch()
    part = algorithm.shape(batch).select([0, 1])
    with pytest.raises(ValueError, match="prepare"):
        algorithm.loss(batch.old_logprobs[:8], part)
    with pytest.raises(ValueError, match="whole mini-batch"):
        algorithm.prepare(batch.old_logprobs[:8], part)


@pytest.mark.parametrize(
    "parts", [[[0, 5], [1, 2, 3, 4, 6, 7]], [[7, 1, 4], [0], [2, 3, 5, 6], []]], ids=str
)
@pytest.mark.parametrize(
    ("name", "ties"), [("clip_cov", False), ("kl_cov", False), ("kl_cov", True)]
)
def test_shares_choose_together_what_the_whole_would(
    name: str, ties: bool, parts: list[list[int]]
) -> None:
    """Every share sees sums only; ties at the threshold go by natural order over all shares."""
    batch = simple_batch((1.0, 0.0, 0.0, 1.0) * 2, positions=20, group_ids=torch.tensor([9, 2] * 4))
    algorithm = build(name, cov_ratio=0.25)
    shaped = algorithm.shape(batch)
    new = (
        batch.segments.spread(batch.rewards - 2.0)
        if ties
        else batch.old_logprobs - 0.3 * batch.old_logprobs.sin()
    )
    whole = algorithm.prepare(new, shaped, seed=5)
    assert 0 < whole.selection.sum() < 160
    barrier, told = threading.Barrier(len(parts)), [torch.zeros(0)] * len(parts)

    def share(number: int) -> torch.Tensor:
        def total(tensor: torch.Tensor) -> torch.Tensor:
            told[number] = tensor
            barrier.wait(PATIENCE_S)
            result = sum(told)
            barrier.wait(PATIENCE_S)
            return result

        part, own = parts[number], batch.segments.take(new, parts[number])
        return algorithm.prepare(own, shaped.lean().select(part), seed=5, total=total).selection

    with ThreadPoolExecutor(len(parts)) as pool:
        for part, selection in zip(parts, pool.map(share, range(len(parts))), strict=True):
            assert torch.equal(selection, batch.segments.take(whole.selection, part))


def test_prepare_is_a_no_op_for_the_others() -> None:
    for name in NAMES:
        algorithm = build(name)
        if not algorithm.needs_prepare:
            shaped = algorithm.shape(simple_batch())
            assert algorithm.prepare(torch.zeros(16), shaped) is shaped


def test_a_mini_batch_of_a_prepared_batch_is_prepared_anew() -> None:
    batch, new, _ = to_batch(mixed_groups(3, max_length=20))
    algorithm = build("kl_cov")
    prepared = algorithm.prepare(new.detach(), algorithm.shape(batch))
    assert prepared.selection is not None and prepared.mini_batch(slice(None)).selection is None


def test_a_reward_at_the_threshold_is_no_success() -> None:
    shaped = build("gtpo_entropy").shape(simple_batch((1.0, 0.5, 1.0, 0.5)))
    assert shaped["success"].tolist() == [True, False, True, False]


def test_failures_without_a_pool_of_successes_get_nothing() -> None:
    """Specification 3.6 step 3: `own` in v1 with an empty P, whatever the penalty."""
    options = {"version": "v1", "adv_pool": "own", "degenerate": "literal"}
    penalty = {"kind": "dapo", "l_max": 4, "l_cache": 3}
    shaped = get_algorithm("grpo_s", length_penalty=penalty, **options).shape(
        simple_batch((0.0, 0.0, 1.0, 0.0))
    )
    assert shaped.seq_advantages[:2].tolist() == [0.0, 0.0] and shaped.seq_advantages[3] != 0


def test_clip_cov_draws_depend_on_the_seed_only() -> None:
    batch, new, _ = to_batch(mixed_groups(3, max_length=20))
    algorithm = build("clip_cov", cov_lb=-5.0, cov_ratio=0.1)
    shaped = algorithm.shape(batch)
    draws = [
        algorithm.prepare(new.detach(), shaped, seed=seed)["chosen"].tolist() for seed in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]


def test_kl_cov_breaks_ties_in_natural_order() -> None:
    """Groups by their id, completions by their place in the batch, positions ascending."""
    rows, positions = 8, 20
    rewards = torch.tensor([0.0, 1.0] * 4)
    group_ids = torch.tensor([9, 9, 9, 9, 2, 2, 2, 2])
    batch = simple_batch(tuple(rewards.tolist()), positions=positions, group_ids=group_ids)
    # All tokens have the same covariance.
    new = torch.where(rewards > 0, -1.0, -2.0).repeat_interleave(positions)
    algorithm = build("kl_cov", cov_ratio=50 / (rows * positions))
    chosen = algorithm.prepare(new, algorithm.shape(batch))["chosen"].tolist()
    ties = [
        [group, completion, t]
        for group in (0, 1)
        for completion in range(4)
        for t in range(positions)
    ]
    assert chosen == ties[:50]


def test_perm_selects_candidates_by_their_number() -> None:
    batch, new, _ = to_batch(mixed_groups(3, max_length=20))
    options = {"cov_lb": -5.0, "cov_ratio": 1.0}
    candidates = build("clip_cov", **options)
    places = candidates.prepare(new.detach(), candidates.shape(batch))["candidates"].tolist()
    algorithm = build("clip_cov", perm=[3, 1], **options)
    assert algorithm.prepare(new.detach(), algorithm.shape(batch))["chosen"].tolist() == [
        places[1],
        places[3],
    ]
    with pytest.raises(ValueError, match="perm must hold distinct indices"):
        algorithm = build("clip_cov", perm=[10_000], **options)
        algorithm.prepare(new.detach(), algorithm.shape(batch))


def test_unknown_quantities_are_refused_with_the_known_ones() -> None:
    shaped = build("gtpo_entropy").shape(simple_batch())
    with pytest.raises(
        LookupError, match="gtpo_entropy has no 'rho_posi' here, only .*rho_pos, .* and fields"
    ):
        _ = shaped["rho_posi"]
    with pytest.raises(LookupError, match="gtpo_entropy has no 'ref_logprobs' here"):
        _ = shaped["ref_logprobs"]
    with pytest.raises(
        AttributeError,
        match=r"LossBatch has no attribute 'advantage' \(did you mean advantages\?\)",
    ):
        _ = shaped.advantage


def test_an_exposed_tensor_is_of_rows_or_of_tokens_for_good() -> None:
    """Also in a share whose rows are single tokens, where its length says nothing."""
    groups = random_groups(5)
    for completion in (completion for group in groups for completion in group[1:]):
        completion.update(
            {key: value[:1] for key, value in completion.items() if isinstance(value, list)}
        )
    batch, _, _ = to_batch(groups)
    shaped = build("gtpo_entropy").shape(batch)
    assert {"success", "pool_mean"} <= set(shaped.of_rows) and set(shaped.of_tokens) == {"shares"}
    single = (batch.lengths == 1).nonzero().flatten()
    share = shaped.select(single)
    assert share.segments.tokens == len(share) > 1
    assert set(share.of_rows) == set(shaped.of_rows) and set(share.of_tokens) == {"shares"}
    assert torch.equal(share["Rpos"], shaped.segments.take(shaped["Rpos"], single))


def test_metrics_of_a_batch() -> None:
    entropies = torch.tensor([1.0] * 4 + [2.0] * 4 + [3.0] * 8)
    shaped = build("dapo").shape(simple_batch((1.0, 0.0, 1.0, 1.0), entropies=entropies))
    metrics = {key: value.item() for key, value in shaped.metrics.items()}
    assert metrics["degenerate_groups"] == 0.5
    assert metrics["kept_completions"] == 0.5
    assert metrics["success_rate"] == 0.75
    assert metrics["entropy_correct"] == pytest.approx(7 / 3)
    assert metrics["entropy_wrong"] == 2.0
    # Only rows 0 and 1 carry advantages: the two lowest entropies, i.e. the lower half of the
    # tokens.
    assert metrics["advantage_mass_q1"] == pytest.approx(4 / 8)
    assert sum(metrics[f"advantage_mass_q{i}"] for i in range(1, 6)) == pytest.approx(1.0)


def test_loss_metrics_count_clipped_tokens() -> None:
    batch = simple_batch()
    algorithm = build("dapo")
    shaped = algorithm.shape(batch)
    new = batch.old_logprobs.clone()
    new[0] += 1.0
    new[4:6] -= 1.0
    metrics = algorithm.loss(new, shaped).metrics
    assert metrics["clip_fraction"].item() == pytest.approx(3 / 16)
    assert metrics["clip_fraction_high"].item() == pytest.approx(1 / 16)
    assert metrics["policy_kl"].item() == pytest.approx((-1 + 2) / 16, abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_correction_weights_leave_the_guides_completions_alone(seed: int) -> None:
    batch, _, places = to_batch(random_groups(seed))
    algorithm = get_algorithm("mixed_policy_dapo", correction={"level": "token", "mode": "clip"})
    shaped = algorithm.shape(batch)
    assert (shaped.correction[batch.segments.spread(batch.from_guide)] == 1).all()


@pytest.mark.parametrize("name", algorithm_names())
def test_the_loss_waits_for_no_device(name: str) -> None:
    """On the meta device there is nothing to read back: reading a number is an error there."""
    batch = simple_batch(
        values=torch.zeros(16), rollout_logprobs=-torch.rand(16), ref_logprobs=-torch.rand(16)
    )
    algorithm = build(
        name, correction={"level": "token"}, **({"zero_batch": True} if "mixed" in name else {})
    )
    shaped = algorithm.prepare(batch.old_logprobs, algorithm.shape(batch)).lean().to("meta")
    part = shaped.select([2, 0])
    new = torch.zeros(8, device="meta", requires_grad=True)
    loss = algorithm.loss(new, part)
    assert loss.value.device.type == "meta" and torch.autograd.grad(loss.value, new)[0].shape == (
        8,
    )
    if terms := algorithm.token_loss(part):
        assert terms(new, torch.arange(8, device="meta")).shape == (8,)


def test_another_device_is_reached_with_to() -> None:
    shaped = build("gtpo_entropy").shape(simple_batch()).to("meta")
    assert shaped.advantages.device.type == "meta" and shaped["shares"].device.type == "meta"
