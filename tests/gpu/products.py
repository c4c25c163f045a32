"""The matrix products that the head is made of, against fp64: bf16 and fp16 operands with fp32
sums, in place."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from openrlhf_ext.head.kernels import Precision, accumulate, multiply
from tests.gpu.kit import Machine

# sums in fp32 are off by about 1e-6 of their size; a result rounded to bf16 by 1e-3, to fp16 by
# 3e-4
_LIMIT = 1e-4


def products(machine: Machine) -> dict[str, Any]:
    """Every form in which `head.passes` multiplies, per operand format; on a CPU the head
    multiplies in fp32 only."""
    formats = (torch.bfloat16, torch.float16, torch.float32) if machine.on_gpu else (torch.float32,)
    width = 5120 if machine.on_gpu else 256
    # tokens and columns: even ones, a single token, and columns that are a multiple of nothing
    shapes = (
        ((2048, 8192), (1, 8192), (77, 1001)) if machine.on_gpu else ((64, 256), (1, 256), (7, 101))
    )
    errors: dict[str, float] = {}
    for dtype in formats:
        for tokens, columns in shapes:
            for form, error in _errors(dtype, tokens, columns, width, machine.device).items():
                errors[f"{dtype} {form} {tokens} x {columns}"] = error
    wrong = {name: error for name, error in errors.items() if not error < _LIMIT}
    assert not wrong, (
        f"relative errors of products that sum in fp32 must be below {_LIMIT}: {wrong}"
    )
    return {"relative_error": errors, **(_speed(width, machine.device) if machine.on_gpu else {})}


def _errors(
    dtype: torch.dtype, tokens: int, columns: int, width: int, device: torch.device
) -> dict[str, float]:
    generator = torch.Generator(device).manual_seed(0)
    precision = Precision.of(dtype, device)

    def normal(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(of)

    hidden_BH, weight_SH = normal(tokens, width), normal(columns, width)
    tile_BS = normal(tokens, columns, of=precision.gradient)
    logits_BS = torch.empty(tokens, columns, dtype=precision.compute, device=device)
    multiply(logits_BS, hidden_BH.to(precision.logits), weight_SH.to(precision.logits).t())
    errors = {"logits": _relative(logits_BS, hidden_BH.double() @ weight_SH.double().t())}
    # sums that are rows of a larger tensor, as blocks and slices of the vocabulary are; two rounds,
    # in place
    hidden_sums, weight_sums = (
        normal(tokens + 2, width, of=torch.float32),
        normal(columns + 2, width, of=torch.float32),
    )
    before = hidden_sums.double(), weight_sums.double()
    for _ in range(2):
        accumulate(hidden_sums[1:-1], tile_BS, weight_SH.to(precision.gradient))
        accumulate(weight_sums[1:-1], tile_BS.t(), hidden_BH.to(precision.gradient))
    added = (
        2 * (tile_BS.double() @ weight_SH.double()),
        2 * (tile_BS.double().t() @ hidden_BH.double()),
    )
    for name, sums, old, new in zip(
        ("hidden", "weight"), (hidden_sums, weight_sums), before, added, strict=True
    ):
        assert torch.equal(sums[[0, -1]].double(), old[[0, -1]]), (
            f"{name}: rows beside the sum were written"
        )
        errors[f"{name} gradient"] = _relative(sums[1:-1], old[1:-1] + new)
    return errors


def _relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def _speed(width: int, device: torch.device) -> dict[str, Any]:
    """TFLOP/s of bf16 products with fp32 results, and with bf16 ones."""
    tokens, columns = 2048, 16384
    hidden_BH = torch.randn(tokens, width, device=device).bfloat16()
    weight_SH = torch.randn(columns, width, device=device).bfloat16()
    wide, narrow = (
        torch.empty(tokens, columns, dtype=d, device=device)
        for d in (torch.float32, torch.bfloat16)
    )
    sums_SH = torch.zeros(columns, width, device=device)
    runs: dict[str, Callable[[], object]] = {
        "fp32_result": lambda: multiply(wide, hidden_BH, weight_SH.t()),
        "bf16_result": lambda: multiply(narrow, hidden_BH, weight_SH.t()),
        "fp32_sum_in_place": lambda: accumulate(sums_SH, narrow.t(), hidden_BH),
    }
    return {
        "tflops": {
            name: 2e-12 * tokens * columns * width / _seconds(run) for name, run in runs.items()
        }
    }


def _seconds(run: Callable[[], object], repeats: int = 10) -> float:
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats
