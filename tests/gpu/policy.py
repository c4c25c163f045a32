"""The policy, alone on its device with plain layers, against transformers and against what a CPU
computed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

from openrlhf_ext.megatron.step.batch import SequenceBatch
from tests.gpu.alone import build, facts, tiny_folder
from tests.gpu.goldens import FOLDER, Goldens, three_steps_of
from tests.gpu.kit import Machine
from tests.megatron.parity import WeightedLogprob
from tests.megatron.reference import TEMPERATURE, make_batch, reference
from tests.models import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
# rounding of fp32 in another order, and of bf16's eight bits, on a model of four layers whose
# log-probs are about -4
_FP32, _BF16 = 1e-4, 0.15
_FP32_GRADIENTS, _BF16_GRADIENTS = 1e-4, 0.1


def parity(machine: Machine) -> dict[str, Any]:
    """fp32: log-probs, entropies and every gradient; three families, tied and not."""
    families = (("qwen2", False), ("qwen3", False), ("llama", True))
    return {
        family: _compared(family, tied, "fp32", _FP32, _FP32_GRADIENTS) for family, tied in families
    }


def bf16(machine: Machine) -> dict[str, Any]:
    """The same in bf16, whose attention on a GPU is torch's variable-length flash attention;
    grouped-query heads."""
    return {"qwen2": _compared("qwen2", False, "bf16", _BF16, _BF16_GRADIENTS)}


def _compared(
    family: str, tied: bool, dtype: str, limit: float, gradient_limit: float
) -> dict[str, Any]:
    with tiny_folder() as folder:
        model = make_tiny_model(folder, family, tied=tied)
        batch, weights_N = make_batch(61)
        expected = reference(model, batch, weights_N, steps=1)
        policy = build({"model": str(folder), "dtype": dtype, "temperature": TEMPERATURE})
        out = policy.logprobs(batch)
        grads = _gradients(policy, batch, weights_N)
    assert grads.keys() == expected["grads"].keys(), (
        f"gradients of {grads.keys() ^ expected['grads'].keys()}"
    )
    errors = {
        "logprob_nats": float((out.logprobs_N - expected["logprobs"]).abs().max()),
        "entropy_nats": float((out.entropies_N - expected["entropies"]).abs().max()),
    }
    over = {name: error for name, error in errors.items() if not error < limit}
    assert not over, (
        f"{family} {dtype}: largest differences to transformers in fp32 must be below {limit}: "
        f"{over}"
    )
    relative = {name: _relative(grad, expected["grads"][name]) for name, grad in grads.items()}
    wrong = {name: error for name, error in relative.items() if not error < gradient_limit}
    assert not wrong, (
        f"{family} {dtype}: relative errors of gradients must be below {gradient_limit}: {wrong}"
    )
    worst = max(relative, key=lambda name: relative[name])
    return {
        **facts(policy),
        **errors,
        "worst_gradient": {"name": worst, "relative_error": relative[worst]},
    }


def _gradients(policy: Any, batch: SequenceBatch, weights_N: Tensor) -> dict[str, Tensor]:
    shaped = WeightedLogprob(weights_N, batch.responses)
    policy.accumulate_gradients(batch, shaped, shaped)
    return {
        name: grad.cpu().clone()
        for name, grad in policy.export(lambda parameter: parameter.main_grad)
    }


def _relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-12))


# ---- three optimizer steps


def three_steps(machine: Machine) -> dict[str, Any]:
    """Losses, gradient norms and log-probs of three steps in fp32 equal those of our code on a
    CPU."""
    carried = machine.bundle / FOLDER if machine.bundle else None
    with tiny_folder() as folder:
        source = "bundle"
        if carried is None or not carried.exists():
            source, carried = "made here, on the CPU", folder / FOLDER
            _make_goldens(carried, machine.seconds)
        expected = Goldens.load(carried)
        got, policy = three_steps_of(carried)
    errors = {
        "logprob_nats": float((got.logprobs_SN - expected.logprobs_SN).abs().max()),
        "loss_relative": max(
            _apart(a, b) for a, b in zip(got.losses, expected.losses, strict=True)
        ),
        "grad_norm_relative": max(
            _apart(a, b) for a, b in zip(got.grad_norms, expected.grad_norms, strict=True)
        ),
    }
    # the second and third step are taken from weights that differ by the rounding of those before
    limits = {"logprob_nats": 5e-4, "loss_relative": 1e-4, "grad_norm_relative": 1e-3}
    over = {name: error for name, error in errors.items() if not error < limits[name]}
    assert not over, f"three steps differ from the goldens ({source}) by more than {limits}: {over}"
    return {**facts(policy), "goldens": source, "goldens_of_torch": expected.torch, **errors}


def _apart(got: float, want: float) -> float:
    return abs(got - want) / max(abs(want), 1e-9)


def _make_goldens(folder: Path, seconds: float) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.gpu.goldens", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        timeout=seconds / 2,
    )
    assert run.returncode == 0, f"making goldens ended with {run.returncode}:\n{run.stderr[-3000:]}"
