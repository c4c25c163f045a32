"""Python imports this first in every process that a test starts (tests/conftest.py puts the folder on PYTHONPATH).

A worker of Ray's spends most of a small job on importing torch and transformers. This one asks ``server.py``, which has
imported them, to fork the worker, and stands in for it in Ray's tree: it ends as the worker does, and the worker ends
with it. Without a server of the same environment it leaves a request for one, and goes on as any other process.
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
_READ = ("HF_", "KMP_", "MKL_", "OMP_", "PYTHON", "TOKENIZERS_", "TORCHDYNAMO_", "TORCH_", "TRANSFORMERS_")
_HANDED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def stand_in(folder: str) -> None:
    """Returns if there is no server; otherwise ends this process when the worker has ended."""
    read = {key: value for key, value in os.environ.items() if key.startswith(_READ)}
    facts = json.dumps([sys.executable, sorted(read.items())])
    address = os.path.join(folder, hashlib.sha256(facts.encode()).hexdigest()[:16])
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(address)
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        if not os.path.exists(address + ".started"):
            with open(f"{address}.{os.getpid()}", "w") as file:
                json.dump(read, file)
            os.replace(file.name, address + ".wanted")
        return
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # until somebody can hand them on
    forked = {
        "argv": sys.orig_argv[1:], "environ": dict(os.environ), "cwd": os.getcwd(), "blocked": sorted(blocked),
        "ignored": [number for number in _HANDED_ON if signal.getsignal(number) is signal.SIG_IGN],
        "files": resource.getrlimit(resource.RLIMIT_NOFILE), "parent": os.getpid(),
    }  # fmt: skip
    streams = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
    connection.sendmsg([json.dumps(forked).encode()], streams)
    if pid := connection.recv(16):
        for number in _HANDED_ON:
            signal.signal(number, lambda received, _: os.kill(int(pid), received))
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
    status = connection.recv(16) if pid else b""  # b"" if the server has died, and what it forked with it
    code = os.waitstatus_to_exitcode(int(status)) if status else 1
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


_program, _module, *_ = *sys.orig_argv[1:3], "", ""
if "OPENRLHF_EXT_TESTS_FORKS" in os.environ and (
    _program.endswith("/ray/_private/workers/default_worker.py")
    # a rank that train_sft has started asks the kernel whether it is its parent
    or _program == "-m" and _module.startswith(("openrlhf_ext.", "tests.")) and "OPENRLHF_EXT_LAUNCHER" not in os.environ
):
    stand_in(os.environ["OPENRLHF_EXT_TESTS_FORKS"])
