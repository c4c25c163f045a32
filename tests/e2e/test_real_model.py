"""A real model in bf16: two steps in three layouts and in FP8, and every command that takes it:
`bash tests/run.sh -m real_model`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from openrlhf_ext.cli.convert import main as convert
from openrlhf_ext.cli.evaluate import main as evaluate
from openrlhf_ext.cli.explain import main as explain
from openrlhf_ext.cli.report import main as report
from openrlhf_ext.cli.train_ppo_ray import main as train

pytestmark = [pytest.mark.real_model, pytest.mark.e2e, pytest.mark.slow]
EXAMPLES = Path(__file__).parents[2] / "examples/python"
REWARD = EXAMPLES / "reward_gsm8k.py"


@pytest.fixture(scope="module")
def model() -> Path:
    """In the cache, where examples/scripts/real_model.sh has it too (OPENRLHF_EXT_CACHE)."""
    command = [sys.executable, str(EXAMPLES / "real_model.py")]
    return Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 sums to train, 8 held out."""
    folder = tmp_path_factory.mktemp("task")
    sizes = ["--train_size", "16", "--heldout_size", "8"]
    subprocess.run(
        [sys.executable, str(EXAMPLES / "gym_task.py"), "--output_dir", str(folder), *sizes],
        check=True,
    )
    return folder


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp3": {"actor.num_gpus_per_node": 3, "megatron.tensor_parallel_size": 3},
    "pp2": {"actor.num_gpus_per_node": 2, "megatron.pipeline_parallel_size": 2},
    "dp2": {"actor.num_gpus_per_node": 2},
    "fp8": {
        "actor.num_gpus_per_node": 1,
        "fp8.enable": "true",
        "fp8.emulate": "true",
        "fp8.rollout_enable": "true",
    },
}


@pytest.fixture(scope="module", params=LAYOUTS)
def run(
    request: pytest.FixtureRequest,
    model: Path,
    data: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The folder of two steps in bf16 through the chat template."""
    out = tmp_path_factory.mktemp(request.param) / "out"
    options = {
        "actor.model_name_or_path": model,
        "actor.adam.lr": 2e-5,
        "megatron.param_dtype": "bf16",
        "algo.advantage.estimator": "dapo",
        "data.apply_chat_template": "true",
        "data.prompt_dataset": data / "train.jsonl",
        "data.input_key": "question",
        "data.label_key": "answer",
        "data.max_len": 160,
        "rollout.max_new_tokens": 24,
        "rollout.batch_size": 8,
        "rollout.n_samples_per_prompt": 4,
        "train.batch_size": 32,
        "train.micro_batch_size": 8,
        "vllm.num_engines": 1,
        "vllm.kv_cache_mib": 256,
        "reward.remote_url": REWARD,
        "ckpt.output_dir": out,
    } | LAYOUTS[request.param]
    assert (
        train([word for name, value in options.items() for word in (f"--{name}", str(value))]) == 0
    )
    return out


def test_two_steps_and_what_reads_them(
    run: Path, model: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    # emulated FP8 in both engines rounds much more than bf16
    tight = "fp8" not in run.parent.name
    for step in steps:
        assert step["weight_sync/probe_diff"] < (0.06 if tight else 0.4), step
        assert step["kl/rollout"] < (5e-3 if tight else 5e-2), step
        assert step["mismatch/mean_abs"] < (0.1 if tight else 0.3), step
    assert any(step["grad_norm"] > 0 for step in steps), "it can do few sums: a step may have none"
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert events[-1]["event"] == "end"
    assert report([str(run)]) == 0 and "SmolLM" in (run / "report.html").read_text()
    capsys.readouterr()
    words = ["--algorithm", "dapo", "--rollouts", str(run / "samples.jsonl"), "--step", "1"]
    assert explain(words) == 0 and capsys.readouterr().out.strip()


def test_evaluate_samples_it_through_its_chat_template(
    model: Path, data: Path, tmp_path: Path
) -> None:
    words = [
        "--model",
        str(model),
        "--data",
        str(data / "heldout.jsonl"),
        "--reward",
        str(REWARD),
        "--n_samples",
        "2",
        "--apply_chat_template",
        "--max_new_tokens",
        "24",
        "--json",
        str(tmp_path / "result.json"),
    ]
    assert evaluate(words) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert (
        result["prompts"] == 8
        and result["samples_per_prompt"] == 2
        and 0 <= result["accuracy"] < 0.6
    )


def test_the_drift_check_holds_on_it(model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"question": "What is 3 + 4?", "answer": "7"}\n' * 4)
    options = {
        "actor.model_name_or_path": model,
        "actor.num_gpus_per_node": 1,
        "megatron.param_dtype": "bf16",
        "algo.advantage.estimator": "grpo",
        "data.prompt_dataset": tmp_path / "prompts.jsonl",
        "data.input_key": "question",
        "data.label_key": "answer",
        "data.max_len": 64,
        "rollout.max_new_tokens": 16,
        "rollout.batch_size": 4,
        "rollout.n_samples_per_prompt": 4,
        "train.batch_size": 16,
        "vllm.num_engines": 1,
        "vllm.kv_cache_mib": 256,
        "train.drift_check": "true",
        "actor.adam.lr": 0,
        "reward.remote_url": REWARD,
        "ckpt.output_dir": tmp_path / "out",
    }
    assert (
        train([word for name, value in options.items() for word in (f"--{name}", str(value))]) == 0
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_it_goes_in_and_out_unchanged(
    dtype: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(["--check", str(model), "--dtype", dtype]) == 0
    assert "the checkpoint is loaded and exported unchanged" in capsys.readouterr().out
