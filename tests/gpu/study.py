"""Call 4: the FP8 study, as a user starts it."""

from __future__ import annotations

import json
import subprocess

from tests.gpu.kit import Machine, Partly
from tests.gpu.te_build import ROOT

_TO_END_S = 20.0  # of the check's time, for the report


def fp8(machine: Machine) -> dict:
    """``examples/scripts/fp8_study.sh`` with the bundle; the next call goes on where this one ended.

    Raises:
        Partly: a cell failed; the others are kept.
    """
    machine.need_gpu("the study of FP8")
    out = (machine.bundle or ROOT / "build") / "fp8_study"
    command = ["bash", "examples/scripts/fp8_study.sh", "--out", str(out)]
    command += ["--minutes", str((machine.seconds - _TO_END_S) / 60)]
    command += ["--bundle", str(machine.bundle)] if machine.bundle else []
    done = subprocess.run(command, cwd=ROOT, timeout=machine.seconds)  # prints into the check's own output
    found = json.loads((out / "study.json").read_text()) if (out / "study.json").exists() else {}
    if done.returncode not in (0, 2):
        raise Partly(f"the study ended with {done.returncode}", found)
    return found
