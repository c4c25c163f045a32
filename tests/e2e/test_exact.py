"""Exact mode through the whole stack: each step is proved, and what is not exact ends the run."""

from __future__ import annotations

import re

import pytest

from tests.e2e.jobs import ONE_RANK, Job, Task

pytestmark = pytest.mark.e2e
EXACT = {"train__exact_rollout_enable": True, "megatron__param_dtype": "bf16"}


def test_a_run_with_two_tensor_parallel_ranks_on_both_sides_is_exact_in_each_step(tmp_path):
    """Two updates per batch, and tokens that the first of them saw count."""
    task = Task.make(tmp_path)
    more = {"vllm__tensor_parallel_size": 2, "train__batch_size": 16}
    job = Job(task.options("out", **EXACT, **more), tmp_path / "log")
    assert job.finish() == 0, job.text
    records = task.metrics("out")
    assert len(records) == 3
    for record in records:
        assert record["rollout/bit_equal"] == 1.0
        assert record["kl/rollout"] == record["kl/rollout_max_abs"] == 0.0
        assert "rank/0/time_logprob" not in record
    assert "old log-probs: of the engine" in job.text
    assert re.search(r"(?m)^ *step .* bit_equal ", job.text)


def test_a_policy_that_is_one_last_place_off_ends_the_run_with_the_module(tmp_path, monkeypatch):
    task = Task.make(tmp_path)
    monkeypatch.setenv("SPOILED", "inexact")
    job = Job(
        task.options("out", **ONE_RANK, **EXACT | {"megatron__param_dtype": "fp32"}),
        tmp_path / "log",
        module="tests.e2e.spoiled_ranks",
    )
    assert job.finish() == 1, job.text
    (record,) = task.metrics("out")
    assert 0 < record["rollout/bit_equal"] < 1
    for part in ("in step 1 the log-probs of", "the first module that differs is '1 attention'"):
        assert part in job.text, job.text
