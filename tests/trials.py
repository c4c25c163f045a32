"""Runs that something happens to: a process of theirs is killed, stopped or asked to end, at a random moment.

    python -m tests.trials FOLDER [--seed 7] [--count 10]      # half a minute to five for each; leaves FOLDER/trial*

A trial holds if the run ends within its deadlines, without a traceback or a process left, and if going on with
``ckpt.load_enable`` gives, bit for bit, the weights of a run that nothing happened to.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from safetensors.torch import load_file

from tests.e2e.jobs import Job, Task
from tests.e2e.test_resume import EXACT

DEADLINES = {
    "vllm__hang_timeout_s": 15, "vllm__start_timeout_s": 120, "weight_sync__timeout_s": 20, "reward__timeout_s": 20,
    "megatron__collective_timeout_s": 20, "megatron__start_timeout_s": 120, "train__step_timeout_s": 60,
}  # fmt: skip
ENDS_WITHIN_S = 600.0
# what the processes are called; the driver and the command are told apart below
WORKERS = ("ray::PolicyActor", "ray::RolloutEngine", "openrlhf_ext.rewards", "raylet/raylet", "gcs_server")


def options(task: Task, name: str, *flags: str, **more: object) -> list[str]:
    """Four steps that are the same every time."""
    more = DEADLINES | {"ckpt__path": task.folder / f"{name}_ckpt", "ckpt__save_steps": 1} | more
    return [*task.options(name, **more), "--train.full_determinism_enable", *flags]


def victims(job: Job) -> dict[str, psutil.Process]:
    """Living processes of the run, one of each kind."""
    job.look()
    found = {name: living[0] for name in WORKERS if (living := job.named(name))}
    command = psutil.Process(job.process.pid)
    drivers = [process for process in command.children() if "train_ppo_ray" in " ".join(process.cmdline())]
    return found | dict(zip(["driver"], drivers, strict=False)) | {"command": command}


def disturb(job: Job, choose: random.Random, after_s: float) -> str:
    """Does it, some seconds after the start; says what."""
    time.sleep(after_s)
    if job.process.poll() is not None:
        return "nothing: it had ended"
    found = victims(job)
    name = choose.choice(sorted(found))
    # a command that is stopped is what Ctrl-Z asks for
    kinds = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT] if name == "command" else [signal.SIGKILL, signal.SIGSTOP]
    how = choose.choice(kinds)
    found[name].send_signal(how)
    return f"{how.name} to {name} after {after_s:.1f} s"


def heard_from_outside(job: Job) -> set[str]:
    """Addresses other than loopback that a process of the run listens on."""
    job.look()
    own = {process.pid for process in job.living()}
    heard = [c.laddr.ip for c in psutil.net_connections("inet") if c.status == psutil.CONN_LISTEN and c.pid in own]
    return {address for address in heard if not address.removeprefix("::ffff:").startswith("127.") and address != "::1"}


def faults_of(job: Job, ends: Callable[[], int], allowed: set[int]) -> list[str]:
    """What is wrong with how a run ended."""
    try:
        code = ends()
    except AssertionError as error:
        return [str(error)]
    faults = [] if code in allowed else [f"exit status {code}"]
    return faults + re.findall(r"Traceback \(most recent call last\)(?s:.{0,2000})", job.text)


def trial(task: Task, name: str, choose: random.Random, duration_s: float) -> tuple[str, list[str]]:
    """What was done, and what did not hold."""
    restarts = choose.choice((0, 1))
    job = Job(options(task, name, train__max_restarts=restarts), task.folder / f"{name}.log")
    told = disturb(job, choose, choose.uniform(0.0, duration_s))
    faults = [f"listens on {address}" for address in sorted(heard_from_outside(job))]
    faults += faults_of(job, lambda: job.finish(ENDS_WITHIN_S), {0, 1, 130, 137, 143, -9, -15, -2})
    job.stop()
    again = Job(options(task, name, "--ckpt.load_enable"), task.folder / f"{name}_again.log")
    faults += faults_of(again, lambda: again.finish(ENDS_WITHIN_S), {0})
    if not faults:
        faults += differences(task, name)
    return f"{told}, {restarts} restarts allowed, exit status {job.process.returncode}", faults


def differences(task: Task, name: str) -> list[str]:
    """From the run that nothing happened to."""
    want, got = (load_file(task.folder / run / "model.safetensors") for run in ("whole", name))
    faults = [f"{tensor} differs" for tensor, values in want.items() if not values.equal(got[tensor])]
    rows = [[{key: row.get(key) for key in ("step", *EXACT)} for row in task.metrics(run)] for run in ("whole", name)]
    return faults if rows[0] == rows[1] else [*faults, f"metrics differ: {rows}"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--count", type=int, default=10)
    asked = parser.parse_args(arguments)
    asked.folder.mkdir(parents=True)
    task = Task.make(asked.folder, prompts=32)
    whole, begun = Job(options(task, "whole"), asked.folder / "whole.log"), time.monotonic()
    assert whole.finish() == 0, whole.text
    duration_s, failed = time.monotonic() - begun, 0
    print(f"seed {asked.seed}; undisturbed {duration_s:.0f} s", flush=True)
    for number in range(asked.count):
        begun = time.monotonic()
        told, faults = trial(task, f"trial{number}", random.Random(f"{asked.seed}/{number}"), duration_s)
        failed += bool(faults)
        print(json.dumps({"trial": number, "did": told, "seconds": round(time.monotonic() - begun), "faults": faults}),
              flush=True)  # fmt: skip
    print(f"{asked.count - failed} of {asked.count} held")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
