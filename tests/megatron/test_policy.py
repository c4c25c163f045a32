"""The Megatron policy equals plain transformers on one process, in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.launch import launch
from tests.megatron.reference import TEMPERATURE, make_batch, reference
from tests.models import make_tiny_model


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Name -> (path, reference); vocabulary 61 and 59 are divisible neither by 2 nor by 4. Mistral
    has a window as long as the longest sequence."""
    made = {}
    for name, family, tied, more in [
        ("qwen2", "qwen2", False, {}),
        ("qwen2-tied", "qwen2", True, {}),
        ("qwen3", "qwen3", False, {}),
        (
            "llama-tied",
            "llama",
            True,
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 500000.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                }
            },
        ),
        ("deep", "qwen2", True, {"layers": 6}),
        ("mistral", "mistral", False, {"sliding_window": 20}),
        ("granite", "granite", False, {}),
        ("granite-tied", "granite", True, {}),
        ("seed_oss", "seed_oss", False, {}),
        ("smollm3", "smollm3", True, {"no_rope_layers": [1, 0, 0, 1]}),
        ("smollm3-untied", "smollm3", False, {}),
    ]:
        path = tmp_path_factory.mktemp(name)
        model = make_tiny_model(path, family, tied=tied, **more)
        batch, weights_N = make_batch(61)
        made[name] = (str(path), reference(model, batch, weights_N))
    return made


def cases(checkpoints, world_size, layouts):
    return [
        {
            "name": name,
            "model": checkpoints[name][0],
            "world_size": world_size,
            "temperature": TEMPERATURE,
            **layout,
        }
        for name, layout in layouts
    ]


FULL, SELECTIVE = {"recompute": "full"}, {"recompute": "selective"}

# every row: a model and a layout; what is left of the ranks is data-parallel
LAYOUTS = {
    1: [
        ("qwen2", {}),
        ("llama-tied", {"micro_batch_size": 7}),
        ("qwen3", {"recompute": FULL, "max_tokens": 24}),
        ("qwen2-tied", {"recompute": {**FULL, "recompute_num_layers": 2}}),
        ("qwen3", {"recompute": {**FULL, "recompute_method": "block", "recompute_num_layers": 3}}),
        ("mistral", {}),
        ("granite", {}),
        ("granite-tied", {"head": "two_pass"}),
        ("seed_oss", {}),
        ("smollm3", {}),
        ("smollm3-untied", {"recompute": FULL}),
    ],
    2: [
        ("qwen2", {"tp": 2}),
        ("qwen2-tied", {"tp": 2, "sp": True, "max_tokens": 30}),
        (
            "llama-tied",
            {
                "tp": 2,
                "sp": True,
                "recompute": {**SELECTIVE, "recompute_modules": ("core_attn", "mlp")},
            },
        ),
        ("qwen2", {"pp": 2}),
        ("qwen2-tied", {"pp": 2, "vp": 2, "max_tokens": 25, "forward_max_tokens": 40}),
        ("qwen3", {"pp": 2, "vp": 2, "micro_batch_size": 3, "recompute": FULL}),
        ("qwen3", {"cp": 2}),
        ("qwen2-tied", {"cp": 2, "max_tokens": 12, "recompute": SELECTIVE}),
        ("qwen2", {"max_tokens": 20}),
        ("qwen2-tied", {"distributed_optimizer": True, "lopsided": True}),
        ("qwen3", {"tp": 2, "sp": True, "max_tokens": 300, "piece_unit": 128}),
        ("llama-tied", {"cp": 2, "max_tokens": 20, "piece_unit": 16}),
        *(
            (family, layout)
            for family in ("mistral", "granite", "seed_oss", "smollm3")
            for layout in (
                {"tp": 2, "sp": True, "max_tokens": 30, "steps": 0},
                {"cp": 2, "recompute": SELECTIVE, "steps": 0},
                {"pp": 2, "recompute": FULL},
            )
        ),
        ("granite-tied", {"pp": 2, "vp": 2}),
        ("smollm3-untied", {"pp": 2, "vp": 2}),
    ],
    4: [
        ("qwen2", {"tp": 2, "pp": 2}),
        ("qwen3", {"tp": 2, "pp": 2, "sp": True, "max_tokens": 30}),
        ("qwen2-tied", {"tp": 2, "pp": 2, "sp": True, "vp": 2, "micro_batch_size": 3}),
        ("qwen2", {"tp": 4, "sp": True}),
        ("qwen3", {"tp": 4}),  # 2 key-value heads
        ("qwen3", {"tp": 2, "cp": 2, "sp": True, "max_tokens": 20}),
        ("qwen2-tied", {"pp": 2, "cp": 2}),
        ("llama-tied", {"cp": 4}),
        ("qwen2", {"pp": 2, "vp": 2, "distributed_optimizer": True}),
        ("qwen2-tied", {"tp": 2, "distributed_optimizer": True}),
        ("qwen2-tied", {"pp": 2, "distributed_optimizer": True, "max_tokens": 30}),
        ("qwen2", {"cp": 2, "distributed_optimizer": True, "max_tokens": 20}),
        (
            "deep",
            {"tp": 2, "pp": 2, "vp": 2, "ends": (4, 2), "sp": True, "distributed_optimizer": True},
        ),
        ("deep", {"pp": 4, "ends": (2, 2), "max_tokens": 30}),
        ("deep", {"pp": 4, "ends": (None, 3), "recompute": FULL}),
    ],
}


def test_bf16_is_close_to_fp32(checkpoints):
    """Rounding only: log-probs within bf16's error of fp32, the same loss on every rank, master
    weights in fp32."""
    batch, weights_N = make_batch(61)
    bf16 = {"dtype": "bf16", "distributed_optimizer": True}
    layouts = [
        ("qwen2", {"tp": 2, "sp": True, **bf16}),
        ("qwen2-tied", {"pp": 2, "vp": 2, **bf16}),
        ("qwen3", {"cp": 2, "max_tokens": 20, **bf16}),
        ("qwen3", {"head": "two_pass", **bf16}),
    ]
    todo = cases(checkpoints, 2, layouts)
    ranks = launch(
        "tests.megatron.parity", "run_cases", 2, cases=todo, batch=batch, weights_N=weights_N
    )
    for i, case in enumerate(todo):
        expected = checkpoints[case["name"]][1]
        for rank in ranks:
            got = rank[i]
            logprobs, entropies = (
                batch.responses.take(expected[k], got["rows"]) for k in ("logprobs", "entropies")
            )
            assert (got["logprobs"] - logprobs).abs().max() < 0.15, case
            assert (got["entropies"] - entropies).abs().max() < 0.15, case
            assert got["steps"] == ranks[0][i]["steps"], case
            assert got["steps"][0]["grad_norm"] == pytest.approx(
                expected["grad_norms"][0], rel=0.1
            ), case
        for name, weight in ranks[0][i]["weights"].items():
            assert weight.dtype == torch.bfloat16
            assert torch.allclose(weight.float(), expected["weights"][name], atol=0.03), (
                case,
                name,
            )


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm().clamp_min(1e-12)).item()


def check_micro_batches(case, forward, training):
    """Those of log-probs and of training each keep to a limit of their own, and use it."""
    tokens = case.get("max_tokens")
    limits = (case.get("forward_max_tokens", tokens), 3), (tokens, case.get("micro_batch_size", 2))
    for lengths, (tokens, sequences) in zip((forward, training), limits, strict=True):
        if tokens is None:
            assert max(map(len, lengths)) <= sequences, case
        else:
            assert max(map(sum, lengths)) <= tokens * case.get("cp", 1), case
    if "forward_max_tokens" in case:
        assert max(map(sum, forward)) > case["max_tokens"], case
    elif "vp" not in case and "max_tokens" not in case and sum(map(len, forward)) == 7:
        assert len(forward) == 3, case


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_equals_transformers(checkpoints, world_size):
    batch, weights_N = make_batch(61)
    todo = cases(checkpoints, world_size, LAYOUTS[world_size])
    ranks = launch(
        "tests.megatron.parity",
        "run_cases",
        world_size,
        cases=todo,
        batch=batch,
        weights_N=weights_N,
    )
    for i, case in enumerate(todo):
        expected = checkpoints[case["name"]][1]
        for rank in ranks:
            got = rank[i]
            logprobs, entropies = (
                batch.responses.take(expected[k], got["rows"]) for k in ("logprobs", "entropies")
            )
            assert torch.allclose(got["logprobs"], logprobs, atol=2e-5, rtol=1e-5), case
            assert torch.allclose(got["entropies"], entropies, atol=2e-5, rtol=1e-5), case
            assert got["steps"] == ranks[0][i]["steps"], f"metrics differ between ranks: {case}"
            check_micro_batches(case, *got["micro_batches"])
            passes = len(got["steps"]) + (1 if case.get("distributed_optimizer") else 2)
            assert (
                got["counted"].real
                == passes * int(batch.lengths_B[got["rows"]].sum())
                <= got["counted"].packed
            )
            assert got["counted"].packed % case.get("piece_unit", 1) == 0, case
            for step, metrics in enumerate(got["steps"]):
                assert metrics["loss/policy"] == pytest.approx(
                    expected["losses"][step], rel=1e-5, abs=1e-4
                ), case
                assert metrics["grad_norm"] == pytest.approx(
                    expected["grad_norms"][step], rel=2e-5
                ), case
        first = ranks[0][i]
        assert set(first["weights"]) == set(expected["weights"])
        if not first["steps"]:
            loaded = load_file(Path(case["model"]) / "model.safetensors")
            assert all(
                torch.equal(first["weights"][name], tensor) for name, tensor in loaded.items()
            ), case
            expected = {**expected, "weights": loaded}
        for name, grad in first.get("grads", {}).items():
            assert relative(grad, expected["grads"][name]) < 1e-5, (case, name)
        for name, weight in first["weights"].items():
            assert torch.allclose(weight, expected["weights"][name], atol=2e-5), (case, name)
