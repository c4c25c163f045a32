"""States that left the device and came back are the same, and while they are away their memory is
free."""

from __future__ import annotations

import functools

import pytest
import torch

from openrlhf_ext.fp8.recipe import Recipe
from openrlhf_ext.megatron import moving_average
from openrlhf_ext.megatron.host_memory import HostArena, ModelStates
from openrlhf_ext.megatron.layers.fp8 import FP8Layers
from openrlhf_ext.megatron.moving_average import MovingAverage
from tests.launch import launch
from tests.megatron.reference import make_batch
from tests.models import make_tiny_model

CASES = [
    {"dtype": "fp32"},
    {"dtype": "fp32", "distributed_optimizer": True},
    {"dtype": "bf16", "distributed_optimizer": True},
    {"dtype": "bf16", "tp": 2},
    {"dtype": "bf16", "pp": 2, "distributed_optimizer": True},
    {
        "dtype": "bf16",
        "distributed_optimizer": True,
        "overlap": {
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
            "ddp_bucket_size": 2000,
        },
    },
    {"dtype": "bf16", "distributed_optimizer": True, "on_host_with_swaps": True},
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_tiny_model(path, tied=True)
    batch, weights_N = make_batch(61)
    cases = [{"model": str(path), **case} for case in CASES]
    return launch(
        "tests.megatron.offload_worker",
        "run_cases",
        2,
        cases=with_world_size(cases),
        batch=batch,
        weights_N=weights_N,
    )


def with_world_size(cases: list[dict]) -> list[dict]:
    return [{"world_size": 2, **case} for case in cases]


@pytest.mark.parametrize("case", range(len(CASES)), ids=[str(case) for case in CASES])
def test_training_with_swaps_equals_training_without(ranks, case):
    for rank in ranks:
        plain, swapped = rank[case]["plain"], rank[case]["swapped"]
        assert swapped["steps"] == plain["steps"]
        assert all(
            torch.equal(a, b) for a, b in zip(swapped["logprobs"], plain["logprobs"], strict=True)
        )
        assert plain["weights"].keys() == swapped["weights"].keys()
        assert all(
            torch.equal(swapped["weights"][name], tensor)
            for name, tensor in plain["weights"].items()
        )


@pytest.mark.parametrize("case", range(len(CASES)), ids=[str(case) for case in CASES])
def test_all_memory_of_model_gradients_and_optimizer_is_given_back(ranks, case):
    for rank in ranks:
        first, second, third = rank[case]["swapped"]["swaps"]
        for swap in (first, second, third):
            assert swap["left"] == 0, (
                "something of the model, its gradients or its optimizer stayed behind"
            )
            assert swap["again"].room_bytes == 0, "a second offload finds nothing"
            assert swap["back"].moved_bytes == swap["had"]["parameters"] > 0
            assert swap["main_grads_are_views"], "views must stay on DDP's buffers"
        assert first["out"].room_bytes == first["total"] == sum(first["had"].values())
        assert first["out"].moved_bytes == first["total"] - first["had"]["gradients"], (
            "of gradients nothing travels"
        )
        assert (
            second["resident"] == {"parameters"}
            and second["out"].moved_bytes == second["had"]["parameters"]
        )
        if CASES[case].get("on_host_with_swaps"):
            assert first["had"]["optimizer"] == second["had"]["optimizer"] == 0, (
                "what waits on the host does not move"
            )
        else:
            assert second["had"]["optimizer"] > first["had"]["optimizer"], (
                "Adam's moments exist after the first step"
            )


def test_mixed_precision_states_have_the_expected_sizes(ranks):
    """Per parameter: 2 bytes of bf16, 4 of gradient, 12 of master weight and moments, the last
    shared by the copies."""
    for rank in ranks:
        # bf16, two data-parallel ranks with the distributed optimizer
        had = rank[2]["swapped"]["swaps"][1]["had"]
        assert had["gradients"] == 2 * had["parameters"]
        # buffers are padded
        assert had["optimizer"] == pytest.approx(had["parameters"] / 2 * 12 / 2, rel=0.02)


def test_an_arena_hands_out_ranges_across_chunks():
    arena = HostArena(pinned=False, chunk_bytes=8)
    arena.reserve(20)
    assert arena.nbytes == 20
    pieces = list(arena.pieces(6, 12))
    assert [piece.numel() for piece in pieces] == [2, 8, 2]
    for value, piece in enumerate(pieces):
        piece.fill_(value)
    assert torch.cat(list(arena.pieces(0, 20)))[6:18].tolist() == [0] * 2 + [1] * 8 + [2] * 2
    first = arena.pieces(0, 8).__next__().data_ptr()
    arena.reserve(30)
    assert arena.nbytes == 30 and next(arena.pieces(0, 8)).data_ptr() == first, (
        "whole chunks are kept"
    )


def test_unknown_kinds_are_refused():
    states = ModelStates([torch.nn.Linear(2, 2)], None, torch.device("cpu"))
    with pytest.raises(ValueError, match="parameters.*got \\['weights'\\]"):
        states.offload("weights")


def test_a_model_that_is_never_trained_has_parameters_only():
    model = torch.nn.Linear(3, 5)
    before = model.weight.clone()
    states = ModelStates([model], None, torch.device("cpu"))
    assert states.offload().moved_bytes == 4 * (15 + 5)
    assert model.weight.untyped_storage().nbytes() == 0
    states.reload()
    assert torch.equal(model.weight, before)


def test_a_cpu_storage_that_numpy_has_seen_is_zero_while_away_and_comes_back():
    model = torch.nn.Linear(3, 5, bias=False)
    before = torch.tensor(model.weight.tolist())
    model.weight.detach().numpy()
    states = ModelStates([model], None, torch.device("cpu"))
    swap = states.offload()
    assert (swap.moved_bytes, swap.measured_bytes) == (60, 0)
    assert not model.weight.any()
    states.reload()
    assert torch.equal(model.weight, before)


def test_a_moving_average_in_blocks_is_the_formula_in_one_piece(monkeypatch):
    """Blocks that end neither with a parameter nor with a piece of the arena."""
    monkeypatch.setattr(moving_average, "_BLOCK_ENTRIES", 7)
    monkeypatch.setattr(moving_average, "HostArena", functools.partial(HostArena, chunk_bytes=1024))
    model = torch.nn.Linear(61, 13, dtype=torch.bfloat16)
    kept = MovingAverage([model], beta=0.75)
    wanted = {name: p.detach().float() for name, p in model.named_parameters()}
    for draw in (1.0, 2.0):
        for name, parameter in model.named_parameters():
            parameter.data.add_(draw)
            wanted[name] = wanted[name].lerp(parameter.detach().float(), 0.25)
        kept.update()
    for name, parameter in model.named_parameters():
        assert torch.equal(kept.of(parameter), wanted[name])
        kept.put(parameter, 2 * wanted[name])
        assert torch.equal(kept.of(parameter), 2 * wanted[name])


def test_copies_that_transformer_engine_keeps_of_weights_go_with_them():
    layer = torch.nn.Linear(4, 4)
    layer._fp8_workspaces = {"weight": torch.zeros(16, dtype=torch.uint8)}
    states = ModelStates(
        [torch.nn.Sequential(layer)], None, torch.device("cpu"), [FP8Layers(Recipe())]
    )
    states.offload("gradients")
    assert layer._fp8_workspaces
    states.offload("parameters")
    assert not layer._fp8_workspaces
