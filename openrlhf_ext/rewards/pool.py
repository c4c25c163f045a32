"""Worker processes around the user's reward function, with a deadline for every call."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import IO, Any

from openrlhf_ext.options import required
from openrlhf_ext.options.sections import Reward
from openrlhf_ext.rewards.foreign import TRIED
from openrlhf_ext.rewards.grading import (
    Group,
    RewardError,
    RewardImportError,
    RewardInvalid,
    RewardPoolClosed,
    RewardRaised,
    RewardResult,
    RewardTimeout,
    RewardWorkerDied,
)
from openrlhf_ext.rewards.worker import STACK_SIGNAL

logger = logging.getLogger(__name__)

# The worker gets this process's import path, so that imports resolve as in this process.
_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from openrlhf_ext.rewards.worker "
    "import main; main(*map(int, sys.argv[2:6]), sys.argv[6])"
)
# Variables that programs need to run and to find their files; `*` ends a prefix. None of them holds
# a secret.
USUAL_VARIABLES = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR", "PYTHON*", "VIRTUAL_ENV",
    "CONDA_PREFIX", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "OMP_*", "MKL_*", "TOKENIZERS_PARALLELISM", "HF_HOME",
    "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "SSL_CERT_*", "REQUESTS_CA_BUNDLE", "NO_PROXY", "no_proxy", "REWARD_*",
)  # fmt: skip
# A dead worker sends no end-of-file while one of its children keeps the connection open.
_LIVENESS_POLL_S = 0.5
_STACK_WAIT_S, _STACK_POLL_S = 10.0, 0.2
_REAP_S = 10.0
_STACK_BYTES = 8192
_CLOSE_S = 15.0


@cache
def _say(text: str) -> None:
    """Logs the text once per process, however many workers report it."""
    logger.info(text)


class WorkerHung(Exception):
    """The worker gave no answer before the deadline; the message is its Python stack at that
    moment."""


class WorkerDied(Exception):
    """The worker process ended; the message says how, with its Python stack if it crashed."""


@dataclass
class _Running:
    """A started worker process.

    ``stack_file`` receives the Python stack after a crash or on request. The process id of a
    ``killed`` process may be reused.
    """

    process: subprocess.Popen[bytes]
    connection: Connection
    stack_file: IO[bytes]
    killed: bool = False


class WorkerProcess:
    """A subprocess that grades one sample at a time.

    One thread owns it, but any thread may call :meth:`stop`. The owning thread must live as long as
    the process: Linux ends the process with the thread that started it.

    Attributes:
        takes_groups: the function takes all completions of a prompt at once.
        to_try: number of trial completions that may precede its first answer.
    """

    def __init__(
        self,
        reward_path: str,
        start_timeout_s: float,
        memory_mib: int,
        environment: tuple[str, ...],
    ) -> None:
        self._reward_path = reward_path
        self._start_timeout_s = start_timeout_s
        self._memory_mib = memory_mib
        self._environment = environment
        self.takes_groups, self.to_try = False, 0
        self._lock = threading.Lock()
        self._kill_lock = threading.Lock()
        self._stopped = False
        self._running: _Running | None = None

    @property
    def pid(self) -> int | None:
        running = self._running
        return (
            running.process.pid if running is not None and running.process.poll() is None else None
        )

    def start(self) -> None:
        """Start (or replace) the process and wait until it has imported the user's file.

        Raises RewardImportError, RewardPoolClosed.
        """
        running = self._spawn()
        try:
            reply = self._receive(running, self._start_timeout_s)
        except WorkerHung as hung:
            self.kill()
            raise RewardImportError(
                f"importing the reward file {self._reward_path} did not finish within "
                f"{self._start_timeout_s:g} s; it was here:\n{hung}"
            ) from None
        except WorkerDied as died:
            raise RewardImportError(
                f"importing the reward file {self._reward_path}: {died}"
            ) from None
        if reply[0] == "import_error":
            self.kill()
            raise RewardImportError(
                f"the reward file {self._reward_path} cannot be used:\n{reply[1]}"
            )
        self.takes_groups = reply[1]
        self.to_try = TRIED * self.takes_groups

    def ask(self, samples: list[tuple[str, str, Any, str]], timeout_s: float) -> tuple[Any, ...]:
        """The worker's reply to one sample, or to all samples of a prompt (``takes_groups``).

        Raises WorkerHung if the process still runs (the caller must kill it), and WorkerDied.
        """
        if (running := self._running) is None:
            raise RuntimeError("start() comes before ask()")
        try:
            running.connection.send(samples)
        except OSError:
            raise WorkerDied(self._how_it_died(running)) from None
        return self._receive(running, timeout_s)

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
        self.kill()

    def kill(self) -> None:
        """Kill the process and every process that it started in its session, and wait for its
        end."""
        with self._kill_lock:
            running = self._running
            if running is None or running.killed:
                return
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.process.pid, signal.SIGKILL)
            try:
                running.process.wait(_REAP_S)
            except subprocess.TimeoutExpired:
                logger.error(
                    "grading worker %d did not end within %g s of SIGKILL",
                    running.process.pid,
                    _REAP_S,
                )
            running.killed = True

    def _spawn(self) -> _Running:
        with self._lock:
            if self._stopped:
                raise RewardPoolClosed("the reward pool is closed")
            if self._running is not None:
                self._running.connection.close()
                self._running.stack_file.close()
            ours, theirs = Pipe()
            stack_file = tempfile.TemporaryFile()
            fds = (theirs.fileno(), stack_file.fileno())
            with theirs:
                process = subprocess.Popen(
                    [
                        sys.executable,
                        "-c",
                        _BOOTSTRAP,
                        json.dumps(sys.path),
                        *map(str, (*fds, os.getpid(), self._memory_mib)),
                        self._reward_path,
                    ],
                    stdin=subprocess.DEVNULL,
                    pass_fds=fds,
                    # Ctrl-C reaches only the driver; killpg reaches all processes of the worker.
                    start_new_session=True,
                    env={
                        "OMP_NUM_THREADS": "1",
                        "PYTHONDONTWRITEBYTECODE": "1",
                        **_variables(self._environment),
                    },
                )
            self._running = _Running(process, ours, stack_file)
            return self._running

    def _receive(self, running: _Running, timeout_s: float) -> tuple[Any, ...]:
        connection, deadline = running.connection, time.monotonic() + timeout_s
        try:
            while not connection.poll(max(0.0, min(_LIVENESS_POLL_S, deadline - time.monotonic()))):
                if running.process.poll() is not None and not connection.poll():
                    raise WorkerDied(self._how_it_died(running))
                if time.monotonic() >= deadline:
                    raise WorkerHung(_current_stack(running))
            return connection.recv()
        except (EOFError, OSError):
            raise WorkerDied(self._how_it_died(running)) from None

    def _how_it_died(self, running: _Running) -> str:
        self.kill()
        stack = _read_stack(running)
        return f"the worker process {_how_it_ended(running.process.returncode)}" + (
            f"\n{stack}" if stack else ""
        )


def _variables(names: tuple[str, ...]) -> dict[str, str]:
    """This process's environment variables that a worker gets."""
    patterns = (*USUAL_VARIABLES, *names)
    return {
        name: value
        for name, value in os.environ.items()
        if any(fnmatchcase(name, one) for one in patterns)
    }


def _current_stack(running: _Running) -> str:
    """Request the worker's Python stack; works even while native code holds its interpreter
    lock."""
    with contextlib.suppress(ProcessLookupError):
        running.process.send_signal(STACK_SIGNAL)
    deadline = time.monotonic() + _STACK_WAIT_S
    before, stack = "", _read_stack(running)
    # The worker may still be writing it.
    while (not stack or stack != before) and time.monotonic() < deadline:
        time.sleep(_STACK_POLL_S)
        before, stack = stack, _read_stack(running)
    return stack or "(no Python stack could be read)"


def _read_stack(running: _Running) -> str:
    return os.pread(running.stack_file.fileno(), _STACK_BYTES, 0).decode(errors="replace").rstrip()


def _how_it_ended(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exited with status {code}"
    hint = ", often the kernel's out-of-memory killer" if code == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{hint}"


@dataclass(frozen=True)
class _Job:
    query: str
    prompt: str
    label: Any
    completion: str
    group: Group | None
    place: int
    queued_at: float = field(default_factory=time.monotonic)
    future: Future[RewardResult] = field(default_factory=Future)

    def fail(self, error: BaseException) -> None:
        """Fail the job with an error of the pool, or of the sample, which the error then
        includes."""
        if isinstance(error, RewardError):
            error = type(error)(error.message, self.prompt, self.completion, self.label)
        self.future.set_exception(error)


class RewardPool:
    """Grades samples with ``reward_func(queries, prompts, labels)`` of a Python file, in killable
    processes.

    The function is called as OpenRLHF calls it, with lists of length one, and with ``completions``
    if it takes them. A function in TRL's form gets all completions of a prompt; its deadline is the
    deadline of one completion times their number. The pool replaces a worker that passes the
    deadline or dies. A sample that waits for a worker longer than ``queue_timeout_s`` fails. Usable
    from any thread and any event loop; a context manager.
    """

    def __init__(
        self, options: Reward, *, start_timeout_s: float = 120.0, queue_timeout_s: float = 600.0
    ) -> None:
        self._reward_path = str(
            Path(required(next(iter(options.addresses), None), "reward.remote_url")).resolve()
        )
        self._timeout_s = options.timeout_s
        self._queue_timeout_s = queue_timeout_s
        self._workers = [
            WorkerProcess(
                self._reward_path, start_timeout_s, options.memory_mib, options.environment
            )
            for _ in range(options.num_workers)
        ]
        self._started: list[Future[None]] = []
        self._threads: list[threading.Thread] = []
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def takes_groups(self) -> bool:
        """Whether the function takes all completions of a prompt; valid after :meth:`check`."""
        return self._workers[0].takes_groups

    def start(self) -> None:
        """Begin to start the workers; the first sample waits for them. Idempotent.

        Raises RewardImportError, RewardPoolClosed.
        """
        with self._lock:
            self._start_locked()

    def check(self) -> None:
        """Start the workers and wait until each has imported the user's file. Raises
        RewardImportError."""
        self.start()
        for started in self._started:
            started.result()

    def submit(
        self,
        query: str,
        prompt: str,
        label: Any,
        completion: str | None = None,
        group: Group | None = None,
        place: int = 0,
    ) -> Future[RewardResult]:
        """Queue one sample; arguments as in ``Grader.grade``. The future raises the errors of
        :meth:`grade`."""
        completion = query.removeprefix(prompt) if completion is None else completion
        job = _Job(query, prompt, label, completion, group, place)
        with self._lock:  # a sample is either rejected here or queued before the threads' end mark
            self._start_locked()
            self._jobs.put(job)
        return job.future

    async def grade(self, *sample: Any) -> RewardResult:
        """Like ``Grader.grade``. Raises RewardError, RewardImportError, RewardPoolClosed."""
        return await asyncio.wrap_future(self.submit(*sample))

    def close(self) -> None:
        """Kill the workers; waiting and running samples fail with ``RewardPoolClosed``.
        Idempotent."""
        with self._lock:
            self._closed = True
        for worker in self._workers:
            worker.stop()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(_CLOSE_S)

    async def aclose(self) -> None:
        await asyncio.to_thread(self.close)

    def __enter__(self) -> RewardPool:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_locked(self) -> None:
        if self._closed:
            raise RewardPoolClosed(f"the reward pool of {self._reward_path} is closed")
        if self._threads:
            return
        if not Path(self._reward_path).is_file():
            raise RewardImportError(f"--reward.remote_url: there is no file {self._reward_path}")
        self._started = [Future() for _ in self._workers]
        self._threads = [
            threading.Thread(target=self._serve, args=pair, daemon=True, name="reward-worker")
            for pair in zip(self._workers, self._started, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def _serve(self, worker: WorkerProcess, started: Future[None]) -> None:
        """The thread that owns one worker: import the file, then grade until the pool is closed."""
        broken = _start(worker)
        started.set_result(None) if broken is None else started.set_exception(broken)
        while (job := self._jobs.get()) is not None:
            if not job.future.set_running_or_notify_cancel():
                continue
            # The worker died between two samples, which is not the fault of a sample.
            if broken is None and worker.pid is None:
                broken = _start(worker)
            if broken is not None:
                job.fail(broken)
                continue
            if not (jobs := self._together(worker, job)):
                continue
            try:
                self._grade(worker, jobs)
            except BaseException as error:  # noqa: B036  it belongs to whoever awaits the samples
                for one in jobs:
                    one.fail(error)
            if worker.pid is None:  # replace it now, not while the next sample waits
                broken = _start(worker)
        worker.stop()

    def _together(self, worker: WorkerProcess, job: _Job) -> list[_Job]:
        """The samples that one call grades; empty if the function takes whole groups and the last
        sample is not here yet."""
        if job.group is None or not (worker.takes_groups or job.group.is_trial):
            return [job]
        with self._lock:
            come = job.group.come
            come[job.place] = job
            return [come[place] for place in sorted(come)] if len(come) == job.group.size else []

    def _grade(self, worker: WorkerProcess, jobs: list[_Job]) -> None:
        waited_s = time.monotonic() - max(job.queued_at for job in jobs)
        if waited_s > self._queue_timeout_s:
            raise RewardTimeout(
                f"the sample waited {waited_s:.1f} s for a grading worker, more than "
                f"{self._queue_timeout_s:g} s: the reward function is slower than the rollout. "
                "Raise --reward.num_workers or make it faster",
            )
        samples = [(job.query, job.prompt, job.label, job.completion) for job in jobs]
        try:
            kind, content, *said = worker.ask(
                samples, self._timeout_s * (len(jobs) + worker.to_try)
            )
        except WorkerHung as hung:
            worker.kill()
            raise RewardTimeout(self._closed_or(self._timeout_message(hung))) from None
        except WorkerDied as died:
            raise RewardWorkerDied(self._closed_or(f"{self._reward_path}: {died}")) from None
        if kind == "raised":
            raise RewardRaised(f"reward_func of {self._reward_path} raised:\n{content}")
        if kind == "invalid":
            raise RewardInvalid(f"reward_func of {self._reward_path} {content}")
        worker.to_try = 0
        if said[0] is not None:
            _say(f"{self._reward_path}: {said[0]}")
        for job, grade in zip(jobs, content, strict=True):
            if isinstance(grade, str):
                job.fail(RewardInvalid(f"reward_func of {self._reward_path} {grade}"))
            else:
                job.future.set_result(grade)

    def _timeout_message(self, hung: WorkerHung) -> str:
        return (
            f"reward_func of {self._reward_path} did not return within {self._timeout_s:g} s "
            f"(--reward.timeout_s); its worker was killed and replaced. It was here:\n{hung}"
        )

    def _closed_or(self, message: str) -> str:
        """``message``, or RewardPoolClosed if the worker ended because the pool was closed."""
        if self._closed:
            raise RewardPoolClosed(
                f"the reward pool of {self._reward_path} was closed while it graded a sample"
            )
        return message


def _start(worker: WorkerProcess) -> Exception | None:
    """Start a worker. Returns the error if that fails; every sample that the worker takes then
    fails with it."""
    try:
        worker.start()
    except (RewardImportError, RewardPoolClosed) as error:
        return error
    except OSError as error:
        return RewardImportError(f"a grading worker process could not be started: {error}")
    return None
