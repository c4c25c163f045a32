"""Matrix products of a decoder's linear layers: seconds, TFLOP/s and ratio to BF16 of the same
process.

``recipes`` times whole layers, quantization of all operands included, as TransformerEngine's
published table does. Shape suffixes: T = tokens, K = inputs, N = outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.fp8_study import engine
from benchmarks.fp8_study.measuring import device_seconds, median_seconds, relative_error
from openrlhf_ext.fp8.quantize import Products
from openrlhf_ext.fp8.recipe import Recipe
from tests.gpu.kit import Machine

# FP8 rounds to 3 bits (E4M3): 0.037 of a sum's size (2 bits of E5M2: 0.06); BF16 to 8 bits: 0.002
_LEAST_ROUNDING, _MOST_ROUNDING = 0.01, 0.1


class Shape(NamedTuple):
    """What one rank multiplies."""

    name: str
    ranks: int
    inputs: int
    outputs: int


def shapes(settings: dict[str, Any]) -> Iterator[Shape]:
    """All shapes over all numbers of ranks."""
    for ranks in settings["tensor_parallel"]:
        for name, (inputs, outputs) in settings["columns"].items():
            yield Shape(name, ranks, inputs, outputs // ranks)
        for name, (inputs, outputs) in settings["rows"].items():
            yield Shape(name, ranks, inputs // ranks, outputs)


def recipes(machine: Machine, recipe: Recipe, settings: dict[str, Any]) -> dict[str, Any]:
    """Forward and backward of te.Linear in FP8 and in BF16; on a CPU the emulation beside fp32.

    Raises:
        AssertionError: FP8's result is BF16's, or far from it.
    """
    rows = []
    for shape in shapes(settings):
        layer = (_layer if machine.on_gpu else _emulated_layer)(
            machine, shape, settings["tokens"], recipe
        )
        rounding = relative_error(layer["forward"](), layer["forward_bf16"]())
        assert _LEAST_ROUNDING < rounding < _MOST_ROUNDING, (
            f"{shape}: FP8 is {rounding:.2e} away from BF16, must be more than "
            f"{_LEAST_ROUNDING:g} (or FP8 is not active) and less than {_MOST_ROUNDING:g}"
        )
        seconds = median_seconds(layer, machine.device, settings["repeats"])
        device = device_seconds(layer, machine, settings["repeats"])
        operations = 2 * settings["tokens"] * shape.inputs * shape.outputs
        rows.append(
            {
                **shape._asdict(),
                "relative_to_bf16": rounding,
                "forward_seconds": seconds["forward"],
                "backward_seconds": seconds["step"] - seconds["forward"],
                "step_seconds": seconds["step"],
                "bf16_forward_seconds": seconds["forward_bf16"],
                "bf16_step_seconds": seconds["step_bf16"],
                "tflops": 3 * operations / seconds["step"] / 1e12,
                "bf16_tflops": 3 * operations / seconds["step_bf16"] / 1e12,
                "ratio": seconds["step_bf16"] / seconds["step"],
                "step_device_seconds": device["step"],
                "bf16_step_device_seconds": device["step_bf16"],
                "device_ratio": device["step_bf16"] / device["step"],
            }
        )
        print(rows[-1], flush=True)
    names = ("step_seconds", "bf16_step_seconds", "step_device_seconds", "bf16_step_device_seconds")
    whole = {name: sum(row[name] for row in rows) for name in names}
    return {
        "what": "te.Linear" if machine.on_gpu else "EMULATED, beside fp32",
        "tokens": settings["tokens"],
        "rows": rows,
        "ratio_of_sums": whole["bf16_step_seconds"] / whole["step_seconds"],
        "device_ratio_of_sums": whole["bf16_step_device_seconds"] / whole["step_device_seconds"],
    }


def _layer(
    machine: Machine, shape: Shape, tokens: int, recipe: Recipe
) -> dict[str, Callable[[], Tensor]]:
    """te.Linear: forward, which keeps what the backward pass needs, and both, in FP8 and in
    BF16."""
    layer = engine.linear(shape.inputs, shape.outputs)
    x_TK = torch.randn(
        tokens, shape.inputs, device=machine.device, dtype=torch.bfloat16, requires_grad=True
    )
    dy_TN = torch.randn(tokens, shape.outputs, device=machine.device, dtype=torch.bfloat16)

    def forward(used: Recipe | None) -> Tensor:
        with engine.autocast(used):
            return layer(x_TK)

    def step(used: Recipe | None) -> Tensor:
        return torch.autograd.grad(forward(used), [x_TK, layer.weight], dy_TN)[0]

    if recipe.delayed:  # the first micro-batches' scales are 1
        for _ in range(2):
            step(recipe)
    return {
        "forward": lambda: forward(recipe),
        "step": lambda: step(recipe),
        "forward_bf16": lambda: forward(None),
        "step_bf16": lambda: step(None),
    }


def _emulated_layer(
    machine: Machine, shape: Shape, tokens: int, recipe: Recipe
) -> dict[str, Callable[[], Tensor]]:
    """The same of the emulation and of fp32."""
    generator = torch.Generator().manual_seed(0)
    x_TK, w_NK, dy_TN = (
        torch.randn(*size, generator=generator, device=machine.device)
        for size in ((tokens, shape.inputs), (shape.outputs, shape.inputs), (tokens, shape.outputs))
    )
    products = Products(recipe)
    delayed = products.scales(machine.device)
    for name, operand in (("x", x_TK), ("w", w_NK), ("dy", dy_TN)):
        if name in delayed:
            delayed[name].record(operand)
            delayed[name].update(delayed[name].history_A[0].clone())
    scales = {name: scale.scale for name, scale in delayed.items()}

    def step() -> Tensor:
        products.output(x_TK, w_NK, scales)
        products.input_gradient(dy_TN, w_NK, scales)
        return products.weight_gradient(dy_TN, x_TK, scales)

    def exact_step() -> Tensor:
        return (x_TK @ w_NK.t(), dy_TN @ w_NK, dy_TN.t() @ x_TK)[2]

    return {
        "forward": lambda: products.output(x_TK, w_NK, scales),
        "step": step,
        "forward_bf16": lambda: x_TK @ w_NK.t(),
        "step_bf16": exact_step,
    }
