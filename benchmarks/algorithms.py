"""Speed and memory of `openrlhf_ext.algorithms` on the CPU, as ratios measured in one run.

    python benchmarks/algorithms.py --output benchmarks/results/algorithms.json   # ten minutes
    python benchmarks/algorithms.py --part shape --prompts 64

Parts:
  shape     time and extra memory of `shape` of every method, against one masked mean-and-std pass
            over the entropies
  loss      time of `loss` with backward, against plain clipped PPO on the same tensors

`benchmarks/algorithm_tables.py` makes the tables of docs/algorithms.md and docs/methods.md from the
record. A ratio is that of the minima over the repeats; the JSON keeps mean, standard deviation, and
maximum.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from benchmarks.harness import Work, peak_extra_bytes, seconds_in_turns, summary
from openrlhf_ext.algorithms import LossBatch, RolloutBatch, get_algorithm
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
    "gtpo_entropy v6 batch scopes": (
        "gtpo_entropy",
        {**METHODS["gtpo_entropy"], "entropy_scope": "batch", "norm_scope": "batch"},
    ),
    "gtpo_conflict official": ("gtpo_conflict", {"preset": "official"}),
}


def timed(args: argparse.Namespace, **works: Work) -> dict[str, list[float]]:
    return seconds_in_turns(works, args.repeats, warm_up=1)


# --------------------------------------------------------------------------------------------------
# Data
# --------------------------------------------------------------------------------------------------


def make_batch(prompts: int, size: int, positions: int) -> RolloutBatch:
    """A rollout batch: float32, half of the completions correct; every completion has all
    positions."""
    generator = torch.Generator().manual_seed(0)
    rows = prompts * size
    token_BT = make_tokens(prompts, size, positions, generator)
    count = rows * positions
    return RolloutBatch(
        tokens=token_BT.view(-1),
        lengths=torch.full((rows,), positions),
        rewards=(torch.arange(rows) % 2).float(),
        group_ids=torch.arange(rows) // size,
        old_logprobs=-torch.empty(count).exponential_(1.0, generator=generator),
        entropies=torch.empty(count).exponential_(2.0, generator=generator),
        values=torch.empty(count).uniform_(generator=generator),
        guide_logprobs=-torch.empty(count).exponential_(1.0, generator=generator),
        group_size=size,
    )


def make_tokens(prompts: int, size: int, positions: int, generator: torch.Generator) -> Tensor:
    """Completions of a prompt share a random prefix of up to 64 and a suffix of 4 ids; the rest is
    drawn from 150,000 ids."""
    token_BT = torch.randint(0, 150_000, (prompts * size, positions), generator=generator)
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


def configurations() -> Iterator[tuple[str, str, dict]]:
    """Label, method, and options."""
    for name, options in METHODS.items():
        yield name, name, options
    for label, (name, options) in VARIANTS.items():
        yield label, name, options


def part_shape(args: argparse.Namespace) -> dict:
    batch = make_batch(args.prompts, args.size, args.positions)
    entropies_BT, mask_BT = table(batch)
    entropy_bytes = batch.entropies.numel() * batch.entropies.element_size()
    out: dict = {}
    for label, name, options in configurations():
        algorithm = get_algorithm(name, **options)
        seconds = timed(
            args,
            ours=lambda algorithm=algorithm: algorithm.shape(batch),
            plain=lambda: masked_mean_std(entropies_BT, mask_BT),
            blocked=lambda: blocked_mean_std(entropies_BT, mask_BT),
        )
        extra = peak_extra_bytes(lambda algorithm=algorithm: algorithm.shape(batch))
        out[label] = {
            "options": options,
            "seconds": summary(seconds["ours"]),
            "baseline_seconds": summary(seconds["plain"]),
            "ratio": min(seconds["ours"]) / min(seconds["plain"]),
            "blocked_baseline_seconds": summary(seconds["blocked"]),
            "ratio_to_blocked_baseline": min(seconds["ours"]) / min(seconds["blocked"]),
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
    for label, name, options in configurations():
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

        seconds = timed(args, ours=loss, plain=ppo)
        out[label] = {
            "options": options,
            "seconds": summary(seconds["ours"]),
            "baseline_seconds": summary(seconds["plain"]),
            "ratio": min(seconds["ours"]) / min(seconds["plain"]),
        }
        if algorithm.needs_prepare:
            fresh = algorithm.shape(batch)
            prepare = timed(args, ours=lambda a=algorithm, s=fresh: a.prepare(new_N.detach(), s))
            out[label]["prepare_seconds"] = summary(prepare["ours"])
        report("loss", label, out[label])
    return out


PARTS = {"shape": part_shape, "loss": part_loss}


def report(part: str, label: str, row: dict) -> None:
    seconds = row["seconds"]["min"]
    sys.stderr.write(f"{part:9s} {label:44s} {seconds:9.4f} s  {row['ratio']:8.2f}x\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=sorted(PARTS), action="append", help="default: all")
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--size", type=int, default=16, help="completions per prompt")
    parser.add_argument("--positions", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    names = ("prompts", "size", "positions", "repeats")
    result = {
        **record.environment("torch"),
        "threads": args.threads,
        "clock": "wall",
        "settings": {name: getattr(args, name) for name in names},
        "parts": {part: PARTS[part](args) for part in args.part or PARTS},
    }
    if args.output is None:
        sys.stdout.write(json.dumps(result, indent=1) + "\n")
    else:
        record.write(args.output, result)


if __name__ == "__main__":
    main()
