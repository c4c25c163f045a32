"""Exact mode through the whole stack: each step is proved, and what is not exact ends the run."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

from openrlhf_ext.exact.limits import processor_problem
from tests.e2e.jobs import ONE_RANK, Job, Task

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(processor_problem() is not None, reason=str(processor_problem())),
]
RUNS = ("whole", "resumed")
EXACT = {"train__exact_rollout_enable": True, "megatron__param_dtype": "bf16"}


def test_a_run_with_two_tensor_parallel_ranks_on_both_sides_is_exact_and_resumes_as_it_was(
    tmp_path,
):
    """Two updates per batch: tokens that the first of them saw count."""
    task = Task.make(tmp_path)
    more = {
        "vllm__tensor_parallel_size": 2,
        "train__batch_size": 16,
        "train__full_determinism_enable": True,
        "ckpt__save_steps": 1,
        "ckpt__max_num": 3,
    }
    job = Job(task.options("whole", **EXACT, **more), tmp_path / "whole.log")
    assert job.finish() == 0, job.text
    whole = task.metrics("whole")
    assert len(whole) == 3
    for record in whole:
        assert record["rollout/bit_equal"] == 1.0
        assert record["kl/rollout"] == record["kl/rollout_max_abs"] == 0.0
        assert "rank/0/time_logprob" not in record
    assert "old log-probs: of the engine" in job.text
    assert re.search(r"(?m)^ *step .* bit_equal ", job.text)

    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(checkpoints / "whole/global_step2", checkpoints / "resumed/global_step2")
    job = Job(
        [*task.options("resumed", **EXACT, **more), "--ckpt.load_enable"],
        tmp_path / "resumed.log",
    )
    assert job.finish() == 0, job.text
    (last,) = task.metrics("resumed")
    for name in ("rollout/bit_equal", "kl/rollout", "loss/policy", "grad_norm", "reward/mean"):
        assert last[name] == whole[2][name], name
    weights, resumed = (load_file(tmp_path / name / "model.safetensors") for name in RUNS)
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in weights.items())


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
