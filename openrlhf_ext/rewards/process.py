"""One grading worker process, seen from the pool: start it, ask it, stop it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection, Pipe
from typing import Any

from openrlhf_ext.rewards.errors import RewardImportError, RewardPoolClosed
from openrlhf_ext.rewards.worker import STACK_SIGNAL

logger = logging.getLogger(__name__)

# The worker gets this process's import path, so that it finds what a function called in this process would find.
_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from openrlhf_ext.rewards.worker import main; "
    "main(int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])"
)
_LIVENESS_POLL_S = 0.5  # a worker that died while a child of it keeps the connection open sends no end-of-file
_STACK_WAIT_S, _STACK_POLL_S = 10.0, 0.2
_REAP_S = 10.0
_STACK_BYTES = 8192


class WorkerHung(Exception):
    """The worker gave no answer before the deadline; the text is its Python stack at that moment."""


class WorkerDied(Exception):
    """The worker process ended; the text says how, with its Python stack if it crashed."""


class WorkerProcess:
    """A subprocess that grades one sample at a time. Owned by one thread; :meth:`stop` may be called from any.

    The owning thread must live as long as the process: Linux ends the process with the thread that started it.

    Args:
        reward_path: the user's Python file.
        start_timeout_s: deadline for importing it.
    """

    def __init__(self, reward_path: str, start_timeout_s: float) -> None:
        self._reward_path = reward_path
        self._start_timeout_s = start_timeout_s
        self._lock = threading.Lock()
        self._kill_lock = threading.Lock()
        self._stopped = False
        self._process: subprocess.Popen[bytes] | None = None
        self._buried: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._stack_file: Any = None

    @property
    def pid(self) -> int | None:
        """Process id of the running worker, ``None`` before the start and after the end."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def start(self) -> None:
        """Start (or replace) the process and wait until it has imported the user's file.

        Raises:
            RewardImportError: the import raised, died or passed ``start_timeout_s``.
            RewardPoolClosed: :meth:`stop` was called.
        """
        self._spawn()
        try:
            reply = self._receive(self._start_timeout_s)
        except WorkerHung as hung:
            self.kill()
            raise RewardImportError(
                f"importing the reward file {self._reward_path} did not finish within {self._start_timeout_s:g} s; "
                f"it was here:\n{hung}"
            ) from None
        except WorkerDied as died:
            raise RewardImportError(f"importing the reward file {self._reward_path}: {died}") from None
        if reply[0] == "import_error":
            self.kill()
            raise RewardImportError(f"the reward file {self._reward_path} cannot be used:\n{reply[1]}")

    def ask(self, query: str, prompt: str, label: Any, timeout_s: float) -> tuple[str, Any]:
        """Grade one sample and return the worker's reply (see the module ``worker``).

        Raises:
            WorkerHung: no answer within ``timeout_s``. The process still runs: kill it.
            WorkerDied: the process ended.
        """
        assert self._connection is not None, "start() comes first"
        try:
            self._connection.send((query, prompt, label))
        except OSError:
            raise WorkerDied(self._obituary()) from None
        return self._receive(timeout_s)

    def stop(self) -> None:
        """Kill the process and refuse to start another one."""
        with self._lock:
            self._stopped = True
        self.kill()

    def kill(self) -> None:
        """Kill the process and every process it started in its session, and wait for its end."""
        with self._kill_lock:
            process = self._process
            if process is None or process is self._buried:  # its number may by now belong to another process
                return
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            try:
                process.wait(_REAP_S)
            except subprocess.TimeoutExpired:
                logger.error("grading worker %d did not end within %g s of SIGKILL", process.pid, _REAP_S)
            self._buried = process

    def _spawn(self) -> None:
        with self._lock:
            if self._stopped:
                raise RewardPoolClosed("the reward pool is closed")
            self._release()
            self._connection, theirs = Pipe()
            self._stack_file = tempfile.TemporaryFile()
            fds = (theirs.fileno(), self._stack_file.fileno())
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _BOOTSTRAP, json.dumps(sys.path), *map(str, fds), str(os.getpid()),
                     self._reward_path],
                    stdin=subprocess.DEVNULL,
                    pass_fds=fds,
                    start_new_session=True,  # Ctrl-C reaches the controller only; killpg reaches all of the worker
                    env={"OMP_NUM_THREADS": "1", **os.environ},
                )  # fmt: skip

    def _release(self) -> None:
        for resource in (self._connection, self._stack_file):
            if resource is not None:
                resource.close()

    def _receive(self, timeout_s: float) -> tuple[str, Any]:
        connection, process = self._connection, self._process
        assert connection is not None and process is not None
        deadline = time.monotonic() + timeout_s
        try:
            while not connection.poll(max(0.0, min(_LIVENESS_POLL_S, deadline - time.monotonic()))):
                if process.poll() is not None and not connection.poll():
                    raise WorkerDied(self._obituary())
                if time.monotonic() >= deadline:
                    raise WorkerHung(self._current_stack())
            return connection.recv()
        except (EOFError, OSError):
            raise WorkerDied(self._obituary()) from None

    def _current_stack(self) -> str:
        """Ask the worker for its Python stack; works while its interpreter lock is held by native code."""
        process = self._process
        assert process is not None
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(STACK_SIGNAL)
        deadline = time.monotonic() + _STACK_WAIT_S
        before, stack = "", self._read_stack()
        while (not stack or stack != before) and time.monotonic() < deadline:  # it is still being written
            time.sleep(_STACK_POLL_S)
            before, stack = stack, self._read_stack()
        return stack or "(no Python stack could be read)"

    def _read_stack(self) -> str:
        return os.pread(self._stack_file.fileno(), _STACK_BYTES, 0).decode(errors="replace").rstrip()

    def _obituary(self) -> str:
        self.kill()
        process = self._process
        assert process is not None
        stack = self._read_stack()
        return f"the worker process {_how_it_ended(process.returncode)}" + (f"\n{stack}" if stack else "")


def _how_it_ended(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exited with status {code}"
    hint = ", often the kernel's out-of-memory killer" if code == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{hint}"
