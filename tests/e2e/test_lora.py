"""Adapters through the command: through kills, in another layout, started from, in the hands of
peft."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.e2e.jobs import Job, Task
from tests.e2e.test_resume import COLOCATED, HOLDING_REWARD, hold_after, in_call, policy_ranks

LORA = {
    "algo__advantage__estimator": "gtpo_conflict", "algo__gtpo_conflict__filter": "off", "algo__kl__init_coef": 0.01,
    "algo__kl__use_loss": True, "algo__kl__estimator": "k3", "ckpt__save_steps": 1, "ckpt__max_num": 3,
    "megatron__sequence_parallel_enable": True,
}  # fmt: skip
STAGES = {
    "megatron__tensor_parallel_size": 1,
    "megatron__pipeline_parallel_size": 2,
    "megatron__sequence_parallel_enable": False,
    "vllm__lora": "merged",
}
RESTART = ("--train.max_restarts", "1")


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
    wrapped = get_peft_model(
        model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    wrapped.save_pretrained(task.folder / "start")


def adapter(task: Task, name: str) -> dict[str, torch.Tensor]:
    return load_file(task.folder / name / "adapter_model.safetensors")


@pytest.mark.e2e
def test_adapters_of_runs_that_are_killed_and_of_one_in_another_layout(tmp_path):
    """Tensor parallel, and the same with both sides asleep in turns that loses a rank and an
    engine; then in stages."""
    task = Task.make(tmp_path, reward=HOLDING_REWARD)
    peft_adapter(task)
    run(task, "whole")
    assert not (tmp_path / "whole/config.json").exists(), "an adapter and nothing else"
    for record in task.metrics("whole"):
        assert record["kl/reference"] > 1e-4 and record["grad_norm"] > 0, (
            "the reference is the base"
        )
        assert record["kl/rollout"] < 1e-6, (
            "the engines have the adapter that the run started from, and the later ones"
        )
    assert len(adapter(task, "whole")) == 28

    kill_a_rank_and_an_engine(task)
    assert_same(task, "cut", "whole")

    for name in ("stages", "cut_stages"):
        resume_at(task, name, step=1)
    run(task, "stages", "--ckpt.load_enable", **STAGES)
    wanted, found = adapter(task, "whole"), adapter(task, "stages")
    far = max(float((found[name] - tensor).abs().max()) for name, tensor in wanted.items())
    assert far < 1e-6, far
    job = Job(
        options(task, "cut_stages", "--ckpt.load_enable", *RESTART, **STAGES),
        tmp_path / "cut_stages.log",
    )
    job.wait_for(r"wrote the checkpoint .*global_step2")
    policy_ranks(job)[1].kill()
    assert job.finish() == 0, job.text
    assert "resumed from" in job.text.partition("restart 1 of 1")[2], job.text
    assert_same(task, "cut_stages", "stages")

    peft_agrees(task, "whole")


def kill_a_rank_and_an_engine(task: Task) -> None:
    """A rank in the second update, and after the restart the engine in the third generation."""
    hold_after(task, 1)
    job = Job(options(task, "cut", *RESTART, **COLOCATED), task.folder / "cut.log")
    job.wait_until((task.folder / "held1").exists, "the second generation")
    ranks = policy_ranks(job)
    hold_after(task, 2)
    job.wait_until(lambda: in_call(ranks, "fit"), "an update")
    ranks[0].kill()
    job.wait_until((task.folder / "held2").exists, "the third generation")
    assert re.search(r"restart 1 of 1[\s\S]*resumed from .*global_step1\n", job.text), job.text
    assert "policy rank" in job.text and "dead processes" in job.text, job.text
    job.kill("ray::RolloutEngine")
    (task.folder / "hold").unlink()
    assert job.finish() == 0, job.text
    assert re.search(r"replacing rollout engines \[[01]\]", job.text), job.text


def resume_at(task: Task, name: str, step: int) -> None:
    """The checkpoints that a job of this name finds: the one of "whole" after a step, which has no
    base in it."""
    wanted = task.folder / f"checkpoints/{name}"
    shutil.copytree(task.folder / "checkpoints/whole", wanted)
    for path in wanted.glob("global_step*"):
        if path.name != f"global_step{step}":
            shutil.rmtree(path)
    weights = sum(
        p.numel() for p in AutoModelForCausalLM.from_pretrained(task.folder / "policy").parameters()
    )
    saved = sum(
        path.stat().st_size
        for path in (wanted / f"global_step{step}/policy").rglob("*.safetensors")
    )
    assert 0 < saved < 4 * weights, "less than the base alone"


def assert_same(task: Task, name: str, undisturbed: str) -> None:
    """The same adapter, and the same steps that both runs have computed, bit for bit."""
    wanted, found = adapter(task, undisturbed), adapter(task, name)
    assert all(found[tensor].equal(value) for tensor, value in wanted.items())
    both = zip(task.metrics(undisturbed), task.metrics(name), strict=True)
    for expected, got in both:
        for metric in (
            "step",
            "reward/mean",
            "grad_norm",
            "loss/policy",
            "kl/reference",
            "entropy/mean",
        ):
            assert got[metric] == expected[metric], (got["step"], metric)


def peft_agrees(task: Task, name: str) -> None:
    """What the run wrote peft loads unchanged."""
    base = AutoModelForCausalLM.from_pretrained(task.folder / "policy", dtype=torch.float32)
    config = json.loads((task.folder / name / "adapter_config.json").read_text())
    assert (
        config["r"] == 4
        and config["lora_alpha"] == 8
        and Path(config["base_model_name_or_path"]).is_dir()
    )
    model = PeftModel.from_pretrained(base, task.folder / name)
    loaded = {n.replace(".default", ""): p for n, p in model.named_parameters() if "lora" in n}
    assert all(loaded[n].equal(tensor) for n, tensor in adapter(task, name).items())
