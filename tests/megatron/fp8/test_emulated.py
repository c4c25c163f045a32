"""Emulated FP8 layers in every layout: the same codes as one process makes of the same shards, the same training."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from openrlhf_ext.fp8.recipe import BF16Layers, Recipe
from openrlhf_ext.megatron.fp8.transformer_engine import FP8Unavailable, prove
from tests.launch import launch
from tests.megatron.reference import make_batch
from tests.models import make_tiny_model

BLOCKWISE = Recipe(emulate=True)
CURRENT = Recipe("current", "hybrid", emulate=True)
DELAYED = Recipe("delayed", "hybrid", amax_history_len=4, emulate=True)
FULL = {"granularity": "full"}
# cases that must give the same bits as the first of their recipe
SAME = {
    "blockwise": [
        {"fp8": BLOCKWISE}, {"fp8": BLOCKWISE, "pp": 2}, {"fp8": BLOCKWISE, "pp": 2, "vp": 2},
        {"fp8": BLOCKWISE, "recompute": FULL}, {"fp8": BLOCKWISE, "pp": 2, "recompute": FULL},
    ],
    "delayed": [
        {"fp8": DELAYED}, {"fp8": DELAYED, "pp": 2}, {"fp8": DELAYED, "pp": 2, "vp": 2},
        {"fp8": DELAYED, "recompute": FULL}, {"fp8": DELAYED, "pp": 2, "recompute": FULL},
    ],
}  # fmt: skip


def world_size(case: dict) -> int:
    return case.get("tp", 1) * case.get("pp", 1) * case.get("cp", 1) * case.get("dp", 1)


def run(cases: list[dict], model, batch, weights_N) -> list[list[dict]]:
    """Of each case the results of all ranks; cases of a size share a launch."""
    results: dict[int, list[dict]] = {}
    for size in sorted({world_size(case) for case in cases}):
        chosen = [i for i, case in enumerate(cases) if world_size(case) == size]
        given = [{"model": str(model), "head": "two_pass", **cases[i]} for i in chosen]
        ranks = launch("tests.megatron.fp8.ranks", "run_policies", size, cases=given, batch=batch, weights_N=weights_N)
        for place, i in enumerate(chosen):
            results[i] = [rank[place] for rank in ranks]
    return [results[i] for i in range(len(cases))]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_model(folder, layers=4)
    return folder


@pytest.fixture(scope="module")
def same(tiny):
    batch, weights_N = make_batch(61)
    cases = [case for group in SAME.values() for case in group]
    results = iter(run(cases, tiny, batch, weights_N))
    return {name: [next(results) for _ in group] for name, group in SAME.items()}


@pytest.mark.parametrize("name", SAME)
def test_stages_and_recomputation_change_no_bit(same, name):
    first, *others = same[name]
    for case, ranks in zip(SAME[name][1:], others, strict=True):
        whole = ranks[0]
        assert torch.equal(whole["before"], first[0]["before"]), case
        assert torch.equal(whole["after"], first[0]["after"]), case
        for got, want in zip(whole["steps"], first[0]["steps"], strict=True):
            assert got["loss/policy"] == want["loss/policy"], case
        assert whole["weights"].keys() == first[0]["weights"].keys()
        assert all(torch.equal(whole["weights"][n], w) for n, w in first[0]["weights"].items()), case
        state = {n: t for rank in ranks for n, t in rank["state"].items()}
        assert state.keys() == first[0]["state"].keys(), case
        assert all(torch.equal(state[n], t) for n, t in first[0]["state"].items()), case


def test_recomputing_a_part_of_a_layer_uses_the_scales_of_its_first_pass(tiny):
    batch, weights_N = make_batch(61)
    part = {"granularity": "selective", "modules": ("mlp",)}
    whole, recomputed = run([{"fp8": DELAYED}, {"fp8": DELAYED, "recompute": part}], tiny, batch, weights_N)
    # Megatron adds up gradients in another order then, without FP8 too: 5e-6 nats after two steps
    assert whole[0]["after"].allclose(recomputed[0]["after"], atol=1e-4)


def test_forward_passes_move_no_scale_and_training_does(same):
    for ranks in same["delayed"]:
        for rank in ranks:
            assert rank["unmoved"] and torch.equal(rank["before"], rank["again"])
            moved = [n for n, t in rank["state"].items() if not torch.equal(t, rank["at_start"][n])]
            assert {n.rpartition(".")[0] for n in moved} == {n.rpartition(".")[0] for n in rank["state"]}


def test_delayed_scales_begin_with_what_the_weights_make_of_a_sequence(same):
    state = same["delayed"][0][0]["at_start"]
    assert len(state) == 4 * 4 * 3 * 2, "layers x linears x operands x (scale, history)"
    for name, tensor in state.items():
        operand, what = name.split(".")[-2:]
        if what == "scale":
            assert (tensor == 1) == (operand == "dy"), name
        else:
            assert (tensor != 0).sum() == (operand != "dy"), name


def test_only_delayed_scaling_has_state(same):
    assert not same["blockwise"][0][0]["state"]


def test_layers_left_in_bf16_are(tiny):
    batch, weights_N = make_batch(61)
    some, none, all_of_them = run(
        [
            {"fp8": Recipe(emulate=True, bf16_layers=BF16Layers(3, 1))},
            {"fp8": Recipe(emulate=True, bf16_layers=BF16Layers(1, 1))},
            {"fp8": BLOCKWISE},
        ],
        tiny, batch, weights_N,
    )  # fmt: skip
    exact = run([{"fp8": None}], tiny, batch, weights_N)[0]
    assert torch.equal(some[0]["before"], exact[0]["before"])
    gaps = [(case[0]["before"] - exact[0]["before"]).abs().mean() for case in (none, all_of_them)]
    assert 0 < gaps[0] < gaps[1]


def make_aligned_model(folder) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=61, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=128, max_position_embeddings=256, tie_word_embeddings=False,
        initializer_range=0.1, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    Qwen2ForCausalLM(config).float().save_pretrained(folder)


def test_cutting_a_model_changes_log_probs_by_a_fifth_of_quantization(tmp_path):
    make_aligned_model(tmp_path)
    batch, weights_N = make_batch(61)
    cases = [{"tp": 2}, {"tp": 2, "sp": True}, {"cp": 2}, {"dp": 2}]
    plain, alone, *layouts = run(
        [{"fp8": None}, {"fp8": BLOCKWISE}, *({"fp8": BLOCKWISE, **case} for case in cases)], tmp_path, batch, weights_N
    )
    quantization = (alone[0]["before"] - plain[0]["before"]).abs().mean()
    assert quantization > 1e-3
    for case, ranks in zip(cases, layouts, strict=True):
        if "dp" in case:
            continue  # each rank has other sequences; the weights below are everybody's
        gap = (ranks[0]["before"] - alone[0]["before"]).abs().mean()
        assert gap <= quantization / 5, (case, float(gap), float(quantization))
    trained = [r[0]["weights"] for r in (plain, alone)]
    effect = sum((trained[1][n] - trained[0][n]).abs().sum() for n in trained[0])
    for case, ranks in zip(cases, layouts, strict=True):
        gap = sum((ranks[0]["weights"][n] - trained[1][n]).abs().sum() for n in trained[0])
        assert gap <= effect / 2, (case, float(gap), float(effect))


def test_layers_cut_over_ranks_give_the_codes_of_their_shards(tiny):
    recipes = [BLOCKWISE, Recipe(scales="pow2", emulate=True), CURRENT]
    for rank in launch("tests.megatron.fp8.ranks", "cut_layers", 2, model=str(tiny), recipes=recipes):
        assert len(rank) == 2 * len(recipes)
        for found in rank:
            assert max(found.values()) < 1e-6, found


def test_current_scaling_depends_on_the_pack_and_blockwise_does_not(tiny):
    batch, weights_N = make_batch(61)
    cases = [
        {"fp8": recipe, "micro_batch_size": size, "forward_max_tokens": 64 * size, "max_tokens": 64 * size}
        for recipe in (BLOCKWISE, CURRENT)
        for size in (1, 8)
    ]
    found = [case[0]["before"] for case in run(cases, tiny, batch, weights_N)]
    assert torch.equal(found[0], found[1])
    assert (found[2] - found[3]).abs().max() > 1e-3


def test_a_layer_of_another_precision_is_an_error():
    class Decoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = torch.nn.Module()
            layer.linear_fc1 = torch.nn.Linear(2, 2)
            self.layers = torch.nn.ModuleList([layer])

    with pytest.raises(FP8Unavailable, match=r"layers\.0\.linear_fc1 is a Linear, which does not compute in FP8"):
        prove(Decoder(), BLOCKWISE, 0, 1)
    prove(Decoder(), Recipe(emulate=True, bf16_layers=BF16Layers(1)), 0, 1)
