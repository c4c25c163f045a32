"""Emulated FP8 layers in every layout: the same codes as one process makes of the same shards, the
same training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from openrlhf_ext.fp8.recipe import BF16Layers, Recipe
from openrlhf_ext.megatron.layers.fp8 import FP8Unavailable, prove
from tests.launch import launch
from tests.megatron.reference import make_batch
from tests.models import make_tiny_model

BLOCKWISE = Recipe(emulate=True)
CURRENT = Recipe("current", "hybrid", emulate=True)
DELAYED = Recipe("delayed", "hybrid", amax_history_len=4, emulate=True)
FULL = {"recompute": "full"}
SAME_BITS = {
    "pp": {"pp": 2},
    "vp": {"pp": 2, "vp": 2},
    "full": {"recompute": FULL},
    "pp full": {"pp": 2, "recompute": FULL},
}
ALIGNED = {"tp": {"tp": 2}, "sp": {"tp": 2, "sp": True}, "cp": {"cp": 2}, "dp": {"dp": 2}}
CASES = {
    **{f"blockwise {name}": {"fp8": BLOCKWISE, **case} for name, case in SAME_BITS.items()},
    **{f"delayed {name}": {"fp8": DELAYED, **case} for name, case in SAME_BITS.items()},
    "blockwise": {"fp8": BLOCKWISE},
    "delayed": {"fp8": DELAYED},
    "delayed part": {
        "fp8": DELAYED,
        "recompute": {"recompute": "selective", "recompute_modules": ("mlp",)},
    },
    "none": {"fp8": None},
    "no layer": {"fp8": Recipe(emulate=True, bf16_layers=BF16Layers(3, 1))},
    "two layers": {"fp8": Recipe(emulate=True, bf16_layers=BF16Layers(1, 1))},
    "mlp": {"fp8": replace(DELAYED, modules="mlp")},
    **{
        f"{recipe.name} packs of {size}": {
            "fp8": recipe,
            "micro_batch_size": size,
            "forward_max_tokens": 64 * size,
            "max_tokens": 64 * size,
        }
        for recipe in (BLOCKWISE, CURRENT)
        for size in (1, 8)
    },
    "aligned none": {"fp8": None, "aligned": True},
    "aligned": {"fp8": BLOCKWISE, "aligned": True},
    **{
        f"aligned {name}": {"fp8": BLOCKWISE, "aligned": True, **case}
        for name, case in ALIGNED.items()
    },
}


def world_size(case: dict) -> int:
    return case.get("tp", 1) * case.get("pp", 1) * case.get("cp", 1) * case.get("dp", 1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_model(folder, layers=4)
    return folder


def make_aligned_model(folder) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=61,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.1,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).float().save_pretrained(folder)


@pytest.fixture(scope="module")
def results(tiny, tmp_path_factory) -> dict[str, list[dict]]:
    """Of each case what all of its ranks found; cases of a size share a launch."""
    aligned = tmp_path_factory.mktemp("aligned")
    make_aligned_model(aligned)
    batch, weights_N = make_batch(61)
    found = {}
    for size in (1, 2):
        chosen = {name: case for name, case in CASES.items() if world_size(case) == size}
        given = [
            {"model": str(aligned if "aligned" in case else tiny), "head": "two_pass", **case}
            for case in chosen.values()
        ]
        ranks = launch(
            "tests.megatron.fp8.ranks",
            "run_policies",
            size,
            cases=given,
            batch=batch,
            weights_N=weights_N,
        )
        found |= {
            name: list(of_ranks)
            for name, of_ranks in zip(chosen, zip(*ranks, strict=True), strict=True)
        }
    return found


@pytest.mark.parametrize("recipe", ["blockwise", "delayed"])
@pytest.mark.parametrize("case", SAME_BITS)
def test_stages_and_recomputation_change_no_bit(results, recipe, case):
    whole, ranks = results[recipe][0], results[f"{recipe} {case}"]
    got = ranks[0]
    assert torch.equal(got["before"], whole["before"])
    assert torch.equal(got["after"], whole["after"])
    assert [step["loss/policy"] for step in got["steps"]] == [
        step["loss/policy"] for step in whole["steps"]
    ]
    assert got["weights"].keys() == whole["weights"].keys()
    assert all(
        torch.equal(got["weights"][name], weight) for name, weight in whole["weights"].items()
    )
    state = {name: tensor for rank in ranks for name, tensor in rank["state"].items()}
    assert state.keys() == whole["state"].keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in whole["state"].items())


def test_recomputing_a_part_of_a_layer_uses_the_scales_of_its_first_pass(results):
    # Megatron adds up gradients in another order then, without FP8 too: 5e-6 nats after two steps
    assert results["delayed"][0]["after"].allclose(results["delayed part"][0]["after"], atol=1e-4)


def test_forward_passes_move_no_scale_and_training_does(results):
    for name in ("delayed", "delayed pp", "delayed vp", "delayed full"):
        for rank in results[name]:
            assert rank["unmoved"] and torch.equal(rank["before"], rank["again"])
            moved = [n for n, t in rank["state"].items() if not torch.equal(t, rank["at_start"][n])]
            assert {n.rpartition(".")[0] for n in moved} == {
                n.rpartition(".")[0] for n in rank["state"]
            }


def test_delayed_scales_begin_with_what_the_weights_make_of_a_sequence(results):
    state = results["delayed"][0]["at_start"]
    assert len(state) == 4 * 4 * 3 * 2, "layers x linears x operands x (scale, history)"
    for name, tensor in state.items():
        operand, what = name.split(".")[-2:]
        if what == "scale":
            assert (tensor == 1) == (operand == "dy"), name
        else:
            assert (tensor != 0).sum() == (operand != "dy"), name


def test_only_delayed_scaling_has_state(results):
    assert not results["blockwise"][0]["state"]


def test_layers_left_in_bf16_are(results):
    exact, none = results["none"][0]["before"], results["no layer"][0]["before"]
    assert none.allclose(exact, atol=1e-4), "packs are padded with FP8, which moves the last bits"
    gaps = [
        (results[name][0]["before"] - exact).abs().mean() for name in ("two layers", "blockwise")
    ]
    assert 0 < gaps[0] < gaps[1]


def test_only_mlps_are_in_fp8_where_the_recipe_says_so(results):
    exact, mlp = results["none"][0]["before"], results["mlp"][0]
    gaps = [(found["before"] - exact).abs().mean() for found in (mlp, results["delayed"][0])]
    assert 1e-4 < gaps[0] < gaps[1]
    assert mlp["state"] and all(".mlp." in name for name in mlp["state"])


def test_cutting_a_model_changes_log_probs_by_a_fifth_of_quantization(results):
    plain, alone = results["aligned none"][0], results["aligned"][0]
    quantization = (alone["before"] - plain["before"]).abs().mean()
    assert quantization > 1e-3
    for name in ("tp", "sp", "cp"):
        gap = (results[f"aligned {name}"][0]["before"] - alone["before"]).abs().mean()
        assert gap <= quantization / 5, (name, float(gap), float(quantization))


@pytest.mark.parametrize("name", ALIGNED)
def test_cutting_a_model_changes_training_by_less_than_half_of_quantization(results, name):
    plain, alone, cut = (
        results[n][0]["weights"] for n in ("aligned none", "aligned", f"aligned {name}")
    )
    effect = sum((alone[n] - plain[n]).abs().sum() for n in plain)
    gap = sum((cut[n] - alone[n]).abs().sum() for n in plain)
    assert gap <= effect / 2, (float(gap), float(effect))


def test_layers_cut_over_ranks_give_the_codes_of_their_shards(tiny):
    recipes = [BLOCKWISE, Recipe(scales="pow2", emulate=True), CURRENT]
    for rank in launch(
        "tests.megatron.fp8.ranks", "cut_layers", 2, model=str(tiny), recipes=recipes
    ):
        assert len(rank) == 2 * len(recipes)
        for found in rank:
            assert max(found.values()) < 1e-6, found


def test_current_scaling_depends_on_the_pack_and_blockwise_does_not(results):
    blockwise, current = (
        [results[f"{recipe.name} packs of {size}"][0]["before"] for size in (1, 8)]
        for recipe in (BLOCKWISE, CURRENT)
    )
    noise = [float((one - other).abs().mean()) for one, other in (blockwise, current)]
    assert noise[1] > 1e-3 and noise[0] <= noise[1] / 10, noise


def test_a_layer_of_another_precision_is_an_error():
    class Decoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = torch.nn.Module()
            layer.linear_fc1 = torch.nn.Linear(2, 2)
            self.layers = torch.nn.ModuleList([layer])

    with pytest.raises(
        FP8Unavailable, match=r"layers\.0\.linear_fc1 is a Linear, which does not compute in FP8"
    ):
        prove(Decoder(), BLOCKWISE, 0, 1)
    prove(Decoder(), Recipe(emulate=True, bf16_layers=BF16Layers(1)), 0, 1)
