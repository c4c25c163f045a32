"""A run of a study by ``train_ppo_ray``: the same curves as those of ``training``, read from what
the job writes."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.study.outcomes import SHAPED
from openrlhf_ext.groups.processes import die_with
from openrlhf_ext.reporting.lines import read_lines
from openrlhf_ext.tools.evaluate.problems import load_problems

_LOGS = "reward_log/"
_EVALUATED = {"accuracy": "accuracy", "reward": "reward_mean", "length": "response_length_mean"}
"""Names in a row: names in metrics.jsonl, after ``eval/``; pass@K has its own name in both."""
_CURVES = {
    "accuracy": "accuracy/mean",
    "reward": "reward/mean",
    "length": "response/length_mean",
    "entropy": "entropy/mean",
    "completion_entropy": "entropy/completion_mean",
    "grad_norm": "grad_norm",
    "clip_fraction": "loss/clip_fraction",
    "update_rms": "update/rms",
    "sampling_s": "time/generate",
    "shaping_s": "time/shape",
    "step_s": "time/step",
    **{name: f"algorithm/{name}" for name in SHAPED},
}
"""Names in a row: names in metrics.jsonl."""


def run_assignment(given: Mapping[str, Any]) -> dict[str, Any]:
    """The curves of an assigned run (``runs.execute`` writes assignments); its job prints into this
    process's log.

    Raises:
        subprocess.CalledProcessError: the job failed.
        ValueError: it made another number of steps than the task has.
    """
    folder = Path(given["folder"])
    if folder.exists():  # of a run that failed
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    options = folder / "options.yaml"
    options.write_text(json.dumps(job_options(given, folder)))
    command = [sys.executable, "-m", "openrlhf_ext.cli.train_ppo_ray", "--config", str(options)]
    # SIGTERM, not SIGKILL: the job has processes of its own to end
    subprocess.run(command, check=True, preexec_fn=partial(die_with, os.getpid(), signal.SIGTERM))
    records = [record for _, record in read_lines(folder / "metrics.jsonl")]
    steps = curves(records, folder, given["short_tokens"])
    # prompts that are too long, groups that are filtered
    if (made := len(steps["accuracy"])) != given["steps"]:
        raise ValueError(
            f"the job made {made} steps of the task's {given['steps']}: they cannot be compared"
        )
    for weights in folder.glob("*.safetensors"):  # a study has dozens of runs
        weights.unlink()
    return {
        "steps": steps,
        "evaluations": evaluations(records, given["evaluation"]["last_problems"]),
    }


def job_options(given: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """What ``train_ppo_ray`` is told: the arm's options, the policy, and the prompts that a run in
    one process samples.

    The job shuffles them once more: both see the same prompts in the end, at other steps.
    """
    options, evaluation = given["options"], given["evaluation"]
    keys = options["data.input_key"], options["data.label_key"]
    there = load_problems(given["train"], *keys)
    random.Random(given["seed"]).shuffle(there)
    # a file's first prompts need not be like the others: those of toy_task.py are easier, for it
    # makes no prompt twice
    chosen = [there[i % len(there)] for i in range(given["steps"] * options["rollout.batch_size"])]
    held_out = load_problems(given["heldout"], *keys)[: evaluation["last_problems"]]
    for name, problems in (("prompts", chosen), ("heldout", held_out)):
        records = [dict(zip(keys, (one.prompt, one.label), strict=True)) for one in problems]
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in records)
        )
    return options | {
        "actor.model_name_or_path": given["policy"],
        "data.prompt_dataset": str(folder / "prompts.jsonl"),
        "eval.dataset": str(folder / "heldout.jsonl"),
        "eval.steps": evaluation["every"],
        "eval.n_samples_per_prompt": evaluation["samples"],
        "eval.temperature": options.get("rollout.temperature", 1.0),
        "train.num_episodes": 1,
        "train.seed": given["seed"],
        "ckpt.output_dir": str(folder),
        # the default is one folder for all, and several run at a time
        "ckpt.path": str(folder / "checkpoints"),
        "ckpt.grace_s": 0,  # a cell is made anew
        "logger.samples_every": 1,
        "logger.samples_groups": 0,
    }


def curves(
    records: Sequence[Mapping[str, Any]], folder: Path, short_tokens: int
) -> dict[str, list[float | None]]:
    """Curves by name, a value for each step, of the lines of metrics.jsonl and the completions in a
    run folder."""
    records = [record for record in records if "accuracy/mean" in record]
    names = _CURVES | {name[len(_LOGS) :]: name for name in records[0] if name.startswith(_LOGS)}
    found = {
        own: [record.get(name) for record in records]
        for own, name in names.items()
        if name in records[0]
    }
    found["ended"] = [1.0 - record["response/truncated_rate"] for record in records]
    samples: dict[int, list[dict[str, Any]]] = {record["step"]: [] for record in records}
    for _, sample in read_lines(folder / "samples.jsonl"):
        samples[sample["step"]].append(sample)
    described = [_described(completions, short_tokens) for completions in samples.values()]
    return found | {name: [values[name] for values in described] for name in described[0]}


def evaluations(records: Sequence[Mapping[str, Any]], problems: int) -> list[dict[str, Any]]:
    """The job's evaluations, that before the first step included."""
    return [
        {"step": record["step"], "problems": problems, "seconds": record["time/eval"]}
        | {own: record[f"eval/{name}"] for own, name in _EVALUATED.items()}
        | {
            name[len("eval/") :]: value
            for name, value in record.items()
            if name.startswith("eval/pass@")
        }
        for record in records
        if "eval/accuracy" in record
    ]


def _described(samples: Sequence[Mapping[str, Any]], short_tokens: int) -> dict[str, float | None]:
    """Of a step's completions; the names of ``training``."""
    short = [sample for sample in samples if len(sample["token_ids"]) <= short_tokens]
    long = [sample for sample in samples if len(sample["token_ids"]) > short_tokens]
    right = [
        entropy for sample in samples if sample["score"] >= 1 for entropy in sample["entropies"]
    ]
    wrong = [
        entropy for sample in samples if sample["score"] < 1 for entropy in sample["entropies"]
    ]
    return {
        "short": len(short) / len(samples),
        "accuracy_short": _mean([sample["score"] for sample in short]),
        "accuracy_long": _mean([sample["score"] for sample in long]),
        "entropy_right": _mean(right),
        "entropy_wrong": _mean(wrong),
    }


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
