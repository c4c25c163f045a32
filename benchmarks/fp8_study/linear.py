"""One linear layer: TransformerEngine's against our emulation; on a CPU the emulation alone.

Shape suffixes: T = tokens, K = inputs, N = outputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.fp8_study import engine
from benchmarks.fp8_study.measuring import relative_error
from openrlhf_ext.fp8.quantize import DelayedScale, Products
from openrlhf_ext.fp8.recipe import Recipe
from tests.gpu.kit import Machine, Partly


class Operands(NamedTuple):
    """Of one micro-batch; entries grow with it, so that delayed scales matter."""

    x_TK: Tensor
    w_NK: Tensor
    dy_TN: Tensor


class Results(NamedTuple):
    """The three products."""

    y: Tensor
    dx: Tensor
    dw: Tensor


def measure(machine: Machine, recipe: Recipe, settings: dict[str, Any]) -> dict[str, Any]:
    """Relative errors of y, dx and dw: against the peer, and of both against products of the
    unrounded operands.

    Raises:
        Partly: an error against the peer is above the bound; what was measured is kept.
    """
    peer = _TransformerEngine(recipe, settings) if machine.on_gpu else None
    emulated = _Emulated(recipe, machine.device)
    rows = []
    for number in range(settings["micro_batches"]):
        operands = _operands(settings, machine, number)
        mine, exact = emulated(operands), _exact(operands)
        other = None if peer is None else peer(operands)
        rows.append(
            {
                "micro_batch": number,
                "emulation_against_exact": _errors(mine, exact),
                "peer_against_exact": None if other is None else _errors(other, exact),
                "emulation_against_peer": None if other is None else _errors(mine, other),
            }
        )
        emulated.end_micro_batch()
    bound = _bound(recipe, settings)
    found = {
        "peer": "none on a CPU" if peer is None else "te.Linear",
        "bound": bound,
        "micro_batches": rows,
    }
    against = [
        row["emulation_against_peer"] for row in rows if row["emulation_against_peer"] is not None
    ]
    worst = max((error for errors in against for error in errors.values()), default=None)
    found["worst_against_peer"] = worst
    if worst is not None and not worst <= bound:
        raise Partly(
            f"te.Linear is {worst:.2e} away from the emulation, at most {bound:g} is allowed",
            found,
        )
    return found


def _bound(recipe: Recipe, settings: dict[str, Any]) -> float:
    """Some 0.3 % of bf16 entries lie midway between two FP8 values once they are multiplied by an
    fp32 scale of their block, and the scale's last bit decides between the two: an ulp moves y by
    up to 7e-3, no farther from the exact product (``tests/fp8/test_quantize.py``). Powers of two
    move nothing, and a tensor has one scale."""
    return settings["bound_of_fp32_blocks" if recipe.blockwise and not recipe.pow2 else "bound"]


def _operands(settings: dict[str, Any], machine: Machine, number: int) -> Operands:
    """bf16 on both sides: TransformerEngine is given bf16, so the emulation rounds the same
    entries."""
    generator = torch.Generator(machine.device).manual_seed(number)
    tokens, inputs, outputs = settings["tokens"], settings["inputs"], settings["outputs"]

    def drawn(*shape: int, size: float) -> Tensor:
        return (torch.randn(*shape, generator=generator, device=machine.device) * size).bfloat16()

    growth = 1.0 + 0.5 * number
    return Operands(
        drawn(tokens, inputs, size=growth),
        drawn(outputs, inputs, size=inputs**-0.5),
        drawn(tokens, outputs, size=1e-2 * growth),
    )


def _exact(operands: Operands) -> Results:
    x, w, dy = (operand.double() for operand in operands)
    return Results(x @ w.t(), dy @ w, dy.t() @ x)


def _errors(found: Results, wanted: Results) -> dict[str, float]:
    return {
        name: relative_error(getattr(found, name), getattr(wanted, name))
        for name in Results._fields
    }


class _Emulated:
    """Products in fp32 of operands on FP8's grid, in the dtype that TransformerEngine gives."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.products = Products(recipe)
        self.scales: dict[str, DelayedScale] = self.products.scales(device)

    def __call__(self, operands: Operands) -> Results:
        x, w, dy = operands
        for name, operand in zip(("x", "w", "dy"), operands, strict=True):
            if name in self.scales:
                self.scales[name].record(operand)
        scales = {name: delayed.scale for name, delayed in self.scales.items()}
        return Results(
            self.products.output(x, w, scales),
            self.products.input_gradient(dy, w, scales),
            self.products.weight_gradient(dy, x, scales).to(w.dtype),
        )

    def end_micro_batch(self) -> None:
        for delayed in self.scales.values():
            delayed.update(delayed.history_A[0].clone())


class _TransformerEngine:
    """te.Linear, which keeps delayed scales itself."""

    def __init__(self, recipe: Recipe, settings: dict[str, Any]) -> None:
        self._recipe, self._layer = recipe, engine.linear(settings["inputs"], settings["outputs"])

    def __call__(self, operands: Operands) -> Results:
        x = operands.x_TK.clone().requires_grad_()
        with torch.no_grad():
            self._layer.weight.copy_(operands.w_NK)
        self._layer.weight.grad = None
        with engine.autocast(self._recipe):
            y = self._layer(x)
        y.backward(operands.dy_TN)
        return Results(y.detach(), x.grad, self._layer.weight.grad)
