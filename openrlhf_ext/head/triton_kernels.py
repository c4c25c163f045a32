"""The passes over a tile of logits as Triton kernels; importing this module needs the package
``triton``.

A tile is larger than a GPU's caches, so that a pass costs its memory traffic: 4 bytes a logit for
the statistics, 4 read and 2 (bf16) or 4 written for the gradient, against 2 H operations a logit in
the product that made it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from openrlhf_ext.head.statistics import TokenGradient

_BLOCK = 4096  # columns that a program handles at a time
_WARPS = 8
# of a row in the statistics, whose loop waits for its own sums: one read 1.7 TB/s of 4.3 on an H200
_PROGRAMS = 4
_MERGED = 256  # tokens whose programs' parts are put together by one program


@triton.jit
def _statistics_kernel(
    logits_ptr,
    scale_ptr,
    column_ptr,
    part_ptr,
    tokens,
    columns,
    stride,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a token and ``stride`` columns of its row: their (m, s, w, t), online; into
    (programs, 4, tokens)."""
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits_ptr += row * columns
    part_ptr += number.to(tl.int64) * 4 * tokens + row
    scale = tl.load(scale_ptr + row) if SCALED else 1.0
    start = number * stride
    maximum = tl.full((), -1.0e38, tl.float32)  # finite: -inf - -inf would be NaN
    total = tl.full((), 0.0, tl.float32)
    weighted = tl.full((), 0.0, tl.float32)
    for first in range(start, tl.minimum(start + stride, columns), BLOCK):
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
    here = (column >= start) & (column < tl.minimum(start + stride, columns))
    target = tl.load(logits_ptr + column, mask=here, other=0.0) * scale
    tl.store(part_ptr, maximum)
    tl.store(part_ptr + tokens, total)
    tl.store(part_ptr + 2 * tokens, weighted)
    tl.store(part_ptr + 3 * tokens, target)


@triton.jit
def _merge_kernel(parts_ptr, part_ptr, tokens, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """``statistics.merge`` of (PARTS, 4, tokens)."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < tokens
    maximum = tl.load(parts_ptr + rows, mask=inside, other=0.0)
    for part in range(1, PARTS):
        maximum = tl.maximum(
            maximum, tl.load(parts_ptr + 4 * part * tokens + rows, mask=inside, other=0.0)
        )
    total = tl.full((BLOCK,), 0.0, tl.float32)
    weighted = tl.full((BLOCK,), 0.0, tl.float32)
    target = tl.full((BLOCK,), 0.0, tl.float32)
    for part in range(PARTS):
        one_ptr = parts_ptr + 4 * part * tokens + rows
        shift = tl.load(one_ptr, mask=inside, other=0.0) - maximum
        factor = tl.exp(shift)
        share = tl.load(one_ptr + tokens, mask=inside, other=0.0)
        total += factor * share
        weighted += factor * (tl.load(one_ptr + 2 * tokens, mask=inside, other=0.0) + shift * share)
        target += tl.load(one_ptr + 3 * tokens, mask=inside, other=0.0)
    tl.store(part_ptr + rows, maximum, mask=inside)
    tl.store(part_ptr + tokens + rows, total, mask=inside)
    tl.store(part_ptr + 2 * tokens + rows, weighted, mask=inside)
    tl.store(part_ptr + 3 * tokens + rows, target, mask=inside)


@triton.jit
def _gradient_kernel(
    logits_ptr,
    out_ptr,
    scale_ptr,
    maximum_ptr,
    log_sum_ptr,
    coefficient_ptr,
    column_ptr,
    entropy_coefficient_ptr,
    entropy_ptr,
    columns,
    SCALED: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
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

    def statistics(
        self, logits_BS: Tensor, spare_BS: Tensor, column_B: Tensor, scale_B: Tensor | None
    ) -> Tensor:
        tokens, columns = logits_BS.shape
        block = _block(columns)
        stride = triton.cdiv(triton.cdiv(columns, _PROGRAMS), block) * block
        parts_P4B = logits_BS.new_empty(triton.cdiv(columns, stride), 4, tokens)
        part_4B = parts_P4B[0]
        with _device(logits_BS):
            _statistics_kernel[(tokens, len(parts_P4B))](
                logits_BS,
                scale_B if scale_B is not None else logits_BS,
                column_B,
                parts_P4B,
                tokens,
                columns,
                stride,
                SCALED=scale_B is not None,
                BLOCK=block,
                num_warps=_WARPS,
            )
            if len(parts_P4B) > 1:
                part_4B = logits_BS.new_empty(4, tokens)
                _merge_kernel[(triton.cdiv(tokens, _MERGED),)](
                    parts_P4B, part_4B, tokens, PARTS=len(parts_P4B), BLOCK=_MERGED
                )
        return part_4B

    def gradient(self, logits_BS: Tensor, token: TokenGradient, out_BS: Tensor) -> None:
        tokens, columns = logits_BS.shape
        block = _block(columns)
        unused = token.maximum_B
        vectors = [
            (unused if vector is None else vector.contiguous())
            for vector in (
                token.scale_B,
                token.maximum_B,
                token.log_sum_B,
                token.coefficient_B,
                token.column_B,
                token.entropy_coefficient_B,
                token.entropy_B,
            )
        ]
        with _device(logits_BS):
            _gradient_kernel[(tokens, triton.cdiv(columns, block))](
                logits_BS,
                out_BS,
                *vectors,
                columns,
                SCALED=token.scale_B is not None,
                ENTROPY=token.entropy_coefficient_B is not None,
                BLOCK=block,
                num_warps=_WARPS,
            )

    def kept_gradient(
        self, kept_BS: Tensor, part_4B: Tensor, token: TokenGradient, out_BS: Tensor
    ) -> None:
        self.gradient(kept_BS, token, out_BS)


def _block(columns: int) -> int:
    return min(_BLOCK, triton.next_power_of_2(columns))


def _device(tensor: Tensor):
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device_of(tensor)
