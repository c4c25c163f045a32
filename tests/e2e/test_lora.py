"""Adapters through the command: killed and resumed, in another layout, started from, in the hands of peft."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import psutil
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.e2e.jobs import Job, Task
from tests.patience import PATIENCE_S

LORA = {
    "algo__kl__init_coef": 0.01, "algo__kl__use_loss": True,
    "algo__kl__estimator": "k3", "ckpt__save_steps": 1, "megatron__sequence_parallel_enable": True,
}  # fmt: skip
STAGES = {"megatron__tensor_parallel_size": 1, "megatron__pipeline_parallel_size": 2,
          "megatron__sequence_parallel_enable": False}  # fmt: skip


def options(task: Task, name: str, *flags: str, **more: object) -> list[str]:
    given = LORA | {"ds__lora__path": task.folder / "start"} | more
    return [*task.options(name, **given), "--train.full_determinism_enable", *flags]


def run(task: Task, name: str, *flags: str, **more: object) -> None:
    job = Job(options(task, name, *flags, **more), task.folder / f"{name}.log")
    assert job.finish() == 0, job.text


def peft_adapter(task: Task) -> None:
    """What the runs start from: of another model than the base from the first token on."""
    model = AutoModelForCausalLM.from_pretrained(task.folder / "policy", dtype=torch.float32)
    torch.manual_seed(0)
    wrapped = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    wrapped.save_pretrained(task.folder / "start")


def adapter(task: Task, name: str) -> dict[str, torch.Tensor]:
    return load_file(task.folder / name / "adapter_model.safetensors")


@pytest.mark.e2e
def test_adapters_of_a_run_that_is_killed_and_of_one_in_another_layout(tmp_path):
    task = Task.make(tmp_path)
    peft_adapter(task)
    run(task, "whole")
    assert not (tmp_path / "whole/config.json").exists(), "an adapter and nothing else"

    job = Job(options(task, "cut"), tmp_path / "cut1.log")
    job.wait_for(r"wrote the checkpoint .*global_step1")
    job.stop()
    psutil.wait_procs(job.seen.values(), timeout=PATIENCE_S)
    run(task, "cut", "--ckpt.load_enable")
    wanted, found = adapter(task, "whole"), adapter(task, "cut")
    assert len(wanted) == 28 and all(found[name].equal(tensor) for name, tensor in wanted.items())
    for expected, got in zip(task.metrics("whole"), task.metrics("cut"), strict=True):
        for name in ("reward/mean", "grad_norm", "loss/policy", "kl/reference", "entropy/mean"):
            assert got[name] == expected[name], name
    for record in task.metrics("whole"):
        assert record["kl/reference"] > 1e-4 and record["grad_norm"] > 0, "the reference is the base"
        assert record["kl/rollout"] < 1e-6, "the engines have the adapter that the run started from, and the later ones"

    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(checkpoints / "whole", checkpoints / "stages")
    shutil.rmtree(checkpoints / "stages/global_step3")
    weights = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(tmp_path / "policy").parameters())
    saved = sum(path.stat().st_size for path in (checkpoints / "stages/global_step2/policy").rglob("*.safetensors"))
    assert saved < 4 * weights, "less than the base alone"
    run(task, "stages", "--ckpt.load_enable", vllm__lora="merged", **STAGES)
    far = max(float((tensor - wanted[name]).abs().max()) for name, tensor in adapter(task, "stages").items())
    assert far < 1e-6, far

    peft_agrees(task, "whole")


def peft_agrees(task: Task, name: str) -> None:
    """What the run wrote peft loads unchanged."""
    base = AutoModelForCausalLM.from_pretrained(task.folder / "policy", dtype=torch.float32)
    config = json.loads((task.folder / name / "adapter_config.json").read_text())
    assert config["r"] == 4 and config["lora_alpha"] == 8 and Path(config["base_model_name_or_path"]).is_dir()
    model = PeftModel.from_pretrained(base, task.folder / name)
    loaded = {n.replace(".default", ""): p for n, p in model.named_parameters() if "lora" in n}
    assert all(loaded[n].equal(tensor) for n, tensor in adapter(task, name).items())
