from __future__ import annotations

import json
import subprocess
import sys

import pytest

from openrlhf_ext.cli.train_ppo_ray import main
from tests.e2e.jobs import Task
from tests.patience import PATIENCE_S
from tests.tools.plan.test_layout_proof import QWEN25_32B


def test_dry_run_proves_a_32b_layout_without_a_gpu(tmp_path):
    task = Task.make(tmp_path)
    options = task.options(
        "out",
        actor__model_name_or_path=QWEN25_32B,
        actor__num_nodes=8,
        actor__num_gpus_per_node=8,
        megatron__tensor_parallel_size=8,
        megatron__pipeline_parallel_size=2,
        megatron__param_dtype="bf16",
        rollout__micro_batch_size=8,
        megatron__sequence_parallel_enable="true",
        fp8__enable="true",
        fp8__rollout_enable="true",
        fp8__layers_in_bf16_end=1,
    )
    command = [sys.executable, "-m", "openrlhf_ext.cli.train_ppo_ray", *options, "--dry_run"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    assert "policy: 64 ranks = tp 8 x cp 1 x pp 2 x dp 4" in run.stdout
    assert (
        "built 16 of 64 ranks" in run.stdout
        and "771 HF tensors, 32,763,876,352 parameters" in run.stdout
    )
    assert (
        "FP8 of the linear layers: training blockwise e4m3 fp32; rollout blockwise e4m3 fp32"
        in run.stdout
    )
    assert "layers that stay in the model's precision: 63\n" in run.stdout
    assert (
        "tiles of the weights: the same in trainer and engines" in run.stdout
        and "FP8 copies" in run.stdout
    )
    correction = '{"level": "token", "mode": "clip", "gating": "ratio", "threshold": [0.0, 2.0]}'
    assert f"# importance correction: {correction}" in run.stdout
    assert not (tmp_path / "out").exists(), "a dry run writes nothing"


def test_a_wrong_configuration_is_one_report_and_exit_code_2(tmp_path, capsys):
    task = Task.make(tmp_path)
    words = ["--train.batch_size", "33", "--algo.grpo.foo", "1", "--train.sead", "1"]
    capsys.readouterr()
    assert main([*task.options("out"), *words]) == 2
    report = capsys.readouterr().err
    assert report.startswith("4 problems in the configuration:\n- unknown option train.sead")
    assert "unknown option 'foo'" in report


def test_a_reward_file_that_cannot_be_imported_stops_the_run_before_ray_starts(tmp_path, capfd):
    task = Task.make(
        tmp_path, reward="import no_such_module\ndef reward_func(queries, prompts, labels): ...\n"
    )
    capfd.readouterr()
    # a run ends what it leaves behind, nothing else
    with subprocess.Popen(["sleep", "600"]) as before:
        try:
            assert main(task.options("out")) == 2
            assert before.poll() is None
        finally:
            before.kill()  # leaving the block waits for its end
    report = capfd.readouterr().err  # of the driver's process
    assert report.startswith("1 problem in the configuration:\n- reward.remote_url: ")
    assert "No module named 'no_such_module'" in report


OWN_ALGORITHM = """
from openrlhf_ext.algorithms import TokenAlgorithm, register_algorithm
from openrlhf_ext.algorithms.option_blocks import *
from openrlhf_ext.algorithms.option_blocks import degenerate as rule
print("registering")

class Options(PartitionOptions, TruncationOptions, ClipOptions, ScopeOptions):
    degenerate: Degenerate = rule("zero")

@register_algorithm("loud", Options)
class Loud(TokenAlgorithm):
    def advantages(self, inputs):
        return {"advantages": inputs.segments.spread(inputs.part.success_B.double())}
"""
PRINTS_AND_RAISES = """
import os
print("loading")

def reward_func(queries, prompts, labels):
    print("grading")
    os.system("echo by another process")
    raise OSError("down")
"""


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "reward.remote_url raised an exception in its trial"),
        (
            ["--actor.model_name_or_path", "Qwen/Qwen3-4B-Base"],
            "actor.model_name_or_path Qwen/Qwen3-4B-Base, which",
        ),
        (
            ["--actor.model_name_or_path", "Qwen/Qwen2.5-0.5B"],
            "actor.model_name_or_path Qwen/Qwen2.5-0.5B, which",
        ),
        (
            ["--data.prompt_dataset", "openai/gsm8k"],
            "data.prompt_dataset openai/gsm8k, which is not on this machine",
        ),
    ],
)
def test_a_dry_run_that_could_not_look_at_everything_cannot_say(tmp_path, capfd, words, why):
    """Its status is 3, as text and as JSON, which a launcher takes."""
    task = Task.make(tmp_path)
    if not words:
        (tmp_path / "reward.py").write_text(PRINTS_AND_RAISES)
    (tmp_path / "own.py").write_text(OWN_ALGORITHM)
    own = ["--algo.advantage.estimator", "custom", "--algo.module_path", str(tmp_path / "own.py")]
    options = [*task.options("out"), *(own if not words else words)]
    capfd.readouterr()
    # first: an algorithm's file is imported once in a process
    assert main([*options, "--dry_run_json"]) == 3
    out = capfd.readouterr().out  # nothing that the user's files print
    assert json.loads(out)["options"]["train.batch_size"] == 32
    assert main([*options, "--dry_run"]) == 3
    out = capfd.readouterr().out
    printed = ("registering", "loading", "grading", "by another process")
    said = [line for line in out.splitlines() if line not in printed]
    assert said[0].startswith("cannot say: ") and why in said[0] and "would start" not in out
    assert said[-1] == said[0], "it stands at the end too"
