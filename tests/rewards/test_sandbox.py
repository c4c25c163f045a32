"""Code that a model wrote earns what it computes, and can do nothing else."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from openrlhf_ext.rewards import sandbox, sandboxed
from openrlhf_ext.rewards.sandbox import BadTests, Limits, SandboxMissing, run_asserts

TESTS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0\nassert add([1], [2]) == [1, 2]"
RIGHT = "def add(a, b):\n    return a + b\n"
LIMITS = Limits(seconds=20, cpu_s=20, memory_mib=256)
SHORT = Limits(seconds=0.5, cpu_s=5, memory_mib=256)


def failure(code: str, limits: Limits = LIMITS) -> str:
    """What an answer that earns nothing failed by."""
    outcome = run_asserts(code, TESTS, limits)
    assert outcome.passed < outcome.asserts == 3, outcome
    return outcome.failure


def test_a_right_answer_passes_and_a_wrong_one_does_in_part() -> None:
    assert run_asserts(RIGHT, TESTS, LIMITS) == sandbox.Outcome(3, 3, "")
    outcome = run_asserts("def add(a, b):\n    return 3", TESTS, LIMITS)
    assert (outcome.passed, outcome.failure) == (1, "does not hold: assert add(-1, 1) == 0")


def test_plain_values_pass_both_ways_as_they_are() -> None:
    code = (
        "import math, collections\ndef same(x): return x\ndef kind(x, *, deep=0): return "
        "type(x).__name__, deep"
    )
    tests = """
values = [None, True, 0, -5, 2.5, "text", [1, [2]], (1, (2,)), {1, 2}, frozenset({3}), {"a": (1,), 2: {"list": []}}]
for value in values:
    assert same(value) == value and type(same(value)) is type(value)
assert [kind(value)[0] for value in values[:3]] == ["NoneType", "bool", "int"] and kind(1, deep=2) == ("int", 2)
assert all(same(n) == n for n in range(3))
"""
    assert run_asserts(code, tests, LIMITS).passed == 2


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import sys; sys.exit(0)", "SystemExit"),
        ("import os; os._exit(0)", "it ended (status 0)"),
        (
            "import builtins; builtins.AssertionError = ValueError\ndef add(a, b): return 3.5",
            "does not hold",
        ),
        ("import builtins; builtins.len = int\ndef add(a, b): return 0", "it ended (status 1)"),
        (
            "class Any:\n  def __eq__(self, other): return True\ndef add(a, b): return Any()",
            "no plain value",
        ),
        (
            "class Any(int):\n  def __eq__(self, other): return True\ndef add(a, b): return Any(7)",
            "no plain value",
        ),
        ("def add(a, b): return True\nprint('3 asserts passed')", "does not hold"),
        ("def add(", "SyntaxError"),
        ("", "KeyError"),
        ("def add(a, b): return 10**100_000", "4300 digits"),
        (
            "def add(a, b):\n  x = []\n  for _ in range(9999): x = [x]\n  return x",
            "nested more than",
        ),
        ("def add(a, b): return 'x' * 10**6", "more than 65536 bytes"),
        ("def add(a, b): return bytearray(10**9)", "MemoryError"),
        ("def add(a, b):\n  return add(a, b)", "RecursionError"),
    ],
)
def test_what_is_no_right_value_earns_nothing(code: str, why: str) -> None:
    assert why in failure(code)


REPLIES = (
    "import os\nfor descriptor in range(16):\n  try: os.write(descriptor, {!r})\n  except "
    "OSError: pass\n" + RIGHT
)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"value": 3}\n', "does not hold"),
        (b'{"passed": 3}\n', "not asked"),
        (b"[" * 60_000 + b"\n", "no JSON"),
        (b'{"value": {"set": [[]]}}\n' * 3, "no plain value"),
        (b'{"value": {"a": 1, "b": 2}}\n', "no plain value"),
        (b"3\n", "not asked"),
        (b"x" * 100_000, "more than 65536 bytes"),
    ],
    ids=["value", "passed", "deep", "unhashable", "two kinds", "number", "flood"],
)
def test_forged_replies_are_values_at_most(line: bytes, why: str) -> None:
    assert why in failure(REPLIES.format(line))


def test_it_cannot_see_what_is_expected() -> None:
    code = """
import gc, sys
def add(a, b):
    frame, seen = sys._getframe(), []
    while frame:
        seen.append(repr(frame.f_locals) + repr(frame.f_globals))
        frame = frame.f_back
    return "".join(["42"] * 10) in " ".join(seen) + repr(gc.get_objects())
"""
    outcome = run_asserts(
        code, f"assert add(1, 2) == {'42' * 10}\nassert add(1, 2) is False", LIMITS
    )
    assert outcome.passed == 1, outcome


@pytest.mark.parametrize(
    "attempt",
    [
        "open('{folder}/written', 'w')",
        "open('{folder}/label')",
        "os.listdir('/')",
        "os.unlink('{folder}/label')",
        "os.mkdir('{folder}/made')",
        "os.fork()",
        "os.posix_spawn('/bin/true', ['true'], {{}})",
        "os.execv('/bin/true', ['true'])",
        "os.kill({parent}, 9)",
        "os.kill(os.getppid(), 9)",
        "os.killpg(0, 9)",
        "os.setuid(1)",
        "os.chmod('{folder}/label', 0)",
        "os.symlink('{folder}/label', '{folder}/link')",
        "os.memfd_create('x')",
        "os.stat('{folder}/label')",
    ],
)
def test_the_kernel_refuses(attempt: str, tmp_path: Path) -> None:
    (tmp_path / "label").write_text("3")
    code = f"import os\n{attempt.format(folder=tmp_path, parent=os.getpid())}\n{RIGHT}"
    assert failure(code).startswith("PermissionError"), (
        "and the answer earns nothing, though add is right"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["label"]


def test_it_has_no_network_though_it_calls_the_kernel_itself() -> None:
    code = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def add(a, b):
    return [libc.socket({socket.AF_INET.value}, {socket.SOCK_STREAM.value}, 0), ctypes.get_errno()]
"""
    # ctypes is there, since the filter is set with it; libc's function is called, and the kernel
    # says no
    outcome = run_asserts(code, "assert add(1, 2) == [-1, 1]", LIMITS)
    assert outcome.passed == 1, outcome


def test_threads_and_unknown_modules_are_not_there() -> None:
    assert "can't start new thread" in failure(
        "import _thread\n_thread.start_new_thread(print, ())\n" + RIGHT
    )
    assert "No module named 'socket'" in failure("import socket\n" + RIGHT)
    assert (
        run_asserts(
            "".join(f"import {name}\n" for name in sandboxed.MODULES) + RIGHT, TESTS, LIMITS
        ).passed
        == 3
    )


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "def add(a, b):\n  while True: pass",
        "import os, time\nos.close(0)\ntime.sleep(60)",
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass",
        "def add(a, b):\n  sum(range(10**12))",
        "import re\nre.match('(a+)+b', 'a' * 64)",
    ],
)
def test_it_has_its_time_and_no_more(code: str) -> None:
    assert "longer than 0.5 s" in failure(code, SHORT)


def test_the_time_is_that_of_all_calls_together() -> None:
    code = "import time\ndef add(a, b):\n  time.sleep(0.4)\n  return a + b"
    outcome = run_asserts(code, TESTS, SHORT)
    assert outcome.passed == 1 and "longer than 0.5 s" in outcome.failure


def test_seconds_of_a_core_are_limited_too() -> None:
    assert "it ended (status -9)" in failure("while True: pass", Limits(seconds=60, cpu_s=1))


def test_nothing_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "secret")
    code = "import os, sys\ndef seen(): return [dict(os.environ), sys.argv[1:], sorted(os.environ)]"
    with sandbox.Answer(code, LIMITS) as answer:
        environment, arguments, _ = answer.call("seen")
        assert set(environment) <= {"LD_LIBRARY_PATH", "LC_CTYPE"}, "Python sets LC_CTYPE itself"
        assert arguments == [str(LIMITS.memory_mib), str(LIMITS.cpu_s), str(os.getpid())]


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        ("x = add(1, 2)", "must have an assert"),
        ("assert 1 == 1", "call a function of the answer"),
        ("assert add(", "must be Python"),
        ("assert add(print, 1) == 2", "add is called with what no process"),
    ],
)
def test_tests_that_no_answer_can_pass_are_an_error(tests: str, why: str) -> None:
    with pytest.raises(BadTests, match=why):
        run_asserts(RIGHT, tests, LIMITS)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("x = 1\n  for _ in range(49): x = [x]", "nested more than 50 deep"),
        ("x = -2", "a complex number"),
    ],
)
def test_a_value_of_the_answer_that_cannot_be_sent_on_earns_nothing(given: str, why: str) -> None:
    """Neither at once nor by way of a name; what the tests pass of their own stays their fault."""
    code = f"def add(a, b):\n  {given}\n  return x"
    for tests in (
        "assert add([add(1, 1) ** 0.5] if add(1, 1) == -2 else [add(1, 1)], 1) == 3",
        "x = add(1, 1)\nassert add([x ** 0.5] if x == -2 else [x], 1) == 3",
    ):
        outcome = run_asserts(code, tests, LIMITS)
        assert outcome.passed == 0 and why in outcome.failure
        with pytest.raises(BadTests, match="object is no plain value"):
            run_asserts(
                code, f"assert add(1, 1) != 5\nassert add(1, object()) == 3\n{tests}", LIMITS
            )


def test_without_the_kernels_filter_nothing_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "sandboxed.py"
    program.write_text(Path(sandboxed.__file__).read_text().replace('"x86_64": (0', '"none": (0'))
    monkeypatch.setattr(sandbox, "_PROGRAM", str(program))
    with pytest.raises(SandboxMissing, match="no filter of system calls is written for linux"):
        run_asserts(RIGHT, TESTS, LIMITS)


def test_a_process_that_never_starts_is_an_error_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "sandboxed.py"
    program.write_text("raise SystemExit(3)")
    monkeypatch.setattr(sandbox, "_PROGRAM", str(program))
    with pytest.raises(SandboxMissing, match=r"its process did not start \(status 3\)"):
        run_asserts(RIGHT, TESTS, LIMITS)
