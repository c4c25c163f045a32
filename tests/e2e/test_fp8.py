"""FP8 training and rollouts, emulated, through the command: killed and resumed bit for bit."""

from __future__ import annotations

import re

import pytest
from safetensors.torch import load_file

from tests.e2e.jobs import Job, Task
from tests.e2e.test_resume import EXACT, kill
from tests.models import make_tiny_policy

# one request at a time: on CPU the last bits of a product depend on the batch, and FP8 makes more
# of them
FP8 = {
    "fp8__enable": "true",
    "fp8__emulate": "true",
    "fp8__rollout_enable": "true",
    "vllm__max_num_seqs": 1,
}
DELAYED = {
    **FP8,
    "fp8__recipe": "delayed",
    "fp8__amax_history_len": 16,
    "megatron__tensor_parallel_size": 1,
    "megatron__pipeline_parallel_size": 2,
    "algo__kl__init_coef": 0.01,
}


def options(task: Task, name: str, *flags: str, **more: object) -> list[str]:
    checkpoints = {"ckpt__path": task.folder / "ckpt", "ckpt__save_steps": 1, "ckpt__max_num": 3}
    return [*task.options(name, **checkpoints, **more), "--train.full_determinism_enable", *flags]


def killed_and_resumed(task: Task, **more: object) -> Job:
    """A run killed in its third step; then resumed from its first, so that both have computed the
    second."""
    job = Job(options(task, "out", **more), task.folder / "first.log")
    checkpoint, aside = task.folder / "ckpt/global_step2", task.folder / "killed_step2"
    job.wait_until(checkpoint.exists, "the checkpoint of step 2")
    kill(job)
    killed = task.metrics("out")
    assert [record["step"] for record in killed] == [1, 2]
    checkpoint.rename(aside)
    again = Job(options(task, "out", "--ckpt.load_enable", **more), task.folder / "again.log")
    assert again.finish() == 0, again.text
    assert re.search(r"resumed from .*global_step1\n", again.text), again.text
    resumed = task.metrics("out")
    assert [record["step"] for record in resumed] == [1, 2, 3]
    assert [resumed[1][name] for name in EXACT] == [killed[1][name] for name in EXACT]
    states = sorted(path.relative_to(aside) for path in aside.rglob("*.safetensors"))
    assert len(states) >= 2, "one of each rank"
    for state in states:
        expected, got = (load_file(folder / state) for folder in (aside, checkpoint))
        assert expected.keys() == got.keys() and all(
            got[name].equal(tensor) for name, tensor in expected.items()
        ), state
    return again


def assert_labeled(job: Job, records: list[dict], recipe: str) -> None:
    assert all("EMULATED" in record["label"] and recipe in record["label"] for record in records)
    lines = [line for line in job.text.splitlines() if line.strip().partition("/")[0].isdigit()]
    assert lines and all("EMULATED" in line for line in lines), job.text


@pytest.mark.e2e
def test_delayed_scaling_in_two_stages_with_a_reference(tmp_path):
    task = Task.make(tmp_path)
    job = killed_and_resumed(task, **DELAYED)
    records = task.metrics("out")
    assert_labeled(job, records, "delayed hybrid fp32")
    for manifest in (task.folder / "ckpt").glob("global_step*/*.json"):
        if "options" in manifest.read_text():
            assert "EMULATED" in manifest.read_text()
    assert "a log-prob depends on the other sequences in its pack" in job.text
    assert all(1e-3 < record["algorithm/abs_log_ratio"] < 1 for record in records)
    assert records[-1]["kl/reference"] > records[0]["kl/reference"] >= 0, (
        "the policy leaves its reference"
    )


@pytest.mark.e2e
def test_the_quantizer_of_the_engines_brings_the_trainer_near_them(tmp_path):
    """What is left between them is rounding of another order of sums, which depends on the
    processor: 0.0023 nats a token on one, less than 0.002 on others. A trainer without FP8 is more
    than 0.01 away."""
    task = Task.make(tmp_path, prompts=8)
    # heads of 128 and an MLP of 256 on each rank: both sides cut the same tiles
    make_tiny_policy(
        tmp_path / "policy", hidden_size=256, intermediate_size=512, num_attention_heads=2
    )
    options = {
        **FP8,
        "megatron__sequence_parallel_enable": "true",
        "rollout__batch_size": 2,
        "train__batch_size": 8,
    }
    job = Job(task.options("out", **options), tmp_path / "log")
    assert job.finish() == 0, job.text
    records = task.metrics("out")
    assert len(records) == 4, "three syncs between them"
    assert_labeled(job, records, "blockwise e4m3 fp32")
    assert all(record["packs/padding_fraction"] > 0 for record in records), (
        "sequences are cut in two"
    )
    assert all(record["algorithm/abs_log_ratio"] < 1e-3 for record in records), (
        "the pack does not matter"
    )
    assert sum(record["mismatch/mean_abs"] for record in records) / len(records) <= 0.005
