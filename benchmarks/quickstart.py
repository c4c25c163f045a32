"""Summarizes a finished quickstart as a benchmark record: accuracy before and after, seconds of
each phase per step.

bash examples/scripts/quickstart.sh
python benchmarks/quickstart.py --run_dir runs/quickstart --minutes 7.5 --output
benchmarks/results/quickstart_cpu.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from benchmarks.harness import spread
from openrlhf_ext.reporting import read_metrics
from openrlhf_ext.reporting.progress import ProgressLine

PHASES = ("generate", "grade", "logprob", "shape", "train", "sync", "step")
PACKAGES = ("torch", "megatron-core", "ray", "transformers", "openrlhf")


def summarize(run_dir: Path, minutes: float, overrides: str) -> dict:
    """The record: hardware, commit, versions, settings, metrics with their spread over steps."""
    lines = read_metrics(run_dir / "metrics.jsonl")
    steps = [line for line in lines if "reward/mean" in line]
    evaluations = [line for line in lines if "eval/accuracy" in line]
    # the first step warms up
    seconds = {name: [step[f"time/{name}"] for step in steps[1:]] for name in PHASES}
    return {
        "what": "examples/scripts/quickstart.sh, everything after the installation",
        **record.environment(*PACKAGES),
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
            "lines": progress_lines(steps),
            "accuracy_by_engine": [[line["step"], line["eval/accuracy"]] for line in evaluations],
            "seconds_per_step": {name: spread(values) for name, values in seconds.items()},
            "tokens_per_second": spread(
                [step["throughput/tokens_per_second"] for step in steps[1:]]
            ),
            "kl_rollout_max_abs": max(step["kl/rollout_max_abs"] for step in steps),
            "weight_sync_probe_diff": max(step["weight_sync/probe_diff"] for step in steps),
        },
    }


def accuracy(path: Path) -> dict[str, float]:
    """Sampled accuracy on held-out problems with plain transformers."""
    result = json.loads(path.read_text())
    return {
        name: result[name]
        for name in ("accuracy", "standard_error", "prompts", "samples_per_prompt")
    }


def progress_lines(steps: list[dict]) -> list[str]:
    """What the terminal showed of the first step, a quarter of the run and the last step."""
    lines: list[str] = []
    progress = ProgressLine(len(steps), lines.append)
    for step in (steps[0], steps[len(steps) // 4 - 1], steps[-1]):
        progress.show(step["step"], step)
    return lines


def lines() -> str:
    """docs/first_run.md: the table that the terminal shows."""
    return "\n".join(["```", *record.load("quickstart_cpu.json")["metrics"]["lines"], "```"])


def text() -> str:
    """docs/first_run.md: what the run gained and what it took."""
    found = record.load("quickstart_cpu.json")
    metrics, steps = found["metrics"], found["settings"]["steps"]
    before, after = metrics["accuracy_before"], metrics["accuracy_after"]
    seconds = {name: spread["median"] for name, spread in metrics["seconds_per_step"].items()}
    return record.wrapped(
        f"On {found['cores']} CPU cores "
        "([benchmarks/results/quickstart_cpu.json](../benchmarks/results/quickstart_cpu.json)): "
        f"accuracy on {before['prompts']} held-out problems, {before['samples_per_prompt']} "
        f"samples each at temperature 1, went from **{100 * before['accuracy']:.1f} % to "
        f"{100 * after['accuracy']:.1f} %** (standard error {100 * before['standard_error']:.1f} "
        f"and {100 * after['standard_error']:.1f}) in {steps} steps of "
        f"{found['settings']['samples_per_step']} samples. A step took {seconds['step']:.1f} s "
        f"(median: generate {seconds['generate']:.2f}, log-prob {seconds['logprob']:.2f}, train "
        f"{seconds['train']:.2f}, weight sync {seconds['sync']:.2f}), the whole script "
        f"{metrics['minutes_total']:.1f} minutes after the installation."
    )


def short() -> str:
    """README.md: what the run gained and how long it took."""
    found = record.load("quickstart_cpu.json")
    metrics = found["metrics"]
    before, after = metrics["accuracy_before"], metrics["accuracy_after"]
    return record.wrapped(
        f"After the installation the script takes {metrics['minutes_total']:.0f} minutes on "
        f"{found['cores']} CPU cores. Held-out accuracy rises from {before['accuracy']:.0%} to "
        f"{after['accuracy']:.0%}."
    )


TEXTS = {"lines": lines, "short": short, "text": text}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--run_dir", type=Path, default=Path("runs/quickstart"))
    parser.add_argument(
        "--minutes", type=float, required=True, help="what the script printed as its time"
    )
    parser.add_argument(
        "--overrides", default="", help="options given to the script beyond the configuration file"
    )
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    record.write(args.output, summarize(args.run_dir, args.minutes, args.overrides))


if __name__ == "__main__":
    main()
