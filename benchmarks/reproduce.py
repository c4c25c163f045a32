"""A figure or a table of a paper: its runs on the toy policy or on a small real model, or the
commands of a cluster.

    bash examples/scripts/reproduce.sh --list
    bash examples/scripts/reproduce.sh simoni fig3                     # toy policy, two cores,
    minutes bash examples/scripts/reproduce.sh simoni fig3 --scale real        # SmolLM2-135M, two
    cores, a run after the other bash examples/scripts/reproduce.sh simoni fig3 --scale paper
    # prints the cluster's commands

``configs/papers.yaml`` has the items. At scale ``toy`` every run keeps its method, with the
recipe's options of the method, length penalty, Adam's betas and group size, and learns a task of
two minutes by the trainer of one process that studies use (docs/science.md). At scale ``real`` it
keeps the same, and the whole stack trains what examples/scripts/real_model.sh trains. Both show
that the path of a figure works, not what the paper found. Exit status:
0; 1 if a run failed; 2 if the item is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, PositiveInt

from benchmarks import real_model, record
from benchmarks.harness import markdown_table
from benchmarks.study.outcomes import smoothed
from benchmarks.study.runs import (
    Places,
    Rows,
    commit,
    execute,
    finished,
    hardware,
    missing,
    read_rows,
    runs_of,
)
from benchmarks.study.settings import Study, StudyError, faults
from openrlhf_ext.cli import plan, report
from openrlhf_ext.cli.main import CommandParser, silence_libraries
from openrlhf_ext.config.load import flattened
from openrlhf_ext.inputs import nearest
from openrlhf_ext.outputs import in_one_piece
from openrlhf_ext.reporting import read_metrics

ROOT = Path(__file__).resolve().parents[1]
PAPERS = ROOT / "configs/papers.yaml"
RECORD = ROOT / "benchmarks/results/papers/toy.json"
PICTURES = ROOT / "docs/images/papers"
_LN2 = 0.6931
# what of a recipe is a method's; the rest is its model's, its data's and its cluster's
_OF_THE_METHOD = re.compile(
    r"algo\.(?!dynamic_).*|reward\.length_penalty\..*|actor\.(adam\.betas|eps_clip_low_high)|"
    r"rollout\.n_samples_per_prompt"
)
_GROUP = 8  # where the paper's runs differ in it they keep theirs
_REAL_STEPS, _REAL_SAMPLES = 20, 16
_OF_TAGS, _TRAINED = "format", "trained"
IN_REPORT = {  # what a curve of the toy policy is called in metrics.jsonl of train_ppo_ray
    "accuracy": "accuracy/mean",
    "format": "reward_log/format",
    "entropy": "entropy/mean",
    "completion_entropy": "entropy/completion_mean",
    "length": "response/length_mean",
    "ref_kl": "kl/reference",
    "conflict_forward": "algorithm/conflict_forward",
    "conflict_backward": "algorithm/conflict_backward",
}
_TOY: dict[str, Any] = {
    "actor": {"lr_scheduler": "constant_with_warmup", "lr_warmup_ratio": 0.05, "adam.lr": 3.0e-4},
    "data": {"input_key": "question", "label_key": "answer"},
    "rollout": {"max_new_tokens": 48, "micro_batch_size": 64},
    "train": {"micro_batch_size": 64},
}


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Toy(_Part):
    """The task that stands for a paper's data: what makes policy and problems, and how much of it a
    step takes."""

    maker: str
    reward: str
    prompts: PositiveInt
    updates: PositiveInt  # of a batch of rollouts
    steps: PositiveInt


class Evaluation(_Part):
    """How the paper's checkpoints are evaluated: ``protocol`` of ``openrlhf-ext evaluate``."""

    protocol: str
    benchmarks: list[str]


class Run(_Part):
    """A recipe with other options; ``toy`` are those in their place at scales toy and real, whose
    answers are short."""

    recipe: str
    data: str
    options: dict[str, Any] = {}
    toy: dict[str, Any] = {}
    environment: dict[str, str] = {}


class Tuned(_Part):
    """A run of supervised fine-tuning: a recipe of configs/sft. At scales toy and real there is
    none."""

    recipe: str
    data: str


class Item(_Part):
    """What of the runs is drawn: ``curves`` of rollouts over steps, ``evaluated`` numbers over
    steps, a ``table``."""

    what: str
    runs: list[str]
    sft: list[str] = []
    curves: list[str] = []
    evaluated: list[str] = []
    table: list[str] = []
    ours: str


class Paper(_Part):
    """The figures and tables of a text, and the ``missing`` ones with the reason; ``data``: the
    words that prepare_data.py makes each file of."""

    title: str
    reward: str
    steps: PositiveInt  # of a run at the paper's scale, for the hours of docs/papers.md
    toy: Toy
    evaluation: Evaluation
    data: dict[str, str]
    runs: dict[str, Run]
    sft: dict[str, Tuned] = {}
    items: dict[str, Item]
    missing: dict[str, str] = {}


class ReproduceError(ValueError):
    """There is no such paper or item."""


def read_papers() -> dict[str, Paper]:
    """All papers by name. Raises ValueError where PAPERS is not as the classes above say."""
    papers = {
        name: Paper.model_validate(raw) for name, raw in yaml.safe_load(PAPERS.read_text()).items()
    }
    for name, paper in papers.items():
        for item, value in paper.items.items():
            unknown = [run for run in value.runs if run not in paper.runs]
            if unknown := unknown + [run for run in value.sft if run not in paper.sft]:
                raise ValueError(
                    f"{PAPERS}: {name}.items.{item}: no such runs: {', '.join(unknown)}"
                )
    return papers


def _one(kind: str, name: str | None, known: Mapping[str, Any]) -> Any:
    if name is not None and name in known:
        return known[name]
    meant = [
        other
        for other, what in known.items()
        if name and (other.startswith(name) or isinstance(what, Paper) and name in what.title)
    ]
    meant = meant or [near for near in [nearest(name or "", list(known))] if near]
    hint = f"; did you mean {' or '.join(meant)}?" if meant else ""
    raise ReproduceError(f"{kind} must be one of {', '.join(known)}, got {name}{hint}")


# ---- the toy policy


def flat(options: Mapping[str, Any]) -> dict[str, Any]:
    """Nested options by dotted name."""
    settings = (
        setting
        for name, value in options.items()
        for setting in flattened(name, value, "papers.yaml")
    )
    return {setting.name: setting.value for setting in settings}


def recipe_path(run: Run) -> Path:
    return ROOT / f"configs/recipes/{run.recipe}.yaml"


def method_options(run: Run) -> dict[str, Any]:
    """What of a run its method reads, and the size of its groups."""
    recipe = flat(yaml.safe_load(recipe_path(run).read_text()))
    given = flat(run.options) | flat(run.toy)
    kept = recipe | given
    estimator = kept["algo.advantage.estimator"]
    of_others = re.compile(rf"algo\.(?!advantage\.|kl\.|{estimator}\.)")
    options = {
        n: v for n, v in kept.items() if _OF_THE_METHOD.fullmatch(n) and not of_others.match(n)
    }
    return options | {
        "rollout.n_samples_per_prompt": int(given.get("rollout.n_samples_per_prompt", _GROUP))
    }


def toy_options(run: Run, toy: Toy) -> dict[str, Any]:
    """What the trainer of one process reads of a run."""
    options = method_options(run)
    return options | {
        "rollout.batch_size": toy.prompts,
        "train.batch_size": toy.prompts * options["rollout.n_samples_per_prompt"] // toy.updates,
        "reward.remote_url": toy.reward,
    }


def toy_study(paper: Paper, item: Item, *, steps: int | None = None, seeds: int = 1) -> Study:
    """The item's runs as a study, in which runs that differ in model or data only are made once.

    Raises:
        StudyError: a run's options break rules.
    """
    toy, cells, tasks = paper.toy, {}, {}
    length = steps or toy.steps
    for name in item.runs:
        run = paper.runs[name]
        task = "_".join(["toy", *(value for _, value in sorted(run.environment.items()))])
        tasks[task] = {
            "maker": toy.maker,
            "steps": length,
            "seeds": seeds,
            "environment": run.environment,
            "evaluation": {
                "every": max(1, length // 5),
                "problems": 32,
                "last_problems": 128,
                "samples": 16,
            },
        }
        cells[name] = {"task": task, "options": toy_options(run, toy)}
    study = Study.model_validate({"tasks": tasks, "cells": cells, "options": _TOY})
    if found := list(faults(study)):
        raise StudyError("\n".join(found))
    return study


def run_toy(name: str, paper: Paper, item_name: str, arguments: argparse.Namespace) -> int:
    """Runs what is not there yet, and draws."""
    item = paper.items[item_name]
    study = toy_study(paper, item, steps=arguments.steps, seeds=arguments.seeds)
    folder = (arguments.out or Path("runs/papers")).resolve() / name
    places, started = Places(folder), time.monotonic()
    rows = Rows(places)
    try:
        runs = runs_of(study, study.arms)
        left = missing(study, runs, finished(study, runs, read_rows(places)))
        print(f"{name} {item_name}: {len(left)} of {len(runs)} runs to go in {folder}", flush=True)
        failed = execute(
            study, left, places, rows, workers=arguments.workers, device="cpu", told=print
        )
    finally:
        rows.close()
    if failed:
        return 1
    of_run: dict[str, list[dict[str, Any]]] = {}
    for row in finished(study, runs, read_rows(places)).values():
        of_run.setdefault(row["cell"], []).append(row)
    picture = folder / f"{item_name}.png"
    show(item, of_run, f"{paper.title}: {item_name}, toy scale", picture)
    if arguments.record:
        _record(name, item_name, picture, of_run, item, round(time.monotonic() - started))
    return 0


def show(
    item: Item,
    of_run: Mapping[str, Sequence[Mapping[str, Any]]],
    title: str,
    picture: Path,
    note: str = "",
) -> None:
    """Draws the picture, and writes and prints the table beside it."""
    draw(item, of_run, title, picture)
    table = table_text(item, of_run) + note
    picture.with_suffix(".md").write_text(table)
    print(table, picture, sep="\n")


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Mean over seeds of the evaluation after the last step; of its rollouts' last tenth for what
    only they have."""
    found = []
    for row in rows:
        value = row["evaluations"][-1].get(name)
        if value is None:
            values = [v for v in row["steps"].get(name, []) if v is not None]
            last = values[-max(1, len(values) // 10) :]
            value = sum(last) / len(last) if last else None
        found.append(value)
    return sum(found) / len(found) if found and None not in found else None


def shown(item: Item) -> list[str]:
    """The numbers of an item's table."""
    return list(dict.fromkeys([*item.table, *item.evaluated, *item.curves]))


def table_text(item: Item, of_run: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """A line for each run, as Markdown."""
    names = shown(item)
    lines = []
    for run, rows in of_run.items():
        values = (_mean(rows, name) for name in names)
        lines.append([run, *("-" if value is None else f"{value:.3g}" for value in values)])
    return markdown_table(["run", *names], lines) + "\n"


def draw(
    item: Item, of_run: Mapping[str, Sequence[Mapping[str, Any]]], title: str, picture: Path
) -> None:
    """A panel for each curve; for a table of pass@k its curve over k."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [*item.curves, *item.evaluated, *(["pass@k"] if len(item.table) > 1 else [])]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(3.6 * len(panels), 3.2), squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        for number, (run, rows) in enumerate(of_run.items()):
            x, y = _points(panel, item, rows)
            axis.plot(
                x,
                y,
                color=f"C{number % 10}",
                label=run,
                linewidth=1.1,
                marker="." if len(x) < 12 else None,
            )
        if panel == "completion_entropy":
            axis.axhline(_LN2, color="gray", linestyle=":", linewidth=0.8)
        axis.set(title=panel, xlabel="k" if panel == "pass@k" else "step")
    figure.suptitle(title, fontsize=9)
    figure.legend(*axes[0][0].get_legend_handles_labels(), fontsize=6, loc="lower center", ncols=4)
    figure.tight_layout(rect=(0, 0.05 + 0.04 * ((len(of_run) + 3) // 4), 1, 1))
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=75)
    pyplot.close(figure)


def _points(
    panel: str, item: Item, rows: Sequence[Mapping[str, Any]]
) -> tuple[list[float], list[float]]:
    """Means over seeds."""
    if panel == "pass@k":
        names = [name for name in item.table if name.startswith("pass@")]
        return [float(name[5:]) for name in names], [_mean(rows, name) or 0.0 for name in names]
    if panel in item.evaluated:
        curves = [[(e["step"], e[panel]) for e in row["evaluations"]] for row in rows]
        return [x for x, _ in curves[0]], [
            sum(y for _, y in at) / len(at) for at in zip(*curves, strict=True)
        ]
    smooth = [
        smoothed([0.0 if v is None else v for v in row["steps"].get(panel, [])]) for row in rows
    ]
    values = [sum(at) / len(at) for at in zip(*smooth, strict=True)]
    return [float(step) for step in range(1, len(values) + 1)], values


def _record(
    name: str,
    item_name: str,
    picture: Path,
    of_run: Mapping[str, Sequence[Any]],
    item: Item,
    seconds: int,
) -> None:
    """The committed record: commit, command, picture, numbers."""
    from PIL import Image

    kept = PICTURES / f"{name}_{item_name}.png"
    kept.parent.mkdir(parents=True, exist_ok=True)
    # a third of matplotlib's size
    Image.open(picture).convert("RGB").quantize(128).save(kept, optimize=True)
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"items": {}}
    some = next(iter(of_run.values()))
    record["items"][f"{name} {item_name}"] = {
        "command": f"bash examples/scripts/reproduce.sh {name} {item_name}",
        "commit": some[0].get("commit", commit()),
        "hardware": some[0].get("hardware", hardware("cpu")),
        "picture": str(kept.relative_to(ROOT)),
        "seeds": len(some),
        "steps": len(some[0]["steps"]["accuracy"]),
        "seconds_of_runs": round(sum(row["seconds"] for rows in of_run.values() for row in rows)),
        "numbers": {run: {n: _mean(rows, n) for n in shown(item)} for run, rows in of_run.items()},
    }
    record["items"] = dict(sorted(record["items"].items()))
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    with in_one_piece(RECORD) as partial:
        partial.write_text(json.dumps(record, indent=1) + "\n")


# ---- a real model


def real_options(run: Run, paper: Paper, steps: int) -> dict[str, Any]:
    """What train_ppo_ray is told of a run beside configs/real_model.yaml, whose reward is 0 or
    1."""
    options = {
        name: value
        for name, value in method_options(run).items()
        if not name.endswith(".success_threshold")
    }
    ks = [
        int(name.removeprefix("pass@")) for item in paper.items.values() for name in item.evaluated
    ]
    return options | {
        "train.batch_size": real_model.PROMPTS * options["rollout.n_samples_per_prompt"],
        "eval.steps": max(1, steps // 2),
        **({"eval.n_samples_per_prompt": max(ks)} if ks else {}),
    }


def real_folder(folder: Path, options: Mapping[str, Any], steps: int) -> Path:
    """Of the run with these options; runs that differ in model or data only have the same."""
    measured = record.digests([*real_model.FILES, "openrlhf_ext/algorithms"])
    digest = hashlib.sha256(
        json.dumps([options, steps, measured], sort_keys=True).encode()
    ).hexdigest()
    return folder / f"{options['algo.advantage.estimator']}-{digest[:8]}"


def run_real(name: str, paper: Paper, item_name: str, arguments: argparse.Namespace) -> int:
    """Trains and measures what is not there yet, one run after the other, and draws."""
    steps = arguments.steps or _REAL_STEPS
    item, note = _as_real(paper.items[item_name])
    out = (arguments.out or Path("runs/papers")).resolve()
    work = out / "real"
    options = {run: real_options(paper.runs[run], paper, steps) for run in item.runs}
    folders = {run: real_folder(work, options[run], steps) for run in item.runs}
    made = {folder: options[run] for run, folder in folders.items()}
    left = [folder for folder in made if not _is_finished(folder, item)]
    print(f"{name} {item_name}: {len(left)} of {len(made)} runs to go in {work}", flush=True)
    start = work / "start.json"
    try:
        if left:
            model = real_model.prepare(work)
            _evaluated(model, start, item, work)
        for folder in left:
            print(
                f"{folder.name}: {steps} steps, "
                f"{[run for run in folders if folders[run] == folder]}",
                flush=True,
            )
            _trained(model, folder, work, steps, made[folder])
            _evaluated(str(folder), folder / "after.json", item, work)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"reproduce: {error}; the same command goes on", file=sys.stderr)
        return 1
    rows = {"start": [_start_row(start)]} if item.table else {}
    rows |= {run: [_real_row(folder)] for run, folder in folders.items()}
    picture = out / name / f"{item_name}_real.png"
    show(item, rows, f"{paper.title}: {item_name}, SmolLM2-135M, {steps} steps", picture, note)
    return report.main([*map(str, made), "--output", str(picture.with_suffix(".html"))])


def _as_real(item: Item) -> tuple[Item, str]:
    """What of an item the real model can show, and a note on what it cannot."""
    note = "\nformat is left out: the real model's reward is of numbers, not of tags.\n" * (
        _OF_TAGS in item.curves
    )
    note += "\nRuns of supervised fine-tuning are left out.\n" * bool(item.sft)
    return item.model_copy(
        update={"curves": [curve for curve in item.curves if curve != _OF_TAGS]}
    ), note


def _is_finished(folder: Path, item: Item) -> bool:
    return (folder / _TRAINED).exists() and (not item.table or (folder / "after.json").exists())


def _trained(model: str, folder: Path, work: Path, steps: int, options: Mapping[str, Any]) -> None:
    """Trains a run, from its last checkpoint if it was ended; a finished one keeps none."""
    if (folder / _TRAINED).exists():
        return
    checkpoints = folder / "checkpoints"
    resumed = {
        "ckpt.path": str(checkpoints),
        "ckpt.save_steps": 5,
        "ckpt.max_num": 1,
        "ckpt.load_enable": True,
    }
    real_model.train(model, folder, work, steps, *words({**options, **resumed}))
    (folder / _TRAINED).touch()
    shutil.rmtree(checkpoints)


def _evaluated(model: str, result: Path, item: Item, work: Path) -> None:
    """Samples the held-out problems for an item's table."""
    if item.table and not result.exists():
        real_model.evaluate(model, result, work, _REAL_SAMPLES)


def _start_row(result: Path) -> dict[str, Any]:
    return {"steps": {}, "evaluations": [{"step": 0, **_shares(result)}]}


def _real_row(folder: Path) -> dict[str, Any]:
    """A run in the form of the toy policy's: curves of its steps, numbers of its evaluations."""
    lines = read_metrics(folder / "metrics.jsonl")
    made = [line for line in lines if "reward/mean" in line]
    steps = {own: [line.get(name) for line in made] for own, name in IN_REPORT.items()}
    evaluations = [
        {
            "step": line["step"],
            **{
                name.removeprefix("eval/"): value for name, value in line.items() if "eval/" in name
            },
        }
        for line in lines
        if "eval/accuracy" in line
    ]
    if (result := folder / "after.json").exists():
        evaluations[-1] |= _shares(result)
    return {"steps": steps, "evaluations": evaluations}


def _shares(result: Path) -> dict[str, float]:
    found = json.loads(result.read_text())
    return {
        "accuracy": found["accuracy"],
        **{f"pass@{k}": share for k, share in found["pass_at_k"].items()},
    }


# ---- the cluster


def words(options: Mapping[str, Any]) -> list[str]:
    """Options as they are typed."""
    typed: list[str] = []
    for name, value in flat(options).items():
        values = value if isinstance(value, list) else [value]
        texts = [
            "null" if v is None else str(v).lower() if isinstance(v, bool) else str(v)
            for v in values
        ]
        typed += [f"--{name}", *texts]
    return typed


def paper_commands(name: str, paper: Paper, item_name: str) -> Iterator[str]:
    """The commands of an item: data, training, evaluation, report."""
    item, folder = paper.items[item_name], f"runs/papers/{name}"
    trained, tuned = [paper.runs[run] for run in item.runs], [paper.sft[run] for run in item.sft]
    yield f"# {paper.title}, {item_name}: {item.what}"
    yield f"# ours: {item.ours}"
    yield (
        "# $MODELS: the start models; $DATA/*_train.jsonl, *_test.jsonl: data sets as published "
        "(docs/papers.md)"
    )
    sets = paper.evaluation.benchmarks if any(map(_evaluates, trained)) else []
    for data in dict.fromkeys(
        [*(run.data for run in trained), *(run.data for run in tuned), *sets]
    ):
        yield (
            f"python examples/python/prepare_data.py {paper.data[data]} --output $DATA/{data}.jsonl"
        )
    for run_name, sft in zip(item.sft, tuned, strict=True):
        yield _tuning_command(sft, f"{folder}/{run_name}")
    yield "# on a cluster: submit_recipe.sh URL, or slurm_recipe.sh"
    for run_name, run in zip(item.runs, trained, strict=True):
        yield _training_command(run, paper, f"{folder}/{run_name}")
    runs = [*item.sft, *item.runs]
    if item.table or item.evaluated:
        if any(
            "ckpt.best_metric_key" in yaml.safe_load(recipe_path(run).read_text())
            for run in trained
        ):
            yield (
                "# a run that collapsed: --model OUT/checkpoints/global_stepN_hf; best.json "
                "beside it says N"
            )
        files = " ".join(f"{each}=$DATA/{each}_test.jsonl" for each in paper.evaluation.benchmarks)
        for run_name in runs:
            yield (
                f"openrlhf-ext evaluate --protocol {paper.evaluation.protocol} --model "
                f"{folder}/{run_name} --benchmark {files} --engine vllm --device cuda --dtype "
                f"bfloat16 --out {folder}/{run_name}/evaluation"
            )
    drawn = [IN_REPORT[curve] for curve in item.curves]
    if "conflict_forward" in item.curves:
        drawn.append("conflict/mean")
    if item.evaluated:
        drawn += [f"eval/{each}/pass@K" for each in sets]
    if drawn:
        yield f"# in the report: {', '.join(drawn)}"
    yield (
        f"openrlhf-ext report {' '.join(f'{folder}/{run}' for run in runs)} --output "
        f"{folder}/{item_name}.html"
    )


def _evaluates(run: Run) -> bool:
    """Whether the recipe evaluates during training."""
    return any(
        option.startswith("eval.") for option in yaml.safe_load(recipe_path(run).read_text())
    )


def _training_command(run: Run, paper: Paper, out: str) -> str:
    model = yaml.safe_load(recipe_path(run).read_text())["actor.model_name_or_path"].rpartition(
        "/"
    )[2]
    given = [*words(run.options), "--ckpt.output_dir", out, "--ckpt.path", f"{out}/checkpoints"]
    typed = shlex.join(given)
    if _evaluates(run):
        typed += (
            " --eval.dataset "
            f"{','.join(f'{each}=$DATA/{each}.jsonl' for each in paper.evaluation.benchmarks)}"
        )
    variables = "".join(f"{key}={value} " for key, value in run.environment.items())
    return (
        f"{variables}bash examples/scripts/train_recipe.sh {run.recipe} $MODELS/{model} "
        f"$DATA/{run.data}.jsonl {paper.reward} {typed}"
    )


def tuning_path(run: Tuned) -> Path:
    return ROOT / f"configs/sft/{run.recipe}.yaml"


def _tuning_command(run: Tuned, out: str) -> str:
    model = yaml.safe_load(tuning_path(run).read_text())["model.model_name_or_path"].rpartition(
        "/"
    )[2]
    return (
        f"python -m openrlhf_ext.cli.train_sft --config {tuning_path(run).relative_to(ROOT)} "
        f"--model.model_name_or_path $MODELS/{model} --data.dataset $DATA/{run.data}.jsonl "
        f"--ckpt.output_dir {out} --ckpt.path {out}/checkpoints"
    )


# ---- docs/papers.md


def pages_table(papers: Mapping[str, Paper]) -> str:
    """The items in docs/papers.md, with their pictures at toy scale; GPUs and hours are those of
    ``openrlhf-ext plan``, nothing of them is measured."""
    planned: dict[tuple[str, Any], tuple[int, float]] = {}
    made = json.loads(RECORD.read_text())["items"]
    lines: list[list[str]] = []
    for name, paper in papers.items():
        lines.append([f"**{paper.title}**", "", ""])
        for item_name, item in paper.items.items():
            hours: dict[int, list[float]] = {}
            for run in (paper.runs[run] for run in item.runs):
                key = (run.recipe, run.options.get("rollout.n_samples_per_prompt"))
                planned[key] = planned.get(key) or _planned(run)
                gpus, step_s = planned[key]
                hours.setdefault(gpus, []).append(paper.steps * step_s / 3600)
            needs = ", ".join(
                f"{len(h)} x {sum(h) / len(h):.0f} h on {gpus} GPUs" for gpus, h in hours.items()
            )
            link = item_link(f"{name} {item_name}", made)
            lines.append([link, item.what, needs])
        for item_name, why in paper.missing.items():
            lines.append([f"{name} {item_name}", f"no command: {why}", ""])
    return markdown_table(["item", "what", "plan"], lines) + "\n"


def item_link(item: str, made: Mapping[str, Any]) -> str:
    """The words of an item's command; in docs/papers.md they lead to its picture at toy scale."""
    if item not in made:
        return f"`{item}`"
    return f"[`{item}`]({made[item]['picture'].removeprefix('docs/')})"


def _planned(run: Run) -> tuple[int, float]:
    """(GPUs, predicted seconds of a step) of a recipe as it is laid out."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        result = Path(folder) / "plan.json"
        typed = ["--config", str(recipe_path(run)), *words(run.options), "--json", str(result)]
        if plan.main(typed) != 0:
            raise ReproduceError(f"openrlhf-ext plan does not take {run.recipe} with {run.options}")
        found = json.loads(result.read_text())
    return found["gpus"], found["configured"]["seconds"]["step"]


# ---- the command


def listing(papers: Mapping[str, Paper]) -> str:
    """Every item, and every figure without one."""
    lines = []
    for name, paper in papers.items():
        lines.append(f"{name}: {paper.title}")
        runs = {item: len(value.runs) + len(value.sft) for item, value in paper.items.items()}
        lines += [
            f"  {item:16} {runs[item]:2} runs  {value.what}" for item, value in paper.items.items()
        ]
        lines += [f"  {item:16} none     {why}" for item, why in paper.missing.items()]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    silence_libraries()
    parser = CommandParser("reproduce", __doc__.split("\n")[0])
    parser.prog = "bash examples/scripts/reproduce.sh"
    add = parser.add_argument
    add("paper", nargs="?", metavar="PAPER", help="such as simoni; --list has all")
    add("item", nargs="?", metavar="ITEM", help="a figure or a table, such as fig3")
    add(
        "--scale",
        choices=["toy", "real", "paper"],
        default="toy",
        help="toy policy or SmolLM2-135M on this machine, or a cluster's commands",
    )
    add("--list", action="store_true", help="print papers and items")
    add("--table", action="store_true", help="print the table of docs/papers.md")
    add("--seeds", type=int, default=1, help="toy: runs of each method (default 1)")
    add(
        "--steps",
        type=int,
        help=f"toy, real: steps of each run (default: the toy task's; {_REAL_STEPS})",
    )
    add(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        help="toy: runs at a time (default: the cores)",
    )
    add("--out", type=Path, help="toy, real: folder of runs and pictures (default: runs/papers)")
    add(
        "--record",
        action="store_true",
        help="toy: keep picture and numbers in docs/images and benchmarks/results",
    )
    arguments = parser.parse_args(argv)
    papers = read_papers()
    if arguments.list:
        print(listing(papers))
        return 0
    if arguments.table:
        print(pages_table(papers), end="")
        return 0
    try:
        paper = _one("PAPER", arguments.paper, papers)
        _one("ITEM", arguments.item, paper.items | paper.missing)
        if arguments.item in paper.missing:
            raise ReproduceError(
                f"{arguments.paper} {arguments.item} has no command: "
                f"{paper.missing[arguments.item]}"
            )
        if arguments.scale != "toy" and (arguments.record or arguments.seeds != 1):
            raise ReproduceError(
                f"--seeds and --record need --scale toy, got {arguments.scale}; leave them out"
            )
        if arguments.scale == "real":
            return run_real(arguments.paper, paper, arguments.item, arguments)
        if arguments.scale == "paper":
            print(*paper_commands(arguments.paper, paper, arguments.item), sep="\n")
            return 0
        return run_toy(arguments.paper, paper, arguments.item, arguments)
    except (ReproduceError, StudyError) as error:
        print(f"reproduce: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
