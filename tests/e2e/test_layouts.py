"""The same rollouts give the same training in stages and in context parallel ranks, while engines
die or hang.

Tensor parallelism: tests/e2e/test_estimators.py, beside plain transformers; data parallelism:
tests/e2e/test_guide.py.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.e2e.jobs import REWARD, Job, Task

# of the job "engines": after a step for which there is a file "hold<step>", all but four gradings
# wait and say so
HOLDING = """
import pathlib, time
FOLDER = pathlib.Path({folder!r})
def wait():
    metrics = FOLDER / "engines/metrics.jsonl"
    step = len(metrics.read_text().splitlines()) if metrics.exists() else 0
    with open(FOLDER / f"calls{{step}}", "a") as calls:
        calls.write(".")
    while (FOLDER / f"hold{{step}}").exists() and (FOLDER / f"calls{{step}}").stat().st_size > 4:
        (FOLDER / f"held{{step}}").touch()
        time.sleep(0.02)
"""
ONE = {"megatron__tensor_parallel_size": 1}
LAYOUTS = {
    # two stages, on shared bundles; the policy's states are in host memory whenever the engines
    # work, also around a checkpoint; and although an engine is killed while they sleep
    "colocated": {
        **ONE,
        "megatron__pipeline_parallel_size": 2,
        "train__colocate_all": "true",
        "ds__enable_sleep": "true",
        "vllm__enable_sleep": "true",
        "vllm__num_engines": 2,
        "ckpt__save_steps": 2,
    },
    # halves of every sequence, micro-batches by tokens instead of samples; while they generate, one
    # engine is killed and another one stops
    "engines": {
        **ONE,
        "megatron__context_parallel_size": 2,
        "train__dynamic_batch_enable": True,
        "train__max_tokens_per_gpu": 100,
        "vllm__num_engines": 2,
        "vllm__max_restarts": 2,
        "vllm__hang_timeout_s": 10,
    },
}


@pytest.mark.e2e
def test_every_layout_trains_alike(tmp_path):
    reward = HOLDING.format(folder=str(tmp_path)) + REWARD.replace(
        "    completion =", "    wait()\n    completion ="
    )
    task = Task.make(tmp_path, reward=reward)
    for name, layout in LAYOUTS.items():
        options = task.options(name, ckpt__path=tmp_path / "steps", **layout)
        module = {"module": "tests.e2e.sleeping_engines"} if name == "colocated" else {}
        job = Job([*options, "--train.full_determinism_enable"], tmp_path / f"{name}.log", **module)
        if name == "engines":
            kill_and_stop_engines(job, tmp_path)
        assert job.finish() == 0, job.text
    assert "did not answer within 10 s: they hang" in (tmp_path / "engines.log").read_text()
    runs = {name: task.metrics(name) for name in LAYOUTS}
    for name, records in runs.items():
        restarts = [0, 1, 1] if name == "colocated" else [0, 1, 2]
        assert [(record["step"], record["engines/restarts"]) for record in records] == list(
            enumerate(restarts, 1)
        )
        for record in records:
            assert record["kl/rollout_max_abs"] < 1e-4
            assert record["staleness/max"] == 0, "synchronous training is on-policy"
            assert (record.get("offload/freed_mib", 0) > 0) == (name == "colocated")
            assert record["weight_sync/probe_diff"] < 1e-4
            assert max(record["mismatch/loss"], record["mismatch/trained"]) < 1e-5, (
                "of every stage and half"
            )
            assert (
                record["update/adam_steps"] == record["step"]
                and record["update/still"] == 0 < record["update/rms"]
            )
            assert (
                record["prompts/changed"] == 0
                and abs(record["advantage/reward_correlation"] - 1) < 0.1
            )
    for expected, got in zip(*runs.values(), strict=True):
        for metric in ("reward/mean", "accuracy/mean", "response/length_mean", "tokens/generated"):
            assert got[metric] == expected[metric], (got["step"], metric)
        for metric in ("loss/policy", "grad_norm", "entropy/mean"):
            assert got[metric] == pytest.approx(expected[metric], rel=1e-4, abs=1e-6), (
                got["step"],
                metric,
            )
    trained = load_file(tmp_path / "engines/model.safetensors")
    before = load_file(tmp_path / "policy/model.safetensors")
    assert any((trained[name] != before[name]).any() for name in before), (
        "three steps changed no weight"
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "colocated")
    for name, parameter in model.named_parameters():
        assert parameter.allclose(trained[name], atol=1e-4), name


def kill_and_stop_engines(job: Job, folder: Path) -> None:
    """In the second step SIGKILL to an engine, in the third SIGSTOP to the other, when some
    responses are graded."""
    for step in (1, 2):
        (folder / f"hold{step}").touch()
    for step, how in ((1, signal.SIGKILL), (2, signal.SIGSTOP)):
        job.wait_until((folder / f"held{step}").exists, f"the grading after step {step}")
        job.kill("ray::RolloutEngine", how)
        (folder / f"hold{step}").unlink()
