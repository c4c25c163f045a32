"""Speed and memory of `openrlhf_ext.head` against the bare matrix products and other ways, as
ratios of one run.

    python benchmarks/head.py --part forward --output benchmarks/results/head_cpu.json   # each part
    takes minutes, python benchmarks/head.py --part backward --output
    benchmarks/results/head_cpu.json  # and is added to the file python benchmarks/head.py --part
    scaling --output benchmarks/results/head_cpu.json python benchmarks/head.py --part gpu --output
    benchmarks/results/head_gpu.json       # needs a CUDA device

Parts:
  forward   log-probability and entropy of every token
  backward  the same and the gradients of hidden states and weight; and the token loss, which makes
  them in its forward
  scaling   time per token and memory over the number of tokens, and memory over the vocabulary
  gpu       forward and backward in bf16, whole vocabulary and one of eight shards; public kernels
  where installed

Yardsticks:
  floor     the bare matrix products alone, each in its own fastest tiling of several: 1 product for
  the forward pass, 3
            for the token loss (logits, d hidden, d weight), 4 where the backward pass computes the
            logits again. The tilings are tried at the start on a part of the vocabulary; d weight
            is summed in fp32, as training needs it
  full      logits of all tokens in fp32, log-softmax, softmax for the entropy (OpenRLHF's way)
  chunked   blocks of rows times chunks of the vocabulary, statistics kept online, in plain torch
  (other trainers' way)

Every function runs once per repeat, in turns, so that a change of load hits all; a ratio is the
median over the repeats of that of two times in one repeat. The weight has a ``main_grad``, as in a
Megatron policy. Extra memory is the growth of the resident peak (CPU) or of the allocator's peak
(CUDA) in a run, without the gradients it returns.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from openrlhf_ext.algorithms.losses import clipped_surrogate
from openrlhf_ext.head import linear_logprob_entropy, linear_token_loss
from openrlhf_ext.head.kernels import accumulate

Function = Callable[[], object]


# --------------------------------------------------------------------------------------------------
# Measuring
# --------------------------------------------------------------------------------------------------


class Meter:
    """Seconds, and growth of the peak of memory, of one run of a function."""

    def __init__(self, function: Function) -> None:
        gc.collect()
        before = self._reset()
        start = time.perf_counter()
        result = function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - start
        self.extra_bytes = max(0, self._peak() - before)
        del result

    @staticmethod
    def _reset() -> int:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        # memory that the last run left behind would hide what this one takes
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        return record.status_bytes("VmRSS")

    @staticmethod
    def _peak() -> int:
        return (
            torch.cuda.max_memory_allocated()
            if torch.cuda.is_available()
            else record.status_bytes("VmHWM")
        )


class Row:
    """All runs of one function."""

    def __init__(self, meters: list[Meter]) -> None:
        self.seconds = [meter.seconds for meter in meters]
        self.best = min(self.seconds)
        self.median = statistics.median(self.seconds)
        self.extra_bytes = max(meter.extra_bytes for meter in meters)

    def summary(self) -> dict[str, float | int]:
        spread = statistics.stdev(self.seconds) if len(self.seconds) > 1 else 0.0
        return {
            "min": self.best,
            "median": self.median,
            "mean": statistics.mean(self.seconds),
            "std": spread,
            "max": max(self.seconds),
            "repeats": len(self.seconds),
        }


def measure(functions: dict[str, Function], repeats: int) -> dict[str, Row]:
    """Every function once per repeat, in turns."""
    meters: dict[str, list[Meter]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            meters[name].append(Meter(function))
            sys.stderr.write(f"  {name:32s} {meters[name][-1].seconds:9.4f} s\n")
    return {name: Row(values) for name, values in meters.items()}


def ratio(row: Row, floors: list[Row]) -> dict[str, float]:
    """Time of a function over that of others together, repeat by repeat."""
    values = [
        own / sum(others)
        for own, *others in zip(row.seconds, *(f.seconds for f in floors), strict=True)
    ]
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


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

    def fastest(self, name: str) -> Function:
        """The product over the whole vocabulary in the tiling that is the fastest on an eighth of
        it."""
        vocab = len(self.weight_VH)
        trials = {
            f"{name} {tiling}": (lambda tiling=tiling: self.run(name, tiling, vocab // 8))
            for tiling in self.tilings
        }
        rows = measure(trials, 3)
        best = min(self.tilings, key=lambda tiling: rows[f"{name} {tiling}"].best)
        self.chosen[name] = f"{best[0]} x {best[1]}"
        return lambda: self.run(name, best, vocab)

    def floors(self, names: tuple[str, ...]) -> dict[str, Function]:
        with torch.no_grad():
            return {f"product {name}": self.fastest(name) for name in names}


def full_logits(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> tuple[Tensor, Tensor]:
    logits_TV = (hidden_TH @ weight_VH.t()).float()
    logprob_T = logits_TV.log_softmax(-1).gather(1, target_T[:, None])[:, 0]
    with torch.no_grad():
        entropy_T = logits_TV.logsumexp(-1) - (logits_TV.softmax(-1) * logits_TV).sum(-1)
    return logprob_T, entropy_T


class ChunkedLogprob(torch.autograd.Function):
    """Online statistics over chunks of the vocabulary; the backward pass computes the logits
    again."""

    ROWS, COLUMNS = 1024, 8192

    @staticmethod
    def forward(
        ctx, hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        pieces = [
            ChunkedLogprob._rows(h, weight_VH, t)
            for h, t in zip(*_split(hidden_TH, target_T), strict=True)
        ]
        logprob_T, entropy_T, log_z_T = (torch.cat(values) for values in zip(*pieces, strict=True))
        ctx.save_for_backward(hidden_TH, weight_VH, target_T, log_z_T)
        ctx.mark_non_differentiable(entropy_T)
        return logprob_T, entropy_T

    @staticmethod
    def _rows(
        hidden_BH: Tensor, weight_VH: Tensor, target_B: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        maximum = torch.full(target_B.shape, float("-inf"), device=hidden_BH.device)
        total, weighted, chosen = (torch.zeros_like(maximum) for _ in range(3))
        for first in range(0, len(weight_VH), ChunkedLogprob.COLUMNS):
            logits = (hidden_BH @ weight_VH[first : first + ChunkedLogprob.COLUMNS].t()).float()
            new = torch.maximum(maximum, logits.amax(-1))
            factor, exponential = (maximum - new).exp(), (logits - new[:, None]).exp()
            total = total * factor + exponential.sum(-1)
            weighted = weighted * factor + (exponential * logits).sum(-1)
            here = (target_B >= first) & (target_B < first + logits.shape[1])
            index = (target_B - first).clamp(0, logits.shape[1] - 1)
            chosen = torch.where(here, logits.gather(1, index[:, None])[:, 0], chosen)
            maximum = new
        log_z = maximum + total.log()
        return chosen - log_z, log_z - weighted / total, log_z

    @staticmethod
    def backward(ctx, grad_T: Tensor, _: Tensor):
        hidden_TH, weight_VH, target_T, log_z_T = ctx.saved_tensors
        grad_weight = torch.zeros_like(weight_VH)
        grads = []
        for hidden, target, log_z, grad in zip(
            *_split(hidden_TH, target_T, log_z_T, grad_T), strict=True
        ):
            grad_hidden = torch.zeros_like(hidden)
            for first in range(0, len(weight_VH), ChunkedLogprob.COLUMNS):
                weight = weight_VH[first : first + ChunkedLogprob.COLUMNS]
                p = ((hidden @ weight.t()).float() - log_z[:, None]).exp() * -grad[:, None]
                here = ((target >= first) & (target < first + len(weight))).float()
                index = (target - first).clamp(0, len(weight) - 1)
                p.scatter_add_(1, index[:, None], (grad * here)[:, None])
                p = p.to(hidden.dtype)
                grad_hidden += p @ weight
                grad_weight[first : first + ChunkedLogprob.COLUMNS] += p.t() @ hidden
            grads.append(grad_hidden)
        return torch.cat(grads), grad_weight, None


def _split(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    return [tensor.split(ChunkedLogprob.ROWS) for tensor in tensors]


# --------------------------------------------------------------------------------------------------
# Parts
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

    def chunked(self) -> object:
        with torch.no_grad():
            return ChunkedLogprob.apply(self.hidden_TH, self.weight_VH, self.target_T)

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

    def chunked_backward(self) -> object:
        logprob_T, _ = ChunkedLogprob.apply(self.hidden_TH, self.weight_VH, self.target_T)
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
    for forward in (problem.full, problem.chunked):
        for ours, other in zip(problem.ours(), forward(), strict=True):
            torch.testing.assert_close(ours, other, atol=1e-4, rtol=1e-4)
    for backward in (problem.full_backward, problem.chunked_backward):
        problem.total_VH.zero_()
        hidden, _ = problem.ours_backward()
        for ours, other in zip((hidden, problem.total_VH), backward(), strict=True):
            torch.testing.assert_close(ours, other, atol=1e-5, rtol=1e-4)


def part_forward(args: argparse.Namespace) -> dict:
    problem = Problem(args.tokens, args.hidden, args.vocab)
    products = problem.products()
    bare = products.floors(("logits",))
    rows = measure(bare | {"ours": problem.ours}, args.repeats)
    others = measure({"ours": problem.ours, "full": problem.full, "chunked": problem.chunked}, 2)
    one = [rows["product logits"]]
    result = table(rows | {name: others[name] for name in ("full", "chunked")}, problem, args)
    return result | {
        "floor_tilings": products.chosen,
        "floor_gflops": 2 * args.tokens * args.hidden * args.vocab / one[0].median / 1e9,
        "ratio_to_1_product": {"ours": ratio(rows["ours"], one)},
        "ratio_to_ours": {
            name: ratio(others[name], [others["ours"]]) for name in ("full", "chunked")
        },
        "extra_memory_over_full": rows["ours"].extra_bytes / others["full"].extra_bytes,
    }


def part_backward(args: argparse.Namespace) -> dict:
    problem = Problem(args.tokens, args.hidden, args.vocab)
    products = problem.products()
    bare = products.floors(Products.NAMES)
    methods = {
        "token loss": problem.ours_token_loss,
        "logprob": problem.ours_backward,
        "full": problem.full_backward,
        "chunked": problem.chunked_backward,
    }
    rows = measure(bare | {name: methods[name] for name in args.methods}, args.repeats)
    three = [rows[name] for name in bare]
    return table(rows, problem, args) | {
        "floor_tilings": products.chosen,
        "ratio_to_3_products": {name: ratio(rows[name], three) for name in args.methods},
        "ratio_to_4_products": {
            name: ratio(rows[name], [*three, rows["product logits"]]) for name in args.methods
        },
    }


def table(rows: dict[str, Row], problem: Problem, args: argparse.Namespace) -> dict:
    forward = "ours" in rows
    memory = {
        name: row.extra_bytes - (0 if forward else problem.result_bytes(name))
        for name, row in rows.items()
        if not name.startswith("product")
    }
    logits_bytes = 4 * args.tokens * args.vocab
    return {
        "settings": {
            "tokens": args.tokens,
            "hidden": args.hidden,
            "vocab": args.vocab,
            "dtype": "fp32",
        },
        "seconds": {name: row.summary() for name, row in rows.items()},
        "extra_memory_mib": {name: value / 2**20 for name, value in memory.items()},
        "extra_memory_over_full_logits": {
            name: value / logits_bytes for name, value in memory.items()
        },
    }


def part_scaling(args: argparse.Namespace) -> dict:
    out: dict = {"workspace_mib": 256, "tokens": {}, "vocab": {}}
    for tokens in (1024, 4096, 16384, 65536):
        out["tokens"][tokens] = scaling_row(tokens, 64, 32000)
    for vocab in (32000, 64000, 128256, 256512):
        out["vocab"][vocab] = scaling_row(2048, 64, vocab)
    return out


def scaling_row(tokens: int, hidden: int, vocab: int) -> dict:
    problem = Problem(tokens, hidden, vocab)
    rows = measure({"forward": problem.ours, "token loss": problem.ours_token_loss}, 2)
    out: dict = {"settings": {"tokens": tokens, "hidden": hidden, "vocab": vocab, "dtype": "fp32"}}
    for name, row in rows.items():
        extra = row.extra_bytes - (problem.result_bytes(name) if name == "token loss" else 0)
        out[name] = {
            "us_per_token": row.best / tokens * 1e6,
            "ns_per_logit": row.best / tokens / vocab * 1e9,
            "extra_memory_mib": extra / 2**20,
            "extra_memory_over_full_logits": extra / (4 * tokens * vocab),
        }
    return out


def part_gpu(args: argparse.Namespace) -> dict:
    if not torch.cuda.is_available():
        raise SystemExit("--part gpu needs a CUDA device; none is visible")
    out: dict = {}
    for hidden in args.gpu_hidden:
        for shards in (1, 8):
            for tokens in (8192, 32768):
                label = f"tokens {tokens} hidden {hidden} vocab 152064 tp {shards}"
                sys.stderr.write(label + "\n")
                out[label] = gpu_row(tokens, hidden, 152064 // shards, args)
                torch.cuda.empty_cache()
    return out


def gpu_row(tokens: int, hidden: int, vocab: int, args: argparse.Namespace) -> dict:
    problem = Problem(tokens, hidden, vocab, "cuda", torch.bfloat16)
    forward = {"forward ours": problem.ours, "forward chunked": problem.chunked}
    backward = {"token loss": problem.ours_token_loss, "logprob": problem.ours_backward}
    backward |= {"chunked": problem.chunked_backward, **peers(problem)}
    if tokens <= 8192:  # more do not fit
        forward["forward full"] = problem.full
        backward["full"] = problem.full_backward
    for function in (forward | backward).values():
        function()  # compiles kernels
    products = problem.products()
    bare = products.floors(Products.NAMES)
    rows = measure(bare | forward | backward, args.repeats)
    one, three = [rows["product logits"]], [rows[name] for name in bare]
    return {
        "floor_tilings": products.chosen,
        "seconds": {name: row.summary() for name, row in rows.items()},
        "ratio_to_1_product": {name: ratio(rows[name], one) for name in forward},
        "ratio_to_3_products": {name: ratio(rows[name], three) for name in backward},
        "ratio_to_4_products": {name: ratio(rows[name], [*three, *one]) for name in backward},
        "forward_extra_memory_mib": {name: rows[name].extra_bytes / 2**20 for name in forward},
        "backward_extra_memory_mib": {
            name: (rows[name].extra_bytes - problem.result_bytes(name)) / 2**20 for name in backward
        },
    }


def peers(problem: Problem) -> dict[str, Function]:
    """Public kernels that are installed here."""
    found: dict[str, Function] = {}
    if importlib.util.find_spec("verl"):
        from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

        def verl() -> object:
            logprob_T, _ = linear_cross_entropy(
                problem.hidden_TH, problem.weight_VH, problem.target_T, 1.0, "none"
            )
            return problem.gradients((logprob_T * problem.slope_T).sum())

        found["verl linear_cross_entropy"] = verl
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        loss = LigerFusedLinearCrossEntropyLoss()
        found["liger cross-entropy (loss only)"] = lambda: problem.gradients(
            loss(problem.weight_VH, problem.hidden_TH, problem.target_T)
        )
    return found


PARTS = {
    "forward": part_forward,
    "backward": part_backward,
    "scaling": part_scaling,
    "gpu": part_gpu,
}


def environment(args: argparse.Namespace) -> dict:
    """What a number needs to be repeated: hardware, commit, versions, settings."""
    here = record.environment("torch")
    return {
        **here,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else here["device"],
        "threads": torch.get_num_threads(),
        "repeats": args.repeats,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=sorted(PARTS), required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument(
        "--gpu_hidden", type=int, nargs="+", default=[4096, 5120], help="of the part 'gpu'"
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="of ours and the floor; other ways take two"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--methods",
        nargs="*",
        default=["token loss", "logprob"],
        help="of the part 'backward': also 'full' and 'chunked' (minutes each)",
    )
    parser.add_argument("--label", help="name of the run in the JSON; default: the part")
    parser.add_argument(
        "--output", type=Path, help="JSON file; runs that it has under other names stay"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    check_equal()
    before = environment(args)
    row = {**before, **PARTS[args.part](args)}
    known = json.loads(args.output.read_text()) if args.output and args.output.exists() else {}
    found = {**known, args.label or args.part: row}
    if args.output is None:
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
    else:
        record.write(args.output, found, kept=True)


if __name__ == "__main__":
    main()
