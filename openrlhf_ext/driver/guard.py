"""Runs the driver in a child process; the parent, which does not use Ray, ends it if it cannot end
itself.

If a raylet dies, Ray ends its driver without an exception. A call into Ray can wait forever and
ignore signals while one of Ray's processes is stopped. So the driver reports to its parent through
a pipe: by when its current phase ends, which processes it depends on, and how it ended. The parent
kills a driver that is late, that lost one of these processes, or that does not end after Ctrl-C,
SIGTERM, or SIGHUP; then it ends the run's remaining processes and logs the cause.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil

from openrlhf_ext.config import RunConfig
from openrlhf_ext.driver.about import last_words
from openrlhf_ext.groups.processes import die_with
from openrlhf_ext.locks import check_held, displaced
from openrlhf_ext.reporting import EventLog, RunStatus
from openrlhf_ext.run.checkpoints import own_folders, resumption
from openrlhf_ext.run.ending import INTERRUPTED, hear_again, listened

logger = logging.getLogger(__name__)

_SIGNALS = {code: number for number, code in INTERRUPTED.items()}

END_S = 30.0
"""Time for a run's processes to end: ray.shutdown takes up to 10 s, ``end_processes`` twice its
grace."""

_LATE_S = 10.0  # a slow driver ends its waits by itself
_STOPPED_S = 20.0  # Ray's own health check gives a raylet 15 s
_LOOK_S = 0.2
_PROGRESS_S = 1.0
_GRACE_S = 5.0
_DRIVER = "the driver"
_FRAMES = 12
_M_ARENA_MAX = -8  # from glibc's malloc.h
_PR_SET_CHILD_SUBREAPER = 36
_FINAL = (0, 2, *INTERRUPTED.values())  # exit codes without a restart

Train = Callable[[RunConfig, "Guard", int], int]
"""Trains with a configuration, the guard, and the number of the restart (0: the first attempt);
returns the exit code."""


class Guard:
    """Sends the driver's reports to its parent, and receives signals. Ctrl-C, SIGTERM, and SIGHUP
    raise KeyboardInterrupt in the driver. Only the first signal counts: ``received``, at
    ``received_at`` on the monotonic clock. With ``pipe`` None there are no reports."""

    def __init__(self, pipe: Connection | None = None) -> None:
        self._pipe = pipe
        self._held_s: float | None = None
        self._pending = False
        self._told_at = self._looked_at = -math.inf
        self.received: signal.Signals | None = None
        self.received_at = math.inf
        self.events = EventLog()

    # ---- reports

    def expect(self, seconds: float, doing: str) -> None:
        """Reports that the driver does ``doing`` and will report again within ``seconds``."""
        self._tell(until=time.monotonic() + seconds, doing=doing, seconds=seconds)

    def progress(self, detail: str) -> None:
        """Reports progress for the status line, at most once a second."""
        if time.monotonic() - self._told_at >= _PROGRESS_S:
            self._told_at = time.monotonic()
            self._tell(detail=detail)

    def step_ended(self, steps: int | None, seconds: float) -> None:
        """Reports that one of ``steps`` steps (None: unknown) has ended after ``seconds``."""
        self._tell(ended_step=(steps, seconds))

    def watch(self, processes: Mapping[str, int], logs: str = "") -> None:
        """Reports the processes of this machine that the run depends on, pids by name; ``logs`` is
        their log folder."""
        self._tell(watched=dict(processes), logs=logs)

    def ended(self, code: int) -> None:
        """Reports the exit code of a run that has ended and written its event; only cleanup
        follows."""
        self._tell(code=code)

    def broke(self, error: str) -> None:
        """Reports an error that ends the driver and that it has not logged."""
        self._tell(error=error)

    def _tell(self, **facts: Any) -> None:
        if self._pipe is not None:
            # the parent has died: this process ends soon
            with contextlib.suppress(BrokenPipeError):
                self._pipe.send({"step": self.events.step, **facts})

    # ---- signals

    def listen(self) -> None:
        """Installs the signal handlers."""
        for number in listened():
            signal.signal(number, self._receive)
        signal.signal(signal.SIGALRM, self._give_up)

    def _receive(self, number: int, _: object) -> None:
        if self.received is not None:
            return
        self.received, self.received_at, self._pending = (
            signal.Signals(number),
            time.monotonic(),
            True,
        )
        if self._held_s is not None and number != signal.SIGINT:
            signal.setitimer(signal.ITIMER_REAL, max(self._held_s, 1e-6))
            return
        raise KeyboardInterrupt

    def _give_up(self, *_: object) -> None:
        self._held_s = None
        raise KeyboardInterrupt

    def check(self) -> None:
        """Raises KeyboardInterrupt if one is due: Python drops an exception that a handler raises
        inside a finalizer. Raises FileDisplaced if another run has taken a folder of this run;
        checks that once a second."""
        if self._pending and (self._held_s is None or self.received == signal.SIGINT):
            raise KeyboardInterrupt
        if time.monotonic() - self._looked_at >= _PROGRESS_S:
            self._looked_at = time.monotonic()
            check_held()

    def hold(self, seconds: float) -> None:
        """Delays SIGTERM and SIGHUP until ``release``, at most ``seconds`` after they arrive."""
        self._held_s = seconds

    def release(self) -> None:
        """Ends ``hold`` and raises a delayed signal."""
        self._held_s = None
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.check()

    def ignore_signals(self) -> None:
        """Ignores further signals: the run ends anyway, and they must not interrupt its last
        actions."""
        self._pending = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number in INTERRUPTED:
            signal.signal(number, signal.SIG_IGN)


# ---- the parent


def run(config: RunConfig, train: Train) -> int:
    """Trains in a child process, and restarts after a failure, at most ``train.max_restarts``
    times. Returns the driver's exit code: 0, 1 = failed, 2 = wrong configuration, 130 = Ctrl-C, 143
    = SIGTERM, 129 = SIGHUP; 128 + n if signal n killed it (137 also if Ray or this process had to
    end it). Raises ConfigError if another run holds a folder of this one."""
    began = time.monotonic()
    _adopt_orphans(True)
    parent = _Parent(config, train)
    handlers = {number: signal.signal(number, parent.forward) for number in listened()}
    try:
        with own_folders(config):
            code = run_with_restarts(config, parent.attempt)
            if code != 2 and not displaced():
                logger.info("%s", last_words(config, code, time.monotonic() - began))
            return code
    finally:
        hear_again(handlers)
        _adopt_orphans(False)  # no one waits for them from here on


def run_with_restarts(config: RunConfig, attempt: Callable[[RunConfig, int], int]) -> int:
    """Runs one ``attempt``, and after a failure another one from the run's last checkpoint, or from
    the beginning if it wrote none: ``own_folders`` moved the checkpoints of other runs aside."""
    for restart in range(config.train.max_restarts + 1):
        if restart:
            logger.warning(
                "restart %d of %d (train.max_restarts)", restart, config.train.max_restarts
            )
            config = config.model_copy(
                update={"ckpt": config.ckpt.model_copy(update={"load_enable": True})}
            )
        code = attempt(config, restart)
        if code in _FINAL or displaced():
            break
    return code


class _Parent:
    """Runs one driver after the other and forwards signals to it."""

    def __init__(self, config: RunConfig, train: Train) -> None:
        self._config, self._train = config, train
        self._driver: _Driver | None = None
        self._received: signal.Signals | None = None
        self._others = psutil.Process().children(recursive=True)  # not processes of the run

    def forward(self, number: int, _: object) -> None:
        """Forwards a signal to the driver; the first signal determines the exit code."""
        self._received = self._received or signal.Signals(number)
        if self._driver is not None:
            self._driver.interrupt(number, self._config.ckpt.grace_s)

    def attempt(self, config: RunConfig, restart: int) -> int:
        if self._received is not None:  # between two drivers
            return INTERRUPTED[self._received]
        # block signals: one that comes now would run this process's handler in the child
        signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTED)
        self._driver = driver = _Driver(config, self._train, restart)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTED)
        driver.wait()
        self._driver = None
        end_processes(
            [
                child
                for child in psutil.Process().children(recursive=True)
                if child not in self._others
            ]
        )
        return self._report(driver, config)

    def _report(self, driver: _Driver, config: RunConfig) -> int:
        """Returns the exit code; logs and records the end if the driver could not."""
        if driver.code is not None:
            if driver.killed_because:
                logger.warning(
                    "the run had ended, but the driver had not: %s", driver.killed_because
                )
            return driver.code
        if (number := self._received or _SIGNALS.get(driver.process.exitcode or 0)) is not None:
            logger.error("%s: %s\n%s", number.name, driver.why, resumption(config))
            self._note(config, driver.step, "interrupted", signal=number.name, why=driver.why)
            return INTERRUPTED[number]
        if driver.process.exitcode == 2 and not driver.killed_because:
            return 2  # the driver has reported the wrong configuration
        logger.error("the run failed:\n%s", driver.why)
        self._note(config, driver.step, "failure", error=driver.why)
        return driver.exit_code

    @staticmethod
    def _note(config: RunConfig, step: int, event: str, **facts: Any) -> None:
        try:
            check_held()
            with EventLog(config.logger.beside("events.jsonl"), goes_on=True) as events:
                events.step = step
                events.note(event, **facts)
        except (OSError, ValueError) as error:
            logger.error("events.jsonl does not say how the run ended: %s", error)


class _Driver:
    """The parent's view of a driver process."""

    def __init__(self, config: RunConfig, train: Train, restart: int) -> None:
        self._traces = tempfile.TemporaryFile()
        context = multiprocessing.get_context("fork")  # the child inherits imports and checks
        self._pipe, pipe = context.Pipe(duplex=False)
        arguments = (os.getpid(), pipe, self._traces, config, train, restart)
        self.process = context.Process(target=_drive, args=arguments, name="driver")
        self.process.start()
        pipe.close()
        self.step, self.code, self.error = 0, None, ""
        self.killed_because = ""
        self._doing, self._until = "starting", math.inf
        self._status = RunStatus()
        self._ends: tuple[float, str] = (math.inf, "")
        self._watched: dict[str, psutil.Process | int] = {}
        self._stopped: dict[str, float] = {}
        self._logs = self._lost_at_end = ""

    # ---- while it lives

    def interrupt(self, number: int, grace_s: float) -> None:
        """Forwards a signal, and sets the time by which the driver must have ended."""
        saves = number != signal.SIGINT
        seconds = END_S + (grace_s if saves else 0.0)
        if self._ends[0] == math.inf:
            what = f"saving (ckpt.grace_s {grace_s:g}) and ending" if saves else "ending"
            logger.warning("%s: %s", signal.Signals(number).name, what)
            self._ends = (
                time.monotonic() + seconds,
                f"{signal.Signals(number).name}, which came {seconds:g} s ago",
            )
        if self.process.pid is not None and self.process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.process.pid, number)

    def wait(self) -> None:
        """Waits until the process has ended; kills it if it is at fault."""
        while self.process.exitcode is None:
            self._hear(_LOOK_S)
            self._status.tick()
            self._reap()
            if (fault := self._fault()) and self.process.exitcode is None:
                self.killed_because = fault
                self.process.kill()
                self.process.join()
        self._status.clear()
        self._hear(0.0)
        self._lost_at_end = self._lost()  # before the parent ends the remaining processes

    def _reap(self) -> None:
        """Reaps orphans that have ended: until then the driver, which waits for them, still sees
        them."""
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while (
            ended := os.waitid(os.P_ALL, 0, look)
        ) is not None and ended.si_pid != self.process.pid:
            os.waitpid(ended.si_pid, 0)

    def _hear(self, timeout_s: float) -> None:
        """Receives the driver's reports."""
        wait([self.process.sentinel, *([] if self._pipe.closed else [self._pipe])], timeout_s)
        try:
            while not self._pipe.closed and self._pipe.poll():
                self._take(**self._pipe.recv())
        except (EOFError, ConnectionResetError):  # it has ended, or is about to
            self._pipe.close()

    def _take(self, step: int, **facts: Any) -> None:
        self.step = step
        self.code, self.error = facts.get("code", self.code), facts.get("error", self.error)
        if "until" in facts:
            self._until = facts["until"]
            self._doing = f"{facts['doing']} (at most {facts['seconds']:g} s)"
            self._status.phase(facts["doing"], facts["seconds"])
        if "detail" in facts:
            self._status.detail(facts["detail"])
        if "ended_step" in facts:
            self._status.step_ended(step, *facts["ended_step"])
        if "watched" in facts:
            self._logs, self._stopped = facts["logs"], {}
            self._watched = {name: _found(pid) for name, pid in facts["watched"].items()}

    def _fault(self) -> str:
        """Returns why the process must be killed; '' if it need not."""
        now = time.monotonic()
        ends, asked = self._ends
        if now > ends:
            return f"the driver did not end after {asked}; it was {self._doing}{self._where()}"
        if now > self._until + _LATE_S:
            late = f"did not notice its own deadline, {now - self._until:.0f} s ago"
            return f"the driver is stuck, and {late}: it was {self._doing}{self._where()}"
        return self._lost()

    def _lost(self) -> str:
        """Returns which processes that the run depends on are gone, or which one is stopped and for
        how long; '' if all run."""
        now = time.monotonic()
        watched = self._watched | (
            {} if self.process.pid is None else {_DRIVER: _found(self.process.pid)}
        )
        states = {name: _state(process) for name, process in watched.items()}
        # without the raylet Ray ends the driver, and without the driver the GCS
        if gone := sorted((name for name in self._watched if states[name] is None), reverse=True):
            named = " and ".join(_named(name, self._watched[name]) for name in gone)
            have = "have" if len(gone) > 1 else "has"
            return f"{named} {have} died, and the driver cannot go on without{self._see_logs()}"
        for name, process in watched.items():
            if states[name] == psutil.STATUS_STOPPED:
                since = self._stopped.setdefault(name, now)
                if now - since > _STOPPED_S:
                    return (
                        f"{_named(name, process)} has been stopped for {now - since:.0f} "
                        f"s{self._see_logs()}"
                    )
                continue
            self._stopped.pop(name, None)
        return ""

    def _see_logs(self) -> str:
        return f" (logs: {self._logs})" if self._logs else ""

    def _where(self) -> str:
        """Returns the driver's innermost frames; ``faulthandler`` answers even while the driver
        waits."""
        if self.process.pid is None or self.process.exitcode is not None:
            return ""
        os.kill(self.process.pid, signal.SIGUSR1)
        time.sleep(_LOOK_S)
        self._traces.seek(0)
        frames = self._traces.read().decode(errors="replace").splitlines()[1 : 1 + _FRAMES]
        return "\n".join(["", "--- where it was, innermost first", *frames])

    # ---- afterwards

    @property
    def why(self) -> str:
        """Why the driver ended, if it did not report that itself."""
        if self.killed_because or self.error:
            return self.killed_because or self.error
        code = self.process.exitcode or 0
        if code in _SIGNALS:
            return "the run had not begun"
        if code < 0:
            name = signal.Signals(-code).name
            hint = ", often by the kernel's out-of-memory killer" if name == "SIGKILL" else ""
            return f"the driver was killed by {name}{hint}; it was {self._doing}"
        why = (
            self._lost_at_end or f"no process of Ray's on this machine is missing{self._see_logs()}"
        )
        return (
            f"the driver was ended from inside (exit code {code}), as Ray does without its "
            f"raylet: {why}"
        )

    @property
    def exit_code(self) -> int:
        """The exit code of a run whose driver did not report how it ended."""
        code = self.process.exitcode or 0
        if code < 0:
            return 128 - code
        # launch.sh treats both as drivers that were killed
        return 1 if self.error else 128 + signal.SIGKILL


def _drive(
    parent: int, pipe: Connection, traces: Any, config: RunConfig, train: Train, restart: int
) -> None:
    """Runs the driver; exits with its exit code."""
    guard = Guard(pipe)
    die_with(parent)
    if sys.platform == "linux":
        # glibc gives each of Ray's threads its own heap, and memory that one thread frees there is
        # lost to the others: the process grows with the steps, though the memory in use does not
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    faulthandler.register(signal.SIGUSR1, file=traces, all_threads=False)
    code = 1
    try:
        guard.listen()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTED)
        guard.expect(config.vllm.start_timeout_s, "starting the driver")
        code = train(config, guard, restart)
    except KeyboardInterrupt:
        # before the run began: the parent logs the rest
        code = INTERRUPTED[guard.received or signal.SIGINT]
    except Exception:
        guard.broke(traceback.format_exc())
    sys.exit(code)


def _adopt_orphans(adopt: bool) -> None:
    """Sets whether orphaned descendants become children of this process, which ends them."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def _found(pid: int) -> psutil.Process | int:
    """Returns the process, or its id if it is gone already."""
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return pid


def _named(name: str, process: psutil.Process | int) -> str:
    who = name if name == _DRIVER else f"Ray's {name}"
    return f"{who} (pid {process if isinstance(process, int) else process.pid})"


def _state(process: psutil.Process | int) -> str | None:
    """Returns psutil's name of the process state; None if the process has ended."""
    if isinstance(process, int) or not process.is_running():
        return None
    try:
        state = process.status()
    except psutil.NoSuchProcess:
        return None
    return None if state in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else state


def end_processes(processes: list[psutil.Process]) -> None:
    """Sends SIGTERM, waits ``_GRACE_S``, then sends SIGKILL."""
    for send in (psutil.Process.terminate, psutil.Process.kill):
        running = [p for p in processes if p.is_running()]
        for process in running:
            with contextlib.suppress(psutil.NoSuchProcess):
                send(process)
        psutil.wait_procs(running, timeout=_GRACE_S)
