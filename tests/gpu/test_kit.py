"""The command that a user types on a GPU machine, here on the CPU; and what becomes of checks that
fail or hang."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import bad_checks, calls
from tests.gpu import run as kit_run
from tests.patience import PATIENCE_S, until

ROOT = Path(__file__).resolve().parents[2]
BAD = bad_checks.NAME
_WITHOUT_SERVICES = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        absent = name.split(".")[0] in ("ray", "vllm", "openrlhf", "deepspeed", "mbridge")
        return None if absent else super().find_spec(name, path, target)

sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
"""


def start(output: Path, *arguments: str, **environment: str) -> subprocess.Popen:
    command = ["bash", "tests/gpu/run.sh", *arguments, "--output", str(output)]
    own = {"PYTHON": sys.executable, "CHILD_FILE": str(output.parent / "child"), **environment}
    # without what pytest has and a machine with a GPU has not
    given = {
        name: value for name, value in os.environ.items() if name != "OPENRLHF_EXT_TESTS_FORKS"
    } | own
    return subprocess.Popen(
        command, cwd=ROOT, env=given, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def run(output: Path, *arguments: str, **environment: str) -> tuple[int, str, dict[str, Any]]:
    """Exit code, what was printed, the file."""
    process = start(output, *arguments, **environment)
    text, _ = process.communicate(timeout=PATIENCE_S)
    return process.returncode, text, json.loads(output.read_text()) if output.exists() else {}


def main(monkeypatch: pytest.MonkeyPatch, output: Path, *arguments: str) -> int | str | None:
    """What the command ends with, here without another process for it; the checks have theirs."""
    monkeypatch.setattr(sys, "argv", ["run.sh", *arguments, "--output", str(output)])
    with pytest.raises(SystemExit) as ended:
        kit_run.main()
    return ended.value.code


def is_there(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.slow
def test_a_check_of_the_policy_and_one_that_needs_a_gpu_on_a_cpu_without_ray_and_vllm(
    tmp_path: Path,
) -> None:
    """As on a machine that has neither: the interpreter does not find them. The whole call takes a
    minute on a CPU."""
    (tmp_path / "sitecustomize.py").write_text(_WITHOUT_SERVICES)
    modules = {check.name.partition(":")[0] for check in calls.CHECKS if check.call == 1}
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    program = (
        f"from openrlhf_ext import patches; patches.apply(); import {', '.join(sorted(modules))}"
    )
    imports = [sys.executable, "-c", program]
    subprocess.run(imports, cwd=ROOT, env=environment, check=True, timeout=PATIENCE_S)
    checks = {
        "transport:ipc": "passed",
        "policy:three_steps": "passed",
        "transport:expandable": "skipped",
    }
    for only, status in checks.items():
        words = ("--only", only, "--minutes", str(PATIENCE_S / 60))
        code, text, report = run(tmp_path / f"{status}.json", *words, PYTHONPATH=str(tmp_path))
        ((name, check),) = report["checks"].items()
        assert (only in name, check["status"], code) == (True, status, int(status == "skipped")), (
            text
        )
        assert (
            report["versions"]["torch"]
            and report["commit"]["commit"]
            and report["hardware"]["cores"]
        )
        assert "0 failed" in text.splitlines()[-1]
    assert "needs a GPU" in check["error"]


def test_every_check_is_where_the_list_says() -> None:
    """Read, not imported, which takes long: call 1's are imported above, those of calls 2 and 3 by
    test_layers.py."""
    importlib.import_module("tests.gpu.study")  # call 4's
    names = [(check.name, check.call) for check in calls.CHECKS]
    assert len(set(names)) == len(names)
    for check in calls.CHECKS:
        module, function = check.name.split(":")
        tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
        assert function in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)], (
            check.name
        )


def test_a_bad_check_fails_alone_and_the_others_go_on(tmp_path: Path) -> None:
    code, text, report = run(tmp_path / "gpu.json", "--calls", BAD, "--bundle", str(tmp_path))
    checks = {name.split(":")[1]: check for name, check in report["checks"].items()}
    found = {name: check["status"] for name, check in checks.items()}
    assert code == 1 and found == {
        "wrong": "failed",
        "crashing": "failed",
        "leaving": "failed",
        "unwritable": "failed",
        "hanging": "failed",
        "elsewhere": "skipped",
        "lacking": "skipped",
        "good": "passed",
    }
    assert (
        "in wrong" in checks["wrong"]["error"]
        and "two and two are five" in checks["wrong"]["error"]
    )
    assert (
        "signal 11 (SIGSEGV)" in checks["crashing"]["error"]
        and "in crashing" in checks["crashing"]["output"]
    )
    assert "without a result" in checks["leaving"]["error"]
    assert "not JSON serializable" in checks["unwritable"]["error"]
    assert (
        "limit of 30 s" in checks["hanging"]["error"]
        and "in hanging" in checks["hanging"]["output"]
    )
    assert checks["elsewhere"]["error"] == "it needs a machine of another kind"
    assert "not installed here: no_such_package (--bundle)" in checks["lacking"]["error"]
    assert checks["good"]["measured"] == {"device": "cpu", "bundle": str(tmp_path)}
    assert not is_there(int((tmp_path / "child").read_text())), (
        "a process of the hanging check is left"
    )
    assert "1 passed, 5 failed, 2 skipped, 0 not run" in text.splitlines()[-1]
    (good,) = [line for line in text.splitlines() if ":good " in line]
    assert "device cpu" in good, "what was found, though the call may be cut after it"


def test_a_finding_is_one_line_of_numbers_and_short_words() -> None:
    measured = {
        "kl": [1e-3, 2.5e-4],
        "bits": {"same": True, "name": "x" * 200},
        "empty": [],
        "seconds": 3,
    }
    assert kit_run.finding({"measured": measured}) == "kl 0.00025, bits.same True, seconds 3"
    assert kit_run.finding({"error": "one\n  two: three", "measured": measured}) == "  two: three"
    assert len(kit_run.finding({"measured": {f"number{i}": i for i in range(100)}})) < 200


def test_call_0_has_what_the_whole_bundle_can_run_and_names_checks_of_other_calls() -> None:
    """Its limits are no tighter than what a check is expected to take; nothing in it builds
    TransformerEngine."""
    first = [check for check in calls.CHECKS if check.call == 0]
    others = {check.name for check in calls.CHECKS if check.call != 0}
    assert len(first) == 10 and [check.name for check in first if check.name not in others] == [
        "tests.gpu.memory:streaming_of_four_shards"
    ]
    assert not any("te_build" in check.name or "layers" in check.name for check in first)


def test_what_has_no_time_left_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHILD_FILE", str(tmp_path / "child"))
    code = main(
        monkeypatch, tmp_path / "gpu.json", "--calls", BAD, "--call", "3", "--minutes", "0.12"
    )
    cut, none = json.loads((tmp_path / "gpu.json").read_text())["checks"].values()
    assert (cut["status"], none["status"]) == ("not run", "not run")
    assert code == 2, "nothing passed, and nothing failed either: the next call goes on"
    assert cut["error"].startswith("not run: time was up after 7 of its 600 s")
    assert none["error"] == "not run: time was up"


def test_what_passed_before_is_not_run_again_and_the_clocks_of_what_runs_are_kept(
    tmp_path: Path, monkeypatch
) -> None:
    """With a stand-in for nvidia-smi, which says the GPU's name, and then its clocks as long as a
    check runs."""
    (tmp_path / "nvidia-smi").write_text(_SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    output, words = tmp_path / "gpu.json", ("--calls", BAD, "--only", ":good,:partial,:always")
    assert main(monkeypatch, output, *words) == 2, "a check had no time for all that it measures"
    first = json.loads(output.read_text())
    good, partial, always = first["checks"].values()
    assert good["gpu"]["busy_samples"] > 1 and good["gpu"]["sm_mhz"] == {
        "min": 1500.0,
        "median": 1980.0,
        "max": 1980.0,
    }
    assert partial["status"] == "not run" and partial["measured"] == {"half": 1}
    assert "time was up: half is there" in partial["error"]
    first["commit"]["commit"] = "an earlier one"
    output.write_text(json.dumps(first))
    assert main(monkeypatch, output, *words, "--skip-passed", str(output)) == 2, (
        "its own file may be the earlier one"
    )
    carried, partial, again = json.loads(output.read_text())["checks"].values()
    assert carried == {**good, "status": "passed before", "of_commit": "an earlier one"}
    assert (always["status"], partial["status"], again["status"]) == (
        "passed",
        "not run",
        "passed",
    ), "these ran again"
    assert (
        main(monkeypatch, output, "--calls", BAD, "--only", ":good", "--skip-passed", str(output))
        == 0
    )
    assert json.loads(output.read_text())["checks"] == {f"{BAD}:good": carried}, (
        "carried over twice, of one commit"
    )


_SMI = """#!/bin/sh
case "$*" in
*loop-ms*) echo "1200, 2619, 90.5, 40, 3"; echo "1500, 2619, 600.0, 60, 97"
           while true; do echo "1980, 2619, 650.5, 61, 99"; sleep 0.2; done;;
*) echo "A GPU, 80 GiB, 1.0, 700 W, 1980 MHz, 2619 MHz";;
esac
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"must be a file that an earlier call wrote, .* is none \(FileNotFoundError"),
        ('{"checks": {"a": ', r"is none \(JSONDecodeError"),
        ("[1, 2]", r"is none \(TypeError"),
        ('{"cells": {}}', r"is none \(KeyError: 'checks'"),
        (
            '{"checks": {}, "commit": {"commit": "a"}, "versions": {"torch": "1.0"}, '
            '"hardware": {"gpus": [{"name": '
            '"H9"}]}}',
            "was measured on H9 with torch 1.0, this is .*: leave it out",
        ),
    ],
)
def test_an_earlier_report_that_is_none_is_refused(
    tmp_path: Path, monkeypatch, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / "earlier.json").write_text(text)
    words = ("--calls", BAD, "--only", ":good", "--skip-passed", str(tmp_path / "earlier.json"))
    said = main(monkeypatch, tmp_path / "gpu.json", *words)
    assert re.search(message, str(said)) and "\n" not in str(said), said
    assert not (tmp_path / "gpu.json").exists()


def test_a_run_that_is_ended_keeps_what_it_has_and_leaves_no_process(tmp_path: Path) -> None:
    output, child = tmp_path / "gpu.json", tmp_path / "child"
    process = start(output, "--calls", BAD, "--only", ":hanging")
    until(child.exists, "the check begins")
    until(child.read_text, "its process is known")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signal.SIGTERM and not is_there(int(child.read_text()))
    found = {
        name: check["error"] for name, check in json.loads(output.read_text())["checks"].items()
    }
    assert found == {f"{BAD}:hanging": "the run was ended before it"}, "--only says which checks"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("__version__ = '2.9.1'", "torch must be 2.11 or newer, .* has 2.9.1"),
        ("raise ImportError('no torch here')", r"cannot import torch \(no torch here\)"),
    ],
)
def test_an_interpreter_without_torch_or_with_an_old_one_is_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(text)
    code, text, report = run(tmp_path / "gpu.json", PYTHONPATH=str(tmp_path))
    assert code == 1 and report == {}
    assert re.search(message, text), text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--bundle", "nowhere"], "--bundle must be a folder"),
        (
            ["--only", "nothing"],
            "--only nothing names no check; these are known: tests.gpu.transport:checksums",
        ),
    ],
)
def test_what_cannot_work_is_refused(
    tmp_path: Path, monkeypatch, words: list[str], message: str
) -> None:
    said = main(monkeypatch, tmp_path / "gpu.json", *words)
    assert message in str(said) and not (tmp_path / "gpu.json").exists(), said
