"""An engine that is killed while it generates costs time, not samples: the run is the one without the kill."""

from __future__ import annotations

import pytest

from tests.e2e.jobs import REWARD, Job, Task

# from the second step on the grading of the second job waits until the engine has been killed
WAITING = """
import pathlib, time
FOLDER = pathlib.Path({folder!r})
def wait():
    with open(FOLDER / "calls", "a") as calls:
        calls.write(".")
    if (FOLDER / "kill").exists() and (FOLDER / "calls").stat().st_size > 32 + 4:
        (FOLDER / "waiting").touch()
        while (FOLDER / "kill").exists():
            time.sleep(0.02)
"""
SAME = ("reward/mean", "accuracy/mean", "response/length_mean", "tokens/generated", "prompts/consumed", "loss/policy",
        "grad_norm", "entropy/mean")  # fmt: skip


@pytest.mark.e2e
@pytest.mark.timeout(1500)
def test_a_killed_engine_is_replaced_and_the_run_is_the_same(tmp_path):
    reward = WAITING.format(folder=str(tmp_path)) + REWARD.replace("    completion =", "    wait()\n    completion =")
    task = Task.make(tmp_path, reward=reward)
    options = {"vllm__num_engines": 2, "vllm__max_restarts": 1}
    undisturbed = Job([*task.options("whole", **options), "--train.full_determinism_enable"], tmp_path / "whole.log")
    assert undisturbed.finish(400) == 0, undisturbed.text

    (tmp_path / "calls").unlink()
    (tmp_path / "kill").touch()
    job = Job([*task.options("killed", **options), "--train.full_determinism_enable"], tmp_path / "killed.log")
    job.wait_until((tmp_path / "waiting").exists, "the grading of the second step")
    job.kill("ray::RolloutEngine")
    (tmp_path / "kill").unlink()
    assert job.finish(400) == 0, job.text
    assert "replacing rollout engines" in job.text, job.text

    expected, got = task.metrics("whole"), task.metrics("killed")
    assert [record["step"] for record in got] == [record["step"] for record in expected] == [1, 2, 3]
    assert [record["engines/restarts"] for record in got] == [0, 1, 1]
    for before, after in zip(expected, got, strict=True):
        for name in SAME:
            assert after[name] == pytest.approx(before[name], rel=1e-5, abs=1e-7), (before["step"], name)
