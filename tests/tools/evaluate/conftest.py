from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SPECIAL = ["<|endoftext|>", "<|im_end|>", "<answer>", "</answer>"]
CHARACTERS = list("0123456789+-=?#")
POSITIONS = 64

REWARD_FILE = """
def reward_func(queries, prompts, labels, **kwargs):
    completion = queries[0].removeprefix(prompts[0])
    if "#" in completion and "fail" in labels[0]:
        raise ValueError("no hashes")
    even = any(digit in completion for digit in "02468")
    logs = {"hashes": completion.count("#"), "ones": float("1" in completion)}
    return {"rewards": even + 0.5, "scores": float(even), "extra_logs": logs}
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results that no option puts anywhere are written below the working directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate(SPECIAL + CHARACTERS)}
    backend = Tokenizer(tokenizer_models.WordLevel(vocabulary, unk_token="<|endoftext|>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=SPECIAL[2:],
    )


@pytest.fixture
def model() -> Qwen2ForCausalLM:
    """A random model whose saved sampling defaults would change every distribution, were they
    used."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(SPECIAL) + len(CHARACTERS),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=POSITIONS,
        initializer_range=0.2,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config).float()
    model.generation_config = GenerationConfig(
        do_sample=True,
        top_k=1,
        top_p=0.01,
        repetition_penalty=3.0,
        temperature=0.01,
        eos_token_id=1,
        pad_token_id=0,
    )
    return model


@pytest.fixture
def checkpoint(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "problems.jsonl"
    rows = [
        {"question": f"{i}+{i}=?", "answer": f"{i}+{i}={2 * i}\n#### {2 * i}"} for i in range(1, 9)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def reward(tmp_path: Path) -> Path:
    path = tmp_path / "reward.py"
    path.write_text(REWARD_FILE)
    return path
