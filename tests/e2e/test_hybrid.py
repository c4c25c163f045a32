"""A model with gated delta nets (Qwen3.5) through the whole stack, engines asleep while it
trains."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.e2e.jobs import Job, Task
from tests.models import make_tiny_policy


@pytest.mark.e2e
def test_engines_sample_from_what_is_trained_and_transformers_reads_what_is_written(
    tmp_path: Path,
) -> None:
    """Ranks and an engine of two workers each; responses are longer than a chunk of the rule."""
    task = Task.make(tmp_path)
    shutil.rmtree(tmp_path / "policy")
    make_tiny_policy(tmp_path / "policy", "qwen3_5_text", head_dim=32, num_hidden_layers=4)
    more = {"train__colocate_all": "true", "ds__enable_sleep": "true", "vllm__enable_sleep": "true"}
    more |= {"data__max_len": 128, "rollout__max_new_tokens": 80, "algo__old_logprobs": "policy"}
    more["vllm__tensor_parallel_size"] = 2
    job = Job(task.options("hybrid", **more), tmp_path / "hybrid.log")
    assert job.finish() == 0, job.text
    records = task.metrics("hybrid")
    assert [record["step"] for record in records] == [1, 2, 3]
    for record in records:
        assert record["kl/rollout"] < 1e-6 and record["kl/rollout_max_abs"] < 1e-3
        assert record["weight_sync/probe_diff"] < 1e-5 and 0 < record["grad_norm"] < 100
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "hybrid").state_dict()
    before = load_file(tmp_path / "policy/model.safetensors")
    for name in ("A_log", "dt_bias", "conv1d.weight", "norm.weight", "in_proj_qkv.weight"):
        name = f"model.layers.1.linear_attn.{name}"
        assert not trained[name].equal(before[name]), name
