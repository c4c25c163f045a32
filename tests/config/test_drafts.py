"""What drafts do not work with is refused by name, in one report."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.config.conftest import MIXTURE, MODEL
from tests.config.test_hybrid_rules import HYBRID

METHOD, PATH = "--vllm.speculative.method", "--vllm.speculative.path"
NGRAM = (METHOD, "ngram")


@pytest.fixture
def head(tmp_path: Path):
    """Writes a head of this config.json; returns the words that ask for it."""

    def write(**changed: int) -> tuple[str, ...]:
        folder = tmp_path / "head"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(MODEL | changed))
        save_file({"fc.weight": np.zeros((2, 6), np.float32)}, folder / "model.safetensors")
        return METHOD, "eagle3", PATH, str(folder)

    return write


def test_what_drafts_do_not_work_with_is_in_one_report(problems, head):
    assert problems(*NGRAM) == problems(*head()) == []
    (message,) = problems(METHOD, "eagle3")
    assert message.startswith("vllm.speculative.method eagle3 needs a head: got no vllm.spec")
    (message,) = problems(*NGRAM, "--train.exact_rollout_enable")
    assert "train.exact_rollout_enable does not work with vllm.speculative.method ngram" in message
    found = problems(
        *head(), "--fp8.rollout_enable", "--ds.lora.rank", "4",
        "--vllm.lora", "adapter",
    )  # fmt: skip
    for option in (
        "fp8.rollout_enable true",
        "vllm.lora adapter",
    ):
        assert any(
            f"vllm.speculative.method eagle3 does not work with {option}: " in message
            and message.endswith("; leave one of them out")
            for message in found
        ), (option, found)
    assert problems(*NGRAM, "--ds.lora.rank", "4") == []


def test_a_head_is_of_the_policys_model(problems, head, tmp_path):
    found = problems(
        *head(hidden_size=128, vocab_size=99, num_attention_heads=5),
        "--vllm.tensor_parallel_size",
        "2",
    )
    assert [message.split("; ")[0] for message in found] == [
        *(
            f"vllm.speculative.path must be the head of a model with the {name} of "
            f"actor.model_name_or_path: got {own} and {policy}"
            for name, own, policy in (("hidden_size", 128, 256), ("vocab_size", 99, 101))
        ),
        "vllm.tensor_parallel_size must divide the attention heads of vllm.speculative.path: got 2 and 5",
    ]
    words = head()
    (tmp_path / "head/model.safetensors").unlink()
    (message,) = problems(*words)
    assert "holds no *.safetensors file" in message
    (message,) = problems(*words[:-1], str(tmp_path / "none"))
    assert message.startswith("vllm.speculative.path: ") and "does not exist" in message


@pytest.mark.parametrize(
    ("model", "words", "said"),
    [
        (HYBRID, (), "must be none for the model of actor.model_name_or_path, got ngram"),
        (
            MIXTURE,
            ("--train.routing_replay", "rollout", "--vllm.enable_prefix_caching"),
            "ngram does not work with train.routing_replay rollout",
        ),
    ],
)
def test_models_whose_engines_keep_more_than_keys_have_no_drafts(
    problems, run_dir, model, words, said
):
    (run_dir / "model/config.json").write_text(json.dumps(model))
    assert problems(*words) == []
    (message,) = problems(*NGRAM, *words)
    assert said in message
