"""Speed and memory of `openrlhf_ext.head` against the bare matrix products and other ways, as
ratios of one run.

    python benchmarks/head_speed.py --output head.json                   # needs a CUDA device
    python benchmarks/head_speed.py --device cpu --tokens 4096 --hidden 1024

For every number of tokens and hidden size, with the whole vocabulary and with one of eight shards:
the forward pass (log-probability and entropy of every token), and the same with the gradients of
hidden states and weight. bf16 on a GPU, fp32 on a CPU.

Yardsticks:
  products  the bare matrix products alone, each in its own fastest tiling of several: 1 product for
            the forward pass, 3 for the token loss (logits, d hidden, d weight), 4 where the
            backward pass computes the logits again. The tilings are tried at the start on a part of
            the vocabulary; d weight is summed in fp32, as training needs it
  full      logits of all tokens in fp32, log-softmax, softmax for the entropy (OpenRLHF's way)

A ratio is the median over the repeats of that of two times in one repeat. The weight has a
``main_grad``, as in a Megatron policy. Extra memory is the growth of the allocator's peak (CUDA) or
of the resident peak (CPU) in a run, without the gradients it returns.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from benchmarks.harness import (
    Work,
    nothing,
    paired_ratio,
    peak_extra_bytes,
    seconds_in_turns,
    summary,
)
from openrlhf_ext.algorithms.losses import clipped_surrogate
from openrlhf_ext.head import linear_logprob_entropy, linear_token_loss
from openrlhf_ext.head.kernels import accumulate

# --------------------------------------------------------------------------------------------------
# Measuring
# --------------------------------------------------------------------------------------------------


def measure(functions: dict[str, Work], repeats: int, device: str) -> dict[str, list[float]]:
    """Seconds of every function, once per repeat, in turns."""
    gc.collect()
    synchronize = torch.cuda.synchronize if device == "cuda" else nothing
    return seconds_in_turns(functions, repeats, synchronize=synchronize)


def extra_mib(function: Work, device: str, without: int = 0) -> float | None:
    """Growth of the peak of memory during one run, without so many bytes; None if the kernel does
    not tell it."""
    gc.collect()
    extra = peak_extra_bytes(function) if device == "cpu" else cuda_extra_bytes(function)
    return None if extra is None else (extra - without) / 2**20


def cuda_extra_bytes(function: Work) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = function()
    torch.cuda.synchronize()
    del result
    return max(0, torch.cuda.max_memory_allocated() - before)


# --------------------------------------------------------------------------------------------------
# Yardsticks
# --------------------------------------------------------------------------------------------------


class Products:
    """The bare matrix products of a call, tile by tile in one reused buffer: what no head can be
    faster than."""

    NAMES = ("logits", "grad_hidden", "grad_weight")
    # tokens, columns
    TILINGS = ((1024, 4096), (2048, 1024), (2048, 2048), (2048, 4096), (4096, 1024), (4096, 4096))
    CUDA_TILINGS = ((2048, 16384), (4096, 8192), (4096, 16384), (8192, 8192), (8192, 16384))

    def __init__(self, hidden_TH: Tensor, weight_VH: Tensor, total_VH: Tensor) -> None:
        """``total_VH``: fp32 sum of the gradients of the weight."""
        self.hidden_TH, self.weight_VH, self.total_VH = hidden_TH, weight_VH, total_VH
        self.chosen: dict[str, str] = {}
        self.grad_hidden_TH = torch.zeros_like(hidden_TH, dtype=torch.float32)
        self.tilings = self.CUDA_TILINGS if hidden_TH.is_cuda else self.TILINGS
        largest = max(tokens * columns for tokens, columns in self.tilings)
        self.buffer = torch.randn(largest, device=hidden_TH.device).to(hidden_TH)

    def run(self, name: str, tiling: tuple[int, int], vocab: int) -> None:
        """A product over the first rows of the weight."""
        tokens, columns = tiling
        for first in range(0, len(self.hidden_TH), tokens):
            for column in range(0, vocab, columns):
                self._tile(
                    name, slice(first, first + tokens), slice(column, min(column + columns, vocab))
                )

    def _tile(self, name: str, rows: slice, columns: slice) -> None:
        hidden_BH, weight_SH = self.hidden_TH[rows], self.weight_VH[columns]
        tile_BS = self.buffer[: len(hidden_BH) * len(weight_SH)].view(
            len(hidden_BH), len(weight_SH)
        )
        if name == "logits":
            torch.mm(hidden_BH, weight_SH.t(), out=tile_BS)
        elif name == "grad_hidden":
            accumulate(self.grad_hidden_TH[rows], tile_BS, weight_SH)
        else:
            accumulate(self.total_VH[columns], tile_BS.t(), hidden_BH)

    def fastest(self, name: str) -> Work:
        """The product over the whole vocabulary in the tiling that is the fastest on an eighth of
        it."""
        vocab = len(self.weight_VH)
        trials = {
            f"{name} {tiling}": (lambda tiling=tiling: self.run(name, tiling, vocab // 8))
            for tiling in self.tilings
        }
        rows = measure(trials, 3, self.hidden_TH.device.type)
        best = min(self.tilings, key=lambda tiling: min(rows[f"{name} {tiling}"]))
        self.chosen[name] = f"{best[0]} x {best[1]}"
        return lambda: self.run(name, best, vocab)

    def floors(self, names: tuple[str, ...]) -> dict[str, Work]:
        with torch.no_grad():
            return {f"product {name}": self.fastest(name) for name in names}


def full_logits(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> tuple[Tensor, Tensor]:
    logits_TV = (hidden_TH @ weight_VH.t()).float()
    logprob_T = logits_TV.log_softmax(-1).gather(1, target_T[:, None])[:, 0]
    with torch.no_grad():
        entropy_T = logits_TV.logsumexp(-1) - (logits_TV.softmax(-1) * logits_TV).sum(-1)
    return logprob_T, entropy_T


# --------------------------------------------------------------------------------------------------
# The problem
# --------------------------------------------------------------------------------------------------


class Problem:
    """Random operands and the methods on them."""

    def __init__(
        self, tokens: int, hidden: int, vocab: int, device: str = "cpu", dtype=torch.float32
    ) -> None:
        generator = torch.Generator(device).manual_seed(0)
        randn = lambda *s: torch.randn(*s, generator=generator, device=device)  # noqa: E731
        self.hidden_TH = randn(tokens, hidden).to(dtype).requires_grad_()
        # logits of standard deviation 3: entropies between those of a peaked and of a flat
        # distribution
        self.weight_VH = (randn(vocab, hidden) * 3 / hidden**0.5).to(dtype).requires_grad_()
        # pages that are there already
        self.total_VH = torch.ones(vocab, hidden, device=device).zero_()
        self.weight_VH.main_grad, self.weight_VH.grad_added_to_main_grad = self.total_VH, False
        self.target_T = torch.randint(0, vocab, (tokens,), generator=generator, device=device)
        with torch.no_grad():
            old = linear_logprob_entropy(self.hidden_TH, self.weight_VH, self.target_T).logprob_T
        self.slope_T = randn(tokens) / tokens
        advantage_T, old_T = randn(tokens), old + 0.1 * randn(tokens)
        self.loss = lambda logprob_B, rows: (
            -clipped_surrogate(logprob_B - old_T[rows], advantage_T[rows], 0.2, 0.2)[0] / tokens
        )

    def products(self) -> Products:
        return Products(self.hidden_TH.detach(), self.weight_VH.detach(), self.total_VH)

    def ours(self) -> object:
        with torch.no_grad():
            return linear_logprob_entropy(self.hidden_TH, self.weight_VH, self.target_T)

    def full(self) -> object:
        with torch.no_grad():
            return full_logits(self.hidden_TH, self.weight_VH, self.target_T)

    def ours_backward(self) -> object:
        out = linear_logprob_entropy(self.hidden_TH, self.weight_VH, self.target_T)
        return self.gradients((out.logprob_T * self.slope_T).sum())

    def ours_token_loss(self) -> object:
        return self.gradients(
            linear_token_loss(self.hidden_TH, self.weight_VH, self.target_T, self.loss).value
        )

    def full_backward(self) -> object:
        logprob_T, _ = full_logits(self.hidden_TH, self.weight_VH, self.target_T)
        return self.gradients((logprob_T * self.slope_T).sum())

    def gradients(self, loss: Tensor) -> tuple[Tensor | None, ...]:
        """Of hidden states and weight; None where main_grad took it."""
        loss.backward()
        grads = self.hidden_TH.grad, self.weight_VH.grad
        self.hidden_TH.grad = self.weight_VH.grad = None
        return grads

    def result_bytes(self, name: str) -> int:
        """What a forward and backward pass returns."""
        ours = name in ("token loss", "logprob")
        return self.hidden_TH.nbytes + (0 if ours else self.weight_VH.nbytes)


def check_equal() -> None:
    """The methods agree: a fast wrong answer is none."""
    problem = Problem(300, 64, 5000)
    for ours, other in zip(problem.ours(), problem.full(), strict=True):
        torch.testing.assert_close(ours, other, atol=1e-4, rtol=1e-4)
    problem.total_VH.zero_()
    hidden, _ = problem.ours_backward()
    for ours, other in zip((hidden, problem.total_VH), problem.full_backward(), strict=True):
        torch.testing.assert_close(ours, other, atol=1e-5, rtol=1e-4)


# --------------------------------------------------------------------------------------------------
# The program
# --------------------------------------------------------------------------------------------------


def row(tokens: int, hidden: int, vocab: int, device: str, repeats: int) -> dict:
    """All ways on one problem."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    problem = Problem(tokens, hidden, vocab, device, dtype)
    forward = {"forward ours": problem.ours}
    backward = {"token loss": problem.ours_token_loss, "logprob": problem.ours_backward}
    if tokens <= 8192:  # more do not fit
        forward["forward full"] = problem.full
        backward["full"] = problem.full_backward
    for function in (forward | backward).values():
        function()  # compiles kernels
    products = problem.products()
    bare = products.floors(Products.NAMES)
    seconds = measure(bare | forward | backward, repeats, device)
    one, three = seconds["product logits"], [seconds[name] for name in bare]
    return {
        "floor_tilings": products.chosen,
        "seconds": {name: summary(values) for name, values in seconds.items()},
        "ratio_to_1_product": {name: paired_ratio(seconds[name], one) for name in forward},
        "ratio_to_3_products": {name: paired_ratio(seconds[name], *three) for name in backward},
        "ratio_to_4_products": {
            name: paired_ratio(seconds[name], *three, one) for name in backward
        },
        "forward_extra_memory_mib": {
            name: extra_mib(function, device) for name, function in forward.items()
        },
        "backward_extra_memory_mib": {
            name: extra_mib(function, device, without=problem.result_bytes(name))
            for name, function in backward.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--hidden", type=int, nargs="+", default=[4096, 5120])
    parser.add_argument("--vocab", type=int, default=152064)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("benchmarks/head_speed.py needs a CUDA device; none is visible")
    check_equal()
    found = record.environment("torch") | {"repeats": args.repeats}
    if args.device == "cuda":
        found["device"] = torch.cuda.get_device_name()
    for hidden in args.hidden:
        for shards in (1, 8):
            for tokens in args.tokens:
                label = f"tokens {tokens} hidden {hidden} vocab {args.vocab} tp {shards}"
                sys.stderr.write(label + "\n")
                found[label] = row(tokens, hidden, args.vocab // shards, args.device, args.repeats)
                if args.device == "cuda":
                    torch.cuda.empty_cache()
    record.write(args.output, {"gpu": found})


if __name__ == "__main__":
    main()
