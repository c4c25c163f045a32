"""The self-test of ``train.drift_check`` passes on a healthy stack, and the gauges of a step are there."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file

from openrlhf_ext.reporting import is_documented
from tests.e2e.jobs import ONE_RANK, Job, Task


@pytest.mark.e2e
def test_two_steps_with_learning_rate_zero_change_nothing(tmp_path):
    task = Task.make(tmp_path, prompts=16)
    options = task.options("out", **ONE_RANK, train__batch_size=16, logger__peak_tflops=0.01)
    job = Job([*options, "--train.drift_check"], tmp_path / "log")
    assert job.finish() == 0, job.text
    assert "drift check, step 2: weights unchanged" in job.text, job.text
    records = task.metrics("out")
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        assert record["drift/logprob_max_abs"] <= 1e-6 and record["lr"] == 0.0 and record["grad_norm"] > 0
        assert [name for name in record if not is_documented(name)] == []
        squares = sum(record[f"grad_norm/{group}"] ** 2 for group in ("embedding", "attention", "mlp", "norms"))
        # both are means over the two updates of a step: equal up to how much the updates differ
        assert math.sqrt(squares) <= record["grad_norm"] * 1.00001 <= math.sqrt(2 * squares) * 1.00002
        assert 0 < record["throughput/train_mfu"] == record["throughput/train_tflops_per_rank"] / 0.01
        assert record["throughput/train_tokens_per_second"] > 0 and record["mismatch/mean_abs"] < 1e-5
        assert record["mismatch/ess_tokens"] == pytest.approx(1.0, abs=1e-4)
        assert 0.05 < record["memory/rank_max_gib"] < 20
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("policy", "out"))
    assert all(torch.equal(before[name], after[name]) for name in before)
