"""Summarizes a finished quickstart as a benchmark record: accuracy before and after, seconds of each phase per step.

bash examples/scripts/quickstart.sh
python benchmarks/quickstart.py --run_dir runs/quickstart --minutes 7.5 --output benchmarks/results/quickstart_cpu.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
from importlib.metadata import version
from pathlib import Path

from openrlhf_ext.reporting import read_metrics

PHASES = ("generate", "grade", "logprob", "shape", "train", "sync", "step")
PACKAGES = ("torch", "megatron-core", "ray", "transformers", "openrlhf")


def summarize(run_dir: Path, minutes: float, overrides: str) -> dict:
    """The record: hardware, commit, versions, settings, metrics with their spread over steps."""
    records = read_metrics(run_dir / "metrics.jsonl")
    steps = [record for record in records if "reward/mean" in record]
    evaluations = [record for record in records if "eval/accuracy" in record]
    seconds = {name: [record[f"time/{name}"] for record in steps[1:]] for name in PHASES}
    return {
        "what": "examples/scripts/quickstart.sh, everything after the installation",
        "hardware": {"cpu": cpu_model(), "cores": os.cpu_count(), "machine": platform.machine()},
        "commit": git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain") else ""),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "settings": {
            "config": "configs/quickstart.yaml",
            "steps": len(steps),
            "samples_per_step": 256,
            "layout": "DP2",
            "overrides": overrides,
        },
        "metrics": {
            "minutes_total": minutes,
            "accuracy_before": accuracy(run_dir / "before.json"),
            "accuracy_after": accuracy(run_dir / "after.json"),
            "accuracy_by_engine": [[record["step"], record["eval/accuracy"]] for record in evaluations],
            "seconds_per_step": {name: spread(values) for name, values in seconds.items()},
            "tokens_per_second": spread([record["throughput/tokens_per_second"] for record in steps[1:]]),
            "kl_rollout_max_abs": max(record["kl/rollout_max_abs"] for record in steps),
            "weight_sync_probe_diff": max(record["weight_sync/probe_diff"] for record in steps),
        },
    }


def accuracy(path: Path) -> dict[str, float]:
    """Sampled accuracy on held-out problems with plain transformers."""
    result = json.loads(path.read_text())
    return {name: result[name] for name in ("accuracy", "standard_error", "prompts", "samples_per_prompt")}


def spread(values: list[float]) -> dict[str, float]:
    """Median, smallest and largest over steps (the first step, which warms up, left out)."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--run_dir", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--minutes", type=float, required=True, help="what the script printed as its time")
    parser.add_argument("--overrides", default="", help="options given to the script beyond the configuration file")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    args.output.write_text(json.dumps(summarize(args.run_dir, args.minutes, args.overrides), indent=2) + "\n")


if __name__ == "__main__":
    main()
