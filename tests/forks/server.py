"""A process that has imported what Ray's workers and whole commands import from other packages, and
forks them (sitecustomize.py).

Neither openrlhf_ext, nor vLLM, nor Megatron, nor Ray is imported here: their patches, environments,
and threads are the worker's own. Every worker is a process as any other, apart from its parent.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import random
import resource
import runpy
import select
import signal
import socket
import sys
import threading
from typing import Any

_IMPORTS = (
    "torch._dynamo", "torch._inductor.standalone_compile", "torch._inductor.lowering", "torch.distributed.checkpoint",
    "torch.distributed.tensor", "torch.distributed.nn", "transformers.models.auto.image_processing_auto",
    "transformers.modeling_utils", "scipy.signal", "openai.types.responses", "wandb", "torch.utils.tensorboard",
    "cv2", "mistral_common.protocol.instruct.messages", "xgrammar", "llguidance", "fastapi",
)  # fmt: skip


def main(address: str, tests: int) -> None:
    """Serves at the address until the process with the pid ``tests`` ends.

    It leaves the tree of the test that starts it: what ends or looks at the processes below that
    test would find the workers of other tests, which run at the same time.
    """
    if os.fork():
        os._exit(0)
    gc.disable()
    for name in _IMPORTS:
        with contextlib.suppress(ImportError):
            __import__(name)
    gc.collect()
    gc.freeze()  # a collection in a worker leaves the pages of what it shares alone
    gc.enable()
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not fork"
    serve(address, os.pidfd_open(tests))


def serve(address: str, tests: int) -> None:
    """Forks a worker for every connection, and tells it how the worker ended. Ends with the
    tests."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address + ".binding")
    listener.listen(64)
    os.rename(address + ".binding", address)
    poll = select.poll()
    poll.register(tests, select.POLLIN)
    poll.register(listener, select.POLLIN)
    # by the descriptor of a worker, and of its stand-in's connection: the worker, its connection
    # and its note
    ends: dict[int, tuple[int, socket.socket, str]] = {}
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == tests:
                for pid, *_ in ends.values():
                    os.kill(pid, signal.SIGKILL)
                return
            if descriptor == listener.fileno():
                connection, _ = listener.accept()
                if (forked := fork(address, connection)) is None:
                    continue
                end = os.pidfd_open(forked[0])
                ends[end] = ends[connection.fileno()] = (forked[0], connection, forked[1])
                poll.register(end, select.POLLIN)
                poll.register(connection, select.POLLIN)
                continue
            if descriptor not in ends:  # ended in this round
                continue
            pid, connection, note = ends[descriptor]
            if descriptor == connection.fileno():  # the stand-in was killed
                os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            with contextlib.suppress(FileNotFoundError):  # the tests end
                os.unlink(note)  # both pids may be those of other processes soon
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.send(str(status).encode())
            for end in [key for key, value in ends.items() if value[0] == pid]:
                poll.unregister(end)
                del ends[end]
                if end != connection.fileno():
                    os.close(end)
            connection.close()


def fork(address: str, connection: socket.socket) -> tuple[int, str] | None:
    """The worker's pid, and the note of it under its stand-in's; None if the stand-in died before
    it asked."""
    message, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    if not message:
        connection.close()
        return None
    worker = json.loads(message)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = run(worker, streams)
        finally:
            os._exit(code)
    note = f"{os.path.dirname(address)}/{worker['parent']}.forked"  # for tests.e2e.jobs
    with open(note + ".new", "w") as file:
        file.write(str(pid))
    os.rename(note + ".new", note)
    for stream in streams:
        os.close(stream)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # serve sees that it died
        connection.send(str(pid).encode())
    return pid, note


def run(worker: dict[str, Any], streams: list[int]) -> int:
    """Runs Ray's worker program, or a module, as its stand-in would have; returns the exit
    status."""
    for descriptor, stream in enumerate(streams):
        os.dup2(stream, descriptor)
    os.closerange(3, 256)  # of the server and of other workers
    os.setsid()
    os.chdir(worker["cwd"])
    # setproctitle finds its place by the old ones
    os.environ.update(worker["environ"].items() - os.environ.items())
    signal.pthread_sigmask(signal.SIG_SETMASK, worker["blocked"])
    resource.setrlimit(resource.RLIMIT_NOFILE, worker["files"])
    random.seed()
    sys.argv = worker["argv"]
    sys.orig_argv[1:] = sys.argv
    code: Any = 0
    try:
        if sys.argv[0] == "-m":
            sys.path[0] = worker["cwd"]
            name, sys.argv = sys.argv[1], sys.argv[1:]
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(sys.argv[0])
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as error:
        code = error.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads as any interpreter does
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else 1


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
