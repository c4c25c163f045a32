"""The lifetime of a job's Ray processes: start, report of a death in the process's own words, and a clean end.

Ctrl-C, SIGTERM and errors all leave through ``RaySession.__exit__``, after which no process of the job is alive.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from openrlhf_ext.megatron.phases import Address, describe_ranks

logger = logging.getLogger(__name__)

_TAIL_BYTES = 4000
_GRACE_S = 5.0


class RaySession:
    """Starts a local Ray, or joins the cluster that RAY_ADDRESS names; ends what it started."""

    def __init__(self, *, policy_ranks: int, engines: int, env: dict[str, str], verbose: bool) -> None:
        self.policy_ranks, self.engines, self.env, self.verbose = policy_ranks, engines, env, verbose
        self.pids: dict[str, int] = {}
        self._groups: dict[str, list[Address]] = {}
        self._children: dict[int, psutil.Process] = {}
        self._sigterm = None
        self.use_gpu = False

    def __enter__(self) -> RaySession:
        self._sigterm = signal.signal(signal.SIGTERM, _terminate)
        arguments = self._arguments()
        ray.init(**arguments)
        # a local Ray on a machine without GPUs only counts "GPUs": see _arguments
        self.use_gpu = "num_gpus" not in arguments and ray.cluster_resources().get("GPU", 0) > 0
        self.remember_children()
        return self

    def _arguments(self) -> dict:
        runtime_env = {"env_vars": self.env, "worker_process_setup_hook": "openrlhf_ext.patches.apply"}
        common = {"runtime_env": runtime_env, "log_to_driver": self.verbose, "logging_level": logging.WARNING}
        if os.environ.get("RAY_ADDRESS"):
            return common
        import torch

        local: dict = {"include_dashboard": False}
        if not torch.cuda.is_available():
            # OpenRLHF's actor group asks for one GPU per rank: on a CPU they are only numbers. One CPU each, likewise.
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
            local["address"] = "local"  # not somebody else's Ray that happens to run on this machine
            local |= {"num_gpus": self.policy_ranks, "num_cpus": self.policy_ranks + self.engines + 1}
            local["object_store_memory"] = 256 << 20
        return common | local

    def remember(self, name: str, pid: int, host: str) -> None:
        """Names a process of this host, so that its log can be shown if it dies (Ray reports deaths on other hosts)."""
        if host == socket.gethostname():
            self.pids[name] = pid
        self.remember_children()

    def watch(self, group: str, addresses: list[Address]) -> None:
        """Where the ranks of a group say what they are doing (``megatron.phases``), for reports of deadlines."""
        self._groups[group] = addresses

    def remember_children(self) -> None:
        """Keeps hold of every descendant, since a dead parent would hide its children."""
        for process in psutil.Process().children(recursive=True):
            self._children.setdefault(process.pid, process)

    def __exit__(self, kind, error, trace) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not stop the clean-up
        self.remember_children()
        with contextlib.suppress(RayError):
            ray.shutdown()
        _end(list(self._children.values()))
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, self._sigterm)

    def describe_failure(self, error: BaseException) -> str:
        """The failing process's own error text and, of every process that died, its name and the end of its log.

        Which process reports a death first is a matter of chance: often it is one that waited for the dead process.
        """
        of_a_task = isinstance(error, RayTaskError) and not isinstance(error.cause, RayActorError)
        lines = [str(error) if of_a_task else f"{type(error).__name__}: {error}"]
        if isinstance(error, TimeoutError):
            lines += [f"--- ranks of the {group}\n{describe_ranks(where)}" for group, where in self._groups.items()]
        dead = {name: pid for name, pid in self.pids.items() if not _alive(pid)}
        if dead:
            lines.append("dead processes: " + ", ".join(f"{name} (pid {pid})" for name, pid in dead.items()))
        for name, pid in dead.items():
            if tail := _log_tail(pid):
                lines.append(f"--- last output of {name} (pid {pid})\n{tail}")
        return "\n".join(lines)


def _terminate(*_) -> None:
    raise KeyboardInterrupt("SIGTERM")


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _end(processes: list[psutil.Process]) -> None:
    """SIGTERM, a short grace, SIGKILL."""
    for send in (psutil.Process.terminate, psutil.Process.kill):
        running = [p for p in processes if p.is_running()]
        for process in running:
            with contextlib.suppress(psutil.NoSuchProcess):
                send(process)
        psutil.wait_procs(running, timeout=_GRACE_S)


def _logs_of(pid: int) -> Iterator[Path]:
    folder = Path(ray._private.worker._global_node.get_logs_dir_path()) if ray.is_initialized() else None
    if folder is not None:
        yield from sorted(folder.glob(f"worker-*-{pid}.err"))
        yield from sorted(folder.glob(f"worker-*-{pid}.out"))


def _log_tail(pid: int) -> str:
    time.sleep(0.2)  # the dying process's last lines
    texts = [path.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip() for path in _logs_of(pid)]
    return "\n".join(text for text in texts if text)
