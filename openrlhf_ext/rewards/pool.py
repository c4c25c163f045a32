"""A pool of worker processes around the user's reward function, with a deadline for every call."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openrlhf_ext.options import required
from openrlhf_ext.options.sections import Reward
from openrlhf_ext.rewards.errors import (
    RewardError,
    RewardImportError,
    RewardInvalid,
    RewardPoolClosed,
    RewardRaised,
    RewardTimeout,
    RewardWorkerDied,
)
from openrlhf_ext.rewards.grading import RewardResult
from openrlhf_ext.rewards.process import WorkerDied, WorkerHung, WorkerProcess

logger = logging.getLogger(__name__)
_CLOSE_S = 15.0


@dataclass(frozen=True)
class _Job:
    query: str
    prompt: str
    label: Any
    completion: str
    queued_at: float = field(default_factory=time.monotonic)
    future: Future[RewardResult] = field(default_factory=Future)

    def error(self, kind: type[RewardError], message: str) -> RewardError:
        return kind(message, self.prompt, self.completion, self.label)


class RewardPool:
    """Grades samples with ``reward_func(queries, prompts, labels)`` of a Python file, in killable processes.

    The function is called as OpenRLHF calls it, with lists of length one, and with ``completions`` if it takes them.
    Each worker imports the file once. A worker that passes the deadline or dies is replaced. Usable from any thread and
    any event loop; a context manager.

    Args:
        options: ``reward.remote_url`` is the user's Python file; processes, deadline of a call, memory, environment.
        start_timeout_s: deadline for importing the file.
        queue_timeout_s: a sample that waited longer than this for a worker fails instead of being graded.
    """

    def __init__(self, options: Reward, *, start_timeout_s: float = 120.0, queue_timeout_s: float = 600.0) -> None:
        self._reward_path = str(Path(required(next(iter(options.addresses), None), "reward.remote_url")).resolve())
        self._timeout_s = options.timeout_s
        self._queue_timeout_s = queue_timeout_s
        self._workers = [
            WorkerProcess(self._reward_path, start_timeout_s, options.memory_mib, options.environment)
            for _ in range(options.num_workers)
        ]
        self._started: list[Future[None]] = []
        self._threads: list[threading.Thread] = []
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._lock = threading.Lock()
        self._closed = False

    def start(self) -> None:
        """Begin to start the workers and return at once; the first sample waits for them. Idempotent.

        Raises:
            RewardImportError: there is no such file.
            RewardPoolClosed: the pool was closed.
        """
        with self._lock:
            self._start_locked()

    def check(self) -> None:
        """Start the workers and wait until each has imported the user's file.

        Raises:
            RewardImportError: with the traceback of the import.
        """
        self.start()
        for started in self._started:
            started.result()

    def submit(self, query: str, prompt: str, label: Any, completion: str | None = None) -> Future[RewardResult]:
        """Queue one sample; arguments as of ``Grader.grade``. The future raises what :meth:`grade` raises."""
        job = _Job(query, prompt, label, query.removeprefix(prompt) if completion is None else completion)
        with self._lock:  # a sample is either refused here or queued before the threads' end mark
            self._start_locked()
            self._jobs.put(job)
        return job.future

    async def grade(self, query: str, prompt: str, label: Any, completion: str | None = None) -> RewardResult:
        """Grade one sample; arguments as of ``Grader.grade``.

        Raises:
            RewardRaised, RewardInvalid, RewardTimeout, RewardWorkerDied: this sample could not be graded.
            RewardImportError: the file cannot be used.
            RewardPoolClosed: the pool was closed meanwhile.
        """
        return await asyncio.wrap_future(self.submit(query, prompt, label, completion))

    def close(self) -> None:
        """Kill the workers; samples that wait or run fail with ``RewardPoolClosed``. Idempotent."""
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
            if broken is None and worker.pid is None:  # it died between two samples, which is no sample's fault
                broken = _start(worker)
            if broken is not None:
                job.future.set_exception(broken)
                continue
            try:
                job.future.set_result(self._grade(worker, job))
            except BaseException as error:  # noqa: B036  it belongs to whoever awaits the sample
                job.future.set_exception(error)
            if worker.pid is None:  # replace it now rather than at the cost of the next sample
                broken = _start(worker)
        worker.stop()

    def _grade(self, worker: WorkerProcess, job: _Job) -> RewardResult:
        waited_s = time.monotonic() - job.queued_at
        if waited_s > self._queue_timeout_s:
            raise job.error(
                RewardTimeout,
                f"the sample waited {waited_s:.1f} s for a grading worker, more than {self._queue_timeout_s:g} s: the "
                "reward function is slower than the rollout. Raise --reward.num_workers or make it faster",
            )
        try:
            kind, content = worker.ask(job.query, job.prompt, job.label, job.completion, self._timeout_s)
        except WorkerHung as hung:
            worker.kill()
            raise job.error(RewardTimeout, self._closed_or(self._timeout_message(hung))) from None
        except WorkerDied as died:
            raise job.error(RewardWorkerDied, self._closed_or(f"{self._reward_path}: {died}")) from None
        if kind == "raised":
            raise job.error(RewardRaised, f"reward_func of {self._reward_path} raised:\n{content}")
        if kind == "invalid":
            raise job.error(RewardInvalid, f"reward_func of {self._reward_path} {content}")
        return content

    def _timeout_message(self, hung: WorkerHung) -> str:
        return (
            f"reward_func of {self._reward_path} did not return within {self._timeout_s:g} s (--reward.timeout_s); its "
            f"worker was killed and replaced. It was here:\n{hung}"
        )

    def _closed_or(self, message: str) -> str:
        """``message``, unless the worker ended because the pool was closed."""
        if self._closed:
            raise RewardPoolClosed(f"the reward pool of {self._reward_path} was closed while it graded a sample")
        return message


def _start(worker: WorkerProcess) -> Exception | None:
    """Start a worker; the reason if that is impossible, which then is the answer to every sample it takes."""
    try:
        worker.start()
    except (RewardImportError, RewardPoolClosed) as error:
        return error
    except OSError as error:
        return RewardImportError(f"a grading worker process could not be started: {error}")
    return None
