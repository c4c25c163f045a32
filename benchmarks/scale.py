"""Seconds and memory of what the driver does with one batch of rollouts, at the size of a real run.

    python benchmarks/scale.py --output benchmarks/results/scale_cpu.json                    # a quarter of a 32B step
    python benchmarks/scale.py --sequences 16384 --algorithm clip_cov                        # all of it: 64 GiB

No model and no Ray: samples are synthetic, and what travels between processes is pickled and unpickled here, the way
Ray does it (protocol 5, buffers out of band). Stages, in the order of a step:

  receive      responses of the engines into samples
  batch        samples into one batch of token rows
  send         every data-parallel rank's rows: `bytes` go out, unpickled as the first rank of each would
  collect      log-probs and entropies of all ranks: `bytes` come back, merged
  rollout      the algorithms' view of the batch
  shape        advantages and weights (`Algorithm.shape`)
  shards       mini-batches and every rank's shard of each
  ship         the shards: `bytes` go out
  metrics      what the records say of the batch
  plan         micro-batches of one rank, for log-probs and for training

Each stage has its seconds, the growth of the resident peak while it runs (`peak_bytes`), and what it leaves behind
(`kept_bytes`). Lengths are log-normal, cut at the longest response: a few long ones among many short ones.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray.cloudpickle as pickle
import torch
from torch import Tensor

from openrlhf_ext.algorithms import get_algorithm
from openrlhf_ext.compat import Experience, SamplesGenerator
from openrlhf_ext.controller.experience import batch_metrics, in_group_order, rollout_batch
from openrlhf_ext.controller.rollout_sample import RolloutSample, staleness_metrics
from openrlhf_ext.controller.scorers import padded_scores
from openrlhf_ext.controller.shards import mini_batch_shards
from openrlhf_ext.megatron.batch import (
    LogprobEntropy,
    SequenceBatch,
    balance_rows,
    micro_batches,
    sequence_batch,
    sequence_costs,
)

OPTIONS: dict[str, dict[str, Any]] = {
    "dr_grpo": {"l_norm": 4096.0},
    "gtpo_entropy": {"alpha1": 1.0, "alpha2": 0.1},
    "grpo_s": {"beta1": 1.0, "beta2": 0.1},
}
VOCABULARY = 152_064


def status_bytes(key: str) -> int:
    """A size out of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


class Stages:
    """Runs one stage after the other and notes what each costs."""

    def __init__(self) -> None:
        self.costs: dict[str, dict[str, float]] = {}

    def run(self, name: str, function: Callable[[], Any], **more: float) -> Any:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        before, started, cpu = status_bytes("VmRSS"), time.perf_counter(), time.process_time()
        result = function()
        seconds, cpu, peak = time.perf_counter() - started, time.process_time() - cpu, status_bytes("VmHWM")
        gc.collect()
        cost = {
            "seconds": seconds,
            "cpu_seconds": cpu,
            "peak_bytes": peak - before,
            "kept_bytes": status_bytes("VmRSS") - before,
            **more,
        }
        self.costs[name] = cost
        gib = {key: f"{value / 2**30:.2f} GiB" for key, value in cost.items() if key.endswith("bytes")}
        print(f"{name:10s} {seconds:8.2f} s  cpu {cpu:8.2f} s  {gib}", flush=True)  # noqa: T201
        return result


# --------------------------------------------------------------------------------------------------------------------
# Data
# --------------------------------------------------------------------------------------------------------------------


def response_lengths(args: argparse.Namespace) -> Tensor:
    """(B,) tokens of each response, of about the mean that was asked for."""
    generator = torch.Generator().manual_seed(0)
    shape_B = torch.randn(args.sequences, generator=generator).mul_(0.8).exp_()
    return (shape_B * (args.mean_length / shape_B.mean())).round().long().clamp(1, args.longest)


def response(index: int, length: int, args: argparse.Namespace) -> dict[str, Any]:
    """What an engine says of one completion, in OpenRLHF's form."""
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(VOCABULARY, (args.prompt_length + length,), generator=generator).tolist()
    logprobs = (-torch.rand(len(tokens), generator=generator)).tolist()
    reward = float(index % 2)
    return {
        "prompt": f"prompt {index // args.group_size:08d}",
        "label": "",
        "images": None,
        "observation_tokens": tokens,
        "action_ranges": [(args.prompt_length, len(tokens))],
        "rollout_log_probs": logprobs,
        "truncated": length == args.longest,
        "reward": reward,
        "scores": reward,
        "extra_logs": {"reward_failed": 0.0},
        "weight_versions": [(3, args.prompt_length, len(tokens))],
    }


def sample_of(answer: dict[str, Any], args: argparse.Namespace) -> RolloutSample:
    """A sample as the trainer's generator makes it."""
    generator = SamplesGenerator.__new__(SamplesGenerator)
    experience: Experience = generator._process_response_into_experience(
        answer, max_len=args.prompt_length + args.longest
    )
    return RolloutSample.of(experience, answer["weight_versions"])


def travel(value: Any) -> tuple[Any, int]:
    """The value as another process has it, and the bytes that went there."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    size = len(data) + sum(len(buffer.raw()) for buffer in buffers)
    return pickle.loads(data, buffers=buffers), size


def scores_of(part: SequenceBatch) -> list[Tensor]:
    """What a rank answers for its rows: log-probs and entropies of their response tokens."""
    generator = torch.Generator().manual_seed(len(part))
    old_N, entropies_N = (torch.rand(int(part.counts_B.sum()), generator=generator) for _ in range(2))
    return [-old_N, entropies_N]


# --------------------------------------------------------------------------------------------------------------------
# The step
# --------------------------------------------------------------------------------------------------------------------


def step(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The costs of all stages."""
    stages, lengths_B = Stages(), response_lengths(args)
    answers = [pickle.dumps([response(g + i, int(lengths_B[g + i]), args) for i in range(args.group_size)])
               for g in range(0, args.sequences, args.group_size)]  # fmt: skip

    def receive() -> list[RolloutSample]:
        return [sample_of(answer, args) for group in answers for answer in pickle.loads(group)]

    samples = stages.run("receive", receive, bytes=sum(map(len, answers)))
    answers.clear()

    def make_batch() -> Any:
        ordered = in_group_order(samples, args.group_size)
        return sequence_batch([s.sequences[0] for s in ordered], [s.action_mask[0] for s in ordered])

    batch = stages.run("batch", make_batch)
    sizes: list[int] = []

    def send() -> list[list[int]]:
        parts = balance_rows(batch.lengths_B, args.ranks, args.attention_length)
        for rows in parts:
            sizes.append(travel(batch.select(rows))[1])
        return parts

    parts = stages.run("send", send)
    stages.costs["send"]["bytes"] = sum(sizes)
    results = [scores_of(batch.select(rows)) for rows in parts]
    sizes.clear()

    def collect() -> LogprobEntropy:
        answers = []
        while results:
            answer, size = travel(results.pop(0))
            answers.append(answer)
            sizes.append(size)
        return LogprobEntropy(*(padded_scores(batch, parts, scores) for scores in zip(*answers, strict=True)))

    old = stages.run("collect", collect)
    stages.costs["collect"]["bytes"] = sum(sizes)
    rollout = stages.run("rollout", lambda: rollout_batch(samples, batch, old, args.group_size))
    correction = {"level": "token", "mode": "mask"} if args.correction else None
    algorithm = get_algorithm(args.algorithm, correction=correction, **OPTIONS.get(args.algorithm, {}))
    shaped = stages.run("shape", lambda: algorithm.shape(rollout))

    def make_shards() -> Any:
        return mini_batch_shards(
            batch, shaped, args.group_size, args.mini_batch, args.ranks, seed=1, attention_length=args.attention_length
        )

    shards = stages.run("shards", make_shards)
    sizes.clear()
    stages.run("ship", lambda: sizes.extend(travel(shard)[1] for shard in shards))
    stages.costs["ship"]["bytes"] = sum(sizes)
    stages.run("metrics", lambda: batch_metrics(samples, rollout) | staleness_metrics(samples, 3))

    def plan() -> None:
        for rows, capacity in ((parts[0], args.forward_tokens), (parts[0], args.train_tokens)):
            sizes = batch.lengths_B[rows].tolist()
            micro_batches(sequence_costs(sizes, args.attention_length), sizes, capacity)

    stages.run("plan", plan)
    return stages.costs


def environment(args: argparse.Namespace) -> dict[str, Any]:
    """What a number needs to be repeated: hardware, commit, versions, settings."""

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], capture_output=True, text=True, cwd=Path(__file__).parent).stdout

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), platform.processor())
    return {
        "device": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),
        "commit": git("rev-parse", "HEAD").strip() + ("-dirty" if git("status", "--porcelain").strip() else ""),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "settings": {name: value for name, value in vars(args).items() if name != "output"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=4096, help="completions of the step")
    parser.add_argument("--group_size", type=int, default=16, help="completions per prompt")
    parser.add_argument("--prompt_length", type=int, default=512)
    parser.add_argument("--mean_length", type=int, default=8192, help="mean tokens of a response")
    parser.add_argument("--longest", type=int, default=32768, help="most tokens of a response")
    parser.add_argument("--algorithm", default="gtpo_entropy")
    parser.add_argument("--correction", action=argparse.BooleanOptionalAction, default=True, help="of the mismatch")
    parser.add_argument("--mini_batch", type=int, default=1024, help="completions per optimizer step")
    parser.add_argument("--ranks", type=int, default=4, help="data-parallel ranks")
    parser.add_argument("--attention_length", type=float, default=100_000.0, help="see ModelShape.attention_length")
    parser.add_argument("--forward_tokens", type=int, default=32768, help="of a micro-batch that computes log-probs")
    parser.add_argument("--train_tokens", type=int, default=16384, help="of a micro-batch that trains")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    record = {"environment": environment(args), "stages": step(args)}
    record["total_seconds"] = sum(cost["seconds"] for cost in record["stages"].values())
    if args.output:
        args.output.write_text(json.dumps(record, indent=1) + "\n")
    print(f"total      {record['total_seconds']:8.2f} s")  # noqa: T201


if __name__ == "__main__":
    main()
