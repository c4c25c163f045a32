"""Checks that do what checks may do, for the test of the runner."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.gpu.calls import Check
from tests.gpu.kit import Machine, NotHere, TimeUp

NAME = "tests.gpu.bad_checks"


def good(machine: Machine) -> dict[str, Any]:
    return {"device": machine.device.type, "bundle": str(machine.bundle)}


def wrong(machine: Machine) -> dict[str, Any]:
    raise AssertionError("two and two are five")


def crashing(machine: Machine) -> dict[str, Any]:
    ctypes.string_at(0)
    return {}


def leaving(machine: Machine) -> dict[str, Any]:
    os._exit(0)


def hanging(machine: Machine) -> dict[str, Any]:
    """With a process in a session of its own, as Ray's are, whose number it leaves."""
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True
    )
    Path(os.environ["CHILD_FILE"]).write_text(str(child.pid))
    time.sleep(3600)
    return {}


def elsewhere(machine: Machine) -> dict[str, Any]:
    raise NotHere("it needs a machine of another kind")


def unwritable(machine: Machine) -> dict[str, Any]:
    return {"device": machine.device}


def partial(machine: Machine) -> dict[str, Any]:
    raise TimeUp("half is there", {"half": 1})


def always(machine: Machine) -> dict[str, Any]:
    return {}


CHECKS = (
    *(Check(f"{NAME}:{name}", 1, 60) for name in ("wrong", "crashing", "leaving", "unwritable")),
    Check(
        f"{NAME}:hanging", 1, 30
    ),  # a process takes three seconds to begin, 15 on a loaded machine
    Check(f"{NAME}:elsewhere", 1, 60),
    # there is no such function either: it is not called
    Check(f"{NAME}:lacking", 1, 60, ("no_such_package",)),
    Check(f"{NAME}:good", 1, 60),
    Check(f"{NAME}:hanging", 3, 600),
    Check(f"{NAME}:elsewhere", 3, 60),
    Check(f"{NAME}:partial", 4, 60),
    Check(f"{NAME}:always", 4, 60, always=True),
)
