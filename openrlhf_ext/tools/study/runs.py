"""The runs of a study: which there are, their rows in runs.jsonl, and the processes that make them."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openrlhf_ext
from openrlhf_ext.reporting.lines import JsonLines, read_lines
from openrlhf_ext.tools.study.settings import Arm, Study, StudyError, Task

logger = logging.getLogger(__name__)

ROWS = "runs.jsonl"
_PACKAGE = Path(openrlhf_ext.__file__).parent
# what the numbers of a run in one process depend on
_CODE = ("algorithms", "rewards/tagged.py", "tools/study/training.py", "tools/study/decoding.py")
_IMPORTED = re.compile(r"^(?:import|from) (\w+)", re.MULTILINE)
_POLL_S = 0.2
_DYING_S = 10.0


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
    """Changes with everything that the numbers of a run depend on: its options, its task, the code that makes them."""
    task, cell = study.task_of(run.arm.cell), study.cells[run.arm.cell]
    settings = task.model_dump(exclude={"seeds", "gates", "options"}) | {
        "options": study.options_of(run.arm),
        "seed": run.seed,
        "seed_offset": cell.seed_offset,
        "placebo": cell.placebo,
    }
    if cell.backend != "local":
        settings["backend"] = cell.backend
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for path in _code(task, settings["options"], _CODE if cell.backend == "local" else (".",)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _code(task: Task, options: dict[str, Any], parts: Sequence[str]) -> Iterator[Path]:
    for part in (_PACKAGE / part for part in parts):
        yield from sorted(part.rglob("*.py")) if part.is_dir() else [part]
    given = [task.maker.split()[0] if task.maker else None, options.get("reward.remote_url")]
    for script in (Path(path) for path in given if path and Path(path).is_file()):
        yield script
        beside = (script.with_name(f"{module}.py") for module in sorted(set(_IMPORTED.findall(script.read_text()))))
        yield from (path for path in beside if path.is_file())


@dataclass(frozen=True)
class Places:
    """Where a study's files are, below one folder."""

    folder: Path

    @property
    def rows(self) -> Path:
        """A line for every run that ended."""
        return self.folder / ROWS

    def log(self, name: str) -> Path:
        """What the process of a run or of a policy printed."""
        return self.folder / "logs" / f"{name}.log"

    def made(self, task: str, seed: int) -> Path:
        """Policy and problems of a task's maker."""
        return self.folder / "policies" / f"{task}-s{seed}"


class Rows:
    """The rows of a study's runs, one process at a time.

    Raises:
        StudyError: another process is at it.
    """

    def __init__(self, places: Places) -> None:
        places.folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(places.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StudyError(
                f"{places.folder} is in use by another process: wait for it, or give another --out"
            ) from error
        self._lines = JsonLines(places.rows, keep=lambda row: True)

    def append(self, row: dict[str, Any]) -> None:
        """Keeps a row."""
        self._lines.append(row)

    def close(self) -> None:
        """Lets others in."""
        self._lines.close()
        os.close(self._lock)


def read_rows(places: Places) -> list[dict[str, Any]]:
    """All rows, of other settings too; none if there is no file."""
    return [row for _, row in read_lines(places.rows)] if places.rows.exists() else []


def finished(study: Study, runs: Sequence[Run], rows: Sequence[dict[str, Any]]) -> dict[Run, dict[str, Any]]:
    """The last row of each run that has one with its key; runs that failed among them."""
    by_key = {row["key"]: row for row in rows}
    keys = {run: key_of(study, run) for run in runs}
    return {run: by_key[key] for run, key in keys.items() if key in by_key}


# ---- processes ------------------------------------------------------------------------------------------------------


@dataclass
class _Job:
    """A process to be run: of a maker, or of a run, which waits for its maker.

    Attributes:
        needs: name of the job that must have succeeded before.
        done: called when it ended, with what is wrong, or None.
    """

    name: str
    command: list[str]
    log: Path
    done: Callable[[str | None, float], None]
    environment: dict[str, str] = field(default_factory=dict)
    needs: str | None = None
    timeout_s: float = 3600.0


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
    common = {"commit": commit(), "hardware": hardware(device), "device": device}

    def ended(run: Run) -> Callable[[str | None, float], None]:
        def done(error: str | None, seconds: float) -> None:
            result = _assignment(places, run).with_suffix(".result.json")
            row = {
                "key": key_of(study, run),
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
    _run_jobs(jobs, workers)
    return len(failed)


def _jobs(
    study: Study,
    runs: Sequence[Run],
    places: Places,
    device: str,
    ended: Callable[[Run], Callable[[str | None, float], None]],
    told: Callable[[str], None],
) -> Iterator[_Job]:
    """Policies one seed ahead of the runs that need them, so that no worker waits for one."""
    limit = 60 * study.run_timeout_minutes
    blocks: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        blocks.setdefault((study.cells[run.arm.cell].task, run.seed), []).append(run)
    waiting: list[_Job] = []
    for (task_name, seed), block in blocks.items():
        task = study.tasks[task_name]
        maker = None
        if task.maker is not None and not places.made(task_name, seed).with_suffix(".made").exists():
            maker = _maker_job(task_name, task, seed, places, limit, told)
            yield maker
        yield from waiting
        waiting = [
            _Job(
                run.name,
                [sys.executable, "-m", "openrlhf_ext.cli.study", "--run", str(_assign(study, run, places, device))],
                places.log(run.name),
                ended(run),
                task.environment,
                maker.name if maker else None,
                limit,
            )
            for run in block
        ]
    yield from waiting


def _maker_job(name: str, task: Task, seed: int, places: Places, limit: float, told: Callable[[str], None]) -> _Job:
    folder = places.made(name, seed)
    words = shlex.split(task.maker or "")
    paths = ["--seed", str(seed), "--output_dir", str(folder / "policy"), "--data_dir", str(folder / "data")]

    def done(error: str | None, seconds: float) -> None:
        if error is None:
            folder.with_suffix(".made").write_text(task.maker or "")
        told(f"{folder.name + ' (policy)':40} {seconds:7.1f} s  {error or ''}".rstrip())

    return _Job(
        f"{folder.name} (policy)",
        [sys.executable, *words, *paths],
        places.log(f"{folder.name}-policy"),
        done,
        task.environment,
        timeout_s=limit,
    )


def _assignment(places: Places, run: Run) -> Path:
    return places.folder / "assignments" / f"{run.name}.json"


def _assign(study: Study, run: Run, places: Places, device: str) -> Path:
    """Writes down what the process of a run has to do."""
    cell, task = study.cells[run.arm.cell], study.task_of(run.arm.cell)
    made = places.made(cell.task, run.seed)
    path = _assignment(places, run)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps(
            {
                "options": study.options_of(run.arm),
                "seed": run.seed + cell.seed_offset,
                "steps": task.steps,
                "evaluation": task.evaluation.model_dump(),
                "short_tokens": task.short_tokens,
                "placebo": cell.placebo,
                "backend": cell.backend,
                "folder": str(places.folder / "jobs" / run.name),
                "policy": task.policy or str(made / "policy"),
                "train": task.train or str(made / "data" / "train.jsonl"),
                "heldout": task.heldout or str(made / "data" / "heldout.jsonl"),
                "device": device,
                "result": str(path.with_suffix(".result.json")),
                "parent": os.getpid(),
            },
            indent=1,
        )
    )
    return path


def _run_jobs(jobs: list[_Job], workers: int) -> None:
    """In order, those that wait for another one later; ends all processes if this one is interrupted."""
    made = {job.name: False for job in jobs}
    broken: dict[str, str] = {}
    waiting = list(jobs)
    running: dict[str, tuple[_Job, subprocess.Popen[bytes], float]] = {}
    try:
        while waiting or running:
            for job in [job for job in waiting if job.needs in broken]:
                waiting.remove(job)
                job.done(f"not run: {broken[job.needs or '']}", 0.0)
            ready = [job for job in waiting if job.needs is None or made[job.needs]]
            while ready and len(running) < workers:
                job = ready.pop(0)
                waiting.remove(job)
                running[job.name] = (job, _start(job), time.monotonic())
            time.sleep(_POLL_S)
            for job, process, started in list(running.values()):
                seconds = time.monotonic() - started
                if process.poll() is None and seconds < job.timeout_s:
                    continue
                error = _error(job, process, seconds)
                del running[job.name]
                made[job.name] = error is None
                if error is not None:
                    broken[job.name] = f"{job.name}: {error}"
                job.done(error, seconds)
    finally:
        for _, process, _ in running.values():
            _end(process)


def _start(job: _Job) -> subprocess.Popen[bytes]:
    job.log.parent.mkdir(parents=True, exist_ok=True)
    # one thread: as many runs as cores
    environment = (
        {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"} | dict(os.environ) | job.environment
    )
    with job.log.open("wb") as log:
        return subprocess.Popen(
            job.command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )


def _error(job: _Job, process: subprocess.Popen[bytes], seconds: float) -> str | None:
    if process.returncode is None:
        _end(process)
        return f"took longer than run_timeout_minutes allows ({seconds:.0f} s); log: {job.log}"
    if process.returncode == 0:
        return None
    lines = [line for line in job.log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{lines[-1] if lines else f'exit status {process.returncode}'} (log: {job.log})"


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(_DYING_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def commit() -> str:
    """Of the checkout, with ``-dirty`` if something is changed; 'unknown' outside of one."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    found = subprocess.run(command, cwd=_PACKAGE, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def hardware(device: str) -> str:
    """Processor, cores and GPU."""
    cpu = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.machine())
    if device != "cuda":
        return f"{cpu}, {os.cpu_count()} cores, no GPU used"
    import torch

    return f"{cpu}, {os.cpu_count()} cores, {torch.cuda.get_device_name()}"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
