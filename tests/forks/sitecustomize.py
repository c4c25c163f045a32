"""Python imports this first in every process that a test starts (tests/conftest.py puts the folder
on PYTHONPATH).

A worker of Ray's spends most of a small job on importing torch and transformers, and so does a
command that starts the job, where a test asks for it (``FORKED`` of tests/e2e/jobs.py). This one
asks ``server.py``, which has imported them, to fork the worker, and stands in for it in the tree of
processes: it ends as the worker does, the worker ends with it, and SIGINT, SIGTERM and SIGHUP go
on to the worker. Without a server of the same environment it leaves a request for one, and goes on
as any other process.
"""

from __future__ import annotations

import array
import hashlib
import json
import os
import resource
import signal
import socket
import sys

# Libraries read these when they are imported: a worker is forked from a process that had the same.
_READ = (
    "HF_",
    "KMP_",
    "MKL_",
    "OMP_",
    "PYTHON",
    "TOKENIZERS_",
    "TORCHDYNAMO_",
    "TORCH_",
    "TRANSFORMERS_",
)


def stand_in(folder: str) -> None:
    """Returns if there is no server; otherwise ends this process when the worker has ended."""
    read = {key: value for key, value in os.environ.items() if key.startswith(_READ)}
    # a worker of a test's own network cannot be forked outside of it
    network = os.readlink("/proc/self/ns/net")
    facts = json.dumps([sys.executable, network, sorted(read.items())])
    address = os.path.join(folder, hashlib.sha256(facts.encode()).hexdigest()[:16])
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(address)
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        if not os.path.exists(address + ".started"):
            with open(f"{address}.{os.getpid()}", "w") as file:
                json.dump({"environ": read, "network": network}, file)
            os.replace(file.name, address + ".wanted")
        return
    worker = {
        "argv": sys.orig_argv[1:],
        "environ": dict(os.environ),
        "cwd": os.getcwd(),
        "parent": os.getpid(),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    }
    streams = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
    connection.sendmsg([json.dumps(worker).encode()], streams)
    pid = int(connection.recv(16) or 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if pid else ():
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: os.kill(pid, number))
    status = connection.recv(16)  # b"" if the server has died, and its workers with it
    os._exit(os.waitstatus_to_exitcode(int(status)) & 0xFF if status else 1)


if "OPENRLHF_EXT_TESTS_FORKS" in os.environ and sys.orig_argv[1:]:
    # removed: a rank that such a command starts ends unless the command is its parent
    asked = os.environ.pop("OPENRLHF_EXT_TESTS_FORKED", "") and sys.orig_argv[1] == "-m"
    if asked or sys.orig_argv[1].endswith("/ray/_private/workers/default_worker.py"):
        stand_in(os.environ["OPENRLHF_EXT_TESTS_FORKS"])
