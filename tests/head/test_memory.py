"""Memory by measuring the process, not by reading the code. Sequence parallelism: ``test_sharded``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from openrlhf_ext.head import linear_logprob_entropy, linear_token_loss
from tests.head.memory import MIB, SLACK, peak_extra_bytes


def measured(function: Callable[[], object]) -> int:
    function()  # the first run loads libraries
    extra = peak_extra_bytes(function)
    if extra is None:
        pytest.skip("this kernel cannot reset a process's resident peak")
    return extra


@pytest.mark.parametrize(
    ("way", "tokens", "vocab", "width", "dtype", "workspace"),
    [
        ("forward", 2000, 32_000, 16, torch.float32, 16 * MIB),
        ("forward", 1000, 256_512, 16, torch.float32, 4 * MIB),
        ("forward", 1000, 4_000, 1024, torch.bfloat16, 16 * MIB),
        ("backward", 2000, 32_000, 16, torch.float32, 16 * MIB),
        ("backward", 1000, 4_000, 1024, torch.bfloat16, 16 * MIB),
        ("token loss", 1000, 128_256, 16, torch.float32, 4 * MIB),
        ("token loss", 1000, 4_000, 1024, torch.bfloat16, 16 * MIB),
        ("token loss, one pass", 2000, 32_000, 16, torch.float32, 16 * MIB),
        ("token loss, one pass", 2000, 32_000, 16, torch.float32, 48 * MIB),
        ("token loss, one pass", 1000, 4_000, 1024, torch.bfloat16, 32 * MIB),
    ],
)
def test_peak_stays_within_the_workspace(way, tokens, vocab, width, dtype, workspace):
    hidden = torch.randn(tokens, width, dtype=dtype).requires_grad_()
    weight = torch.nn.Parameter(torch.randn(vocab, width, dtype=dtype))
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones(vocab, width), False
    target = torch.randint(0, vocab, (tokens,))
    options = {"temperature": 0.7, "workspace_bytes": workspace}

    def forward() -> None:
        with torch.no_grad():
            linear_logprob_entropy(hidden, weight, target, **options)

    def backward() -> None:
        linear_logprob_entropy(hidden, weight, target, **options).logprob_T.sum().backward()
        hidden.grad = None

    def token_loss() -> None:
        recompute = way == "token loss"
        out = linear_token_loss(hidden, weight, target, lambda lp, rows: lp / tokens, recompute=recompute, **options)
        out.value.backward()
        hidden.grad = None

    extra = measured({"forward": forward, "backward": backward}.get(way, token_loss))
    assert extra <= workspace + hidden.nbytes + SLACK, f"{extra / MIB:.1f} MiB"


def test_measuring_sees_full_logits():
    """The yardstick works: all logits at once are seen."""
    hidden, weight = torch.randn(2000, 16), torch.randn(32_000, 16)
    assert measured(lambda: (hidden @ weight.t()).sum()) > 0.9 * 4 * 2000 * 32_000
