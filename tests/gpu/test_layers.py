"""The checks of calls 2 and 3 on a CPU: what they share with a GPU works, and they fail when
something is wrong."""

from __future__ import annotations

import math
from contextlib import contextmanager

import pytest
import torch

from openrlhf_ext.megatron.step import host_optimizer
from tests.gpu import kernels, layers, memory, size
from tests.gpu.kit import Machine, NotHere
from tests.gpu.one_rank import one_rank

CPU = Machine(torch.device("cpu"), None, 120.0)


def test_plain_layers_agree_with_themselves_in_every_mode():
    measured = layers.parity(CPU)
    assert set(measured) == {"head size 64", "head size 128"}
    for modes in measured.values():
        assert len(modes) == 6
        assert all(0 < found["gradient_relative"] < 1e-5 for found in modes.values()), (
            "another order of addition"
        )


def test_mixtures_agree_with_themselves_in_every_mode():
    measured = layers.mixture(CPU)
    assert set(measured) == {"none", "moe", "full"}
    assert all(0 < found["gradient_relative"] < 1e-5 for found in measured.values())


def test_another_weight_a_nan_and_a_wrong_recompute_are_differences():
    with one_rank(CPU) as policies:
        model = policies.Model(2, 64, 4, 1, 16, 96, 61)
        batch, loss = policies.random_batch([(3, 9), (1, 5)], model.vocab_size)
        policy = policies.random_policy(model, "fp32")
        reference = policies.outcome(policy, batch, loss)
        assert reference.gradients.keys() >= {
            "model.embed_tokens.weight",
            "model.layers.1.self_attn.k_proj.bias",
        }
        same = policies.outcome(policies.random_policy(model, "fp32", plain=True), batch, loss)
        assert policies.differences(same, reference)["logprob_max_abs_nats"] == 0.0, (
            "the name decides the weights"
        )
        policy.chunks[0].decoder.layers[1].mlp.linear_fc2.weight.data.mul_(1.001)
        other = policies.differences(policies.outcome(policy, batch, loss), reference)
        with pytest.raises(AssertionError, match="here: .*gradient_relative is"):
            policies.require(other, policies.EXACT, "here")
        worst = reference.gradients["model.norm.weight"]
        broken = policies.Outcome(
            reference.logprobs_N, reference.gradients | {"model.norm.weight": worst * math.nan}
        )
        found = policies.differences(broken, reference)
        assert found["worst_gradient"] == "model.norm.weight"
        with pytest.raises(AssertionError, match="is nan"):
            policies.require(found, policies.as_good_as(other), "here")


def test_four_micro_batches_and_the_way_to_host_memory(monkeypatch):
    measured = layers.training(CPU)
    assert measured["offload"]["moved_bytes"] > 1 << 20
    from tests.gpu import policies

    class Forgetful(policies.ModelStates):
        def reload(self, *kinds):
            swap = super().reload(*kinds)
            self._models[0].module.decoder.layers[0].mlp.linear_fc1.weight.data[0, 0] += 1
            return swap

    monkeypatch.setattr(policies, "ModelStates", Forgetful)
    with pytest.raises(AssertionError, match="linear_fc1.weight"):
        layers.training(CPU)


def test_adams_states_pass_through_with_the_same_bits(monkeypatch):
    measured = memory.streaming(CPU)
    assert measured["parameters"] == 16_000 and len(measured["seconds"]) == 3
    monkeypatch.setattr(host_optimizer, "_BLOCK", 10**9)
    update = host_optimizer.HostOptimizer._update
    monkeypatch.setattr(
        host_optimizer.HostOptimizer,
        "_update",
        lambda self, group, *rest: update(self, {**group, "lr": 2e-2}, *rest),
    )
    with pytest.raises(AssertionError, match="master differs from Adam on the device"):
        memory.streaming(CPU)


def test_adam_is_its_formula_and_another_one_is_not(monkeypatch):
    measured = layers.optimizer(CPU)["picked"]
    assert measured["weight_max_abs_change"] > 1e-3 > measured["weight_max_abs_difference"]
    adam = layers.adam

    def without_decay(weight, mean, square, gradient, step, settings):
        return adam(
            *(values.view(-1) for values in (weight, mean, square, gradient)), step, settings
        )

    monkeypatch.setattr(layers, "adam", without_decay)
    with pytest.raises(AssertionError, match="is not its formula"):
        layers.optimizer(CPU)


def test_packs_of_many_shapes_twice():
    measured = layers.shapes(CPU)
    assert measured["packs"] == 6 and measured["packs_not_bit_equal_again"] == 0


def test_the_fused_rotary_embedding_needs_a_gpu():
    with pytest.raises(NotHere, match="rotary embedding needs a GPU"):
        layers.rope(CPU)


def test_ways_to_choose_from_agree_and_one_that_computes_otherwise_is_found(monkeypatch):
    measured = size.choices(CPU)
    ways = ("default", "head two_pass", "rotary fused, prompts shared")
    assert all(measured[way]["forward_backward_seconds"] > 0 for way in ways)

    @contextmanager
    def spoiled(machine, policy):
        weight = policy.chunks[0].decoder.layers[0].mlp.linear_fc2.weight.data
        weight.mul_(2)
        yield
        weight.div_(2)

    monkeypatch.setattr(size, "_two_pass", spoiled)
    with pytest.raises(AssertionError, match="head two_pass: log-probs differ by"):
        size.choices(CPU)


def test_where_the_time_goes_and_what_travels():
    profile = size.profiles(CPU)["256 tokens"]
    for part in ("forward_backward", "logprobs"):
        groups = profile[part]["groups"]
        assert profile[part]["seconds"] == pytest.approx(sum(groups.values())) and {
            "products",
            "attention",
        } <= set(groups)
    assert profile["logprobs"]["attention"]["transformer_engine"] is None
    assert any("attention" in name for name in profile["logprobs"]["attention"]["kernels"])
    measured = size.host_memory(CPU)
    # bf16 weights, fp32 masters and two moments: 2 + 12 bytes; gradients do not travel
    assert measured["travelled_bytes"] == pytest.approx(14 * measured["parameters"], rel=0.01)
    assert layers.waits(CPU) == {
        "mode": "none on a CPU",
        "all weights": "plain",
        "adapters": "plain",
    }


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "products"),
        (
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_128x128x128",
            "attention",
        ),
        ("void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", "attention"),
        ("_statistics_kernel", "head"),
        ("void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel", "norms"),
        ("void transformer_engine::fused_rope_forward_kernel<bf16>", "rotary"),
        ("void transformer_engine::block_scaled_1d_cast_transpose_kernel", "quantization"),
        ("void transformer_engine::gated_kernel<swiglu>", "swiglu"),
        ("void multi_tensor_apply_kernel<AdamFunctorMaster>", "optimizer"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::reduce_kernel<512, 1>", "reductions"),
        ("void at::native::vectorized_elementwise_kernel<4>", "elementwise and others"),
    ],
)
def test_kernels_are_told_apart_by_their_names(name, group):
    assert kernels.group_of(name) == group


def test_the_rank_of_the_32b_recipe_in_small(monkeypatch):
    measured = size.memory_and_mfu(CPU)
    cells = [cell for cell in measured if cell.startswith("256 tokens")]
    assert len(cells) == 6 and all(measured[cell]["step_seconds"] > 0 for cell in cells)
    assert measured["not_measured"] == [] and "mfu" not in measured[cells[0]]
    predicted = {kind: found["predicted_bytes"] for kind, found in measured["states"].items()}
    monkeypatch.setattr(
        size,
        "_predicted_bytes",
        lambda machine: predicted | {"optimizer": predicted["parameters"] * 4},
    )
    with pytest.raises(AssertionError, match="optimizer take .* were predicted"):
        size.memory_and_mfu(CPU)
