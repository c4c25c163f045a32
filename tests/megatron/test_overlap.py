"""Communication beside computation, and Adam's states in host memory, change nothing: updates,
log-probs and weights are the same to the last bit."""

from __future__ import annotations

import pytest
import torch

from tests.launch import launch
from tests.megatron.test_policy import make_batch
from tests.models import make_tiny_model

BOTH, GRADIENTS = (
    {"overlap_grad_reduce": True, "overlap_param_gather": True},
    {"overlap_grad_reduce": True},
)
SMALL = {"ddp_bucket_size": 2000}  # parameters: a few layers' worth of this model

# lopsided: one replica has empty micro-batches only, in which the head is not called
CASES = {
    2: [
        {"distributed_optimizer": True, "overlap": BOTH},
        {"distributed_optimizer": True, "overlap": {**BOTH, **SMALL}, "on_host": True},
        {"distributed_optimizer": True, "overlap": {**BOTH, **SMALL}, "lopsided": True},
        {
            "tied": True,
            "distributed_optimizer": True,
            "overlap": {**BOTH, **SMALL},
            "dtype": "bf16",
            "on_host": True,
        },
        {
            "tied": True,
            "overlap": {**GRADIENTS, **SMALL},
            "lopsided": True,
            "recompute": {"recompute": "full"},
        },
        {
            "cp": 2,
            "max_tokens": 12,
            "distributed_optimizer": True,
            "overlap": {**BOTH, **SMALL},
            "head": "two_pass",
        },
        {
            "cp": 2,
            "max_tokens": 12,
            "distributed_optimizer": True,
            "overlap": {},
            "dtype": "bf16",
            "on_host": True,
        },
        {
            "distributed_optimizer": True,
            "overlap": {**BOTH, **SMALL},
            "head": "two_pass",
            "micro_batch_size": 1,
        },
        {
            "mixture": True,
            "ep": 2,
            "distributed_optimizer": True,
            "overlap": {**BOTH, **SMALL},
            "lopsided": True,
        },
        {
            "mixture": True,
            "ep": 2,
            "distributed_optimizer": True,
            "overlap": {},
            "dtype": "bf16",
            "on_host": True,
        },
    ],
    4: [
        {
            "pp": 2,
            "vp": 2,
            "micro_batch_size": 1,
            "distributed_optimizer": True,
            "overlap": {**BOTH, **SMALL},
            "dtype": "bf16",
            "on_host": True,
        },
        {
            "tied": True,
            "pp": 2,
            "micro_batch_size": 1,
            "distributed_optimizer": True,
            "overlap": {**BOTH, **SMALL},
        },
        {
            "tp": 2,
            "sp": True,
            "distributed_optimizer": True,
            "overlap": {**BOTH, **SMALL},
            "on_host": True,
        },
        {
            "mixture": True,
            "ep": 2,
            "tp": 2,
            "sp": True,
            "distributed_optimizer": True,
            "overlap": {**BOTH, **SMALL},
            "on_host": True,
        },
    ],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    paths = {name: str(tmp_path_factory.mktemp(name)) for name in ("plain", "tied", "mixture")}
    for name, path in paths.items():
        make_tiny_model(path, "qwen3_moe" if name == "mixture" else "qwen2", tied=name == "tied")
    return paths


@pytest.mark.parametrize("world_size", CASES)
def test_updates_are_the_same_to_the_last_bit(models, world_size):
    batch, weights_N = make_batch(61)
    names = [
        next((name for name in ("tied", "mixture") if name in case), "plain")
        for case in CASES[world_size]
    ]
    cases = [
        {"model": models[name], **case} for name, case in zip(names, CASES[world_size], strict=True)
    ]
    ranks = launch(
        "tests.megatron.overlap_worker",
        "run_cases",
        world_size,
        cases=cases,
        world_size=world_size,
        batch=batch,
        weights_N=weights_N,
    )
    for number, case in enumerate(CASES[world_size]):
        many = "ddp_bucket_size" in case["overlap"]
        assert max(rank[number]["overlapped"]["buckets"] for rank in ranks) > many, (
            "small buckets are several"
        )
        for rank in ranks:
            plain, overlapped = rank[number]["plain"], rank[number]["overlapped"]
            assert torch.equal(overlapped["logprobs"], plain["logprobs"]), case
            for ours, theirs in zip(overlapped["steps"], plain["steps"], strict=True):
                assert ours["loss/policy"] == theirs["loss/policy"], case
            assert all(map(torch.equal, overlapped["parameters"], plain["parameters"])), case
            assert overlapped["weights"].keys() == plain["weights"].keys()
            assert all(
                torch.equal(overlapped["weights"][name], value)
                for name, value in plain["weights"].items()
            )
        losses = [step["loss/policy"] for step in ranks[0][number]["plain"]["steps"]]
        assert len(set(losses)) == len(losses), "every step changed the weights"
