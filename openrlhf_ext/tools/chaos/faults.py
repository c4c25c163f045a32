"""The faults, as a table, and which of them a seed draws."""

from __future__ import annotations

import contextlib
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from openrlhf_ext.tools.chaos.reward import MISDEEDS
from openrlhf_ext.tools.chaos.watch import FILLER, PHASES, REMOVED, Run

_PAUSE_S, _ROOM, _SOME_BYTES = 4.0, 16 << 20, 4096
_EVERYWHERE = tuple(phase for phase in PHASES if phase != "loading")
_RUNNING = _EVERYWHERE[1:]


class NotThere(Exception):
    """There is nothing that the fault could be done to, in this phase."""


@dataclass(frozen=True)
class Fault:
    """``act`` gets the run and, of the kind ``victim``, one process. An error of the run must match
    ``names``.
    ``needs``: root, netem, reward (a function in a file), or a kind of process that not all runs
    have. After one that is ``exact`` a run that can be repeated ends in the same bits."""

    name: str
    about: str
    act: Callable[[Run, psutil.Process], None]
    victim: str = "command"
    names: str = ""
    needs: str = ""
    exact: bool = True
    phases: tuple[str, ...] = _EVERYWHERE


@dataclass(frozen=True)
class Drawn:
    """A fault in a phase, at or after a step; ``choice`` says which one of several processes."""

    fault: str
    phase: str
    step: int
    choice: float

    def inject(self, run: Run) -> None:
        """Raises NotThere: there is no such process at the moment, or no such file."""
        fault = FAULTS[self.fault]
        victims = sorted(
            (p for p in run.kinds.get(fault.victim, ()) if p.is_running()), key=lambda p: p.pid
        )
        if not victims:
            raise NotThere(f"there was no process {fault.victim}")
        try:
            fault.act(run, victims[int(self.choice * len(victims))])
        except (psutil.NoSuchProcess, FileNotFoundError) as error:
            raise NotThere(str(error)) from error


def _send(number: signal.Signals, lasts_s: float, _: Run, process: psutil.Process) -> None:
    process.send_signal(number)
    if lasts_s:
        time.sleep(lasts_s)
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def _limit(which: int, room: int, _: Run, process: psutil.Process) -> None:
    used = process.memory_info().vms if which == resource.RLIMIT_AS else 0
    process.rlimit(which, (used + room, process.rlimit(which)[1]))


def _damage(how: Callable[[Path], None], run: Run, _: psutil.Process) -> None:
    run.kill()
    tensors = sorted(
        (run.folder / "checkpoints").glob("global_step*[0-9]/*/*.safetensors"), key=_written
    )
    if not tensors:
        raise NotThere("there was no checkpoint")
    how(tensors[-1])


def _written(path: Path) -> float:
    return path.stat().st_mtime


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _remove(what: str, run: Run, _: psutil.Process) -> None:
    for path in sorted(run.folder.glob(what), key=_written)[-1:] or [run.folder / what]:
        if what == "run":  # what was recorded is lost to the run, and kept for the judge
            shutil.copytree(
                path, run.folder / REMOVED, ignore=shutil.ignore_patterns("*.safetensors", "*.png")
            )
        # whole, even while the run writes to it
        path = path.rename(path.with_name(f"{path.name}.removed"))
        shutil.rmtree(path, ignore_errors=True)


def _away(run: Run, _: psutil.Process) -> None:
    folder = run.folder / "checkpoints"
    aside = folder.rename(folder.with_name("away"))
    time.sleep(_PAUSE_S)
    shutil.rmtree(folder, ignore_errors=True)  # what the run has made in its place
    aside.rename(folder)


def _inside(script: str, undo: str, run: Run, _: psutil.Process) -> None:
    """Runs it in the namespaces of the run, and some seconds later what undoes it."""
    for number, text in enumerate(filter(None, (script, undo))):
        time.sleep(number * _PAUSE_S)
        enter = [
            "nsenter",
            "-t",
            str(run.command.pid),
            "-n",
            "-m",
            "sh",
            "-ec",
            text,
            "sh",
            str(run.folder),
        ]
        done = subprocess.run(enter, capture_output=True, text=True)
        if done.returncode and run.command.poll() is None:
            raise NotThere(done.stderr.strip())


def ask(misdeed: str, run: Run, _: psutil.Process) -> None:
    """Code inside of the run that looks for this file does it."""
    (run.folder / misdeed).touch()


# kind of process -> how an error names it, and what a run needs to have it
_VICTIMS = {
    "driver": ("the driver", ""), "rank": ("rank|policy|PolicyActor", ""), "critic": ("critic", "critic"),
    "reward_model": ("reward", "reward_model"), "frozen": ("reference|guide", "frozen"), "engine": ("engine", ""),
    "engine_worker": ("engine", "engine_worker"), "grader": ("grad|reward", "reward"),
    "raylet": ("raylet|Not arrived: rank", ""), "agent": ("raylet|agent", ""), "gcs": ("gcs", ""),
}  # fmt: skip
_SIGNALS = {
    "kill": (signal.SIGKILL, 0.0, "is killed, as by the kernel when memory is short"),
    "stop": (signal.SIGSTOP, 0.0, "is stopped for ever"),
    "pause": (signal.SIGSTOP, _PAUSE_S, "is stopped for 4 s"),
}
_ASKED = {
    "term": signal.SIGTERM,
    "interrupt": signal.SIGINT,
    "hangup": signal.SIGHUP,
    "kill": signal.SIGKILL,
}
_DOES = {
    "fills": "fills its memory",
    "prints": "prints 6 MiB",
    "nan": "returns NaN",
    "closes": "closes its files and pipes",
}
_FILES = {"checkpoint": "checkpoint|global_step|removed", "run": "removed|No such file"}
_NETWORK = {
    "cut": ("ip link set lo down", "", "is cut for ever"),
    "gap": ("ip link set lo down", "ip link set lo up", "is cut for 4 s"),
    "slow": ("tc qdisc add dev lo root netem delay 100ms", "", "takes 200 ms for a round"),
    "lossy": ("tc qdisc add dev lo root netem loss 5%", "", "loses 5 % of the packets"),
}


def _of_processes() -> Iterator[Fault]:
    for kind, (names, needs) in _VICTIMS.items():
        for how, (number, lasts_s, about) in _SIGNALS.items():
            exact = kind != "grader" or how == "pause"
            act = partial(_send, number, lasts_s)
            yield Fault(
                f"{how}_{kind}", f"a process {kind} {about}", act, kind, names, needs, exact
            )
    for how, number in _ASKED.items():
        about = f"the command gets {number.name}"
        yield Fault(
            f"{how}_command",
            about,
            partial(_send, number, 0.0),
            names=how != "kill" and number.name or "",
        )
    for kind in ("driver", "rank", "engine", "grader"):
        names, needs = _VICTIMS[kind]
        act = partial(_limit, resource.RLIMIT_AS, _ROOM)
        about = f"a process {kind} gets 16 MiB more memory and no more"
        yield Fault(
            f"memory_{kind}", about, act, kind, f"{names}|[Mm]emory", needs, False, _RUNNING
        )
    for kind in ("driver", "rank"):
        act = partial(_limit, resource.RLIMIT_FSIZE, _SOME_BYTES)
        yield Fault(
            f"disk_{kind}",
            f"a process {kind} can write 4 KiB to a file and no more: the disk is full",
            act,
            kind,
            "File too large|disk full|could not be written",
            phases=_RUNNING,
        )


def _of_files() -> Iterator[Fault]:
    for how, damage in {"flipped": _flip, "cut": _cut}.items():
        yield Fault(
            f"checkpoint_{how}",
            f"the run is killed, and a file of its newest checkpoint is {how}",
            partial(_damage, damage),
            phases=_RUNNING,
        )
    for what, folder, phases in (
        ("checkpoint_removed", "checkpoints/global_step*[0-9]", (*_RUNNING, "loading")),
        ("checkpoints_removed", "checkpoints", (*_RUNNING, "loading")),
        ("run_removed", "run", _RUNNING),
    ):
        about = f"{folder} is removed while the run goes on"
        yield Fault(
            what,
            about,
            partial(_remove, folder),
            names=_FILES[what.split("_")[0].rstrip("s")],
            phases=phases,
        )
    about = "the folder of checkpoints is away for 4 s"
    yield Fault("checkpoints_away", about, _away, names="removed|checkpoint", phases=_RUNNING)
    read_only = (
        'cd "$1/checkpoints" && mount --bind . . && mount -o remount,bind,ro "$1/checkpoints"'
    )
    yield Fault(
        "checkpoints_read_only",
        "the folder of checkpoints is mounted for reading only",
        partial(_inside, read_only, ""),
        names="Read-only",
        needs="root",
        phases=_RUNNING,
    )
    fill = f"head -c 2G /dev/zero > /dev/shm/{FILLER} || true"
    yield Fault(
        "shm_full", "/dev/shm is full", partial(_inside, fill, ""), needs="root", names="shm|space"
    )


def _of_others() -> Iterator[Fault]:
    for how, (script, undo, about) in _NETWORK.items():
        needs = "netem" if "netem" in script else "root"
        yield Fault(
            f"network_{how}",
            f"the network between the run's processes {about}",
            partial(_inside, script, undo),
            "command",
            "Ray|rank|engine",
            needs,
            phases=_RUNNING,
        )
    for misdeed in MISDEEDS:
        about = f"the reward function {_DOES.get(misdeed, misdeed)}, once"
        yield Fault(
            f"reward_{misdeed}",
            about,
            partial(ask, misdeed),
            names="reward",
            needs="reward",
            exact=misdeed in ("forks", "prints"),
            phases=("sampling",),
        )


FAULTS: dict[str, Fault] = {
    fault.name: fault for fault in (*_of_processes(), *_of_files(), *_of_others())
}


def draw(
    seed: int,
    trial: int,
    names: Sequence[str],
    steps: int,
    least: int = 1,
    most: int = 3,
    among: Sequence[str] = PHASES,
) -> list[Drawn]:
    """``least`` to ``most`` faults of a trial, each at a step of its own and in one of its phases
    that is ``among`` those of the run; the same for the same arguments."""
    choose = random.Random(f"{seed}/{trial}")
    count = min(len(names), choose.randint(least, most), steps)
    places, found = sorted(choose.sample(range(steps), count)), []
    for name, step in zip(choose.sample(sorted(names), count), places, strict=True):
        # there is but one start, and one end
        barred = {"start": step > places[0], "end": step < places[-1]}
        phase = choose.choice(
            [phase for phase in FAULTS[name].phases if phase in among and not barred.get(phase)]
        )
        if phase == "loading":
            running = [phase for phase in _RUNNING[:-1] if phase in among]
            found.append(Drawn("kill_command", choose.choice(running), step, 0.0))
        found.append(
            Drawn(name, phase, {"start": 0, "end": steps}.get(phase, step), choose.random())
        )
    return found
