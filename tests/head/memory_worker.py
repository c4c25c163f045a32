"""Measures the memory of every walk in a process that has run nothing else:
``python -m tests.head.memory_worker``.

In a process with a past, memory that other tests have freed hides what a run takes, or adds to it.
Prints JSON: the extra bytes of every case, in order, and last those of a run that does hold all
logits (null: not measurable here).
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch

from openrlhf_ext.head import linear_logprob_entropy, linear_token_loss
from tests.head.memory import MIB, peak_extra_bytes

# way, tokens, vocabulary, width, dtype, workspace
CASES = [
    ("forward", 2000, 32_000, 16, "float32", 16 * MIB),
    ("forward", 1000, 256_512, 16, "float32", 4 * MIB),
    ("forward", 1000, 4_000, 1024, "bfloat16", 16 * MIB),
    ("backward", 2000, 32_000, 16, "float32", 16 * MIB),
    ("backward", 1000, 4_000, 1024, "bfloat16", 16 * MIB),
    ("token loss", 1000, 128_256, 16, "float32", 4 * MIB),
    ("token loss", 1000, 4_000, 1024, "bfloat16", 16 * MIB),
    ("token loss, one pass", 2000, 32_000, 16, "float32", 16 * MIB),
    ("token loss, one pass", 2000, 32_000, 16, "float32", 48 * MIB),
    ("token loss, one pass", 1000, 4_000, 1024, "bfloat16", 32 * MIB),
]
FULL = (2000, 32_000)  # tokens, vocabulary of the run that holds all logits


def measured(function: Callable[[], object]) -> int | None:
    function()  # the first run loads libraries
    return peak_extra_bytes(function)


def extra_bytes(
    way: str, tokens: int, vocab: int, width: int, dtype: str, workspace: int
) -> int | None:
    number = getattr(torch, dtype)
    hidden = torch.randn(tokens, width, dtype=number).requires_grad_()
    weight = torch.nn.Parameter(torch.randn(vocab, width, dtype=number))
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
        out = linear_token_loss(
            hidden, weight, target, lambda lp, rows: lp / tokens, recompute=recompute, **options
        )
        out.value.backward()
        hidden.grad = None

    return measured({"forward": forward, "backward": backward}.get(way, token_loss))


def full_logits_bytes() -> int | None:
    tokens, vocab = FULL
    hidden, weight = torch.randn(tokens, 16), torch.randn(vocab, 16)
    return measured(lambda: (hidden @ weight.t()).sum())


if __name__ == "__main__":
    print(json.dumps([extra_bytes(*case) for case in CASES] + [full_logits_bytes()]))
