"""A mixture of experts in a real vLLM, with the patch and without it, through two loads of other
weights."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from types import ModuleType, SimpleNamespace

import pytest

from openrlhf_ext.patches import vllm_moe
from openrlhf_ext.patches.import_hooks import MARK, change_once
from tests.patience import PATIENCE_S

TOLERANCE = 3e-5  # nats in fp32; what is wrong is off by more than 0.5


def served(way: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.patches.served_mixture", way]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)


def results(run: subprocess.CompletedProcess[str]) -> list:
    return json.loads(run.stdout.splitlines()[-1])  # other libraries print, too


@pytest.mark.parametrize("way", ["padded", "twice"])
def test_log_probs_and_experts_are_those_of_transformers_after_every_load(way: str) -> None:
    run = served(way)
    assert run.returncode == 0, run.stderr
    found = results(run)
    assert len(found) == 4 and all(off < TOLERANCE and rows == 0 for off, rows in found), found


def test_without_the_patch_a_load_is_silently_wrong() -> None:
    run = served("stock")
    assert run.returncode == 0, run.stderr
    offs = [off for off, _ in results(run)]
    assert all(off < TOLERANCE for off in offs[:2]) and all(off > 0.5 for off in offs[2:]), offs


def test_without_the_patch_experts_are_not_told() -> None:
    run = served("stock_experts")
    assert run.returncode == 1 and "AuxOutput Connector requires Model Runner V2" in run.stderr


def test_a_worker_that_vllm_spawns_gets_it_from_the_worker_extension() -> None:
    """By then it has imported what is changed."""
    code = f"""
        import vllm.v1.worker.cpu_model_runner as runner
        import {vllm_moe._FUSED_MOE}.unquantized_fused_moe_method as method
        assert not hasattr(method, "{MARK}")
        import openrlhf_ext.rollout.worker_extension
        assert all(hasattr(module, "{MARK}") for module in (method, runner))
        """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert run.returncode == 0, run.stderr


def test_modules_of_other_devices_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.platforms.current_platform", SimpleNamespace(is_cpu=lambda: False))
    change_once(lambda _: pytest.fail("changed"), ModuleType("changed"))
