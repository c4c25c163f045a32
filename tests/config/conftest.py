"""A small valid run on disk, and helpers that load variations of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openrlhf_ext.config import ConfigError, RunConfig, build_config, load_config
from openrlhf_ext.config.load import load as load_of
from openrlhf_ext.config.sft import SupervisedConfig
from openrlhf_ext.config.sft_rules import check_supervised


def load_supervised(words: list[str]) -> SupervisedConfig:
    return load_of(SupervisedConfig, words, [check_supervised])


MODEL = {
    "model_type": "qwen2",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 256,
    "intermediate_size": 512,
    "vocab_size": 101,
    "max_position_embeddings": 1024,
}

MIXTURE = {
    **MODEL,
    "model_type": "qwen3_moe",
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}

TOKENIZER = {
    "version": "1.0",
    "added_tokens": [
        {
            "id": 3,
            "content": "<end>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
    ],
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
}


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, a dataset, a reward function and ``run.yaml``; it is the current
    directory."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(MODEL))
    for name in ("model.safetensors", "chat_template.jinja"):
        (tmp_path / "model" / name).touch()
    (tmp_path / "model/tokenizer.json").write_text(json.dumps(TOKENIZER))
    records = [{"question": f"{i}+1=", "answer": f"#### {i + 1}"} for i in range(40)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "reward.py").write_text(
        "def reward_func(queries, prompts, labels, **kw):\n    return {'rewards': 0.0}\n"
    )
    (tmp_path / "run.yaml").write_text(
        "actor:\n"
        "  model_name_or_path: model\n"
        "  num_gpus_per_node: 2\n"
        "rollout: {batch_size: 8, n_samples_per_prompt: 4, max_new_tokens: 64}\n"
        "train.batch_size: 32\n"
        "algo.advantage.estimator: grpo\n"
        "data:\n"
        "  prompt_dataset: train.jsonl\n"
        "  input_key: question\n"
        "  label_key: answer\n"
        "  max_len: 256\n"
        "reward.remote_url: reward.py\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def load(run_dir: Path) -> Callable[..., RunConfig]:
    """``load("--train.seed", "1")``: the valid run with further words on the command line."""
    return lambda *words: load_config(["--config", "run.yaml", *words])


@pytest.fixture
def problems(load: Callable[..., RunConfig]) -> Callable[..., list[str]]:
    """Messages of the violations of the valid run with further words; empty when there are none."""

    def messages(*words: str) -> list[str]:
        try:
            load(*words)
        except ConfigError as error:
            return [violation.message for violation in error.violations]
        return []

    return messages


@pytest.fixture
def build(run_dir: Path) -> Callable[..., RunConfig]:
    """``build({"train.seed": 1})``: the valid run with further options."""
    base: dict[str, Any] = {
        "actor.model_name_or_path": "model",
        "actor.num_gpus_per_node": 2,
        "rollout.batch_size": 8,
        "rollout.n_samples_per_prompt": 4,
        "rollout.max_new_tokens": 64,
        "train.batch_size": 32,
        "data.prompt_dataset": "train.jsonl",
        "data.input_key": "question",
        "data.label_key": "answer",
        "data.max_len": 256,
        "reward.remote_url": "reward.py",
    }
    return lambda options=None: build_config(base | (options or {}))
