"""Hybrids with a mixture of experts: gated delta nets and gated attention before experts that tokens
choose and one that sees all of them."""

from __future__ import annotations

import pytest
import torch

from tests.launch import launch
from tests.megatron.reference import TEMPERATURE, make_batch, reference
from tests.megatron.test_policy import relative
from tests.models import make_tiny_model, unfused

TP2 = {"tp": 2, "sp": True}


@pytest.mark.parametrize(
    ("size", "key_heads", "layouts", "tolerance"),
    [
        (1, 2, [{}], 1e-4),
        (2, 2, [TP2, {"ep": 2}, TP2 | {"ep": 2}, {"pp": 2}], 1e-4),
        # more ranks than key-value heads; the decays' gradients in fp32 are off by 4e-5 on one rank
        # and by 1.2e-4 on two
        (4, 4, [{"tp": 4, "sp": True}], 5e-4),
    ],
)
def test_a_hybrid_mixture_equals_transformers_and_goes_out_as_it_came_in(
    tmp_path, size, key_heads, layouts, tolerance
):
    model = make_tiny_model(tmp_path, "qwen3_5_moe_text", linear_num_key_heads=key_heads)
    model.set_experts_implementation("eager")
    before = unfused({name: tensor.clone() for name, tensor in model.state_dict().items()})
    batch, weights_N = make_batch(61)
    expected = reference(model, batch, weights_N, steps=1)
    grads = unfused(expected["grads"])
    common = {
        "model": str(tmp_path),
        "temperature": TEMPERATURE,
        "steps": 0,
        "world_size": size,
    }
    cases = [common | layout for layout in layouts]
    given = {"cases": cases, "batch": batch, "weights_N": weights_N}
    ranks = launch("tests.megatron.parity", "run_cases", size, **given)
    for results in ranks:
        for case, got in zip(cases, results, strict=True):
            for name in ("logprobs", "entropies"):
                wanted = batch.responses.take(expected[name], got["rows"])
                assert torch.allclose(got[name], wanted, atol=2e-5, rtol=1e-5), case
    for case, got in zip(cases, ranks[0], strict=True):
        assert got["weights"].keys() == before.keys(), case
        for name, tensor in before.items():
            assert torch.equal(got["weights"][name], tensor), (case, name)
            assert relative(got["grads"][name], grads[name]) < tolerance, (case, name)
