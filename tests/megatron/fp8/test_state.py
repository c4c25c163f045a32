"""The state of delayed FP8 scaling in checkpoints and with frozen weights."""

from __future__ import annotations

import pytest
import torch

from openrlhf_ext.fp8.recipe import Recipe
from tests.launch import launch
from tests.megatron.reference import make_batch
from tests.models import make_tiny_model

DELAYED = Recipe("delayed", "hybrid", amax_history_len=4, emulate=True)
BLOCKWISE = Recipe(emulate=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_model(folder, layers=4)
    return str(folder)


LOADED = [
    {"fp8": DELAYED, "pp": 2},
    {"fp8": DELAYED, "tp": 2, "sp": True},
    {"fp8": BLOCKWISE, "pp": 2},
    {"fp8": Recipe("delayed", "hybrid", amax_history_len=8, emulate=True), "pp": 2},
]


@pytest.fixture(scope="module")
def resumed(tiny, tmp_path_factory):
    batch, weights_N = make_batch(61)
    cases = [{"model": tiny, "head": "two_pass", **case} for case in LOADED]
    return launch(
        "tests.megatron.fp8.ranks",
        "resume",
        2,
        saved=cases[0],
        loaded=cases,
        folder=tmp_path_factory.mktemp("checkpoint"),
        batch=batch,
        weights_N=weights_N,
    )


def test_a_run_goes_on_bit_for_bit(resumed):
    for rank in resumed:
        saved, loaded, *_ = rank
        assert saved["steps"] == loaded["steps"]
        assert all(
            torch.equal(loaded["weights"][name], value) for name, value in saved["weights"].items()
        )
    assert resumed[0][0]["weights"], "rank 0 has them"


def test_histories_survive_another_layout(resumed):
    saved = {name: value for rank in resumed for name, value in rank[0]["state"].items()}
    assert len(saved) == 4 * 4 * 3 * 2
    for rank in resumed:
        state = rank[2]["state"]
        assert state.keys() == saved.keys(), "every rank has all layers without pipeline stages"
        assert all(torch.equal(state[name], value) for name, value in saved.items())


def test_a_checkpoint_with_histories_can_be_loaded_without_delayed_scaling(resumed):
    assert all(not rank[3]["state"] and rank[3]["steps"] for rank in resumed)


def test_a_history_of_another_length_is_refused(resumed):
    for rank in resumed:
        assert "fp8.amax_history_len" in rank[4]["error"] and "(4,)" in rank[4]["error"]


def test_frozen_weights_have_scales_of_their_own(tiny, tmp_path):
    make_tiny_model(tmp_path, layers=4, seed=5)
    batch, weights_N = make_batch(61)
    case = {"fp8": DELAYED, "pp": 2, "model": tiny, "head": "two_pass"}
    for rank in launch(
        "tests.megatron.fp8.ranks",
        "swap",
        2,
        case=case,
        guide=str(tmp_path),
        batch=batch,
        weights_N=weights_N,
    ):
        assert rank["untouched"] and rank["kept"]
        assert torch.equal(rank["inside"], rank["start"]) and not torch.equal(
            rank["trained"], rank["start"]
        )
        assert torch.equal(rank["guided"], rank["alone"])
        assert all(
            torch.equal(rank["of_guide"][name], value)
            for name, value in rank["alone_state"].items()
        )
