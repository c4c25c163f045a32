"""Memory by measuring the process, not by reading the code."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from openrlhf_ext.head import linear_logprob_entropy, linear_token_loss
from tests.head.cases import make_case

MIB = 1 << 20
TOKENS, VOCAB, WIDTH = 2000, 32_000, 16
FULL_LOGITS = 4 * TOKENS * VOCAB  # 244 MiB
# what the libraries keep for themselves: packed operands of a product, an allocator's rounding
SLACK = 12 * MIB


def status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def peak_extra_bytes(function: Callable[[], object]) -> int:
    """Growth of the resident peak during one run."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that was freed but not given back would hide what the run takes
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("this kernel cannot reset a process's resident peak")
    before = status("VmRSS")
    function()
    return status("VmHWM") - before


@pytest.mark.parametrize(
    ("way", "workspace"),
    [
        ("forward", 16 * MIB), ("backward", 16 * MIB), ("token loss", 16 * MIB), ("token loss, one pass", 16 * MIB),
        ("token loss, one pass", 48 * MIB),
    ],
)  # fmt: skip
def test_peak_stays_within_the_workspace(way, workspace):
    case = make_case(tokens=40, vocab=VOCAB, width=WIDTH)
    hidden = torch.randn(TOKENS, WIDTH).requires_grad_()
    weight, target = case.weight.requires_grad_(), torch.randint(0, VOCAB, (TOKENS,))
    outputs = (hidden.nbytes + weight.nbytes) * 2  # gradients, and one copy under way to autograd

    def forward() -> None:
        with torch.no_grad():
            linear_logprob_entropy(hidden, weight, target, workspace_bytes=workspace)

    def backward() -> None:
        out = linear_logprob_entropy(hidden, weight, target, workspace_bytes=workspace)
        torch.autograd.grad(out.logprob_T.sum(), (hidden, weight))

    def token_loss(recompute: bool = True) -> None:
        out = linear_token_loss(
            hidden, weight, target, lambda lp, rows: lp / TOKENS, workspace_bytes=workspace, recompute=recompute
        )
        torch.autograd.grad(out.value, (hidden, weight))

    function = {
        "forward": forward, "backward": backward, "token loss": token_loss,
        "token loss, one pass": lambda: token_loss(False),
    }[way]  # fmt: skip
    peak_extra_bytes(function)  # the first run loads libraries
    extra = peak_extra_bytes(function)
    assert extra <= workspace + outputs + SLACK, f"{extra / MIB:.1f} MiB"
    assert extra < FULL_LOGITS / 3


def test_measuring_sees_full_logits():
    """The yardstick works: all logits at once are seen."""
    hidden, weight = torch.randn(TOKENS, WIDTH), torch.randn(VOCAB, WIDTH)
    assert peak_extra_bytes(lambda: (hidden @ weight.t()).sum()) > 0.9 * FULL_LOGITS


def test_memory_does_not_grow_with_tokens_or_vocabulary():
    def extra(tokens: int, vocab: int) -> float:
        hidden, weight = torch.randn(tokens, WIDTH), torch.randn(vocab, WIDTH)
        target = torch.randint(0, vocab, (tokens,))

        def run() -> None:
            with torch.no_grad():
                linear_logprob_entropy(hidden, weight, target, workspace_bytes=16 * MIB)

        run()
        return peak_extra_bytes(run)

    sizes = [extra(2048, 16_000), extra(4096, 16_000), extra(2048, 64_000)]
    assert max(sizes) <= 16 * MIB + SLACK, [size / MIB for size in sizes]
