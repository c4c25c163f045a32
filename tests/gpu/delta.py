"""Do the kernels of gated delta nets give what the rule gives, forward and backward?"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from openrlhf_ext.delta_rule import (
    Chunks,
    Gaps,
    Inputs,
    causal_convolution,
    gated_delta_rule,
)
from openrlhf_ext.megatron.model.delta_kernels import convolved, ruled
from openrlhf_ext.megatron.model.spec import PackedSequences
from tests.gpu.kit import Machine, NotHere, Partly
from tests.gpu.runs import report

_MOST = 0.02
"""Relative distance from the rule in fp64 that bf16 explains; Triton's wrong gradients
(flash-linear-attention issue 640) are as large as the gradients."""


def against_the_rule(machine: Machine) -> dict:
    """Outputs and gradients of all inputs, in bf16, of a pack of unlike sequences, against the rule
    and the convolution in fp64.

    Raises:
        Partly: something is farther from them than bf16 explains.
        NotHere: the GPU's machine lacks flash-linear-attention.
    """
    if machine.on_gpu and find_spec("fla") is None:
        raise NotHere("flash-linear-attention is not installed")
    sizes = (4, 12, 128, 128) if machine.on_gpu else (2, 4, 16, 8)
    lengths = (700, 1, 64, 130) if machine.on_gpu else (70, 1, 13)
    pack, (inputs, mixed_LD, weight_D1W) = _drawn(machine, lengths, sizes)
    slots = [*lengths]

    def rule(*given: Tensor) -> Tensor:
        return gated_delta_rule(Inputs(*given), Chunks(slots, machine.device))

    def convolution(x_LD: Tensor, weight_D1W: Tensor) -> Tensor:
        gaps = Gaps(slots, weight_D1W.shape[-1], machine.device)
        return torch.nn.functional.silu(causal_convolution(x_LD, weight_D1W, gaps))

    found = _distances(lambda *given: ruled(Inputs(*given), pack), rule, inputs, Inputs._fields)
    found |= _distances(
        lambda *given: convolved(*given, pack), convolution, (mixed_LD, weight_D1W), ("x", "weight")
    )
    measured = report(machine, {"relative_distance": found}, ["flash-linear-attention"])
    if wrong := {name: distance for name, distance in found.items() if not distance < _MOST}:
        raise Partly(f"farther from the rule than bf16 explains: {wrong}", measured)
    return measured


def _drawn(machine: Machine, lengths: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[Any, Any]:
    groups, heads, keys, values = sizes
    generator = torch.Generator(machine.device).manual_seed(0)
    tokens, channels = sum(lengths), 2 * groups * keys + heads * values

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=machine.device)

    inputs = Inputs(
        draw(tokens, groups, keys).bfloat16(),
        draw(tokens, groups, keys).bfloat16(),
        draw(tokens, heads, values).bfloat16(),
        -torch.nn.functional.softplus(draw(tokens, heads)),
        draw(tokens, heads).sigmoid(),
    )
    boundaries = torch.tensor([0, *lengths], device=machine.device).cumsum(0).int()
    pack = PackedSequences(
        slots=lengths, boundaries=boundaries, positions_L=torch.arange(0, device=machine.device)
    )
    return pack, (inputs, draw(tokens, channels).bfloat16(), draw(channels, 1, 4).bfloat16())


def _distances(kernel: Any, exact: Any, inputs: Any, names: tuple[str, ...]) -> dict[str, float]:
    """Relative distances of the outputs and of the gradients of a weighted sum of them."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    twins = [tensor.detach().double().requires_grad_() for tensor in inputs]
    got, want = kernel(*leaves), exact(*twins)
    weights = torch.randn(
        want.shape,
        generator=torch.Generator(want.device).manual_seed(1),
        device=want.device,
        dtype=want.dtype,
    )
    gradients = torch.autograd.grad((got.double() * weights).sum(), leaves)
    wanted = torch.autograd.grad((want * weights).sum(), twins)
    return {f"output of the {exact.__name__}": _apart(got, want)} | {
        f"gradient of {name}": _apart(one, other)
        for name, one, other in zip(names, gradients, wanted, strict=True)
    }


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other).norm() / other.norm())
