"""Memory by measuring the process, not by reading the code. Sequence parallelism:
``test_sharded``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.head.memory import MIB, SLACK
from tests.head.memory_worker import CASES, FULL
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def extras() -> list[int]:
    command = [sys.executable, "-m", "tests.head.memory_worker"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    if None in found:
        pytest.skip("this kernel cannot reset a process's resident peak")
    return found


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda i: "-".join(map(str, CASES[i])))
def test_peak_stays_within_the_workspace(extras, case):
    _, tokens, _, width, dtype, workspace = CASES[case]
    hidden_bytes = tokens * width * getattr(torch, dtype).itemsize
    assert extras[case] <= workspace + hidden_bytes + SLACK, f"{extras[case] / MIB:.1f} MiB"


def test_measuring_sees_full_logits(extras):
    """The yardstick works: all logits at once are seen."""
    tokens, vocab = FULL
    assert extras[-1] > 0.9 * 4 * tokens * vocab
