"""How long a study takes, by a timed trial, and what differences it can see."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.study.runs import Places, Rows, Run, execute, finished, missing, read_rows, runs_of
from benchmarks.study.settings import Arm, Study, StudyError
from benchmarks.study.statistics import detectable
from benchmarks.study.verdicts import judge, needed

_TRIAL_STEPS = 3
_TRIAL_PROBLEMS = 32


def plan(study: Study, arms: Sequence[Arm], places: Places, *, workers: int, device: str) -> str:
    """Runs, minutes, and the smallest differences that the contrasts see, as lines.

    Raises:
        StudyError: a trial failed.
    """
    runs = runs_of(study, arms)
    rows = read_rows(places)
    done = finished(study, runs, rows)
    runs = needed(study, runs, list(done.values()))
    lines = [f"{len(runs)} runs, {sum('error' not in row for row in done.values())} of them there"]
    total = 0.0
    blocks: dict[tuple[str, str], list[Run]] = {}
    for run in missing(study, runs, done):
        cell = study.cells[run.arm.cell]
        blocks.setdefault((cell.task, cell.backend), []).append(run)
    for (name, backend), left in blocks.items():
        seconds, policy_s = _trial(study, left[0], places, device)
        seeds = len({run.seed for run in left})
        total += len(left) * seconds + seeds * policy_s
        lines.append(
            f"task {name}, {backend}: {len(left)} runs of about {seconds:.0f} s, {seeds} "
            f"policies of {policy_s:.0f} s"
        )
    lines.append(f"about {total / workers / 60:.0f} minutes with {workers} workers")
    return "\n".join([*lines, *_seen(study, list(done.values()))])


def _trial(study: Study, run: Run, places: Places, device: str) -> tuple[float, float]:
    """Seconds of a run, and of the policy of a seed (0 if it is there, or needs none), by a run of
    a few steps."""
    task = study.task_of(run.arm.cell)
    evaluation = task.evaluation.model_copy(
        update={
            "every": _TRIAL_STEPS,
            "problems": _TRIAL_PROBLEMS,
            "last_problems": _TRIAL_PROBLEMS,
        }
    )
    short = task.model_copy(update={"steps": _TRIAL_STEPS, "evaluation": evaluation})
    trial = study.model_copy(
        update={"tasks": {**study.tasks, study.cells[run.arm.cell].task: short}}
    )
    told: list[str] = []
    with tempfile.TemporaryDirectory(dir=places.folder, prefix=".trial-") as folder:
        inside = Places(Path(folder))
        if (policies := places.folder / "policies").exists():
            (inside.folder / "policies").symlink_to(policies)
        rows = Rows(inside)
        try:
            failed = execute(trial, [run], inside, rows, workers=1, device=device, told=told.append)
        finally:
            rows.close()
        if failed:
            raise StudyError("\n".join(["a trial failed:", *told]))
        (row,) = read_rows(inside)
    steps = row["steps"]["step_s"]
    first, last = row["evaluations"][0], row["evaluations"][-1]
    of_problem = (first["seconds"] + last["seconds"]) / (first["problems"] + last["problems"])
    middle = math.ceil(task.steps / task.evaluation.every) * task.evaluation.problems
    start = row["seconds"] - sum(steps) - first["seconds"] - last["seconds"]
    seconds = (
        start
        + task.steps * sum(steps[1:]) / len(steps[1:])
        + (middle + task.evaluation.last_problems) * of_problem
    )
    policy_s = next(
        (float(line.split("(policy)")[1].split()[0]) for line in told if "(policy)" in line), 0.0
    )
    return seconds, policy_s


def _seen(study: Study, rows: Sequence[dict]) -> list[str]:
    """The differences that the contrasts see in four of five studies, by the deviation of the rows
    that are there."""
    primary = sum(contrast.role == "primary" for contrast in study.contrasts.values())
    lines = []
    for judgment in judge(study, rows):
        contrast = judgment.contrast
        seeds = study.task_of(contrast.cells[0]).seeds - contrast.tuned_on
        known = judgment.estimate
        size = detectable(1.0, seeds, primary if contrast.role == "primary" else 1)
        if math.isinf(size):
            lines.append(
                f"{judgment.name}: {seeds} seeds are too few to see any difference of "
                f"{contrast.outcome}"
            )
            continue
        sees = f"{size:.2f} standard deviations"
        if known is not None and known.count > 2:
            sees = (
                f"{size * known.deviation:.3g} (standard deviation {known.deviation:.3g} of "
                f"{known.count} seeds so far)"
            )
        lines.append(
            f"{judgment.name}: {seeds} seeds see a difference of {contrast.outcome} of {sees}"
        )
    return lines
