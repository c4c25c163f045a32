"""``sync.plan.bit_sum`` on a GPU in one pass of a Triton kernel; importing this module needs the
package ``triton``.

In torch's operations it took 7 % of an H200's memory rate, more than half of a weight sync by CUDA
IPC.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _ROUNDS = 64, 16  # that a program adds up at a time, and how often: 128 KiB of whole blocks


@triton.jit
def _bit_sum_kernel(
    words_ptr,
    total_ptr,
    rows,
    FACTOR: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Modulo 2^64, so that the order in which programs add theirs does not matter."""
    first = tl.program_id(0).to(tl.int64) * ROWS * ROUNDS
    sums = tl.zeros((ROWS,), tl.int64)
    for number in range(ROUNDS):
        row = first + number * ROWS + tl.arange(0, ROWS)
        inside = row < rows
        if WORDS == 1:
            mixed = tl.load(words_ptr + row, mask=inside, other=0).to(tl.int64)
        else:
            places = row[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
            mixed = tl.sum(tl.load(words_ptr + places, mask=inside[:, None], other=0), 1)
        mixed *= FACTOR
        sums += mixed ^ (mixed >> 32)
    tl.atomic_add(total_ptr, tl.sum(sums, 0))


@triton.jit
def _mixed_kernel(
    words_ptr, mixed_ptr, rows, FACTOR: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    places = row[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    mixed = tl.sum(tl.load(words_ptr + places, mask=inside[:, None], other=0), 1) * FACTOR
    tl.store(mixed_ptr + row, mixed ^ (mixed >> 32), mask=inside)


def mixed(words: Tensor, factor: int) -> Tensor:
    """(N,): the sums of the rows of (N, W) words, mixed."""
    found = torch.empty(len(words), dtype=torch.int64, device=words.device)
    with torch.cuda.device_of(words):
        _mixed_kernel[(triton.cdiv(len(words), _ROWS),)](
            words, found, len(words), FACTOR=factor, WORDS=words.shape[1], ROWS=_ROWS
        )
    return found


def bit_sum(words: Tensor, factor: int) -> Tensor:
    """(): of (N,) entries, or of (N, W) words, each row of which is added up before it is mixed."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    width = words.shape[1] if words.dim() == 2 else 1
    with torch.cuda.device_of(words):
        if len(words):
            _bit_sum_kernel[(triton.cdiv(len(words), _ROWS * _ROUNDS),)](
                words, total, len(words), FACTOR=factor, WORDS=width, ROWS=_ROWS, ROUNDS=_ROUNDS
            )
    return total
