"""What vLLM's worker processes have to import must stay light."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.patience import PATIENCE_S


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("openrlhf_ext.rollout.response", ["torch", "ray", "vllm", "openrlhf"]),
        ("openrlhf_ext.rollout.sync.sender", ["ray", "vllm", "openrlhf"]),
        ("openrlhf_ext.rollout.worker_extension", ["openrlhf", "deepspeed"]),
    ],
)
def test_importing_does_not_import(module: str, absent: list[str]) -> None:
    code = f"import sys, {module}; print([name for name in {absent} if name in sys.modules])"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "[]"
