"""An exact policy has the gradients of a plain one, and the same log-probs in every layout, packing,
head, and way of recomputing, before and after updates; a fault shows in its bits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from openrlhf_ext.exact.limits import processor_problem
from openrlhf_ext.megatron.step.batch import SequenceBatch, sequence_batch
from tests.launch import launch
from tests.models import make_tiny_policy

if (_PROBLEM := processor_problem()) is not None:
    pytest.skip(_PROBLEM, allow_module_level=True)

TOLERANCE = 1e-5
SELECTIVE = {"recompute": "selective", "recompute_modules": ("core_attn", "mlp")}
# {name: (family, case)} by ranks; the first of a family and a type on one rank is what the others
# of both are compared with
ONE: dict[str, dict[str, Any]] = {
    "none": {"trained": True},
    "selective": {"recompute": SELECTIVE},
    "full": {"recompute": {"recompute": "full"}, "trained": True},
    "two_pass": {"head": "two_pass"},
    "one row": {"micro_batch_size": 1},
    "tokens": {"max_tokens": 600, "forward_max_tokens": 400},
}
TWO: dict[str, dict[str, Any]] = {
    "dp": {"micro_batch_size": 3},
    "pp": {"pp": 2, "trained": True},
    "pp full": {"pp": 2, "recompute": {"recompute": "full"}, "max_tokens": 500},
    "tp": {"tp": 2, "trained": True},
    "tp two_pass": {"tp": 2, "head": "two_pass", "micro_batch_size": 3},
}
FAMILIES = ("qwen2", "qwen3")  # with biases; with norms of heads
TYPES = ("fp32", "bf16")


def make_batch() -> tuple[SequenceBatch, torch.Tensor]:
    """Groups of four with the same prompt, one of them longer than a page of keys."""
    chance, rows, spans = random.Random(5), [], []
    for prompt in (140, 9, 33):
        common = [chance.randrange(2, 258) for _ in range(prompt)]
        for _ in range(4):
            response = [chance.randrange(2, 258) for _ in range(chance.randint(1, 60))]
            rows.append(np.array(common + response, dtype=np.int32))
            spans.append([(prompt, len(rows[-1]))])
    batch = sequence_batch(rows, spans)
    generator = torch.Generator().manual_seed(6)
    return batch, torch.randn(batch.responses.tokens, generator=generator) / batch.responses.tokens


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        make_tiny_policy(folder / family, family)
    return {family: folder / family for family in FAMILIES}


@pytest.fixture(scope="module")
def found(models, tmp_path_factory) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    """(family, type, name) -> what each rank saw."""
    batch, weights_N = make_batch()
    seen = {}
    for world_size, layouts in ((1, ONE), (2, TWO)):
        named = {
            (family, dtype, name): {"model": str(models[family]), "dtype": dtype, **layout}
            for family in FAMILIES
            for dtype in TYPES
            for name, layout in layouts.items()
            if family == "qwen2" or name in ("none", "pp", "tp")
        }
        if world_size == 1:
            for family in FAMILIES:
                plain = {"model": str(models[family]), "plain": True}
                named[family, "fp32", "plain"] = plain
        ranks = launch(
            "tests.exact.ranks",
            "run_cases",
            world_size,
            cases=list(named.values()),
            world_size=world_size,
            batch=batch,
            weights_N=weights_N,
            folder=tmp_path_factory.mktemp(f"exported{world_size}"),
        )
        for number, name in enumerate(named):
            seen[name] = [rank[number] for rank in ranks]
    return seen


def differing(one: dict[int, torch.Tensor], other: dict[int, torch.Tensor]) -> int:
    """Log-probs of the rows of ``one`` that are not the same bits in ``other``."""
    return sum(
        int((values.view(torch.int32) != other[row].view(torch.int32)).sum())
        for row, values in one.items()
    )


def test_every_forward_pass_has_the_same_bits(found):
    """Those of tensor parallelism add up in another order, and are compared among themselves."""
    for (family, dtype, name), ranks in found.items():
        if name == "plain":
            continue
        like = "tp" if name.startswith("tp") else "none"
        wanted = found[family, dtype, like][0]["forward"]
        assert len(wanted) == 12
        for rank in ranks:
            for kind in ("forward", "training"):
                assert differing(rank[kind], wanted) == 0, (family, dtype, name, kind)
    for family in FAMILIES:
        exact, plain = (found[family, "fp32", name][0]["forward"] for name in ("none", "plain"))
        assert differing(exact, plain) > 0, "the two kinds of policy cannot be told apart"
        for row, values in exact.items():
            torch.testing.assert_close(values, plain[row], rtol=0, atol=1e-4)


def test_gradients_are_those_of_a_plain_policy(found):
    for (family, dtype, name), ranks in found.items():
        if dtype != "fp32":
            continue
        # an export is whole on the first rank, and empty on others
        grads, truth = ranks[0]["grads"], found[family, "fp32", "plain"][0]["grads"]
        assert grads.keys() == truth.keys(), (family, name)
        error = sum(
            float((grads[each].double() - truth[each].double()).square().sum()) for each in truth
        )
        norm = sum(float(each.double().square().sum()) for each in truth.values())
        assert norm > 0 and (error / norm) ** 0.5 < TOLERANCE, (family, name, error / norm)


def test_a_trained_policy_is_that_of_its_exported_weights(found):
    """Which is what an engine computes after a sync."""
    trained = [rank for ranks in found.values() for rank in ranks if "live" in rank]
    assert len(trained) > 10
    for rank in trained:
        assert differing(rank["live"], rank["fresh"]) == 0
        assert differing(rank["live"], rank["forward"]) > 0.9 * sum(map(len, rank["live"].values()))


@pytest.mark.parametrize("dtype", TYPES)
def test_a_fault_shows_in_a_bit(models, dtype):
    batch, weights_N = make_batch()
    (faults,) = launch(
        "tests.exact.ranks",
        "run_faults",
        1,
        case={"model": str(models["qwen2"]), "dtype": dtype},
        batch=batch,
        weights_N=weights_N,
    )
    differ = {
        fault: int((one.view(torch.int32) != other.view(torch.int32)).sum())
        for fault, (one, other) in faults.items()
    }
    assert differ.pop("again") == 0
    assert len(differ) == 3 and all(differ.values()), differ
