"""The passes over a tile of logits as Triton kernels; importing this module needs the package ``triton``.

A tile is larger than a GPU's caches, so that a pass costs its memory traffic: 4 bytes a logit for the statistics, 4
read and 2 (bf16) or 4 written for the gradient, against 2 H operations a logit in the product that made it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from openrlhf_ext.head.statistics import TokenGradient

_BLOCK = 4096  # columns that a program handles at a time
_WARPS = 8


@triton.jit
def _statistics_kernel(
    logits_ptr, scale_ptr, column_ptr, part_ptr, tokens, columns, SCALED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program a token: (m, s, w, t) of its row, online."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * columns
    scale = tl.load(scale_ptr + row) if SCALED else 1.0
    maximum = tl.full((), -1.0e38, tl.float32)  # finite: -inf - -inf would be NaN
    total = tl.full((), 0.0, tl.float32)
    weighted = tl.full((), 0.0, tl.float32)
    for first in range(0, columns, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        inside = offsets < columns
        logits = tl.load(logits_ptr + offsets, mask=inside, other=-1.0e37) * scale
        new = tl.maximum(maximum, tl.max(logits, 0))
        shifted = logits - new
        exponential = tl.exp(shifted)
        factor = tl.exp(maximum - new)
        weighted = factor * (weighted + (maximum - new) * total)
        weighted += tl.sum(tl.where(inside, exponential * shifted, 0.0), 0)
        total = factor * total + tl.sum(exponential, 0)
        maximum = new
    column = tl.load(column_ptr + row)
    here = (column >= 0) & (column < columns)
    target = tl.load(logits_ptr + column, mask=here, other=0.0) * scale
    tl.store(part_ptr + row, maximum)
    tl.store(part_ptr + tokens + row, total)
    tl.store(part_ptr + 2 * tokens + row, weighted)
    tl.store(part_ptr + 3 * tokens + row, target)


@triton.jit
def _gradient_kernel(
    logits_ptr, out_ptr, scale_ptr, maximum_ptr, log_sum_ptr, coefficient_ptr, column_ptr, entropy_coefficient_ptr,
    entropy_ptr, columns, SCALED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a token and BLOCK columns: logits to d loss / d unscaled logits."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < columns
    logits = tl.load(logits_ptr + row * columns + offsets, mask=inside, other=0.0)
    if SCALED:
        logits *= tl.load(scale_ptr + row)
    coefficient = tl.load(coefficient_ptr + row)
    log_p = (logits - tl.load(maximum_ptr + row)) - tl.load(log_sum_ptr + row)
    p = tl.exp(log_p)
    grad = -coefficient * p
    if ENTROPY:
        grad -= tl.load(entropy_coefficient_ptr + row) * p * (log_p + tl.load(entropy_ptr + row))
    grad += tl.where(offsets == tl.load(column_ptr + row), coefficient, 0.0)
    if SCALED:
        grad *= tl.load(scale_ptr + row)
    tl.store(out_ptr + row * columns + offsets, grad.to(out_ptr.dtype.element_ty), mask=inside)


class TritonKernels:
    """See ``kernels.Kernels``; keeps the logits. Tiles and vectors are contiguous fp32."""

    keeps_logits = True

    def statistics(self, logits_BS: Tensor, spare_BS: Tensor, column_B: Tensor, scale_B: Tensor | None) -> Tensor:
        tokens, columns = logits_BS.shape
        part_4B = logits_BS.new_empty(4, tokens)
        with _device(logits_BS):
            _statistics_kernel[(tokens,)](
                logits_BS, scale_B if scale_B is not None else logits_BS, column_B, part_4B, tokens, columns,
                SCALED=scale_B is not None, BLOCK=_block(columns), num_warps=_WARPS,
            )  # fmt: skip
        return part_4B

    def gradient(self, logits_BS: Tensor, token: TokenGradient, out_BS: Tensor) -> None:
        tokens, columns = logits_BS.shape
        block = _block(columns)
        unused = token.maximum_B
        vectors = [
            (unused if vector is None else vector.contiguous())
            for vector in (
                token.scale_B, token.maximum_B, token.log_sum_B, token.coefficient_B, token.column_B,
                token.entropy_coefficient_B, token.entropy_B,
            )
        ]  # fmt: skip
        with _device(logits_BS):
            _gradient_kernel[(tokens, triton.cdiv(columns, block))](
                logits_BS, out_BS, *vectors, columns, SCALED=token.scale_B is not None,
                ENTROPY=token.entropy_coefficient_B is not None, BLOCK=block, num_warps=_WARPS,
            )  # fmt: skip

    def kept_gradient(self, kept_BS: Tensor, part_4B: Tensor, token: TokenGradient, out_BS: Tensor) -> None:
        self.gradient(kept_BS, token, out_BS)


def _block(columns: int) -> int:
    return min(_BLOCK, triton.next_power_of_2(columns))


def _device(tensor: Tensor):
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device_of(tensor)
