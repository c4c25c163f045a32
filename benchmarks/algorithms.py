"""Speed and memory of `openrlhf_ext.algorithms` on the CPU, as ratios measured in one run.

    python benchmarks/algorithms.py --output benchmarks/results/algorithms.json            # all
    parts, ten minutes python benchmarks/algorithms.py --part shape --prompts 64

Parts:
  shape     time and extra memory of `shape` of every method, against one masked mean-and-std pass
  over the entropies
  loss      time of `loss` with backward, against plain clipped PPO on the same tensors
  conflict  conflict masks against the textbook triple loop
  growth    `shape` and `prepare` over G and T, and the conflict masks on data that makes them work
  hardest

`benchmarks/algorithm_tables.py` writes the tables of docs/algorithms.md from a record.

A ratio is that of the minima over the repeats; mean, standard deviation and maximum are kept in the
JSON. Method and baseline run in turns, so that a change of load hits both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from openrlhf_ext.algorithms import LossBatch, RolloutBatch, get_algorithm
from openrlhf_ext.algorithms.conflict_mask import conflict_spans
from openrlhf_ext.algorithms.groups import Groups
from openrlhf_ext.algorithms.segments import BLOCK_TOKENS

METHODS: dict[str, dict] = {
    "grpo": {},
    "dapo": {},
    "gspo": {},
    "gtpo_entropy": {"alpha1": 1.0, "alpha2": 0.1},
    "grpo_s": {"beta1": 1.0, "beta2": 0.1},
    "gtpo_conflict": {},
    "entropy_advantage": {},
    "high_entropy_tokens": {},
    "clip_cov": {},
    "kl_cov": {},
    "cispo": {},
    "gmpo": {},
    "sapo": {},
    "mixed_policy_dapo": {},
    "on_policy_distillation": {},
    "gae": {},
    "reinforce": {},
    "reinforce_baseline": {},
    "rloo": {},
    "group_norm": {},
    "dr_grpo": {},
    "flash_reinforce": {},
}
VARIANTS: dict[str, tuple[str, dict]] = {
    "gtpo_entropy v1": ("gtpo_entropy", {"version": "v1"}),
    "gtpo_entropy v1u": (
        "gtpo_entropy",
        {"version": "v1u", "alpha1": 0.9, "alpha2": 0.1, "kappa": 2.0},
    ),
    "gtpo_entropy v2": ("gtpo_entropy", {"version": "v2"}),
    "gtpo_entropy v6 row": ("gtpo_entropy", {**METHODS["gtpo_entropy"], "entropy_axis": "row"}),
    "gtpo_entropy v6 matrix": (
        "gtpo_entropy",
        {**METHODS["gtpo_entropy"], "entropy_axis": "matrix"},
    ),
    "gtpo_entropy v6 batch scopes": (
        "gtpo_entropy",
        {**METHODS["gtpo_entropy"], "entropy_scope": "batch", "norm_scope": "batch"},
    ),
    "gtpo_entropy v6 geomean": (
        "gtpo_entropy",
        {**METHODS["gtpo_entropy"], "normaliser": "geomean"},
    ),
    "grpo_s v6 geometric": (
        "grpo_s",
        {**METHODS["grpo_s"], "h_hat": "geometric", "w_hat": "geometric"},
    ),
    "gtpo_conflict first": ("gtpo_conflict", {"anchor": "first"}),
    "gtpo_conflict official": ("gtpo_conflict", {"preset": "official"}),
}


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
clock = CLOCKS["wall"]


@dataclass(frozen=True)
class Timing:
    """Seconds of one function over several runs."""

    seconds: list[float]

    @property
    def best(self) -> float:
        return min(self.seconds)

    def summary(self) -> dict[str, float]:
        spread = statistics.stdev(self.seconds) if len(self.seconds) > 1 else 0.0
        return {
            "min": min(self.seconds),
            "mean": statistics.mean(self.seconds),
            "std": spread,
            "max": max(self.seconds),
        }


def measure(*functions: Callable[[], object], repeats: int) -> list[Timing]:
    """Time functions in turns, after one warm-up run of each."""
    seconds: list[list[float]] = [[] for _ in functions]
    for turn in range(repeats + 1):
        for function, times in zip(functions, seconds, strict=True):
            start = clock()
            function()
            if turn:
                times.append(clock() - start)
    return [Timing(times) for times in seconds]


def peak_extra_bytes(function: Callable[[], object]) -> int | None:
    """Growth of the resident peak during one run; None where the kernel cannot reset its peak
    counter."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    before = record.status_bytes("VmRSS")
    result = function()
    peak = record.status_bytes("VmHWM")
    del result
    return max(0, peak - before)


# --------------------------------------------------------------------------------------------------
# Data
# --------------------------------------------------------------------------------------------------


def make_batch(
    prompts: int,
    size: int,
    positions: int,
    *,
    tokens: str = "text",
    full: bool = True,
    seed: int = 0,
):
    """A rollout batch: float32, half of the completions correct.

    Args:
        tokens: "text": completions of a prompt share a random prefix of up to 64 and a suffix of 4
            ids, the rest is drawn from 150,000 ids. "shared": all completions of a prompt are equal
            (every token is in conflict). "distinct": no two completions share an id anywhere.
            "small": ids from a vocabulary of 8.
        full: every completion has all positions, so that token counts are exact; else lengths are
        uniform.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = prompts * size
    token_BT = make_tokens(tokens, prompts, size, positions, generator)
    lengths_B = torch.full((rows,), positions)
    if not full:
        lengths_B = torch.randint(1, positions + 1, (rows,), generator=generator)
    count = int(lengths_B.sum())
    return RolloutBatch(
        tokens=token_BT.view(-1)
        if full
        else token_BT[torch.arange(positions) < lengths_B[:, None]],
        lengths=lengths_B,
        rewards=(torch.arange(rows) % 2).float(),
        group_ids=torch.arange(rows) // size,
        old_logprobs=-torch.empty(count).exponential_(1.0, generator=generator),
        entropies=torch.empty(count).exponential_(2.0, generator=generator),
        values=torch.empty(count).uniform_(generator=generator),
        guide_logprobs=-torch.empty(count).exponential_(1.0, generator=generator),
        group_size=size,
    )


def make_tokens(
    kind: str, prompts: int, size: int, positions: int, generator: torch.Generator
) -> Tensor:
    rows = prompts * size
    if kind == "shared":
        return torch.randint(
            0, 150_000, (prompts, positions), generator=generator
        ).repeat_interleave(size, dim=0)
    if kind == "distinct":
        multiple_BT = torch.randint(0, 100, (rows, positions), generator=generator)
        return (torch.arange(rows) % size)[:, None] + size * multiple_BT
    if kind == "small":
        return torch.randint(0, 8, (rows, positions), generator=generator)
    token_BT = torch.randint(0, 150_000, (rows, positions), generator=generator)
    prefix = min(64, positions)
    shared = torch.randint(0, 150_000, (prompts, positions), generator=generator).repeat_interleave(
        size, dim=0
    )
    lengths_B = torch.randint(0, prefix + 1, (prompts,), generator=generator).repeat_interleave(
        size
    )
    same_BT = torch.arange(positions) < lengths_B[:, None]
    same_BT[:, -4:] = True
    return torch.where(same_BT, shared, token_BT)


def masked_mean_std(values_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """The yardstick: one masked mean and standard deviation in plain torch, as one computes it of
    padded tensors."""
    count = mask_BT.sum()
    mean = (values_BT * mask_BT).sum() / count
    variance = ((values_BT - mean) ** 2 * mask_BT).sum() / count
    return mean, variance.sqrt()


def blocked_mean_std(values_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """A harder yardstick: the same over blocks of rows that fit the cache, without (B, T)
    temporaries."""
    count, total, squares = 0.0, 0.0, 0.0
    blocks = torch.arange(len(values_BT)).split(max(1, BLOCK_TOKENS // values_BT.shape[1]))
    cuts = [slice(int(block[0]), int(block[-1]) + 1) for block in blocks]
    for rows in cuts:
        count += mask_BT[rows].sum()
        total += torch.where(mask_BT[rows], values_BT[rows], 0.0).sum()
    mean = total / count
    for rows in cuts:
        squares += (torch.where(mask_BT[rows], values_BT[rows] - mean, 0.0) ** 2).sum()
    return mean, (squares / count).sqrt()


def table(batch: RolloutBatch) -> tuple[Tensor, Tensor]:
    """(B, T) entropies and mask of a batch whose completions have all positions, for the
    yardsticks."""
    entropies_BT = batch.entropies.view(len(batch.lengths), -1)
    return entropies_BT, torch.ones_like(entropies_BT, dtype=torch.bool)


def plain_ppo(new_N: Tensor, old_N: Tensor, advantages_N: Tensor, mask_N: Tensor) -> Tensor:
    """The yardstick of the losses: clipped PPO, mean over tokens."""
    ratio_N = (new_N - old_N).exp()
    unclipped_N, clipped_N = ratio_N * advantages_N, ratio_N.clamp(0.8, 1.28) * advantages_N
    return (-torch.minimum(unclipped_N, clipped_N) * mask_N).sum() / mask_N.sum()


# --------------------------------------------------------------------------------------------------
# Parts
# --------------------------------------------------------------------------------------------------


def configurations(names: list[str] | None) -> Iterator[tuple[str, str, dict]]:
    for label, (name, options) in {**{n: (n, o) for n, o in METHODS.items()}, **VARIANTS}.items():
        if names is None or label in names:
            yield label, name, options


def part_shape(args: argparse.Namespace) -> dict:
    batch = make_batch(args.prompts, args.size, args.positions)
    entropies_BT, mask_BT = table(batch)
    entropy_bytes = batch.entropies.numel() * batch.entropies.element_size()
    out: dict = {}
    for label, name, options in configurations(args.methods):
        algorithm = get_algorithm(name, **options)
        timing, baseline, blocked = measure(
            lambda algorithm=algorithm: algorithm.shape(batch),
            lambda: masked_mean_std(entropies_BT, mask_BT),
            lambda: blocked_mean_std(entropies_BT, mask_BT),
            repeats=args.repeats,
        )
        extra = peak_extra_bytes(lambda algorithm=algorithm: algorithm.shape(batch))
        out[label] = {
            "options": options,
            "seconds": timing.summary(),
            "baseline_seconds": baseline.summary(),
            "ratio": timing.best / baseline.best,
            "blocked_baseline_seconds": blocked.summary(),
            "ratio_to_blocked_baseline": timing.best / blocked.best,
            "extra_memory_over_entropies": None if extra is None else extra / entropy_bytes,
        }
        report("shape", label, out[label])
    return out


def part_loss(args: argparse.Namespace) -> dict:
    prompts = max(1, args.prompts // 4)
    batch = make_batch(prompts, args.size, args.positions)
    mask_N = torch.ones_like(batch.old_logprobs, dtype=torch.bool)
    new_N = (batch.old_logprobs + 0.05 * torch.randn(batch.old_logprobs.shape)).requires_grad_()
    out: dict = {"_tokens": prompts * args.size * args.positions}
    for label, name, options in configurations(args.methods):
        algorithm = get_algorithm(name, **options)
        shaped = algorithm.shape(batch).lean()
        shaped = algorithm.prepare(new_N.detach(), shaped)
        advantages_N = shaped.advantages

        def ppo(advantages_N: Tensor = advantages_N) -> None:
            plain_ppo(new_N, batch.old_logprobs, advantages_N, mask_N).backward()
            new_N.grad = None

        def loss(algorithm=algorithm, shaped: LossBatch = shaped) -> None:
            algorithm.loss(new_N, shaped).value.backward()
            new_N.grad = None

        timing, baseline = measure(loss, ppo, repeats=args.repeats)
        out[label] = {
            "options": options,
            "seconds": timing.summary(),
            "baseline_seconds": baseline.summary(),
            "ratio": timing.best / baseline.best,
        }
        if algorithm.needs_prepare:
            fresh = algorithm.shape(batch)
            (prepare,) = measure(
                lambda a=algorithm, s=fresh: a.prepare(new_N.detach(), s), repeats=args.repeats
            )
            out[label]["prepare_seconds"] = prepare.summary()
        report("loss", label, out[label])
    return out


def triple_loop(tokens: list[list[int]], signs: list[int], backward: bool) -> list[list[bool]]:
    """Textbook conflict mask of one group: for each completion, each position, each partner; then
    the run."""
    if backward:
        tokens = [row[::-1] for row in tokens]
    out = []
    for i, row in enumerate(tokens):
        mask = [False] * len(row)
        for position in range(len(row)):
            for j, other in enumerate(tokens):
                if signs[i] * signs[j] < 0 and other[position] == row[position]:
                    mask[position] = True
        run = next((p for p, flag in enumerate(mask) if not flag), len(mask))
        mask = [p < run for p in range(len(row))]
        out.append(mask[::-1] if backward else mask)
    return out


def part_conflict(args: argparse.Namespace) -> dict:
    out: dict = {}
    for kind in ("text", "small", "shared", "distinct"):
        batch = make_batch(8, 16, 1024, tokens=kind)
        groups = Groups.of(batch)
        sign_B = batch.rewards.double() * 2 - 1

        def ours(
            batch: RolloutBatch = batch, groups: Groups = groups, sign_B: Tensor = sign_B
        ) -> list[Tensor]:
            return [
                conflict_spans(batch.tokens, groups, sign_B, backward=flag).mask(batch.segments)
                for flag in (False, True)
            ]

        def textbook(batch: RolloutBatch = batch, sign_B: Tensor = sign_B) -> list[Tensor]:
            cuts = [slice(16 * g, 16 * g + 16) for g in range(8)]
            rows = batch.tokens.view(len(sign_B), -1)
            lists = [(rows[cut].tolist(), sign_B[cut].tolist()) for cut in cuts]
            return [
                torch.tensor([f for t, s in lists for r in triple_loop(t, s, flag) for f in r])
                for flag in (0, 1)
            ]

        if not all(torch.equal(a, b) for a, b in zip(ours(), textbook(), strict=True)):
            raise AssertionError(f"conflict masks differ from the triple loop on {kind} tokens")
        timing, baseline = measure(ours, textbook, repeats=args.repeats)
        out[kind] = {
            "seconds": timing.summary(),
            "baseline_seconds": baseline.summary(),
            "speedup": baseline.best / timing.best,
        }
        report("conflict", kind, out[kind])
    return out


def part_growth(args: argparse.Namespace) -> dict:
    out: dict = {}
    cases = [(64, 16, t) for t in (512, 1024, 2048, 4096)] + [
        (1024 // g, g, 2048) for g in (4, 8, 16, 32, 64, 128)
    ]
    for prompts, size, positions in cases:
        for kind in ("text", "small", "shared", "distinct"):
            batch = make_batch(prompts, size, positions, tokens=kind)
            # Token ids matter to the conflict masks only.
            for name in METHODS if kind == "text" else ("gtpo_conflict",):
                for stage, function in stages(name, batch):
                    label = " ".join(
                        filter(None, (name, stage, kind, f"{prompts}x{size}x{positions}"))
                    )
                    out[label] = growth_row(function, batch, args.repeats)
                    report("growth", label, out[label])
    return out


def stages(name: str, batch: RolloutBatch) -> Iterator[tuple[str, Callable[[], object]]]:
    """`shape` (no name), and `prepare` where the method needs it."""
    algorithm = get_algorithm(name, **METHODS[name])
    yield "", lambda: algorithm.shape(batch)
    if algorithm.needs_prepare:
        shaped = algorithm.shape(batch)
        yield "prepare", lambda: algorithm.prepare(batch.old_logprobs, shaped)


def growth_row(function: Callable[[], object], batch: RolloutBatch, repeats: int) -> dict:
    padded = table(batch)
    timing, baseline = measure(function, lambda: masked_mean_std(*padded), repeats=repeats)
    return {
        "seconds": timing.summary(),
        "baseline_seconds": baseline.summary(),
        "ratio": timing.best / baseline.best,
        "ns_per_token": timing.best / len(batch.tokens) * 1e9,
    }


PARTS = {"shape": part_shape, "loss": part_loss, "conflict": part_conflict, "growth": part_growth}


def report(part: str, label: str, row: dict) -> None:
    ratio = row.get("ratio", row.get("speedup"))
    memory = row.get("extra_memory_over_entropies")
    tail = (
        ""
        if memory is None
        else f"  {row['ratio_to_blocked_baseline']:6.2f}x blocked  memory {memory:.2f}x"
    )
    sys.stderr.write(f"{part:9s} {label:44s} {row['seconds']['min']:9.4f} s  {ratio:8.2f}x{tail}\n")


def environment(args: argparse.Namespace) -> dict:
    """What a number needs to be repeated."""
    return {
        **record.environment("torch"),
        "threads": torch.get_num_threads(),
        "clock": args.clock,
        "settings": {
            "prompts": args.prompts,
            "size": args.size,
            "positions": args.positions,
            "repeats": args.repeats,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=sorted(PARTS), action="append", help="default: all")
    parser.add_argument("--methods", nargs="*", help="labels of the methods to run; default: all")
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--size", type=int, default=16, help="completions per prompt")
    parser.add_argument("--positions", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--clock",
        choices=sorted(CLOCKS),
        default="wall",
        help="cpu: time on the processor, for a busy machine (use it with --threads 1)",
    )
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    global clock
    clock = CLOCKS[args.clock]
    result = {
        **environment(args),
        "parts": {part: PARTS[part](args) for part in args.part or PARTS},
    }
    if args.output is None:
        sys.stdout.write(json.dumps(result, indent=1) + "\n")
    else:
        record.write(args.output, result)


if __name__ == "__main__":
    main()
