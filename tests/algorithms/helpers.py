"""Random ragged groups, their conversion to a RolloutBatch, and comparison with the reference."""

from __future__ import annotations

import math
import random

import torch

from openrlhf_ext.algorithms import RolloutBatch, SequenceAlgorithm, get_algorithm
from tests.algorithms import reference


def random_completion(rng: random.Random, vocabulary: int, max_length: int) -> dict:
    length = rng.randint(1, max_length)
    old = [-rng.expovariate(1.0) - 1e-3 for _ in range(length)]

    def near(scale):
        return [min(-1e-4, value + rng.gauss(0.0, scale)) for value in old]

    return {
        "tokens": [rng.randrange(vocabulary) for _ in range(length)],
        "reward": rng.choice([0.0, 0.0, 1.0, 1.0, 0.3]),
        "H": [rng.expovariate(2.0) if rng.random() > 0.1 else 0.0 for _ in range(length)],
        "old": old,
        "new": near(0.3),
        "ref": near(0.4),
        "guide": near(0.4),
        "rollout": near(0.3),
        "truncated": rng.random() < 0.25,
        "behavior": "guide" if rng.random() < 0.3 else "old",
    }


def random_groups(
    seed: int, *, groups: int = 3, max_size: int = 5, max_length: int = 6, vocabulary: int = 3
) -> list:
    """Ragged groups: mixed, all-correct, all-wrong, single and duplicated completions occur."""
    rng = random.Random(seed)
    out = []
    for _ in range(rng.randint(1, groups)):
        group = [
            random_completion(rng, vocabulary, max_length) for _ in range(rng.randint(1, max_size))
        ]
        style = rng.random()
        if style < 0.15:
            reward = rng.choice([0.0, 1.0])
            for completion in group:
                completion["reward"] = reward
        elif style < 0.3:
            group.append({**group[0], "reward": rng.choice([0.0, 1.0])})
        out.append(group)
    return out


def rounded(groups: list, dtype: torch.dtype) -> list:
    """The same groups with their floats rounded to `dtype`, so that only the arithmetic is
    compared."""

    def cast(value):
        if isinstance(value, list) and value and isinstance(value[0], float):
            return torch.tensor(value, dtype=dtype).double().tolist()
        return value

    return [[{key: cast(value) for key, value in c.items()} for c in group] for group in groups]


def to_batch(
    groups: list,
    *,
    dtype: torch.dtype = torch.float64,
    shuffle: int | None = None,
    **fields,
):
    """A RolloutBatch with rows shuffled over groups.

    Returns:
        batch, new log-probs (N,), and the (group, completion) of each row.
    """
    places = [(g, i) for g, group in enumerate(groups) for i in range(len(group))]
    if shuffle is not None:
        random.Random(shuffle).shuffle(places)
        # Natural order inside a group is batch order: keep it, so that order-dependent selections
        # agree.
        slots = {g: iter(range(len(groups[g]))) for g in range(len(groups))}
        places = [(g, next(slots[g])) for g, _ in places]
    rows = [groups[g][i] for g, i in places]

    def flat(key, kind=dtype):
        return torch.tensor([value for c in rows for value in c[key]], dtype=kind)

    batch = RolloutBatch(
        tokens=flat("tokens", torch.int64),
        lengths=torch.tensor([len(c["tokens"]) for c in rows]),
        rewards=torch.tensor([c["reward"] for c in rows], dtype=torch.float64),
        group_ids=torch.tensor([10 + 3 * g for g, _ in places]),
        old_logprobs=flat("old"),
        entropies=flat("H"),
        ref_logprobs=flat("ref"),
        guide_logprobs=flat("guide"),
        rollout_logprobs=flat("rollout"),
        truncated=torch.tensor([c["truncated"] for c in rows]),
        from_guide=torch.tensor([c["behavior"] == "guide" for c in rows]),
        **fields,
    )
    return batch, flat("new").requires_grad_(), places


def padded(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """(B, T) with the tokens of each row, 0 behind them."""
    return torch.nn.utils.rnn.pad_sequence(list(values.split(lengths.tolist())), batch_first=True)


def by_place(tensor: torch.Tensor, places: list, groups: list) -> list:
    """A (N,) or (B,) tensor as nested lists like the reference's."""
    out = [[None] * len(group) for group in groups]
    lengths = [len(groups[g][i]["tokens"]) for g, i in places]
    per_token = len(tensor) == sum(lengths)
    values = [part.tolist() for part in tensor.split(lengths)] if per_token else tensor.tolist()
    for (g, i), value in zip(places, values, strict=True):
        out[g][i] = value
    return out


def flatten(nested) -> list[float]:
    if isinstance(nested, (list, tuple)):
        return [value for item in nested for value in flatten(item)]
    return [float(nested)]


def assert_close(got, wanted, tolerance: float, what: str) -> None:
    got, wanted = flatten(got), flatten(wanted)
    assert len(got) == len(wanted), what
    for index, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance), (
            f"{what}[{index}]: {a!r} is not {b!r}"
        )


TOKEN_QUANTITIES = (
    "advantages",
    "Rpos",
    "Rneg",
    "rho_pos",
    "rho_neg",
    "lambda",
    "forward_mask",
    "backward_mask",
    "token_mask",
    "A",
    "A_tilde",
    "delta",
    "H_bar",
    "H_hat",
    "seq_advantages",
    "rewards",
)


def check_against_reference(
    name: str,
    options: dict,
    groups: list,
    *,
    dtype=torch.float64,
    tolerance=1e-9,
    shuffle=None,
    correction=None,
    **extra,
) -> None:
    """Product and reference agree in loss, gradient and every exposed quantity; shares add up to
    the whole."""
    groups = rounded(groups, dtype)
    batch, new, places = to_batch(groups, dtype=dtype, shuffle=shuffle)
    algorithm = get_algorithm(name, correction=correction, **options, **extra.pop("product", {}))
    wanted = reference.run(name, options, groups, correction=correction, **extra)
    if selection_is_a_near_tie(wanted):
        return
    shaped = algorithm.shape(batch)
    loss = algorithm.loss(new, shaped)
    (grad,) = torch.autograd.grad(loss.value, new)
    assert torch.isfinite(grad).all()
    assert_close(loss.value.item(), wanted["loss"], tolerance, "loss")
    assert_close(by_place(grad, places, groups), wanted["grad"], tolerance, "grad")
    for quantity in TOKEN_QUANTITIES:
        if quantity in wanted:
            assert_close(
                by_place(shaped[quantity], places, groups), wanted[quantity], tolerance, quantity
            )
    if "ratios" in wanted:
        # A ratio that is clipped may be infinite in the product's dtype.
        ratios = torch.tensor(flatten(wanted["ratios"]), dtype=torch.float64).to(dtype).tolist()
        assert_close(by_place(loss.details["ratios"], places, groups), ratios, tolerance, "ratios")
    if "clipped" in wanted:
        # Whether A is 0 or a rounding residue decides `clipped` there; it changes nothing.
        clear = [abs(a) > 1e-6 for a in flatten(wanted["advantages"])]
        got = flatten(by_place(loss.details["clipped"], places, groups))
        pairs = zip(clear, got, flatten(wanted["clipped"]), strict=True)
        assert all(mine == theirs for matters, mine, theirs in pairs if matters), "clipped"
    if "tau" in wanted:
        assert_close(float(shaped["tau"]), wanted["tau"], tolerance, "tau")
    check_shares_add_up(algorithm, shaped, new, loss, grad, tolerance)
    check_selection(algorithm, shaped, new, wanted, tolerance)
    check_terms_add_up(algorithm, shaped, new, loss.value.item(), grad, tolerance)


def selection_is_a_near_tie(wanted: dict) -> bool:
    """The last chosen covariance and the next differ by rounding only, so that either choice is
    right."""
    if "cov" not in wanted or "candidates" in wanted or not wanted["chosen"]:
        return False
    last = min(wanted["cov"][place] for place in wanted["chosen"])
    rest = [value for place, value in wanted["cov"].items() if place not in wanted["chosen"]]
    return bool(rest) and (0 < last - max(rest) < 1e-7 or abs(last) < 1e-7)


def check_shares_add_up(algorithm, shaped, new, loss, grad, tolerance) -> None:
    prepared = algorithm.prepare(new.detach(), shaped)
    rows = torch.randperm(len(shaped), generator=torch.Generator().manual_seed(len(shaped)))
    total, total_grad, metrics = 0.0, torch.zeros_like(new), {}
    for part in rows.split(2):
        share = algorithm.loss(shaped.segments.take(new, part), prepared.select(part))
        total += share.value.item()
        total_grad += torch.autograd.grad(share.value, new)[0]
        for key, value in share.metrics.items():
            metrics[key] = metrics.get(key, 0.0) + value.item()
    assert_close(total, loss.value.item(), tolerance, "sum of shares")
    assert_close(total_grad.tolist(), grad.tolist(), tolerance, "sum of gradients")
    for key, value in loss.metrics.items():
        assert_close(metrics[key], value.item(), max(tolerance, 1e-7), f"metric {key}")


def check_terms_add_up(algorithm, shaped, new, loss: float, grad, tolerance: float) -> None:
    """The terms of single tokens, met in blocks in any order, have the whole's sum and gradient."""
    terms = algorithm.token_loss(algorithm.prepare(new.detach(), shaped))
    if (
        isinstance(algorithm, SequenceAlgorithm)
        or getattr(algorithm.options, "policy_loss_type", "ppo") == "gspo"
    ):
        assert terms is None
        return
    tokens = torch.randperm(len(new), generator=torch.Generator().manual_seed(len(new)))
    total, total_grad = 0.0, torch.zeros_like(grad)
    for block_N in tokens.split(5):
        new_N = new.detach()[block_N].requires_grad_()
        loss_N = terms(new_N, block_N)
        assert loss_N.shape == block_N.shape
        total += loss_N.sum().item()
        total_grad[block_N] = torch.autograd.grad(loss_N.sum(), new_N)[0]
    assert_close(total, loss, tolerance, "sum of terms")
    assert_close(total_grad.tolist(), grad.tolist(), tolerance, "gradient of terms")


def check_selection(algorithm, shaped, new, wanted, tolerance) -> None:
    if "cov" not in wanted:
        return
    prepared = algorithm.prepare(new.detach(), shaped)
    assert sorted(map(tuple, prepared["chosen"].tolist())) == sorted(wanted["chosen"])
    if "candidates" in wanted:
        assert list(map(tuple, prepared["candidates"].tolist())) == wanted["candidates"]
