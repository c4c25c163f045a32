"""A real model in bf16: two steps in two layouts, the drift check, convert: `bash tests/run.sh -m real_model`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from openrlhf_ext.cli.convert import main as convert
from openrlhf_ext.cli.train_ppo_ray import main as train
from tests import real_model

pytestmark = [pytest.mark.real_model, pytest.mark.e2e, pytest.mark.slow]
REWARD = Path(__file__).parents[2] / "examples/python/reward_gsm8k.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that OPENRLHF_EXT_REAL_MODEL names, made if it is not there."""
    folder = Path(os.environ.get("OPENRLHF_EXT_REAL_MODEL") or tmp_path_factory.mktemp("real") / "SmolLM2")
    if not (folder / "config.json").is_file():
        real_model.save(folder)
    return folder


@pytest.mark.parametrize("layout", [{"tensor_parallel_size": 3}, {"pipeline_parallel_size": 2}], ids=["tp3", "pp2"])
def test_two_steps_in_bf16_through_the_chat_template(layout: dict[str, int], model: Path, tmp_path: Path) -> None:
    questions = [(a, b) for a in range(2, 10) for b in (1, 7)]
    records = [
        {"question": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": str(a + b)} for a, b in questions
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    options = {
        "actor.model_name_or_path": model, "actor.num_gpus_per_node": max(layout.values()), "actor.adam.lr": 2e-5,
        "megatron.param_dtype": "bf16", "algo.advantage.estimator": "dapo", "data.apply_chat_template": "true",
        "data.prompt_dataset": tmp_path / "prompts.jsonl", "data.input_key": "question", "data.label_key": "answer",
        "data.max_len": 160, "rollout.max_new_tokens": 24, "rollout.batch_size": 8, "rollout.n_samples_per_prompt": 4,
        "train.batch_size": 32, "train.micro_batch_size": 8, "vllm.num_engines": 1, "vllm.kv_cache_mib": 256,
        "reward.remote_url": REWARD, "ckpt.output_dir": tmp_path / "out",
    } | {f"megatron.{name}": size for name, size in layout.items()}  # fmt: skip
    assert train([word for name, value in options.items() for word in (f"--{name}", str(value))]) == 0
    steps = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["weight_sync/probe_diff"] < 0.06 and step["kl/rollout"] < 5e-3, step
        assert step["mismatch/mean_abs"] < 0.1, step
    assert any(step["grad_norm"] > 0 for step in steps), "it can do few sums: a step may have none"
    events = [json.loads(line) for line in (tmp_path / "out/events.jsonl").read_text().splitlines()]
    assert events[-1]["event"] == "end"


def test_the_drift_check_holds_on_it(model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"question": "What is 3 + 4?", "answer": "7"}\n' * 4)
    options = {
        "actor.model_name_or_path": model, "actor.num_gpus_per_node": 1, "megatron.param_dtype": "bf16",
        "algo.advantage.estimator": "grpo", "data.prompt_dataset": tmp_path / "prompts.jsonl",
        "data.input_key": "question", "data.label_key": "answer", "data.max_len": 64, "rollout.max_new_tokens": 16,
        "rollout.batch_size": 4, "rollout.n_samples_per_prompt": 4, "train.batch_size": 16, "vllm.num_engines": 1,
        "vllm.kv_cache_mib": 256, "train.drift_check": "true", "actor.adam.lr": 0, "reward.remote_url": REWARD,
        "ckpt.output_dir": tmp_path / "out",
    }  # fmt: skip
    assert train([word for name, value in options.items() for word in (f"--{name}", str(value))]) == 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_it_goes_in_and_out_unchanged(dtype: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(["--check", str(model), "--dtype", dtype]) == 0
    assert "the checkpoint goes in and out unchanged" in capsys.readouterr().out
