"""The process in which an answer's code runs: a program, started by ``sandbox.py`` and importing
nothing of ours.

It takes its limits, imports what answers may use, and has the kernel refuse every system call that
is not in ``CALLS`` for the rest of its life: no file is opened, no process or thread started, no
signal sent, no socket made. Then it runs the code that comes first on standard input, and answers
calls of its functions, a line of JSON each way. Whatever the code does to this process, it can only
answer
wrongly: what a right answer is never comes here.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import platform
import resource
import signal
import struct
import sys
from typing import Any

MODULES = (
    "abc", "array", "bisect", "calendar", "cmath", "collections", "collections.abc", "copy", "dataclasses", "datetime",
    "decimal", "enum", "fractions", "functools", "heapq", "itertools", "json", "math", "numbers", "operator", "random",
    "re", "statistics", "string", "textwrap", "time", "typing",
)  # fmt: skip
"""What an answer may import: nothing can be read from disk later."""

# number of each system call that an interpreter needs to compute: x86-64, arm64 (asm/unistd_64.h,
# asm-generic/unistd.h)
CALLS = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62), "mmap": (9, 222),
    "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sched_yield": (24, 124), "mremap": (25, 216),
    "madvise": (28, 233), "nanosleep": (35, 101), "getpid": (39, 172), "exit": (60, 93), "gettimeofday": (96, 169),
    "sigaltstack": (131, 132), "futex": (202, 98), "clock_gettime": (228, 113), "clock_nanosleep": (230, 115),
    "exit_group": (231, 94), "getrandom": (318, 278),
}  # fmt: skip
# column of CALLS, the kernel's name (linux/audit.h)
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _MODE_FILTER = 1, 22, 38, 2
# linux/bpf_common.h: BPF_LD | W | ABS, BPF_JMP | JEQ | K, BPF_RET | K
_LOAD, _EQUALS, _RETURN = 0x20, 0x15, 0x06
# linux/seccomp.h: ALLOW, ERRNO | 1, KILL_PROCESS
_ALLOW, _EPERM, _KILL = 0x7FFF0000, 0x00050001, 0x80000000
_LARGEST_DEPTH = 50


class Unprotected(RuntimeError):
    """The kernel does not take the filter: nothing may be run here."""


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def refuse_system_calls() -> None:
    """From here on the kernel answers EPERM to every system call but those of ``CALLS``. Raises
    Unprotected."""
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        raise Unprotected(
            f"no filter of system calls is written for {sys.platform} on {platform.machine()}"
        )
    column, architecture = MACHINES[platform.machine()]
    numbers = [pair[column] for pair in CALLS.values()]
    code = [
        (_LOAD, 0, 0, 4),
        (_EQUALS, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
    ]
    # a match jumps over the numbers that are left and the refusal
    code += [(_EQUALS, len(numbers) - at, 0, number) for at, number in enumerate(numbers)]
    code += [(_RETURN, 0, 0, _EPERM), (_RETURN, 0, 0, _ALLOW)]
    buffer = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in code))
    program = _Program(len(code), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0
    ):
        raise Unprotected(
            "the kernel takes no filter of system calls (seccomp): "
            f"{os.strerror(ctypes.get_errno())}"
        )


def limit(memory_mib: int, cpu_s: int) -> None:
    """Address space, seconds of a core, and no file: neither grown nor dumped."""
    for name, value in (
        (resource.RLIMIT_AS, memory_mib << 20),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(name, (value, value))


def encoded(value: Any, depth: int = 0) -> Any:
    """A plain value as JSON has it: containers other than lists with their kind. Raises TypeError:
    it is not plain;
    ValueError: it is what plain values come to in a container or a power, too deep or complex."""
    if depth > _LARGEST_DEPTH:
        raise ValueError(f"nested more than {_LARGEST_DEPTH} deep")
    kind = type(value)
    if kind is complex:
        raise ValueError("a complex number is no plain value")
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [encoded(each, depth + 1) for each in value]
    if kind in (tuple, set, frozenset):
        return {kind.__name__: [encoded(each, depth + 1) for each in value]}
    if kind is dict:
        return {
            "dict": [
                [encoded(key, depth + 1), encoded(each, depth + 1)] for key, each in value.items()
            ]
        }
    raise TypeError(
        f"{kind.__name__} is no plain value: None, bool, int, float, str, list, tuple, set or dict"
    )


def decoded(value: Any) -> Any:
    """What :func:`encoded` was given. Raises ValueError, TypeError: nothing that it makes."""
    if isinstance(value, list):
        return [decoded(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    made = [decoded(each) for each in content]
    if kind == "dict":
        return dict(made)
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](made)


def main() -> None:
    """Arguments: memory (MiB), seconds of a core, the parent's process number."""
    memory_mib, cpu_s, parent = map(int, sys.argv[1:4])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel was asked
        os._exit(1)
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    for name in MODULES:
        importlib.import_module(name)
    limit(memory_mib, cpu_s)

    def reply(**content: Any) -> None:
        replies.write(json.dumps(content).encode() + b"\n")
        replies.flush()

    try:
        refuse_system_calls()
    except Unprotected as error:
        reply(unprotected=str(error))
        return
    reply(ready=True)
    names: dict[str, Any] = {"__name__": "answer"}
    for line in requests:
        request = json.loads(line)
        try:
            if "code" in request:
                exec(compile(request["code"], "<answer>", "exec"), names)
                reply(value=None)
            else:
                arguments, keywords = decoded(request["arguments"])
                reply(value=encoded(names[request["name"]](*arguments, **keywords)))
        except BaseException as error:  # noqa: B036  whatever the answer raises is its fault, SystemExit too
            reply(raised=f"{type(error).__name__}: {error}"[:500])


if __name__ == "__main__":
    main()
