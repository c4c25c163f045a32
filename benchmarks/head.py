"""Speed and memory of `openrlhf_ext.head` against the bare matrix products and other ways, as ratios of one run.

    python benchmarks/head.py --part forward --output benchmarks/results/head_cpu.json   # each part takes minutes,
    python benchmarks/head.py --part backward --output benchmarks/results/head_cpu.json  # and is added to the file
    python benchmarks/head.py --part scaling --output benchmarks/results/head_cpu.json
    python benchmarks/head.py --part gpu --output benchmarks/results/head_gpu.json       # needs a CUDA device

Parts:
  forward   log-probability and entropy of every token
  backward  the same and the gradients of hidden states and weight; and the token loss, which makes them in its forward
  scaling   time per token and memory over the number of tokens, and memory over the vocabulary
  gpu       forward and backward in bf16, whole vocabulary and one of eight shards; public kernels where installed

Yardsticks:
  floor     the bare matrix products alone, in the fastest of several tilings: 1 product for the forward pass, 3 for the
            token loss (logits, d hidden, d weight), 4 where the backward pass computes the logits again
  full      logits of all tokens in fp32, log-softmax, softmax for the entropy (OpenRLHF's way)
  chunked   blocks of rows times chunks of the vocabulary, statistics kept online, in plain torch (other trainers' way)

Every function runs once per repeat, in turns, so that a change of load hits all; ratios are of the minima. Extra memory
is the growth of the resident peak (CPU) or of the allocator's peak (CUDA) in a run, without the gradients it returns.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from openrlhf_ext.head import ClippedTokenLoss, linear_logprob_entropy, linear_token_loss

Function = Callable[[], object]


# --------------------------------------------------------------------------------------------------------------------
# Measuring
# --------------------------------------------------------------------------------------------------------------------


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
        ctypes.CDLL(None).malloc_trim(0)  # memory that the last run left behind would hide what this one takes
        Path("/proc/self/clear_refs").write_text("5")
        return status_bytes("VmRSS")

    @staticmethod
    def _peak() -> int:
        return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else status_bytes("VmHWM")


class Row:
    """All runs of one function."""

    def __init__(self, meters: list[Meter]) -> None:
        self.seconds = [meter.seconds for meter in meters]
        self.best = min(self.seconds)
        self.extra_bytes = max(meter.extra_bytes for meter in meters)

    def summary(self) -> dict[str, float | int]:
        spread = statistics.stdev(self.seconds) if len(self.seconds) > 1 else 0.0
        return {
            "min": self.best,
            "mean": statistics.mean(self.seconds),
            "std": spread,
            "max": max(self.seconds),
            "repeats": len(self.seconds),
        }


def measure(functions: dict[str, Function], args: argparse.Namespace) -> dict[str, Row]:
    """Every function once per repeat, in turns; a repeat that would not fit the time budget is left out."""
    meters: dict[str, list[Meter]] = {name: [] for name in functions}
    start = time.perf_counter()
    for repeat in range(args.repeats):
        if repeat and (time.perf_counter() - start) * (repeat + 1) / repeat > args.budget_s:
            break
        for name, function in functions.items():
            meters[name].append(Meter(function))
            sys.stderr.write(f"  {name:32s} {meters[name][-1].seconds:9.4f} s\n")
    return {name: Row(values) for name, values in meters.items()}


def status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


# --------------------------------------------------------------------------------------------------------------------
# Yardsticks
# --------------------------------------------------------------------------------------------------------------------


class Products:
    """The bare matrix products of a call, tile by tile in one reused buffer: what no head can be faster than."""

    def __init__(self, hidden_TH: Tensor, weight_VH: Tensor, tokens: int, columns: int) -> None:
        self.hidden_TH, self.weight_VH, self.columns = hidden_TH, weight_VH, columns
        count = hidden_TH.shape[0]
        self.blocks = [slice(i, min(i + tokens, count)) for i in range(0, count, tokens)]
        self.slices = [slice(i, min(i + columns, len(weight_VH))) for i in range(0, len(weight_VH), columns)]
        self.tile = torch.randn(min(tokens, count), columns, device=hidden_TH.device).to(hidden_TH.dtype)
        self.grad_hidden_TH, self.grad_weight_VH = torch.zeros_like(hidden_TH), torch.zeros_like(weight_VH)

    def _tiles(self):
        for rows in self.blocks:
            for columns in self.slices:
                yield rows, columns, self.tile[: rows.stop - rows.start, : columns.stop - columns.start]

    def logits(self) -> None:
        for rows, columns, tile in self._tiles():
            torch.mm(self.hidden_TH[rows], self.weight_VH[columns].t(), out=tile)

    def grad_hidden(self) -> None:
        for rows, columns, tile in self._tiles():
            self.grad_hidden_TH[rows].addmm_(tile, self.weight_VH[columns])

    def grad_weight(self) -> None:
        for rows, columns, tile in self._tiles():
            self.grad_weight_VH[columns].addmm_(tile.t(), self.hidden_TH[rows])


def full_logits(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> tuple[Tensor, Tensor]:
    logits_TV = (hidden_TH @ weight_VH.t()).float()
    logprob_T = logits_TV.log_softmax(-1).gather(1, target_T[:, None])[:, 0]
    with torch.no_grad():
        entropy_T = logits_TV.logsumexp(-1) - (logits_TV.softmax(-1) * logits_TV).sum(-1)
    return logprob_T, entropy_T


class ChunkedLogprob(torch.autograd.Function):
    """Online statistics over chunks of the vocabulary; the backward pass computes the logits again."""

    ROWS, COLUMNS = 1024, 8192

    @staticmethod
    def forward(ctx, hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> tuple[Tensor, Tensor]:
        pieces = [ChunkedLogprob._rows(h, weight_VH, t) for h, t in zip(*_split(hidden_TH, target_T), strict=True)]
        logprob_T, entropy_T, log_z_T = (torch.cat(values) for values in zip(*pieces, strict=True))
        ctx.save_for_backward(hidden_TH, weight_VH, target_T, log_z_T)
        ctx.mark_non_differentiable(entropy_T)
        return logprob_T, entropy_T

    @staticmethod
    def _rows(hidden_BH: Tensor, weight_VH: Tensor, target_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
        for hidden, target, log_z, grad in zip(*_split(hidden_TH, target_T, log_z_T, grad_T), strict=True):
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


# --------------------------------------------------------------------------------------------------------------------
# Parts
# --------------------------------------------------------------------------------------------------------------------


class Problem:
    """Random operands and the methods on them."""

    def __init__(self, tokens: int, hidden: int, vocab: int, device: str = "cpu", dtype=torch.float32) -> None:
        generator = torch.Generator(device).manual_seed(0)
        randn = lambda *s: torch.randn(*s, generator=generator, device=device)  # noqa: E731
        self.hidden_TH = randn(tokens, hidden).to(dtype).requires_grad_()
        # logits of standard deviation 3: entropies between those of a peaked and of a flat distribution
        self.weight_VH = (randn(vocab, hidden) * 3 / hidden**0.5).to(dtype).requires_grad_()
        self.target_T = torch.randint(0, vocab, (tokens,), generator=generator, device=device)
        with torch.no_grad():
            old = linear_logprob_entropy(self.hidden_TH, self.weight_VH, self.target_T).logprob_T
        self.slope_T = randn(tokens) / tokens
        self.loss = ClippedTokenLoss(randn(tokens), torch.full_like(old, 1 / tokens), old + 0.1 * randn(tokens))

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
        return self._gradients((out.logprob_T * self.slope_T).sum())

    def ours_token_loss(self) -> object:
        return self._gradients(linear_token_loss(self.hidden_TH, self.weight_VH, self.target_T, self.loss).value)

    def full_backward(self) -> object:
        logprob_T, _ = full_logits(self.hidden_TH, self.weight_VH, self.target_T)
        return self._gradients((logprob_T * self.slope_T).sum())

    def chunked_backward(self) -> object:
        logprob_T, _ = ChunkedLogprob.apply(self.hidden_TH, self.weight_VH, self.target_T)
        return self._gradients((logprob_T * self.slope_T).sum())

    def _gradients(self, loss: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss, (self.hidden_TH, self.weight_VH))

    @property
    def result_bytes(self) -> int:
        """What a forward and backward pass returns."""
        return self.hidden_TH.nbytes + self.weight_VH.nbytes


def check_equal() -> None:
    """The methods agree: a fast wrong answer is none."""
    problem = Problem(300, 64, 5000)
    for forward in (problem.full, problem.chunked):
        for ours, other in zip(problem.ours(), forward(), strict=True):
            torch.testing.assert_close(ours, other, atol=1e-4, rtol=1e-4)
    for backward in (problem.full_backward, problem.chunked_backward):
        for ours, other in zip(problem.ours_backward(), backward(), strict=True):
            torch.testing.assert_close(ours, other, atol=1e-5, rtol=1e-4)


def products(problem: Problem, tilings: list[tuple[int, int]], names: tuple[str, ...]) -> dict[str, Function]:
    """The bare products in each tiling, as functions to measure; ``floor`` picks the fastest of a name."""
    out: dict[str, Function] = {}
    with torch.no_grad():
        for tokens, columns in tilings:
            tiled = Products(problem.hidden_TH.detach(), problem.weight_VH.detach(), tokens, columns)
            out |= {f"product {name} {tokens}x{columns}": getattr(tiled, name) for name in names}
    return out


def floor(rows: dict[str, Row], name: str) -> float:
    return min(row.best for label, row in rows.items() if label.startswith(f"product {name} "))


def part_forward(args: argparse.Namespace) -> dict:
    problem = Problem(args.tokens, args.hidden, args.vocab)
    functions = {"ours": problem.ours, "full": problem.full, "chunked": problem.chunked}
    bare = products(problem, [(2048, 4096), (2048, 1024)], ("logits",))
    rows = measure(bare | chosen(functions, args), args)
    floor_s = floor(rows, "logits")
    result = table(rows, args) | {
        "floor_gflops": 2 * args.tokens * args.hidden * args.vocab / floor_s / 1e9,
        "ratio_to_floor": {name: row.best / floor_s for name, row in rows.items()},
    }
    if "ours" in rows and "full" in rows:
        result["extra_memory_over_full"] = rows["ours"].extra_bytes / rows["full"].extra_bytes
    return result


def part_backward(args: argparse.Namespace) -> dict:
    problem = Problem(args.tokens, args.hidden, args.vocab)
    functions = {
        "token loss": problem.ours_token_loss,
        "logprob": problem.ours_backward,
        "full": problem.full_backward,
        "chunked": problem.chunked_backward,
    }
    bare = products(problem, [(2048, 4096)], ("logits", "grad_hidden", "grad_weight"))
    rows = measure(bare | chosen(functions, args), args)
    three = floor(rows, "logits") + floor(rows, "grad_hidden") + floor(rows, "grad_weight")
    four = three + floor(rows, "logits")
    return table(rows, args, problem.result_bytes) | {
        "floor_seconds": {"3 products": three, "4 products": four},
        "ratio_to_3_products": {name: row.best / three for name, row in rows.items() if name in functions},
        "ratio_to_4_products": {name: row.best / four for name, row in rows.items() if name in functions},
    }


def chosen(functions: dict[str, Function], args: argparse.Namespace) -> dict[str, Function]:
    return {name: functions[name] for name in args.methods or functions}


def table(rows: dict[str, Row], args: argparse.Namespace, result_bytes: int = 0) -> dict:
    memory = {name: row.extra_bytes - result_bytes for name, row in rows.items() if not name.startswith("product")}
    logits_bytes = 4 * args.tokens * args.vocab
    return {
        "settings": {"tokens": args.tokens, "hidden": args.hidden, "vocab": args.vocab, "dtype": "fp32"},
        "seconds": {name: row.summary() for name, row in rows.items()},
        "extra_memory_mib": {name: value / 2**20 for name, value in memory.items()},
        "extra_memory_over_full_logits": {name: value / logits_bytes for name, value in memory.items()},
    }


def part_scaling(args: argparse.Namespace) -> dict:
    out: dict = {"workspace_mib": 256, "tokens": {}, "vocab": {}}
    for tokens in (1024, 4096, 16384, 65536):
        out["tokens"][tokens] = scaling_row(tokens, 64, 32000, args)
    for vocab in (32000, 64000, 128256, 256512):
        out["vocab"][vocab] = scaling_row(2048, 64, vocab, args)
    return out


def scaling_row(tokens: int, hidden: int, vocab: int, args: argparse.Namespace) -> dict:
    problem = Problem(tokens, hidden, vocab)
    rows = measure({"forward": problem.ours, "token loss": problem.ours_token_loss}, args)
    out: dict = {"settings": {"tokens": tokens, "hidden": hidden, "vocab": vocab, "dtype": "fp32"}}
    for name, row in rows.items():
        extra = row.extra_bytes - (problem.result_bytes if name == "token loss" else 0)
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
    for hidden in (4096, 5120):
        for shards in (1, 8):
            for tokens in (8192, 32768):
                label = f"tokens {tokens} hidden {hidden} vocab 152064 tp {shards}"
                sys.stderr.write(label + "\n")
                out[label] = gpu_row(tokens, hidden, 152064 // shards, args)
    return out


def gpu_row(tokens: int, hidden: int, rows: int, args: argparse.Namespace) -> dict:
    problem = Problem(tokens, hidden, rows, "cuda", torch.bfloat16)
    tilings = [(2048, 16384), (4096, 8192), (8192, 8192)]
    bare = products(problem, tilings, ("logits", "grad_hidden", "grad_weight"))
    forward = {"forward ours": problem.ours, "forward chunked": problem.chunked}
    backward = {"token loss": problem.ours_token_loss, "logprob": problem.ours_backward}
    backward |= {"chunked": problem.chunked_backward, **peers(problem)}
    functions = bare | forward | backward
    for function in functions.values():
        function()  # compiles kernels
    measured = measure(functions, args)
    one = floor(measured, "logits")
    three = one + floor(measured, "grad_hidden") + floor(measured, "grad_weight")
    return {
        "seconds": {name: row.summary() for name, row in measured.items()},
        "forward_share_of_floor_rate": {name: one / measured[name].best for name in forward},
        "share_of_3_products_rate": {name: three / measured[name].best for name in backward},
        "share_of_4_products_rate": {name: (three + one) / measured[name].best for name in backward},
        "forward_extra_memory_mib": {name: measured[name].extra_bytes / 2**20 for name in forward},
        "backward_extra_memory_mib": {
            name: (measured[name].extra_bytes - problem.result_bytes) / 2**20 for name in backward
        },
    }


def peers(problem: Problem) -> dict[str, Function]:
    """Public kernels that are installed here."""
    found: dict[str, Function] = {}
    if importlib.util.find_spec("verl"):
        from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

        def verl() -> object:
            logprob_T, _ = linear_cross_entropy(problem.hidden_TH, problem.weight_VH, problem.target_T, 1.0, "none")
            return problem._gradients((logprob_T * problem.slope_T).sum())

        found["verl linear_cross_entropy"] = verl
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        loss = LigerFusedLinearCrossEntropyLoss()
        found["liger cross-entropy (loss only)"] = lambda: problem._gradients(
            loss(problem.weight_VH, problem.hidden_TH, problem.target_T)
        )
    return found


PARTS = {"forward": part_forward, "backward": part_backward, "scaling": part_scaling, "gpu": part_gpu}


def environment(args: argparse.Namespace) -> dict:
    """What a number needs to be repeated: hardware, commit, versions, settings."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), platform.processor())
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else model,
        "threads": torch.get_num_threads(),
        "cores_visible": os.cpu_count(),
        "load_average": os.getloadavg(),
        "commit": commit,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "most_repeats": args.repeats,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=sorted(PARTS), required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="stop repeating after so many seconds")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--methods", nargs="*", help="of the parts 'forward' and 'backward'; default: all")
    parser.add_argument("--label", help="name of the run in the JSON; default: the part")
    parser.add_argument("--output", type=Path, help="JSON file; runs that it has under other names stay")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    check_equal()
    before = environment(args)
    row = {**before, **PARTS[args.part](args)}
    known = json.loads(args.output.read_text()) if args.output and args.output.exists() else {}
    text = json.dumps({**known, args.label or args.part: row}, indent=1) + "\n"
    if args.output is None:
        sys.stdout.write(text)
    else:
        args.output.write_text(text)


if __name__ == "__main__":
    main()
