from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from openrlhf_ext.cli.train_ppo_ray import check, check_model
from openrlhf_ext.config import ConfigError, load_config
from tests.e2e.jobs import Task
from tests.models import make_tiny_policy
from tests.planning.test_layout_proof import QWEN25_32B


def test_dry_run_proves_a_32b_layout_without_a_gpu(tmp_path):
    task = Task.make(tmp_path)
    options = task.options(
        "out", actor__model_name_or_path=QWEN25_32B, actor__num_nodes=8, actor__num_gpus_per_node=8,
        megatron__tensor_parallel_size=8, megatron__pipeline_parallel_size=2, megatron__param_dtype="bf16",
        rollout__micro_batch_size=8,
    )  # fmt: skip
    started = time.perf_counter()
    command = [sys.executable, "-m", "openrlhf_ext.cli.train_ppo_ray", *options, "--dry_run"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    assert time.perf_counter() - started < 60
    assert "policy: 64 ranks = tp 8 x cp 1 x pp 2 x dp 4" in run.stdout
    assert "built 16 of 64 ranks" in run.stdout and "771 HF tensors, 32,763,876,352 parameters" in run.stdout
    assert not (tmp_path / "out").exists(), "a dry run writes nothing"


def test_a_checkpoint_that_lacks_a_tensor_is_refused_before_anything_starts(tmp_path):
    task = Task.make(tmp_path)
    file = tmp_path / "policy/model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:5].clone()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(ConfigError) as error:
        check(load_config(task.options("out")))
    for part in (
        "actor.model_name_or_path: ", "missing from the checkpoint: ['model.layers.1.mlp.up_proj.weight']",
        "model.norm.weight: (5,), config.json says (128,)",
    ):  # fmt: skip
        assert part in str(error.value)


def test_a_critics_checkpoint_may_hold_a_value_head_and_a_policys_may_not(tmp_path):
    make_tiny_policy(tmp_path)
    check_model(str(tmp_path), None)
    check_model(str(tmp_path), "score")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"score.weight": torch.zeros(1, 128)}, tmp_path / "model.safetensors")
    check_model(str(tmp_path), "score")
    with pytest.raises(ValueError, match=r"no rule uses: \['score.weight'\]"):
        check_model(str(tmp_path), None)
