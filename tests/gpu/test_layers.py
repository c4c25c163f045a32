"""The checks of calls 2 and 3 on a CPU: what they share with a GPU works, and they fail when something is wrong."""

from __future__ import annotations

import math

import pytest
import torch

from tests.gpu import layers, size
from tests.gpu.kit import Machine, NotHere
from tests.gpu.one_rank import one_rank

CPU = Machine(torch.device("cpu"), None, 120.0)


def test_plain_layers_agree_with_themselves_in_every_mode():
    measured = layers.parity(CPU)
    assert set(measured) == {"head size 64", "head size 128"}
    for modes in measured.values():
        assert len(modes) == 6
        assert all(0 < found["gradient_relative"] < 1e-5 for found in modes.values()), "another order of addition"


def test_another_weight_a_nan_and_a_wrong_recompute_are_differences():
    with one_rank(CPU) as policies:
        model = policies.Model(2, 64, 4, 1, 16, 96, 61)
        batch, loss = policies.random_batch([(3, 9), (1, 5)], model.vocab_size)
        policy = policies.random_policy(model, "fp32")
        reference = policies.outcome(policy, batch, loss)
        assert reference.gradients.keys() >= {"model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.bias"}
        same = policies.outcome(policies.random_policy(model, "fp32", plain=True), batch, loss)
        assert policies.differences(same, reference)["logprob_max_abs_nats"] == 0.0, "the name decides the weights"
        policy.chunks[0].decoder.layers[1].mlp.linear_fc2.weight.data.mul_(1.001)
        other = policies.differences(policies.outcome(policy, batch, loss), reference)
        with pytest.raises(AssertionError, match="here: .*gradient_relative is"):
            policies.require(other, policies.EXACT, "here")
        worst = reference.gradients["model.norm.weight"]
        broken = policies.Outcome(reference.logprobs_N, reference.gradients | {"model.norm.weight": worst * math.nan})
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


def test_adam_is_its_formula_and_another_one_is_not(monkeypatch):
    measured = layers.optimizer(CPU)["picked"]
    assert measured["weight_max_abs_change"] > 1e-3 > measured["weight_max_abs_difference"]
    adam = layers.adam

    def without_decay(weight, mean, square, gradient, step, settings):
        return adam(*(values.view(-1) for values in (weight, mean, square, gradient)), step, settings)

    monkeypatch.setattr(layers, "adam", without_decay)
    with pytest.raises(AssertionError, match="is not its formula"):
        layers.optimizer(CPU)


def test_packs_of_many_shapes_twice():
    measured = layers.shapes(CPU)
    assert measured["packs"] == 6 and measured["packs_not_bit_equal_again"] == 0


def test_the_fused_rotary_embedding_needs_a_gpu():
    with pytest.raises(NotHere, match="rotary embedding needs a GPU"):
        layers.rope(CPU)


def test_the_rank_of_the_32b_recipe_in_small(monkeypatch):
    measured = size.memory_and_mfu(CPU)
    cells = [cell for cell in measured if cell.startswith("256 tokens")]
    assert len(cells) == 6 and all(measured[cell]["step_seconds"] > 0 for cell in cells)
    assert measured["not_measured"] == [] and "mfu" not in measured[cells[0]]
    predicted = {kind: found["predicted_bytes"] for kind, found in measured["states"].items()}
    monkeypatch.setattr(
        size, "_predicted_bytes", lambda machine: predicted | {"optimizer": predicted["parameters"] * 4}
    )
    with pytest.raises(AssertionError, match="optimizer take .* were predicted"):
        size.memory_and_mfu(CPU)
