"""What methods make of the same completions: the angles between their gradients.

Before clipping and Adam. How near two gradients of one method come on two rollouts says how much of
an angle is chance.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.study.jobs import Job, run_jobs
from benchmarks.study.runs import Places, assigned_job, commit, hardware, maker_job
from benchmarks.study.settings import Arm, Evaluation, Study, StudyError, resolve
from benchmarks.study.statistics import estimate
from benchmarks.study.training import Rollout, StudyRun

OTHER_ROLLOUT = "the same method on another rollout"
RESULTS = "probe.json"

Row = dict[str, Any]


def probe(
    study: Study,
    arms: Sequence[Arm],
    cell: str,
    places: Places,
    *,
    workers: int,
    device: str,
    told: Callable[[str], None],
) -> str:
    """The cosine of every method's gradient to that of ``cell``, on the rollouts of the latter, as
    a table.

    At the start and after half of the steps, which are those of ``cell``; every seed of its task.
    Cells with backend ``stack`` are left out; of a cell with several learning rates the first is
    taken.

    Args:
        arms: what is compared, where it is on the task of ``cell``.

    Raises:
        StudyError: there is no such cell, or a process failed.
    """
    name, chosen = _chosen(study, arms, cell)
    task = study.tasks[name]
    found: dict[int, list[Row]] = {}
    jobs: list[Job] = []
    for seed in range(task.seeds):
        what = f"probe-{cell}-s{seed}"
        given = {
            "kind": "probe",
            "reference": cell,
            "cells": chosen,
            "seed": seed,
            "device": device,
            "at": [0, task.steps // 2],
            "steps": task.steps,
        }
        maker = maker_job(study, name, seed, places, told)
        job = assigned_job(
            study, name, seed, places, what, given, _keeper(found, seed, what, places, told), maker
        )
        jobs += [job] if maker is None else [maker, job]
    run_jobs(jobs, workers)
    if len(found) < task.seeds:
        raise StudyError(
            f"the probe of {task.seeds - len(found)} seeds failed; logs: {places.log('probe-*')}"
        )
    about = {"reference": cell, "commit": commit(), "hardware": hardware(device)}
    (places.folder / RESULTS).write_text(json.dumps(about | {"seeds": found}, indent=1))
    return _table(cell, [row for rows in found.values() for row in rows])


def _chosen(study: Study, arms: Sequence[Arm], cell: str) -> tuple[str, dict[str, dict[str, Any]]]:
    """The task of a cell, its options, and those of the arms on the task that can be probed."""
    if cell not in study.cells or study.cells[cell].backend != "local":
        raise StudyError(
            f"--probe must name a cell with backend local ({', '.join(study.cells)}), got {cell}"
        )
    name = study.cells[cell].task
    options: dict[str, dict[str, Any]] = {}
    for arm in study.arms:
        other = study.cells[arm.cell]
        if other.task != name or other.backend != "local":
            continue
        if arm in arms or arm.cell == cell:
            options.setdefault(arm.cell, study.options_of(arm))
    return name, options


def _keeper(
    found: dict[int, list[Row]], seed: int, what: str, places: Places, told: Callable[[str], None]
) -> Callable[[str | None, float], None]:
    def done(error: str | None, seconds: float) -> None:
        if error is None:
            found[seed] = json.loads(places.result(what).read_text())["rows"]
        told(f"{what:40} {seconds:7.1f} s  {error or ''}".rstrip())

    return done


def _table(cell: str, rows: Sequence[Row]) -> str:
    steps = sorted({row["step"] for row in rows})
    heads = [f"step {step}: cosine | norm" for step in steps]
    lines = [
        f"| gradient beside that of {cell} | {' | '.join(heads)} |",
        "|---" * (1 + 2 * len(steps)) + "|",
    ]
    for name in dict.fromkeys(row["cell"] for row in rows):
        numbers: list[str] = []
        for step in steps:
            own = [row for row in rows if (row["cell"], row["step"]) == (name, step)]
            numbers += [_mean(own, "cosine"), _mean(own, "norm")]
        lines.append(f"| {name} | {' | '.join(numbers)} |")
    return "\n".join(
        [
            *lines,
            "",
            "Means over seeds [95 % interval]; norm: over that of the other; -: one is zero.",
        ]
    )


def _mean(rows: Sequence[Row], key: str) -> str:
    values = [row[key] for row in rows if row[key] is not None]
    if not values:
        return "-"
    found = estimate(values)
    low, high = found.interval
    # of few seeds
    return (
        f"{found.mean:.3f} [{low:.3f}, {high:.3f}]" if math.isfinite(low) else f"{found.mean:.3f}"
    )


# ---- in a process of its own


def run_assignment(given: Mapping[str, Any]) -> dict[str, Any]:
    """The rows of a seed: cell, step, cosine and norm."""
    torch.set_num_threads(1 if given["device"] == "cpu" else torch.get_num_threads())
    last = max(given["at"])
    runs = {name: _run(given, options) for name, options in given["cells"].items()}
    reference = runs[given["reference"]]
    rows: list[Row] = []
    for step in range(last + 1):
        if step in given["at"]:
            rows += [{"step": step, **row} for row in _compared(runs, reference, step + 1)]
        if step < last:
            reference.step(step + 1)
    return {"rows": rows}


def _run(given: Mapping[str, Any], options: Mapping[str, Any]) -> StudyRun:
    return StudyRun(
        resolve(options, given["seed"]),
        policy=given["policy"],
        train=given["train"],
        heldout=given["heldout"],
        steps=given["steps"],
        evaluation=Evaluation(**given["evaluation"]),
        short_tokens=given["short_tokens"],
        device=given["device"],
    )


def _compared(runs: Mapping[str, StudyRun], reference: StudyRun, step: int) -> list[Row]:
    """Every method's gradient with the present weights of the reference, on what it samples in
    ``step``."""
    rollout = reference.rollout(step)
    weights = reference.model.state_dict()
    own_D = _gradient(reference, rollout, step)
    found = [
        {
            "cell": OTHER_ROLLOUT,
            **_angle(own_D, _gradient(reference, reference.rollout(step + 1), step)),
        }
    ]
    for name, run in runs.items():
        if run is not reference:
            run.model.load_state_dict(weights)
            found.append({"cell": name, **_angle(own_D, _gradient(run, rollout, step))})
    return found


def _gradient(run: StudyRun, rollout: Rollout, step: int) -> Tensor:
    """(D,) gradient of the first update if it took the whole rollout."""
    shaped = run.algorithm.shape(run.batch(rollout))
    run.gradient(rollout, shaped, slice(0, len(shaped)), step)
    return torch.cat(
        [p.grad.flatten().double() for p in run.model.parameters() if p.grad is not None]
    )


def _angle(own_D: Tensor, other_D: Tensor) -> dict[str, float | None]:
    norms = float(own_D.norm()), float(other_D.norm())
    if not all(norms) or not all(map(math.isfinite, norms)):
        return {"cosine": None, "norm": None}
    return {"cosine": float(own_D @ other_D) / (norms[0] * norms[1]), "norm": norms[1] / norms[0]}
