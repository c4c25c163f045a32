"""Every estimator trains through the whole stack."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from openrlhf_ext.algorithms import algorithm_names
from openrlhf_ext.config.sections.algo import CUSTOM, ESTIMATORS
from openrlhf_ext.reporting import is_documented
from tests.e2e.estimators import OPTIONS
from tests.e2e.jobs import JOB_S, REWARD, Task

REPORTED_BY_ALL = {
    "loss/clip_fraction",
    "algorithm/degenerate_groups",
    "algorithm/entropy_correct",
    "algorithm/entropy_wrong",
    *(f"algorithm/advantage_mass_q{fifth}" for fifth in range(1, 6)),
}
REPORTED_BY = {
    "gtpo_conflict": {
        "algorithm/conflict_forward",
        "algorithm/conflict_backward",
        "algorithm/filtered_completions",
    }
}


def test_every_estimator_is_covered():
    assert set(ESTIMATORS) <= set(algorithm_names())
    assert set(OPTIONS) | {"gae"} == {*ESTIMATORS, CUSTOM}, "gae has a critic: see test_ppo.py"


@pytest.mark.e2e
def test_three_steps_with_every_estimator(tmp_path):
    task = Task.make(tmp_path, reward=REWARD.replace('"rewards": share', '"rewards": float(share > 0.25)'))
    command = [sys.executable, "-m", "tests.e2e.estimators", str(tmp_path)]
    root = Path(__file__).resolve().parent.parent.parent
    run = subprocess.run(command, cwd=root, env=dict(os.environ), capture_output=True, text=True, timeout=JOB_S)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]
    for estimator in OPTIONS:
        records = task.metrics(estimator)
        assert [r["step"] for r in records if r["step"]] == [1, 2, 3], estimator
        for record in records:
            for name, value in record.items():
                assert is_documented(name), f"{estimator}: {name} is not in docs/metrics.md"
                assert isinstance(value, (int, float)) and math.isfinite(value), f"{estimator}: {name} = {value}"
        assert any(record.get("grad_norm", 0.0) > 0 for record in records), f"{estimator}: no step had a gradient"
    assert "algorithm/initial_entropy" in task.metrics("gtpo_conflict")[0]
    for estimator in ("clip_cov", "kl_cov"):
        steps = [r["algorithm/optimizer_steps"] for r in task.metrics(estimator) if r["step"]]
        assert steps == [2.0, 2.0, 2.0], estimator
    for estimator in OPTIONS:
        everything = set().union(*task.metrics(estimator))
        assert everything >= REPORTED_BY_ALL | REPORTED_BY.get(estimator, set()), estimator
