"""A driver in trouble, under its guard: ``python -m tests.driver.guarded CASE FOLDER``; exits as
the command would."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path

import psutil

from openrlhf_ext.config import RunConfig
from openrlhf_ext.driver import guard
from openrlhf_ext.driver.guard import Guard
from openrlhf_ext.reporting import TerminalHandler


def deaf() -> None:
    """A native call that holds the interpreter, and that no signal ends: a mutex that is locked
    twice."""
    mutex, libc = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
    libc.pthread_mutex_lock(mutex)
    Path("deaf").touch()
    libc.pthread_mutex_lock(mutex)


def sleeper(name: str) -> subprocess.Popen:
    """A child, known to the test by a file with its id."""
    process = subprocess.Popen(["sleep", "3600"])
    Path(name).write_text(str(process.pid))
    return process


def ended_by_ray(config: RunConfig, watched: Guard, restart: int) -> int:
    """As Ray does it: the raylet dies, and Ray ends the process without an exception."""
    # the GCS lives until the parent ends what is left
    gcs, raylet = sleeper("gcs"), sleeper("raylet")
    watched.watch({"gcs_server": gcs.pid, "raylet": raylet.pid}, "/tmp/ray/logs")
    time.sleep(1.0)  # the parent hears of it, and waits
    raylet.kill()
    os._exit(1)


def stuck(config: RunConfig, watched: Guard, restart: int) -> int:
    """The second try is better."""
    if restart:
        watched.ended(0)
        return 0
    sleeper("child")
    watched.expect(0.2, "training step 3")
    deaf()
    return 0


def stopped(config: RunConfig, watched: Guard, restart: int) -> int:
    gcs = sleeper("gcs")
    watched.watch({"gcs_server": gcs.pid})
    gcs.send_signal(signal.SIGSTOP)
    deaf()
    return 0


def stops_itself(config: RunConfig, watched: Guard, restart: int) -> int:
    watched.expect(3600.0, "training step 5")
    os.kill(os.getpid(), signal.SIGSTOP)
    return 0


def hung_up(config: RunConfig, watched: Guard, restart: int) -> int:
    os.kill(os.getppid(), signal.SIGHUP)
    time.sleep(3600)
    return 0


def deaf_to_signals(config: RunConfig, watched: Guard, restart: int) -> int:
    subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -TERM {os.getppid()}"])
    deaf()
    return 0


def interrupted_while_it_imports(config: RunConfig, watched: Guard, restart: int) -> int:
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(3600)
    return 0


def killed(config: RunConfig, watched: Guard, restart: int) -> int:
    watched.expect(60.0, "training step 5")
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def busy(config: RunConfig, watched: Guard, restart: int) -> int:
    """Two steps; the driver is deaf in the second, as it is while it imports, and then writes a
    record."""
    logging.getLogger("openrlhf_ext").info("starts")
    watched.step_ended(4, 60.0)
    watched.expect(300.0, "training step 2")
    watched.progress("policy: training > update 1 of 2")
    time.sleep(float(os.environ["BUSY_S"]))
    logging.getLogger("openrlhf_ext").info("a record")
    watched.ended(0)
    return 0


def loses_its_folder(config: RunConfig, watched: Guard, restart: int) -> int:
    shutil.rmtree(config.ckpt.path)
    while True:
        watched.check()
        time.sleep(0.1)


def raises(config: RunConfig, watched: Guard, restart: int) -> int:
    raise KeyError("nobody expected this")


def leaves_an_orphan(config: RunConfig, watched: Guard, restart: int) -> int:
    subprocess.run(["sh", "-c", "sleep 3600 & echo $! > orphan"], check=True)
    watched.ended(0)
    return 0


def has_threads(config: RunConfig, watched: Guard, restart: int) -> int:
    """Threads that keep memory at the same time: what glibc says of its heaps is in the file
    ``heaps``."""
    libc, all_are_there, may_end = ctypes.CDLL(None), threading.Barrier(9), threading.Event()
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

    def keep() -> None:
        kept = [libc.malloc(5000) for _ in range(100)]
        all_are_there.wait()
        may_end.wait()
        for address in kept:
            libc.free(address)

    threads = [threading.Thread(target=keep) for _ in range(8)]
    for thread in threads:
        thread.start()
    all_are_there.wait()
    libc.fopen.restype, libc.malloc_info.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    libc.fclose.argtypes = [ctypes.c_void_p]
    file = libc.fopen(b"heaps", b"w")
    libc.malloc_info(0, file)
    libc.fclose(file)
    may_end.set()
    watched.ended(0)
    return 0


def put_to_a_stopped_raylet(config: RunConfig, watched: Guard, restart: int) -> int:
    import ray

    with session(watched):
        of_ray("raylet").send_signal(signal.SIGSTOP)
        watched.expect(1.0, "training step 3")
        ray.put(b"x" * (300 << 20))  # more than the store has: the raylet has to make room
    return 0


def shut_down_with_a_stopped_gcs(config: RunConfig, watched: Guard, restart: int) -> int:
    with session(watched):
        of_ray("gcs_server").send_signal(signal.SIGSTOP)
        watched.ended(0)
    return 0


def session(watched: Guard) -> AbstractContextManager:
    # Ray takes seconds to import, and few cases need it
    from openrlhf_ext.driver.cluster import RaySession

    return RaySession(policy_ranks=1, engines=0, env={}, verbose=False, guard=watched)


def of_ray(name: str) -> psutil.Process:
    (process,) = [
        child for child in psutil.Process().children(recursive=True) if child.name() == name
    ]
    Path(name).write_text(str(process.pid))
    return process


if __name__ == "__main__":
    case, folder = sys.argv[1:]
    os.chdir(folder)
    guard.END_S, guard._LATE_S, guard._STOPPED_S, guard._LOOK_S, guard._GRACE_S = (
        3.0,
        1.0,
        0.5,
        0.1,
        1.0,
    )
    if case == "put_to_a_stopped_raylet":
        guard._STOPPED_S = 3600.0
    logging.basicConfig(level=logging.WARNING, handlers=[TerminalHandler()])
    logging.getLogger("openrlhf_ext").setLevel(logging.INFO)
    logger = {"metrics_path": "metrics.jsonl"}
    given = RunConfig(
        logger=logger,
        train={"max_restarts": int(case in ("stuck", "loses_its_folder"))},
        ckpt={"path": "ckpt", "grace_s": 1},
    )
    sys.exit(guard.run(given, globals()[case]))
