"""Matrix products of a decoder's linear layers: seconds, TFLOP/s and ratio to BF16 of the same
process.

``recipes`` times whole layers, quantization of all operands included, as TransformerEngine's
published table does; ``scaled_mm`` bare products of operands that are FP8 already. Shape suffixes:
T = tokens, K = inputs, N = outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.fp8_study import engine
from benchmarks.fp8_study.measuring import device_seconds, relative_error, seconds_in_turns
from openrlhf_ext.fp8.quantize import (
    E4M3,
    Grid,
    Products,
    Quantized,
    quantize,
    saturating_cast,
    scale_from_amax,
)
from openrlhf_ext.fp8.recipe import Recipe
from tests.gpu.kit import Machine, NotHere, Partly

# FP8 rounds to 3 bits (E4M3): 0.037 of a sum's size (2 bits of E5M2: 0.06); BF16 to 8 bits: 0.002
_LEAST_ROUNDING, _MOST_ROUNDING = 0.01, 0.1
_PRODUCT_BOUND = 2e-3


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


# ---- layers


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
        seconds = seconds_in_turns(layer, machine.device, settings["repeats"])
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


# ---- bare products


class Factors(NamedTuple):
    """a (R, S) times the transpose of b (C, S); ``grids`` says which entries of each share a
    scale."""

    a_RS: Tensor
    b_CS: Tensor
    grids: tuple[Grid, Grid]


def scaled_mm(machine: Machine, scaling: str, settings: dict[str, Any]) -> dict[str, Any]:
    """torch's FP8 product with E4M3 operands that are rounded beforehand, beside BF16's (on a CPU:
    fp32's).

    Raises:
        NotHere: blockwise on a CPU.
        Partly: a product failed or is wrong; the others are kept.
    """
    if scaling == "blockwise" and not machine.on_gpu:
        raise NotHere("torch's blockwise FP8 product needs a GPU")
    rows, wrong = [], []
    for shape in shapes(settings):
        for product, factors in _factors(machine, shape, settings["tokens"]).items():
            row: dict[str, Any] = {**shape._asdict(), "product": product}
            try:
                row |= _timed(machine, scaling, factors, settings["repeats"])
            # torch refuses a shape or a layout: the others are told apart
            except (RuntimeError, ValueError) as error:
                row["error"] = str(error).splitlines()[0][:300]
                wrong.append(f"{shape.name} over {shape.ranks} ranks, {product}: {row['error']}")
            rows.append(row)
            print(row, flush=True)
    good = [row for row in rows if "error" not in row]
    found = {
        "what": "torch.nn.functional.scaled_mm, operands rounded beforehand",
        "tokens": settings["tokens"],
        "rows": rows,
        "ratio_of_sums": sum(r["bf16_seconds"] for r in good) / sum(r["seconds"] for r in good)
        if good
        else None,
    }
    if wrong:
        raise Partly(f"{len(wrong)} of {len(rows)} products: {'; '.join(wrong[:3])}", found)
    return found


def _factors(machine: Machine, shape: Shape, tokens: int) -> dict[str, Factors]:
    generator = torch.Generator(machine.device).manual_seed(0)
    dtype = torch.bfloat16 if machine.on_gpu else torch.float32
    x, w, dy = (
        torch.randn(*size, generator=generator, device=machine.device).to(dtype)
        for size in ((tokens, shape.inputs), (shape.outputs, shape.inputs), (tokens, shape.outputs))
    )
    return {
        "forward": Factors(x, w, (Grid.ROWS, Grid.TILES)),
        "dgrad": Factors(dy, w.t().contiguous(), (Grid.ROWS, Grid.TILES)),
        "wgrad": Factors(dy.t().contiguous(), x.t().contiguous(), (Grid.ROWS, Grid.ROWS)),
    }


def _timed(machine: Machine, scaling: str, factors: Factors, repeats: int) -> dict[str, float]:
    """
    Raises:
        ValueError: the product is not that of its operands.
    """
    multiply, expected = {"tensorwise": _tensorwise, "rowwise": _rowwise, "blockwise": _blockwise}[
        scaling
    ](factors)
    error = relative_error(multiply(), expected)
    if not error <= _PRODUCT_BOUND:
        raise ValueError(
            f"relative error {error:.2e} against the product of its operands, at most "
            f"{_PRODUCT_BOUND:g}"
        )
    plain = factors.a_RS, factors.b_CS.t()
    works = {"fp8": multiply, "bf16": lambda: plain[0] @ plain[1]}
    seconds, device = (
        seconds_in_turns(works, machine.device, repeats),
        device_seconds(works, machine, repeats),
    )
    operations = 2 * factors.a_RS.numel() * factors.b_CS.shape[0]
    return {
        "relative_error": error,
        "seconds": seconds["fp8"],
        "bf16_seconds": seconds["bf16"],
        "tflops": operations / seconds["fp8"] / 1e12,
        "bf16_tflops": operations / seconds["bf16"] / 1e12,
        "ratio": seconds["bf16"] / seconds["fp8"],
        "device_seconds": device["fp8"],
        "bf16_device_seconds": device["bf16"],
        "device_ratio": device["bf16"] / device["fp8"],
    }


Multiply = Callable[[], Tensor]


def _tensorwise(factors: Factors) -> tuple[Multiply, Tensor]:
    a, b = (quantize(factor, E4M3, Grid.TENSOR) for factor in factors[:2])
    return _multiply(
        a.codes_RC, b.codes_RC, "TensorWise", a.scale_inv, "TensorWise", b.scale_inv
    ), _values(a, b)


def _rowwise(factors: Factors) -> tuple[Multiply, Tensor]:
    """One scale for each row of both: outside of ``quantize``, which no recipe asks for it."""
    (a, a_scale), (b, b_scale) = (_rounded_rows(factor) for factor in factors[:2])
    expected = (a.float() * a_scale) @ (b.float() * b_scale).t()
    return _multiply(a, b, "RowWise", a_scale, "RowWise", b_scale.t()), expected


def _rounded_rows(matrix_RC: Tensor) -> tuple[Tensor, Tensor]:
    scale = scale_from_amax(matrix_RC.abs().amax(1, keepdim=True).float(), E4M3)
    return saturating_cast(matrix_RC.float() * scale, E4M3), 1.0 / scale


def _blockwise(factors: Factors) -> tuple[Multiply, Tensor]:
    """Layouts as torch's ScaledBlas.cpp wants them: scales of rows with stride 1 along the rows;
    those of tiles with the number of blocks padded to a multiple of 4, without which products were
    silently wrong."""
    a, b = (
        quantize(factor, E4M3, grid)
        for factor, grid in zip(factors[:2], factors.grids, strict=True)
    )
    a_scale = a.scale_inv.t().contiguous().t()
    if b.grid is Grid.ROWS:
        b_scale, kind = b.scale_inv.t().contiguous().t(), "BlockWise1x128"
    else:
        blocks = b.scale_inv.shape[1]
        padded = torch.nn.functional.pad(b.scale_inv, (0, -blocks % 4)).contiguous()
        b_scale, kind = padded.t(), "BlockWise128x128"
    return _multiply(a.codes_RC, b.codes_RC, "BlockWise1x128", a_scale, kind, b_scale), _values(
        a, b
    )


def _values(a: Quantized, b: Quantized) -> Tensor:
    return a.values() @ b.values().t()


def _multiply(
    a: Tensor, b: Tensor, a_kind: str, a_scale: Tensor, b_kind: str, b_scale: Tensor
) -> Multiply:
    from torch.nn.functional import ScalingType, scaled_mm

    def multiply() -> Tensor:
        return scaled_mm(
            a,
            b.t(),
            a_scale,
            getattr(ScalingType, a_kind),
            b_scale,
            getattr(ScalingType, b_kind),
            output_dtype=torch.bfloat16,
        )

    return multiply
