"""Calls 5 and 6 on a CPU, as far as a minute goes: an engine alone, and what becomes of a run whose
time is up. The whole rehearsal is ``bash tests/gpu/run.sh --call 5``, and ``--call 6``."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import leftovers
from tests.gpu.kit import Machine
from tests.gpu.runs import Runs
from tests.gpu.test_kit import is_there, start
from tests.patience import PATIENCE_S

# its limit counts from the start of the process, which is that of the whole suite here
CPU = Machine(torch.device("cpu"), None, 24 * 3600.0)


@pytest.mark.slow
def test_an_engine_alone_and_a_run(tmp_path: Path) -> None:
    output, logs = tmp_path / "gpu.json", tmp_path / "out"
    logs.mkdir()
    words = ("--only", "engine_alone:first,flight:base", "--minutes", str(PATIENCE_S / 30))
    process = start(output, *words, OUT=str(logs))
    text, _ = process.communicate(timeout=2 * PATIENCE_S)
    assert process.returncode == 0, text
    engine, run = (check["measured"] for check in json.loads(output.read_text())["checks"].values())
    assert (
        engine["attention"] == "CPU_ATTN" and engine["runner"] == "vllm.v1.worker.cpu_model_runner"
    )
    assert all(engine["same_tokens"].values()) and engine["tokens_per_second"] > 0
    assert "Model Runner V2" in engine["not_touched"] and "CUDA IPC" in run["not_touched"]
    assert (
        run["offload/freed_mib"] > 0
        and run["weight_sync/bytes"] > 1 << 20
        and len(run["step_seconds"]) == 3
    )
    kept = zipfile.ZipFile(logs / "flight.zip").namelist()
    assert {"base/base/log", "base/base/metrics.jsonl", "base/base/events.jsonl"} <= set(kept)
    assert any(name.startswith("base/base/ray/") for name in kept), kept


_RECORD = {
    "step": 1,
    "kl/rollout": 1e-4,
    "weight_sync/probe_diff": 1e-2,
    "offload/freed_mib": 5.0,
    "grad_norm": 0.1,
    "throughput/tokens_per_second": 100.0,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"kl/rollout": float("nan")}, "kl/rollout of step 1 is nan, at most 0.005"),
        ({"offload/freed_mib": 0.0}, "the policy freed nothing"),
        ({"grad_norm": 0.0}, "no step had a gradient"),
        ({"step": 2}, r"steps 1 to 1 were to be recorded, got \[2\]"),
        ({"weight_sync/probe_diff": None}, "step . has no probe"),
        ({"code": 3}, "it ended with 3"),
        ({"says": "nothing"}, "it never said 'policy and engines agree'"),
    ],
)
def test_a_run_without_the_proofs_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str | None
) -> None:
    """The command is a stand-in here, which leaves what a run leaves."""
    record = {key: value for key, value in (_RECORD | change).items() if value is not None}
    code, says = record.pop("code", 0), record.pop("says", "policy and engines agree")
    (tmp_path / "stand_in.py").write_text(
        "import json, pathlib, sys\n"
        "out = pathlib.Path(sys.argv[sys.argv.index('--ckpt.output_dir') + 1])\n"
        "out.mkdir()\n"
        f"(out / 'metrics.jsonl').write_text(json.dumps({record!r}) + chr(10))\n".replace(
            "nan", "float('nan')"
        )
        + f"print({says!r})\nsys.exit({code})\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Runs.open(CPU, "test") as runs:
        runs.steps = 1
        if message is None:
            assert runs.run("good", module="stand_in").measured()["kl/rollout"] == 1e-4
        else:
            with pytest.raises(AssertionError, match=message):
                runs.run("bad", module="stand_in")


def test_a_run_whose_time_is_up_leaves_its_log_and_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stand_in.py").write_text(
        "import time\nprint('here it hangs', flush=True)\ntime.sleep(3600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("OUT", str(tmp_path))

    class Ended(Exception):
        pass

    def ended(seconds: float) -> None:
        """Where the check waits for its end, 60 s at most."""
        if seconds > 10:
            raise Ended

    with Runs.open(CPU, "test") as runs, pytest.raises(Ended):
        runs.deadline = 0.0
        monkeypatch.setattr("tests.gpu.runs.time.sleep", ended)
        runs.run("late", module="stand_in")
    assert "test/late/log" in zipfile.ZipFile(tmp_path / "flight.zip").namelist()


def test_a_toy_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPENRLHF_EXT_TOY", str(tmp_path))
    with (
        pytest.raises(FileNotFoundError, match=r"with start/ and data/: .*start.* are missing"),
        Runs.open(CPU, "test"),
    ):
        pass


_ORPHAN = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
open(sys.argv[1], "w").write(str(child.pid))
"""


def test_an_orphan_in_a_session_of_its_own_is_ended_and_others_are_not(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    try:
        with leftovers.none_left():
            subprocess.run([sys.executable, "-c", _ORPHAN, str(tmp_path / "pid")], check=True)
            orphan = int((tmp_path / "pid").read_text())
            assert is_there(orphan)
        assert not is_there(orphan) and is_there(other.pid)
        assert not leftovers._adopts()
    finally:
        other.kill()
        other.wait()
