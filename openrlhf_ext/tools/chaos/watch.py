"""A run as it is seen from outside: its processes, what they do, and what it has written."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

PHASES = (
    "start",
    "loading",
    "sampling",
    "grading",
    "scoring",
    "training",
    "sync",
    "saving",
    "evaluation",
    "end",
)
# kind of process -> what is in its title
KINDS = {
    "rank": "ray::PolicyActor", "critic": "ray::CriticActor", "reward_model": "ray::RewardActor",
    "frozen": "ray::FrozenActor", "engine": "ray::RolloutEngine", "engine_worker": "VLLM::",
    "grader": "openrlhf_ext.rewards", "agent": "ray::RuntimeEnvAgent", "raylet": "raylet/raylet", "gcs": "gcs_server",
}  # fmt: skip
# what Ray writes into a rank's title
_CALLS = {
    "for_replica": "scoring",
    "fit": "training",
    "send_weights": "sync",
    "load_state": "loading",
    "save_state": "saving",
    "save_model": "end",
}
# not the command itself, where a script starts it
_TRAINER = f"{sys.executable} -m openrlhf_ext.cli.train_"
# it starts its ranks itself, which have no titles of Ray's
_SUPERVISED = "openrlhf_ext.cli.train_sft"
_MARK = "OPENRLHF_EXT_CHAOS"
REMOVED = "removed"  # a copy of what a fault has removed of the run's folder
FILLER = "chaos_filler"  # of a /dev/shm that is made full
_APART = 'ip link set lo up && mount -t tmpfs -o size=1g shm /dev/shm && exec "$@"'
_ISOLATE = ["unshare", "--net", "--mount", "--propagation", "private", "sh", "-c", _APART, "sh"]
_LOOK_S, _NAMED = 0.5, 8
_GONE_S = 90.0  # agents of Ray wait 60 s for a GCS that was killed


def abilities() -> set[str]:
    """Of ``root`` (a run can have a network and a /dev/shm of its own) and ``netem`` (which can be
    slow and lossy)."""
    tried = {"root": "true", "netem": "tc qdisc add dev lo root netem delay 1ms"}
    if os.geteuid() != 0:
        return set()
    done = {
        name: subprocess.run([*_ISOLATE, *words.split()], capture_output=True)
        for name, words in tried.items()
    }
    return {name for name, ended in done.items() if ended.returncode == 0}


def read_records(path: Path) -> list[dict[str, Any]]:
    """Whole lines of JSON; none where there is no file."""
    try:
        now = path.stat()
    except FileNotFoundError:
        return []
    return _parsed(path, now.st_size, now.st_mtime_ns)


@functools.lru_cache(maxsize=8)  # a phase that is waited for is asked for every 2 ms
def _parsed(path: Path, *_: int) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def is_evaluation(record: Mapping[str, Any]) -> bool:
    """Whether a record of metrics.jsonl is of an evaluation, and not of the step before it."""
    return any(name.startswith("eval/") for name in record)


class Run:
    """One start of a command whose run is in ``folder``: ``run``, ``checkpoints``, ``calls``,
    ``tmp`` and logs."""

    def __init__(
        self, command: Sequence[str], folder: Path, evaluates_every: int, isolated: bool
    ) -> None:
        self.folder, self._program, self._every, self._looked = (
            folder,
            command[0],
            evaluates_every,
            0.0,
        )
        self.log = folder / f"log{len(list(folder.glob('log*')))}"
        (folder / "tmp").mkdir(exist_ok=True)
        self._short = Path(tempfile.mkdtemp(prefix="chaos"))  # a socket's name has 107 bytes
        (self._short / "t").symlink_to(folder / "tmp")
        env = (
            os.environ
            | dict.fromkeys(("TMPDIR", "RAY_TMPDIR"), str(self._short / "t"))
            | {_MARK: str(folder)}
        )
        apart = _ISOLATE if isolated else []
        self._is_supervised = _SUPERVISED in command
        self.began = time.time()
        read, write = os.pipe()  # limits on the files of a process are not on what it says
        with self.log.open("w") as log:
            self._writer = subprocess.Popen(["cat"], stdin=read, stdout=log, start_new_session=True)
        self.command = psutil.Popen(
            [*apart, *command],
            stdout=write,
            stderr=write,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=env,
        )
        for end in (read, write):
            os.close(end)
        self.kinds: dict[str, list[psutil.Process]] = {}
        self.seen: set[psutil.Process] = set()
        self._shm, self._shm_before = -1, set(() if isolated else os.listdir("/dev/shm"))

    # ---- what it does

    def look(self) -> None:
        """Finds its processes, twice a second: it takes long where there are many."""
        if time.monotonic() - self._looked < _LOOK_S or self.command.poll() is not None:
            return
        if not title(self.command).startswith(self._program):  # it is still being isolated
            return
        self._looked = time.monotonic()
        # the command may end at any moment, and its folder in /proc with it
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            children = self.command.children(recursive=True)
            self.seen |= {self.command, *children}
            titles = {child: title(child) for child in children}
            self.kinds = {
                kind: [c for c, t in titles.items() if part in t] for kind, part in KINDS.items()
            }
            trains = {self.command: title(self.command)} | titles
            trainer = next((p for p, t in trains.items() if t.startswith(_TRAINER)), self.command)
            own = [child for child in trainer.children() if titles.get(child) == trains[trainer]]
            self.kinds |= {
                "rank" if self._is_supervised else "driver": own,
                "command": [self.command],
            }
            if self._shm < 0:
                self._shm = os.open(f"/proc/{self.command.pid}/root/dev/shm", os.O_RDONLY)

    @property
    def step(self) -> int:
        """The last one that is in metrics.jsonl."""
        return max((r["step"] for r in read_records(self.folder / "run/metrics.jsonl")), default=0)

    def phase(self) -> str:
        """One of PHASES, without grading."""
        self.look()
        found = [
            e for e in read_records(self.folder / "run/events.jsonl") if e["time"] >= self.began
        ]
        events, due_steps = (
            [e["event"] for e in found],
            [e["steps"] for e in found if e["event"] == "ready"],
        )
        calls = {
            _CALLS.get(title(rank).rpartition(".")[2].strip())
            for rank in self.kinds.get("rank", ())
        } - {None}
        if "loading" in calls or "ready" not in events or events[-1] in ("failure", "restart"):
            return "loading" if "loading" in calls else "start"
        if calls:
            return str(min(calls, key=lambda call: PHASES.index(str(call))))
        records = read_records(self.folder / "run/metrics.jsonl")[-1:]
        due = not records or (
            not is_evaluation(records[0]) and records[0]["step"] % self._every == 0
        )
        if due and self._every > 0:
            return "evaluation"
        if records and records[0]["step"] >= due_steps[-1]:
            return "end"
        return "training" if self._is_supervised else "sampling"

    def reach(self, phase: str, step: int, kind: str, until: float) -> bool:
        """Waits for a phase, at or after a step, and a process of this kind; whether they came
        before the run ended, or ``until``."""
        graded = self.graded()
        while self.command.poll() is None and time.monotonic() < until:
            now = self.phase()
            before, graded = graded, self.graded()
            is_now = now == phase or (phase == "grading" and now == "sampling" and graded > before)
            if (
                is_now
                and self.kinds.get(kind)
                and (phase in ("start", "loading") or self.step >= step)
            ):
                return True
            time.sleep(0.002)
        return False

    def graded(self) -> int:
        """Samples, by all starts."""
        calls = self.folder / "calls"
        return calls.stat().st_size // 8 if calls.exists() else 0

    # ---- its end

    def finish(self, until: float) -> int | None:
        """The exit status; None: it did not end."""
        while self.command.poll() is None and time.monotonic() < until:
            self.look()
            time.sleep(0.05)
        return self.command.poll()

    def left(self) -> list[str]:
        """Living processes of a run that has ended, after a moment in which they may end; they are
        killed. What it wrote to a /dev/shm, too."""
        deadline = time.monotonic() + _GONE_S
        while (living := self._living()) and time.monotonic() < deadline:
            time.sleep(0.2)
        ports = {
            c.laddr.port: c.pid for c in psutil.net_connections() if c.status == psutil.CONN_LISTEN
        }
        said = [
            f"process {title(p)[:60]!r} (ports {[n for n, pid in ports.items() if pid == p.pid]})"
            for p in living
        ]
        for process in living:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._writer.wait(_GONE_S)  # of what all have said
        shared = (
            sorted({*os.listdir(self._shm)} - self._shm_before - {FILLER}) if self._shm >= 0 else []
        )
        if self._shm >= 0:
            os.close(self._shm)
        (self._short / "t").unlink()
        self._short.rmdir()
        return said + ([f"left in /dev/shm: {', '.join(shared[:_NAMED])}"] if shared else [])

    def kill(self) -> None:
        """All of its processes at once, as a machine that fails."""
        self.look()
        self.command.send_signal(signal.SIGSTOP)
        for process in [*self._living(), self.command]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.command.wait()

    def _living(self) -> list[psutil.Process]:
        marked = {
            process for process in psutil.process_iter() if _marked(process, str(self.folder))
        }
        return [
            p
            for p in marked | self.seen
            if p.is_running() and p.pid != os.getpid() and not _dead(p)
        ]


def title(process: psutil.Process) -> str:
    """What the process calls itself; '' when it has ended."""
    try:
        return (
            Path(f"/proc/{process.pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")
        )
    except OSError:
        return ""


def _marked(process: psutil.Process, folder: str) -> bool:
    try:
        return f"{_MARK}={folder}\0".encode() in Path(f"/proc/{process.pid}/environ").read_bytes()
    except OSError:
        return False


def _dead(process: psutil.Process) -> bool:
    try:
        return process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True
