"""Frozen weights in host memory score, a reference's or a guide's, and leave the policy's training
alone."""

from __future__ import annotations

import functools

import pytest
import torch

from openrlhf_ext.megatron import frozen
from openrlhf_ext.megatron.frozen import FrozenCopy
from openrlhf_ext.megatron.host_memory import HostArena
from tests.launch import launch
from tests.megatron.reference import make_batch
from tests.megatron.reference import reference as transformers_outcome
from tests.models import make_tiny_model

CASES = [
    {"tp": 2, "dtype": "fp32", "distributed": False},
    # parameters are views into Megatron's buffers
    {"pp": 2, "dtype": "bf16", "distributed": True, "tied": True},
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    batch, weights_N = make_batch(61)
    cases, truth = [], []
    for case in CASES:
        name = "tied" if case.get("tied") else "untied"
        make_tiny_model(folder / name, tied="tied" in case, layers=2)
        guide = make_tiny_model(folder / f"{name}_guide", tied="tied" in case, layers=2, seed=7)
        truth.append(transformers_outcome(guide, batch, weights_N, steps=1)["logprobs"])
        cases.append(
            {
                **case,
                "world_size": 2,
                "model": str(folder / name),
                "guide": str(folder / f"{name}_guide"),
            }
        )
    results = launch(
        "tests.megatron.frozen_worker",
        "run_cases",
        2,
        cases=cases,
        batch=batch,
        weights_N=weights_N,
    )
    return [
        [result | {"truth": scores} for result, scores in zip(rank, truth, strict=True)]
        for rank in results
    ]


@pytest.mark.parametrize("index", range(len(CASES)), ids=[str(case) for case in CASES])
def test_scores_with_the_starting_weights_and_changes_nothing(ranks, index):
    for result in (rank[index] for rank in ranks):
        assert torch.equal(result["inside"], result["start"]), (
            "the reference is not what the policy was"
        )
        assert torch.equal(result["later"], result["start"]), (
            "the reference changed by being swapped in"
        )
        assert not torch.allclose(result["trained"], result["start"], atol=1e-3), (
            "training did nothing"
        )
        assert result["exact"], "the policy's weights are not the same bits after a swap"
        assert result["steps"] == result["plain"], (
            "training differs from training without a reference"
        )
        taken, needed = result["bytes"]
        assert needed <= taken < 1.05 * needed, "blocks are aligned, nothing else is added"


@pytest.mark.parametrize("index", range(len(CASES)), ids=[str(case) for case in CASES])
def test_a_guide_scores_as_in_transformers_and_changes_nothing(ranks, index):
    tolerance = 1e-4 if CASES[index]["dtype"] == "fp32" else 0.2
    for result in (rank[index] for rank in ranks):
        assert result["guide"].allclose(result["truth"], atol=tolerance)
        assert not result["guide"].allclose(result["trained"], atol=0.5), (
            "it is the policy that scores"
        )
        assert result["guide_exact"], "the policy's weights are not the same bits"
        assert result["guide_bytes"] == result["bytes"][0], (
            "a guide takes more memory than a reference"
        )


def test_parameters_may_lie_across_the_chunks_of_pinned_memory(monkeypatch):
    """torch rounds a pinned block up to a power of two: whole chunks waste nothing, a block per
    parameter would."""
    monkeypatch.setattr(frozen, "HostArena", functools.partial(HostArena, chunk_bytes=600))
    model = torch.nn.Sequential(torch.nn.Linear(13, 11), torch.nn.Linear(11, 40)).bfloat16()
    start = [p.detach().clone() for p in model.parameters()]
    copy = FrozenCopy([model])
    torch.nn.init.normal_(model[1].weight)
    torch.nn.init.normal_(model[0].bias)
    trained = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        with copy.swapped_in():
            assert all(
                torch.equal(p, before) for p, before in zip(model.parameters(), start, strict=True)
            )
        assert all(torch.equal(p, now) for p, now in zip(model.parameters(), trained, strict=True))
