"""Mixtures of experts equal transformers in every layout, with the experts that routers choose and
with given ones."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.launch import launch
from tests.megatron.reference import TEMPERATURE
from tests.models import EXPERTS, EXPERTS_PER_TOKEN, make_tiny_model, unfused
from tests.sequences import masked_batch, plain_rows

LAYERS = 4
RE_MOE = {"recompute": "selective", "recompute_modules": ("moe",)}
FULL = {"recompute": "full"}


def make_batch():
    """Twelve sequences of three prompts, the same in each group of four; their weights, and experts
    for every token, those of a prompt the same in all of its sequences, as an engine's prefix cache
    has them."""
    generator = torch.Generator().manual_seed(5)
    lengths = [
        (4, 9),
        (4, 1),
        (4, 6),
        (4, 3),
        (7, 2),
        (7, 12),
        (7, 1),
        (7, 5),
        (2, 1),
        (2, 4),
        (2, 8),
        (2, 3),
    ]
    sequences = [torch.randint(2, 61, (p + r,), generator=generator) for p, r in lengths]
    for row, (prompt, _) in enumerate(lengths):
        sequences[row][:prompt] = sequences[row // 4 * 4][:prompt]
    masks = [torch.tensor([0] * (p - 1) + [1] * r) for p, r in lengths]
    batch = masked_batch(sequences, masks)
    experts_MYK = torch.rand((len(batch.tokens_M), LAYERS, EXPERTS), generator=generator)
    experts_MYK = experts_MYK.topk(EXPERTS_PER_TOKEN).indices
    starts = batch.sequences.bounds[:-1]
    for row, (prompt, _) in enumerate(lengths):
        first = starts[row // 4 * 4]
        experts_MYK[starts[row] : starts[row] + prompt - 1] = experts_MYK[
            first : first + prompt - 1
        ]
    weights_N = torch.rand(batch.responses.tokens, generator=generator)
    rows = experts_MYK.to(torch.uint8).split(batch.lengths_B.tolist())
    return batch.with_experts([row.numpy()[:-1] for row in rows]), weights_N


AUX = 0.5


def truth(model, batch, weights_N, aux: float = 0.0) -> dict:
    """Of transformers in fp64: log-probs, entropies and gradients of -sum(weights * log-probs), one
    sequence at a time, and what its routers chose. Experts are the batch's if it has some. ``aux``:
    weight of DeepSeek-V3's balance loss, each sequence's times its tokens, as a mean over all
    tokens and layers."""
    model = copy.deepcopy(model).double()
    model.set_experts_implementation("eager")  # the default, grouped_mm, does not take fp64
    given, chosen, balances = [], [], []

    def routed(layer, router, hidden):
        logits = F.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
        probs = logits.softmax(-1)
        index = probs.topk(EXPERTS_PER_TOKEN, -1).indices
        if given:  # of all tokens but the last
            index = torch.cat([given[0][:-1, layer].long(), index[-1:]])
        chosen.append((layer, index, torch.special.entr(probs).sum(-1).detach()))
        of_choices = torch.bincount(index.flatten(), minlength=EXPERTS) / index.numel()
        balances.append(
            len(probs) * EXPERTS * (of_choices * probs.mean(0)).sum() / len(batch.tokens_M) / LAYERS
        )
        weights = probs.gather(1, index)
        return (
            logits,
            weights / weights.sum(-1, keepdim=True) if router.norm_topk_prob else weights,
            index,
        )

    for number, layer in enumerate(model.model.layers):
        layer.mlp.gate.forward = partial(routed, number, layer.mlp.gate)
    by_row, rows = [], [None] * len(batch)
    if batch.experts_MYK is not None:
        rows = batch.experts_MYK.split(batch.lengths_B.tolist())
    for (tokens, positions), experts in zip(plain_rows(batch), rows, strict=True):
        given[:] = [] if experts is None else [experts]
        log_p = (model(tokens[None]).logits[0] / TEMPERATURE).log_softmax(-1)
        by_row.append(
            (log_p[positions, tokens[positions + 1]], -(log_p.exp() * log_p).sum(-1)[positions])
        )
    logprobs, entropies = (torch.cat(values) for values in zip(*by_row, strict=True))
    loss, balance = -(logprobs * weights_N).sum(), sum(balances)
    (loss + aux * balance).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {
        "balance": balance.item(),
        "logprobs": logprobs.detach(),
        "entropies": entropies.detach(),
        "loss": loss.item(),
        "grads": unfused(grads),
        "grad_norm": torch.stack([g.norm() for g in grads.values()]).norm().item(),
        "chosen": chosen,
    }


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Family -> its path, and (whether experts are given, weight of the balance loss) -> the
    truth."""
    batch, weights_N = make_batch()
    own = dataclasses.replace(batch, experts_MYK=None, told_B=None)
    made = {}
    for family in ("qwen3_moe", "qwen2_moe"):
        path = tmp_path_factory.mktemp(family)
        model = make_tiny_model(path, family)
        truths = {
            (replay, aux): truth(model, batch if replay else own, weights_N, aux)
            for replay in (False, True)
            for aux in (0.0, AUX)
        }
        made[family] = str(path), truths
    return made


# layouts; what is left of the ranks is data-parallel. "replay": experts are given
TP2 = {"tp": 2, "sp": True}
LAYOUTS = {
    1: [
        {},
        {"replay": True},
        {"replay": True, "recompute": {"share_prompts_enable": False}},
        {"family": "qwen2_moe", "replay": True, "recompute": RE_MOE},
        {"replay": True, "recompute": FULL},
        {"record": True},
        {"aux": AUX},
        {"aux": AUX, "family": "qwen2_moe", "replay": True},
    ],
    2: [
        {},
        {"ep": 2},
        {"ep": 2, "lopsided": True, "distributed_optimizer": True},
        {**TP2, "etp": 2},
        {"ep": 2, "lopsided": True, "record": True},
        {**TP2, "ep": 2, "replay": True},
        {"cp": 2, "ep": 2, "replay": True},
        {"cp": 2},
        {"pp": 2, "replay": True, "recompute": FULL},
        {"pp": 2, "replay": True, "recompute": RE_MOE},
        {"pp": 2, "ends": (1, None), "record": True},
        {"family": "qwen2_moe", **TP2, "ep": 2},
        {"family": "qwen2_moe", **TP2},
        {**TP2, "ep": 2, "aux": AUX},
        {"cp": 2, "ep": 2, "aux": AUX, "recompute": RE_MOE},
        {"ep": 2, "aux": AUX},
        {"pp": 2, "aux": AUX, "recompute": FULL, "replay": True},
        {"lopsided": True, "aux": AUX},
    ],
    4: [
        {"ep": 2},
        {"ep": 4, **TP2, "record": True},
        {"cp": 2, **TP2, "record": True, "ep": 2},
        {"ep": 4, **TP2, "distributed_optimizer": True},
        {"ep": 2, "distributed_optimizer": True},
        {"ep": 2, "etp": 2, **TP2, "replay": True},
        {"ep": 2, "pp": 2, "replay": True},
        {"ep": 2, "pp": 2, "vp": 2, "replay": True, "recompute": FULL},
        {**TP2, "ep": 2, "pp": 2, "replay": True, "recompute": RE_MOE},
        {"cp": 2, **TP2, "ep": 4, "replay": True},
        {"family": "qwen2_moe", "ep": 2, "etp": 2, **TP2, "distributed_optimizer": True},
    ],
}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm().clamp_min(1e-12)).item()


def expected_metrics(expected: dict, batch) -> dict[str, float]:
    """Metrics of the experts that transformers chose, of all tokens, a shared prompt's counted once
    for every row."""
    counts, entropies = torch.zeros(LAYERS, EXPERTS), torch.zeros(LAYERS)
    for layer, index, entropy in expected["chosen"]:
        counts[layer] += torch.bincount(index.flatten(), minlength=EXPERTS)
        entropies[layer] += entropy.sum()
    return {
        "moe/load_max": (counts.max(1).values / counts.mean(1)).mean().item(),
        "moe/idle_experts": (counts == 0).sum(1).double().mean().item(),
        "moe/router_entropy": (entropies / len(batch.tokens_M)).mean().item(),
    }


def check_recorded(experts_MYK: torch.Tensor, rows: list[int], chosen: list) -> None:
    """Those of the rank's stage, whatever their order, are transformers'; ``chosen``: of every row
    and layer."""
    seen = experts_MYK.flatten(2).sum((0, 2)) > 0
    assert seen.any()
    for layer in seen.nonzero().flatten().tolist():
        theirs = torch.cat([chosen[row * LAYERS + layer][1] for row in rows])
        assert torch.equal(experts_MYK[:, layer].long().sort(-1).values, theirs.sort(-1).values)


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_equals_transformers(checkpoints, world_size):
    batch, weights_N = make_batch()
    defaults = {
        "family": "qwen3_moe",
        "temperature": TEMPERATURE,
        "world_size": world_size,
        "micro_batch_size": 4,
    }
    todo = [defaults | layout for layout in LAYOUTS[world_size]]
    todo = [case | {"model": checkpoints[case["family"]][0], "steps": 1} for case in todo]
    own = dataclasses.replace(batch, experts_MYK=None, told_B=None)
    ranks = {
        replay: launch(
            "tests.megatron.parity",
            "run_cases",
            world_size,
            batch=batch if replay else own,
            weights_N=weights_N,
            cases=[case for case in todo if case.get("replay", False) == replay],
        )
        for replay in (False, True)
    }
    for case in todo:
        replay = case.get("replay", False)
        expected = checkpoints[case["family"]][1][replay, case.get("aux", 0.0)]
        for rank, results in enumerate(ranks[replay]):
            got = results.pop(0)
            logprobs, entropies = (
                batch.responses.take(expected[k], got["rows"]) for k in ("logprobs", "entropies")
            )
            assert torch.allclose(got["logprobs"].double(), logprobs, atol=1e-5, rtol=0), case
            assert torch.allclose(got["entropies"].double(), entropies, atol=1e-5, rtol=0), case
            (step,) = got["steps"]
            assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-6), case
            groups = (
                sum(value**2 for name, value in step.items() if name.startswith("grad_norm/"))
                ** 0.5
            )
            assert groups == pytest.approx(step["grad_norm"], rel=2e-6), case
            assert {"grad_norm/router", "grad_norm/experts"} <= step.keys()
            assert ("moe/replay_changed" in step) == (replay or case.get("record", False)), case
            if "aux" in case:
                assert step["loss/balance"] == pytest.approx(expected["balance"], rel=1e-5), case
            if case.get("record"):
                assert step["moe/replay_changed"] == 0.0
                if got["rows"] or not case.get("lopsided"):
                    check_recorded(got["experts"], got["rows"], expected["chosen"])
            if rank:
                continue
            for name, grad in got.get("grads", {}).items():
                assert relative(grad.double(), expected["grads"][name]) < 1e-5, (case, name)
            assert got["weights"].keys() == expected["grads"].keys()
            if not replay:
                wanted = expected_metrics(expected, batch)
                assert {name: step[name] for name in wanted} == pytest.approx(wanted, rel=1e-5), (
                    case
                )
