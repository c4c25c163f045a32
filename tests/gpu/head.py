"""The head on its device against fp64; its Triton kernels beyond 2^31 entries and under
compute-sanitizer; speed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openrlhf_ext.head import TokenLoss, linear_logprob_entropy, linear_token_loss
from openrlhf_ext.head.kernels import Kernels, TorchKernels, choose_kernels
from openrlhf_ext.head.statistics import TokenGradient
from tests.gpu.kit import Machine, NotHere

ROOT = Path(__file__).resolve().parents[2]
_VOCABULARY = 152_064
# of the largest entry: log-probs are fp32 sums; gradients are rounded to their format, in bf16 the
# logits' before it
_LIMITS = {torch.float32: (3e-5, 3e-5), torch.bfloat16: (3e-5, 1e-2), torch.float16: (3e-5, 2e-3)}


def against_fp64(machine: Machine) -> dict[str, Any]:
    """Log-probs, entropies, losses and gradients, from autograd and in ``main_grad``."""
    tokens, width, vocab = (3000, 512, _VOCABULARY) if machine.on_gpu else (150, 16, 1001)
    kernels = choose_kernels("auto", torch.float32, machine.device)
    if machine.on_gpu:
        assert not isinstance(kernels, TorchKernels), (
            "on a GPU the head should use its Triton kernels"
        )
    errors = {}
    for dtype in _LIMITS:
        errors[str(dtype)] = _errors(_Problem(tokens, width, vocab, dtype, machine.device))
        over = {
            name: error for name, (error, limit) in errors[str(dtype)].items() if not error <= limit
        }
        assert not over, f"{dtype}: errors (of the largest entry) over their limits: {over}"
    return {
        "kernels": type(kernels).__name__,
        "tokens": tokens,
        "hidden": width,
        "vocabulary": vocab,
        "error_of_largest_entry": {
            d: {n: error for n, (error, _) in found.items()} for d, found in errors.items()
        },
    }


class _Problem:
    """Operands, and in fp64 what is right, a block of tokens at a time."""

    temperature = 0.7

    def __init__(
        self, tokens: int, width: int, vocab: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.dtype = dtype
        self.hidden_TH = torch.randn(tokens, width, generator=generator, device=device).to(dtype)
        # logits of standard deviation 3: between a peaked and a flat distribution
        self.weight_VH = (
            torch.randn(vocab, width, generator=generator, device=device) * 3 / width**0.5
        ).to(dtype)
        self.target_T = torch.randint(0, vocab, (tokens,), generator=generator, device=device)
        self.slope_T = torch.randn(tokens, generator=generator, device=device) / tokens
        self.entropy_slope_T = torch.randn(tokens, generator=generator, device=device) / tokens
        self.expected = self._expected()

    def _expected(self) -> dict[str, Tensor]:
        weight_VH = self.weight_VH.double()
        weight_grad_VH = torch.zeros_like(weight_VH)
        both_grad_VH = torch.zeros_like(weight_VH)
        parts: dict[str, list[Tensor]] = {
            "logprob": [],
            "entropy": [],
            "hidden": [],
            "hidden with entropy": [],
        }
        for rows in torch.arange(len(self.target_T), device=weight_VH.device).split(256):
            hidden_BH, target_B1 = self.hidden_TH[rows].double(), self.target_T[rows][:, None]
            log_p_BV = (hidden_BH @ weight_VH.t() / self.temperature).log_softmax(-1)
            p_BV = log_p_BV.exp()
            entropy_B = -(p_BV * log_p_BV).sum(-1)
            parts["logprob"].append(log_p_BV.gather(1, target_B1)[:, 0])
            parts["entropy"].append(entropy_B)
            slope_B1, entropy_slope_B1 = (
                s[rows].double()[:, None] for s in (self.slope_T, self.entropy_slope_T)
            )
            grad_BV = (-slope_B1 * p_BV).scatter_add_(1, target_B1, slope_B1) / self.temperature
            both_BV = (
                grad_BV
                - entropy_slope_B1 * p_BV * (log_p_BV + entropy_B[:, None]) / self.temperature
            )
            parts["hidden"].append(grad_BV @ weight_VH)
            parts["hidden with entropy"].append(both_BV @ weight_VH)
            weight_grad_VH += grad_BV.t() @ hidden_BH
            both_grad_VH += both_BV.t() @ hidden_BH
        expected = {name: torch.cat(values) for name, values in parts.items()}
        return expected | {"weight": weight_grad_VH, "weight with entropy": both_grad_VH}

    def leaves(self) -> tuple[Tensor, Tensor]:
        return self.hidden_TH.clone().requires_grad_(), self.weight_VH.clone().requires_grad_()


def _errors(problem: _Problem) -> dict[str, tuple[float, float]]:
    """(error, limit) of everything the head gives."""
    value_limit, grad_limit = _LIMITS[problem.dtype]
    expected, target_T = problem.expected, problem.target_T
    found: dict[str, tuple[float, float]] = {}

    def compare(name: str, got: Tensor, want: str, limit: float) -> None:
        difference = (got.detach().double() - expected[want]).abs().max() / expected[
            want
        ].abs().max()
        found[name] = (float(difference), limit)

    leaves = problem.leaves()
    out = linear_logprob_entropy(*leaves, target_T, problem.temperature, entropy_grad=True)
    compare("logprob", out.logprob_T, "logprob", value_limit)
    compare("entropy", out.entropy_T, "entropy", value_limit)
    value = (out.logprob_T * problem.slope_T + out.entropy_T * problem.entropy_slope_T).sum()
    for name, grad in zip(("hidden", "weight"), torch.autograd.grad(value, leaves), strict=True):
        compare(f"{name}, two passes", grad, f"{name} with entropy", grad_limit)
    for recompute in (True, False):
        leaves = problem.leaves()
        loss = linear_token_loss(
            *leaves, target_T, _loss(problem), problem.temperature, recompute=recompute
        )
        for name, grad in zip(
            ("hidden", "weight"), torch.autograd.grad(loss.value, leaves), strict=True
        ):
            compare(f"{name}, one pass, recompute {recompute}", grad, name, grad_limit)
    hidden_TH, weight_VH = problem.leaves()
    # of earlier micro-batches
    weight_VH.main_grad = torch.full(weight_VH.shape, 0.25, device=weight_VH.device)
    weight_VH.grad_added_to_main_grad = False
    linear_token_loss(
        hidden_TH, weight_VH, target_T, _loss(problem), problem.temperature
    ).value.backward()
    assert weight_VH.grad_added_to_main_grad, "the gradient of the weight should be in main_grad"
    # what the 0.25 costs: gradients are known to 2^-24 of it
    resolution = 0.25 * 2**-24 / float(expected["weight"].abs().max())
    compare("main_grad", weight_VH.main_grad - 0.25, "weight", grad_limit + 4 * resolution)
    return found


def _loss(problem: _Problem) -> TokenLoss:
    """Terms whose sum is slope . logprob."""
    return lambda logprob_B, rows: logprob_B * problem.slope_T[rows]


# ---- the Triton kernels alone


def kernels_beyond_int32(machine: Machine) -> dict[str, Any]:
    """One tile of more than 2^31 logits, as no head makes it: what is at its end is found there."""
    machine.need_gpu("a tile of 2^31 logits in Triton's kernels")
    kernels = choose_kernels("triton", torch.float32, machine.device)
    tokens = 2**31 // _VOCABULARY + 64
    tile_BS = torch.randn(tokens, _VOCABULARY, device=machine.device)
    error = _tile_error(kernels, tile_BS, rows=[0, 1, tokens // 2, tokens - 2, tokens - 1])
    assert error < 1e-4, (
        f"statistics and gradients of a tile of {tile_BS.numel()} logits are off by {error}"
    )
    return {"logits": tile_BS.numel(), "error": error}


def _tile_error(kernels: Kernels, tile_BS: Tensor, rows: list[int]) -> float:
    """Largest difference to the torch kernels at these rows."""
    tokens, columns = tile_BS.shape
    column_B = torch.arange(tokens, device=tile_BS.device) * 7 % columns
    index = torch.tensor(rows, device=tile_BS.device)
    some_BS = tile_BS[index]
    part_4B = kernels.statistics(tile_BS, tile_BS, column_B, None)
    want_4B = TorchKernels().statistics(
        some_BS.clone(), torch.empty_like(some_BS), column_B[index], None
    )
    errors = [float((part_4B[:, index] - want_4B).abs().max() / want_4B.abs().max())]
    token = TokenGradient(part_4B[0], part_4B[1].log(), torch.ones_like(part_4B[0]), column_B)
    kernels.gradient(tile_BS, token, tile_BS)
    some = TokenGradient(want_4B[0], want_4B[1].log(), torch.ones_like(want_4B[0]), column_B[index])
    want_BS = torch.empty_like(some_BS)
    TorchKernels().gradient(some_BS, some, want_BS)
    errors.append(float((tile_BS[index] - want_BS).abs().max()))
    return max(errors)


def sanitizer(machine: Machine) -> dict[str, Any]:
    """A tiny call of the head with Triton's kernels under compute-sanitizer: no access out of
    bounds."""
    machine.need_gpu("compute-sanitizer")
    tool = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
    if tool is None:
        raise NotHere("compute-sanitizer is neither on the PATH nor in /usr/local/cuda/bin")
    # torch keeps blocks for later, within which an access out of bounds is none for the tool
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [
        tool,
        "--tool",
        "memcheck",
        "--error-exitcode",
        "9",
        sys.executable,
        "-m",
        "tests.gpu.head",
    ]
    run = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=machine.seconds - 5,
    )
    text = run.stdout + run.stderr
    if "Device not supported" in text:
        raise NotHere("compute-sanitizer does not support this device here")
    assert run.returncode == 0, f"compute-sanitizer ended with {run.returncode}:\n{text[-3000:]}"
    return {
        "summary": next((line for line in text.splitlines() if "ERROR SUMMARY" in line), "none")
    }


def _tiny_call() -> None:
    """What runs under compute-sanitizer."""
    device = torch.device("cuda")
    assert not isinstance(choose_kernels("auto", torch.float32, device), TorchKernels)
    errors = _errors(_Problem(5, 16, 301, torch.bfloat16, device))
    over = {name: error for name, (error, limit) in errors.items() if not error <= limit}
    assert not over, over


# ---- speed


def benchmark(machine: Machine) -> dict[str, Any]:
    """``benchmarks/head_speed.py`` at a hidden size of 5,120."""
    machine.need_gpu("benchmarks/head_speed.py")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "head.json"
        command = [
            sys.executable,
            "benchmarks/head_speed.py",
            "--hidden",
            "5120",
            "--repeats",
            "3",
        ]
        run = subprocess.run(
            [*command, "--output", str(output)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=machine.seconds - 5,
        )
        assert run.returncode == 0, (
            f"{' '.join(command)} ended with {run.returncode}:\n{run.stderr[-3000:]}"
        )
        return json.loads(output.read_text())


if __name__ == "__main__":
    _tiny_call()
