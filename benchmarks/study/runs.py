"""The runs of a study: which there are, their rows in runs.jsonl, and the processes that make
them."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.study.jobs import Job, run_jobs
from benchmarks.study.settings import Arm, Study, StudyError, Task
from openrlhf_ext.locks import LOCK, FolderLock, LockError
from openrlhf_ext.reporting.lines import JsonLines, read_lines

ROOT = Path(__file__).resolve().parents[2]
# what the numbers of a run depend on, by its backend. The whole package is no key: a study by the
# stack takes days, is run from one clone, and its rows name that commit, by which they are paired
# (``verdicts``)
_CODE = {
    "local": (
        "openrlhf_ext/algorithms",
        "benchmarks/study/training.py",
        "benchmarks/study/decoding.py",
    ),
    "stack": (),
}
_IMPORTED = re.compile(r"^(?:import|from) (\w+)", re.MULTILINE)


@dataclass(frozen=True)
class Run:
    """An arm on one seed."""

    arm: Arm
    seed: int

    @property
    def name(self) -> str:
        """Of logs and progress."""
        return f"{self.arm.name}-s{self.seed}"


def runs_of(study: Study, arms: Sequence[Arm]) -> list[Run]:
    """All runs, task by task and seed by seed: what is paired is finished together."""
    return [
        Run(arm, seed)
        for name, task in study.tasks.items()
        for seed in range(task.seeds)
        for arm in arms
        if study.cells[arm.cell].task == name
    ]


def key_of(study: Study, run: Run) -> str:
    """Changes with everything that the numbers of a run depend on: its options, its task, the code
    that makes them."""
    task, cell = study.task_of(run.arm.cell), study.cells[run.arm.cell]
    settings = task.model_dump(exclude={"seeds", "gates", "options"}) | {
        "options": study.options_of(run.arm),
        "seed": run.seed,
        "seed_offset": cell.seed_offset,
    }
    if cell.backend != "local":
        settings["backend"] = cell.backend
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for path in _code(task, settings["options"], _CODE[cell.backend]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _code(task: Task, options: dict[str, Any], parts: Sequence[str]) -> Iterator[Path]:
    for part in (ROOT / part for part in parts):
        yield from sorted(part.rglob("*.py")) if part.is_dir() else [part]
    given = [
        task.maker and task.maker.split()[0],
        options.get("reward.remote_url"),
        options.get("algo.module_path"),
    ]
    for script in (Path(path) for path in given if path and Path(path).is_file()):
        yield script
        beside = (
            script.with_name(f"{module}.py")
            for module in sorted(set(_IMPORTED.findall(script.read_text())))
        )
        yield from (path for path in beside if path.is_file())


@dataclass(frozen=True)
class Places:
    """Where a study's files are, below one folder."""

    folder: Path

    @property
    def rows(self) -> Path:
        """A line for every run that ended."""
        return self.folder / "runs.jsonl"

    def log(self, name: str) -> Path:
        """What the process of a run or of a policy printed."""
        return self.folder / "logs" / f"{name}.log"

    def assignment(self, name: str) -> Path:
        """What the process of a run has to do."""
        return self.folder / "assignments" / f"{name}.json"

    def result(self, name: str) -> Path:
        """What it found."""
        return self.folder / "assignments" / f"{name}.result.json"

    def made(self, task: str, seed: int) -> Path:
        """Policy and problems of a task's maker; a file beside the folder says what made them, when
        they are there."""
        return self.folder / "policies" / f"{task}-s{seed}"


class Rows:
    """The rows of a study's runs, one process at a time.

    Raises:
        StudyError: another process holds its lock.
    """

    def __init__(self, places: Places) -> None:
        try:
            self._lock = FolderLock(
                places.folder, take_over=False, remedy=f"remove {places.folder / LOCK}"
            )
        except LockError as error:
            raise StudyError(f"{places.folder} {error}, or give another --out") from error
        self._lines = JsonLines(places.rows, keep=lambda row: True)

    def append(self, row: dict[str, Any]) -> None:
        """Keeps a row."""
        self._lines.append(row)

    def close(self) -> None:
        """Release the lock."""
        self._lines.close()
        self._lock.close()


def read_rows(places: Places) -> list[dict[str, Any]]:
    """All rows, of other settings too; none if there is no file."""
    return [row for _, row in read_lines(places.rows)] if places.rows.exists() else []


def finished(
    study: Study, runs: Sequence[Run], rows: Sequence[dict[str, Any]]
) -> dict[Run, dict[str, Any]]:
    """The last row of each run that has one with its key; runs that failed among them.

    Cells may have equal arms, such as one at its only and one at several learning rates: one row is
    the row of all.
    """
    by_key = {row["key"]: row for row in rows}
    keys = {run: key_of(study, run) for run in runs}
    return {
        run: by_key[key] | {"cell": run.arm.cell, "learning_rate": run.arm.learning_rate}
        for run, key in keys.items()
        if key in by_key
    }


def missing(study: Study, runs: Sequence[Run], done: Mapping[Run, dict[str, Any]]) -> list[Run]:
    """Runs that are still to be done; those that failed among them, and of equal ones the first."""
    left: dict[str, Run] = {}
    for run in runs:
        if run not in done or "error" in done[run]:
            left.setdefault(key_of(study, run), run)
    return list(left.values())


# ---- processes


def execute(
    study: Study,
    runs: Sequence[Run],
    places: Places,
    rows: Rows,
    *,
    workers: int,
    device: str,
    told: Callable[[str], None],
) -> int:
    """Makes policies and runs, ``workers`` at a time; every run that ended is a row.

    Args:
        told: is given a line for each of them.

    Returns:
        How many runs failed.
    """
    failed: list[str] = []
    keys = {run: key_of(study, run) for run in runs}
    common = {"commit": commit(), "hardware": hardware(device), "device": device}

    def ended(run: Run) -> Callable[[str | None, float], None]:
        def done(error: str | None, seconds: float) -> None:
            result = places.result(run.name)
            if error is None and key_of(study, run) != keys[run]:
                error = (
                    "what its numbers depend on (code, task) was changed while the study ran; "
                    "start it again"
                )
            row = {
                "key": keys[run],
                "cell": run.arm.cell,
                "learning_rate": run.arm.learning_rate,
                "seed": run.seed,
                "seconds": round(seconds, 1),
                **common,
            }
            row |= {"error": error} if error else json.loads(result.read_text())
            rows.append(row)
            result.unlink(missing_ok=True)
            if error:
                failed.append(run.name)
            told(f"{run.name:40} {seconds:7.1f} s  {error or ''}".rstrip())

        return done

    jobs = list(_jobs(study, runs, places, device, ended, told))
    run_jobs(jobs, workers)
    return len(failed)


def _jobs(
    study: Study,
    runs: Sequence[Run],
    places: Places,
    device: str,
    ended: Callable[[Run], Callable[[str | None, float], None]],
    told: Callable[[str], None],
) -> Iterator[Job]:
    """Policies one seed ahead of the runs that need them, so that no worker waits for one."""
    blocks: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        blocks.setdefault((study.cells[run.arm.cell].task, run.seed), []).append(run)
    waiting: list[Job] = []
    for (task, seed), block in blocks.items():
        maker = maker_job(study, task, seed, places, told)
        if maker is not None:
            yield maker
        yield from waiting
        waiting = [_run_job(study, run, places, device, ended(run), maker) for run in block]
    yield from waiting


def maker_job(
    study: Study, name: str, seed: int, places: Places, told: Callable[[str], None]
) -> Job | None:
    """What makes the policy of a seed; None if it is there, or the task names one."""
    task, folder = study.tasks[name], places.made(name, seed)
    if task.maker is None:
        return None
    maker, note = task.maker, folder.with_suffix(".made")
    made_by = _made_by(task)
    if note.exists() and note.read_text() == made_by:
        return None
    paths = [
        "--seed",
        str(seed),
        "--output_dir",
        str(folder / "policy"),
        "--data_dir",
        str(folder / "data"),
    ]

    def done(error: str | None, seconds: float) -> None:
        if error is None:
            note.write_text(made_by)
        told(f"{folder.name + ' (policy)':40} {seconds:7.1f} s  {error or ''}".rstrip())

    return Job(
        f"{folder.name} (policy)",
        [sys.executable, *shlex.split(maker), *paths],
        places.log(f"{folder.name}-policy"),
        done,
        task.environment,
        timeout_s=60 * study.run_timeout_minutes,
    )


def _made_by(task: Task) -> str:
    """What a policy depends on: its maker with its options, and a digest of the scripts."""
    digest = hashlib.sha256()
    for path in _code(task, {}, ()):
        digest.update(path.read_bytes())
    return f"{task.maker} {digest.hexdigest()[:16]}"


def _run_job(
    study: Study,
    run: Run,
    places: Places,
    device: str,
    done: Callable[[str | None, float], None],
    maker: Job | None,
) -> Job:
    cell = study.cells[run.arm.cell]
    given = {
        "kind": cell.backend,
        "options": study.options_of(run.arm),
        "seed": run.seed + cell.seed_offset,
        "steps": study.tasks[cell.task].steps,
        "folder": str(places.folder / "jobs" / run.name),
    }
    return assigned_job(
        study, cell.task, run.seed, places, run.name, given | {"device": device}, done, maker
    )


def assigned_job(
    study: Study,
    name: str,
    seed: int,
    places: Places,
    what: str,
    given: Mapping[str, Any],
    done: Callable[[str | None, float], None],
    maker: Job | None,
) -> Job:
    """A process that works on the policy of a seed, with what it is told in a file.

    Args:
        name: of the task.
        what: name of the job.
        given: ``kind`` is what ``__main__`` goes by.
        maker: what makes the policy, if that is still to be done.
    """
    task, made = study.tasks[name], places.made(name, seed)
    path = places.assignment(what)
    path.parent.mkdir(parents=True, exist_ok=True)
    of_task = {
        "evaluation": task.evaluation.model_dump(),
        "short_tokens": task.short_tokens,
        "policy": task.policy or str(made / "policy"),
        "train": task.train or str(made / "data" / "train.jsonl"),
        "heldout": task.heldout or str(made / "data" / "heldout.jsonl"),
        "result": str(places.result(what)),
        "parent": os.getpid(),
    }
    path.write_text(json.dumps({**given, **of_task}, indent=1))
    return Job(
        what,
        [sys.executable, "-m", "benchmarks.study", "--run", str(path)],
        places.log(what),
        done,
        task.environment,
        maker.name if maker else None,
        60 * study.run_timeout_minutes,
    )


def commit() -> str:
    """Of the checkout, with ``-dirty`` if something is changed; 'unknown' outside of one."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def hardware(device: str) -> str:
    """Processor, cores and GPU."""
    cpu = next(
        (line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")),
        platform.machine(),
    )
    if device != "cuda":
        return f"{cpu}, {os.cpu_count()} cores, no GPU used"
    import torch

    return f"{cpu}, {os.cpu_count()} cores, {torch.cuda.get_device_name()}"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
