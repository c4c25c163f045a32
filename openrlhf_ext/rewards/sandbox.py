"""Functions that a model wrote, called from a process that they cannot reach.

The answer's code runs in a child process (``sandboxed.py``) with limits on memory and time that the
kernel lets compute and nothing else. Only arguments go in and only plain values come back: the
tests run on this side, so there is no expected result, no assert and no word of success where the
code could read, replace or print it.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from openrlhf_ext.rewards.sandboxed import decoded, encoded

# bytes: nobody waits for a value that takes longer to compare than to compute
LARGEST_REPLY = 1 << 16
_START_S = 20.0  # an interpreter and its modules, on a busy machine; not the answer's time
_END_S = 1.0
_PROGRAM = str(Path(__file__).with_name("sandboxed.py"))


class AnswerFailed(Exception):
    """The answer's code raised, ended its process, passed a limit or returned what is no plain
    value."""


class BadTests(ValueError):
    """The tests, which are yours, cannot be run against any answer."""


class SandboxMissing(RuntimeError):
    """This machine cannot confine the code, so nothing is run."""


@dataclass(frozen=True)
class Limits:
    """Of one answer, all of its calls together: seconds by the clock, seconds of a core, address
    space (MiB)."""

    seconds: float = 5.0
    cpu_s: int = 5
    memory_mib: int = 256


@dataclass(frozen=True)
class Outcome:
    """Asserts that hold, of all; what the first one that does not hold failed by, '' if all
    hold."""

    passed: int
    asserts: int
    failure: str


class Answer:
    """An answer's code in a process of its own; a context manager. Raises AnswerFailed: the code
    does not run; SandboxMissing."""

    def __init__(self, code: str, limits: Limits) -> None:
        command = [
            sys.executable,
            "-I",
            "-S",
            _PROGRAM,
            *map(str, (limits.memory_mib, limits.cpu_s, os.getpid())),
        ]
        # its loader may need the path; nothing else of this process's environment goes with it
        environment = {
            name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ
        }
        # in this process's group: who kills a grading worker kills the answer it is at
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd="/",
        )
        self._left, self._told = b"", False
        self._give(_START_S)
        try:
            self._started()
            self._give(limits.seconds)
            self._ask(code=code)
        except BaseException:
            self.close()
            raise

    def call(self, name: str, *arguments: Any, **keywords: Any) -> Any:
        """The value of one of its functions. Raises AnswerFailed; BadTests: an argument is no plain
        value, and is not made of those that the answer gave before."""
        try:
            given = encoded([list(arguments), keywords])
        except (TypeError, ValueError) as error:
            is_its_own = self._told and isinstance(error, ValueError)
            kind = AnswerFailed if is_its_own else BadTests
            raise kind(f"{name} is called with what no process can be sent: {error}") from error
        value = self._ask(name=name, arguments=given)
        self._told = True
        return value

    def close(self) -> None:
        """Kills the process, whatever it is at."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):  # what it did not read
                _open(pipe).close()

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _started(self) -> None:
        try:
            reason = self._reply("its process did not start").get("unprotected")
        except AnswerFailed as error:  # no code of an answer has run yet
            raise SandboxMissing(
                f"the process for a model's code cannot be used: {error}"
            ) from error
        if reason:
            raise SandboxMissing(f"code of a model is not run on this machine: {reason}")

    def _ask(self, **request: Any) -> Any:
        line = json.dumps(request).encode() + b"\n"
        descriptor = _open(self._process.stdin).fileno()
        os.set_blocking(descriptor, False)
        while line:
            self._wait([], [descriptor])
            try:
                line = line[os.write(descriptor, line) :]
            except OSError as error:
                raise AnswerFailed(self._end("it reads no calls")) from error
        reply = self._reply("it ended")
        if "value" not in reply:
            raise AnswerFailed(str(reply.get("raised", "it replied what it was not asked")))
        try:
            return decoded(reply["value"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise AnswerFailed("it replied what is no plain value") from error

    def _reply(self, what: str) -> dict[str, Any]:
        descriptor = _open(self._process.stdout).fileno()
        while b"\n" not in self._left and len(self._left) <= LARGEST_REPLY:
            self._wait([descriptor], [])
            if not (read := os.read(descriptor, LARGEST_REPLY)):
                raise AnswerFailed(self._end(what))
            self._left += read
        line, _, self._left = self._left.partition(b"\n")
        if len(line) > LARGEST_REPLY:
            raise AnswerFailed(f"it returned more than {LARGEST_REPLY} bytes")
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise AnswerFailed("it replied what is no JSON") from error
        if not isinstance(reply, dict):
            raise AnswerFailed("it replied what it was not asked")
        return reply

    def _give(self, seconds: float) -> None:
        self._seconds, self._deadline = seconds, time.monotonic() + seconds

    def _wait(self, readable: list[int], writable: list[int]) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0 or not any(select.select(readable, writable, [], left)):
            self._process.kill()
            raise AnswerFailed(f"it took longer than {self._seconds:g} s")

    def _end(self, what: str) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)  # it has closed its pipes, which comes before its end
        self._process.kill()
        return f"{what} (status {self._process.wait()})"


def run_asserts(code: str, tests: str, limits: Limits) -> Outcome:
    """Runs ``tests``, statements of yours with asserts, against the functions of ``code``, which a
    model wrote.

    Every name that the tests use and neither define nor import is a function of the answer; its
    arguments and its value are plain values, copies of those on the other side. An assert that does
    not hold, or whose call fails, does not stop the others.

    Raises:
        BadTests: the tests are no Python, have no assert, call no function of the answer, or call
            one with what is no plain value.
        SandboxMissing: this machine cannot confine the code.
    """
    tree = _tests(tests)
    names = _asked_for(tree)
    statements, asserts = tree.body, sum(isinstance(each, ast.Assert) for each in tree.body)
    if not asserts or not names:
        raise BadTests(
            f"tests must have an assert, and call a function of the answer: got {tests!r}"
        )
    passed, failures = 0, []
    try:
        with Answer(code, limits) as answer:
            space: dict[str, Any] = {name: partial(answer.call, name) for name in names}
            for statement in statements:
                try:
                    exec(compile(ast.Module([statement], []), "<tests>", "exec"), space)
                    passed += isinstance(statement, ast.Assert)
                except BadTests:
                    raise
                except (AssertionError, AnswerFailed) as error:
                    failures.append(str(error) or f"does not hold: {ast.unparse(statement)}")
                except Exception as error:
                    # of a wrong value, such as None where a number is compared: the tests hold for
                    # right answers
                    failures.append(f"{type(error).__name__}: {error}: {ast.unparse(statement)}")
    except AnswerFailed as error:
        failures.append(str(error))
    return Outcome(passed, asserts, failures[0] if failures else "")


def _tests(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise BadTests(f"tests must be Python: {error}") from error


def _asked_for(tree: ast.Module) -> set[str]:
    """Names that the tests have from the answer."""
    used: set[str] = set()
    own = set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else own).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.alias):
            own.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.arg):
            own.add(node.arg)
    return used - own


def _open(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None, "the process was started with it"
    return pipe
