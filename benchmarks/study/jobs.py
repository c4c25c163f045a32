"""Processes of a study, some at a time: those that make policies, and those that need them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

_POLL_S = 0.2
_DYING_S = 10.0


@dataclass
class Job:
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


def run_jobs(jobs: list[Job], workers: int) -> None:
    """In order, those that wait for another one later; ends all processes if this one is
    interrupted, or told to end (SIGTERM, SIGHUP: SystemExit with 128 + n)."""
    with _told_to_end():
        _run_jobs(jobs, workers)


@contextlib.contextmanager
def _told_to_end() -> Iterator[None]:
    def leave(number: int, _: object) -> None:
        for other in before:
            signal.signal(other, signal.SIG_IGN)  # the jobs have to be ended
        sys.exit(128 + number)

    heard = (
        [signal.SIGTERM, signal.SIGHUP]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
        else [signal.SIGTERM]
    )
    before = {number: signal.signal(number, leave) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run_jobs(jobs: list[Job], workers: int) -> None:
    made = {job.name: False for job in jobs}
    broken: dict[str, str] = {}
    waiting = list(jobs)
    running: dict[str, tuple[Job, subprocess.Popen[bytes], float]] = {}
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


def _start(job: Job) -> subprocess.Popen[bytes]:
    job.log.parent.mkdir(parents=True, exist_ok=True)
    # one thread: as many runs as cores
    environment = (
        {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        | dict(os.environ)
        | job.environment
    )
    with job.log.open("wb") as log:
        return subprocess.Popen(
            job.command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def _error(job: Job, process: subprocess.Popen[bytes], seconds: float) -> str | None:
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
