"""A run of a study by ``train_ppo_ray``: the same curves as those of ``training``, read from what the job writes."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.study.settings import Evaluation, resolve
from benchmarks.study.training import SHAPED, StudyRun
from openrlhf_ext.reporting.lines import read_lines
from openrlhf_ext.rewards.worker import die_with

_LOGS = "reward_log/"
_CURVES = {
    "accuracy": "accuracy/mean",
    "reward": "reward/mean",
    "length": "response/length_mean",
    "entropy": "entropy/mean",
    "completion_entropy": "entropy/completion_mean",
    "grad_norm": "grad_norm",
    "clip_fraction": "loss/clip_fraction",
    "sampling_s": "time/generate",
    "shaping_s": "time/shape",
    "step_s": "time/step",
    **{name: f"algorithm/{name}" for name in SHAPED},
}
"""Names in a row: names in metrics.jsonl."""


def run_assignment(given: Mapping[str, Any]) -> dict[str, Any]:
    """The curves of an assigned run (``runs.execute`` writes assignments); its job prints into this process's log.

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
    steps = curves(folder, given["short_tokens"])
    if (made := len(steps["accuracy"])) != given["steps"]:  # prompts that are too long, groups that are filtered
        raise ValueError(f"the job made {made} steps of the task's {given['steps']}: they cannot be compared")
    return {
        "steps": steps,
        "evaluations": [
            evaluated(given, policy) | {"step": step}
            for step, policy in ((0, given["policy"]), (given["steps"], str(folder)))
        ],
    }


def job_options(given: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """What ``train_ppo_ray`` is told: the arm's options, the policy, and the prompts that a run in one process samples.

    The job shuffles them once more: both see the same prompts in the end, at other steps.
    """
    options, path = given["options"], folder / "prompts.jsonl"
    # a file's first prompts need not be like the others: those of toy_task.py are easier, for it makes no prompt twice
    there = _study_run(given, given["policy"], "cpu").train_problems
    chosen = [there[i % len(there)] for i in range(given["steps"] * options["rollout.batch_size"])]
    input_key, label_key = options["data.input_key"], options["data.label_key"]
    path.write_text("".join(json.dumps({input_key: one.prompt, label_key: one.label}) + "\n" for one in chosen))
    return options | {
        "actor.model_name_or_path": given["policy"],
        "data.prompt_dataset": str(path),
        "data.max_samples": len(chosen),
        "train.num_episodes": 1,
        "train.seed": given["seed"],
        "ckpt.output_dir": str(folder),
        "ckpt.path": str(folder / "checkpoints"),  # the default is one folder for all, and several run at a time
        "ckpt.grace_s": 0,  # a cell is made anew
        "logger.samples_every": 1,
        "logger.samples_groups": 0,
    }


def curves(folder: Path, short_tokens: int) -> dict[str, list[float | None]]:
    """A run folder's curves by name, a value for each step."""
    records = [record for _, record in read_lines(folder / "metrics.jsonl") if record["step"] > 0]
    names = _CURVES | {name[len(_LOGS) :]: name for name in records[0] if name.startswith(_LOGS)}
    found = {own: [record.get(name) for record in records] for own, name in names.items() if name in records[0]}
    found["ended"] = [1.0 - record["response/truncated_rate"] for record in records]
    samples: dict[int, list[dict[str, Any]]] = {record["step"]: [] for record in records}
    for _, sample in read_lines(folder / "samples.jsonl"):
        samples[sample["step"]].append(sample)
    described = [_described(completions, short_tokens) for completions in samples.values()]
    return found | {name: [values[name] for values in described] for name in described[0]}


def _described(samples: Sequence[Mapping[str, Any]], short_tokens: int) -> dict[str, float | None]:
    """Of a step's completions; the names of ``training``."""
    short = [sample for sample in samples if len(sample["token_ids"]) <= short_tokens]
    long = [sample for sample in samples if len(sample["token_ids"]) > short_tokens]
    right = [entropy for sample in samples if sample["score"] >= 1 for entropy in sample["entropies"]]
    wrong = [entropy for sample in samples if sample["score"] < 1 for entropy in sample["entropies"]]
    return {
        "short": len(short) / len(samples),
        "accuracy_short": _mean([sample["score"] for sample in short]),
        "accuracy_long": _mean([sample["score"] for sample in long]),
        "entropy_right": _mean(right),
        "entropy_wrong": _mean(wrong),
    }


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def evaluated(given: Mapping[str, Any], policy: str) -> dict[str, Any]:
    """The evaluation of a checkpoint, as that after the last step of a run in one process."""
    return _study_run(given, policy, given["device"]).run()["evaluations"][0]


def _study_run(given: Mapping[str, Any], policy: str, device: str) -> StudyRun:
    """The run in one process that this is compared with, without its steps."""
    return StudyRun(
        resolve(given["options"], given["seed"]), policy=policy, train=given["train"], heldout=given["heldout"],
        steps=0, evaluation=Evaluation(**given["evaluation"]), short_tokens=given["short_tokens"], device=device,
    )  # fmt: skip
