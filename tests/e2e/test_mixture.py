"""A mixture of experts through the whole stack, experts over two ranks: those of the engine
replayed, killed and resumed while groups wait for training; and colocated without replay."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.e2e.jobs import Job, Task
from tests.e2e.test_resume import kill
from tests.models import make_tiny_policy

EP2 = {"megatron__tensor_parallel_size": 1, "megatron__expert_parallel_size": 2}


@pytest.fixture
def task(tmp_path: Path) -> Task:
    task = Task.make(tmp_path, prompts=48)
    shutil.rmtree(tmp_path / "policy")
    make_tiny_policy(tmp_path / "policy", "qwen3_moe", head_dim=32)
    return task


@pytest.mark.e2e
def test_the_engines_experts_are_trained_with_also_those_of_groups_in_a_checkpoint(
    task: Task, tmp_path: Path
) -> None:
    """In fp32 a router that has hardly moved chooses almost the same; another token's experts it
    would not choose."""
    more = {"train__routing_replay": "rollout", "train__max_staleness": 1, "ckpt__save_steps": 2}
    more |= {"actor__adam__lr": 1e-5, "vllm__enable_prefix_caching": "true"}
    options = task.options("replay", **EP2, **more)
    job = Job(options, tmp_path / "killed.log")
    job.wait_for(r"global_step2\b")
    job.wait_for(r" 3/6 ")
    kill(job)
    resumed = Job([*options, "--ckpt.load_enable"], tmp_path / "resumed.log")
    assert resumed.finish() == 0, resumed.text
    records = task.metrics("replay")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert records[0]["moe/replay_changed"] == 0.0 and records[0]["kl/rollout_max_abs"] < 1e-4
    for record in records:
        assert (
            record["moe/replay_changed"] < 0.1
            and record["grad_norm/router"] > 0 < record["grad_norm/experts"]
        )
        assert record["weight_sync/probe_diff"] < 1e-5


@pytest.mark.e2e
def test_colocated_without_replay_and_what_is_written_is_read_by_transformers(
    task: Task, tmp_path: Path
) -> None:
    more = {"train__colocate_all": "true", "ds__enable_sleep": "true", "vllm__enable_sleep": "true"}
    more |= {"vllm__num_engines": 2, "algo__old_logprobs": "policy", "data__max_samples": 16}
    job = Job(task.options("colocated", **EP2, **more), tmp_path / "colocated.log")
    assert job.finish() == 0, job.text
    for record in task.metrics("colocated"):
        assert record["kl/rollout_max_abs"] < 1e-4 and "moe/replay_changed" not in record
        assert record["moe/load_max"] >= 1 and record["moe/router_entropy"] > 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "colocated")
    before = load_file(tmp_path / "policy/model.safetensors")
    name = "model.layers.0.mlp.experts.3.down_proj.weight"
    trained = model.model.layers[0].mlp.experts.down_proj[3]
    assert trained.equal(load_file(tmp_path / "colocated/model.safetensors")[name])
    assert not trained.equal(before[name])
