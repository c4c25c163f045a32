"""Rules about models: any layout of any model, and the guide, which reads the policy's tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from openrlhf_ext.config import format_config, placement_table
from openrlhf_ext.config.model_rules import _heads_divisible, divisible
from openrlhf_ext.megatron.model.shape import ModelShape, read_model_shape
from openrlhf_ext.options.sections import Megatron
from tests.config.conftest import MODEL, TOKENIZER

sizes = st.integers(1, 12)


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODEL))
    return read_model_shape(folder)


def found(shape: ModelShape, **layout: int) -> list[str]:
    return [v.message for v in divisible("actor.model_name_or_path", shape, "megatron", Megatron(**layout))]


@given(heads=sizes, groups=sizes, layers=sizes, tp=sizes, pp=sizes)
def test_the_model_can_be_cut(shape, heads, groups, layers, tp, pp):
    shape = replace(shape, num_heads=heads, num_kv_heads=groups, num_layers=layers, ffn_hidden_size=tp)
    broken = (heads % tp != 0) + (groups % tp != 0 and tp % groups != 0) + (layers % pp != 0)
    assert len(found(shape, tensor_parallel_size=tp, pipeline_parallel_size=pp)) == broken


def test_every_chunk_has_layers(shape):
    def chunks(vp: int) -> list[str]:
        return found(replace(shape, num_layers=8), pipeline_parallel_size=2, virtual_pipeline_size=vp)

    assert chunks(2) == chunks(4) == []
    (message,) = chunks(3)
    assert "got 2 * 3" in message and "use a megatron.virtual_pipeline_size of 1, 2, 4" in message


def test_an_engine_may_replicate_key_value_heads_but_not_split_them_unevenly(shape):
    def broken(size: int, kv_heads: int) -> int:
        model = replace(shape, num_heads=24, num_kv_heads=kv_heads)
        return len(list(_heads_divisible("actor.model_name_or_path", model, "vllm.tensor_parallel_size", size)))

    assert (broken(4, 8), broken(8, 4), broken(6, 4), broken(5, 5)) == (0, 0, 1, 1)


# ---- the guide -------------------------------------------------------------------------------------------------------


MIXED = ("--algo.advantage.estimator", "mixed_policy_dapo")
GUIDE = (*MIXED, "--guide.model_name_or_path", "guide")


def write_model(folder: Path, tokenizer: dict[str, Any] = TOKENIZER, **changes: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL | changes))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "model.safetensors").touch()


@pytest.fixture
def run_dir(run_dir: Path) -> Path:
    """With a guide beside the policy."""
    write_model(run_dir / "model")
    write_model(run_dir / "guide")
    return run_dir


def test_a_guide_is_there_only_where_the_estimator_has_one(load):
    config = load(*GUIDE, "--guide.samples_per_prompt", "2")
    assert (config.has_guide, config.guide_samples, config.guide_ranks) == (True, 2, 0)
    assert (config.training_ranks, config.engine_workers) == (2, 2)
    own = load(*GUIDE, "--guide.num_gpus_per_node", "4", "--guide.num_engines", "3")
    assert (own.guide_ranks, own.training_ranks, own.engine_workers) == (4, 6, 4)
    for words in (MIXED, GUIDE[2:]):
        config = load(*words)
        assert not config.has_guide and config.guide_samples == config.guide_ranks == 0
        assert config.engine_workers == 1


@pytest.mark.parametrize("words", [("--guide.model_name_or_path", "guide"), ("--guide.samples_per_prompt", "2")])
def test_another_estimator_has_no_guide(load, words):
    (warning,) = [warning for warning in load(*words).warnings if "guide" in warning]
    assert warning.startswith(f"{words[0][2:]} has no effect: got ")


def test_how_the_guide_samples_without_a_guide(load):
    assert any(
        warning.startswith("guide.num_engines has no effect: got 2, and guide.model_name_or_path is not set")
        for warning in load(*MIXED, "--guide.num_engines", "2").warnings
    )


def test_a_batch_of_failures_needs_a_guide(problems):
    (message,) = problems(*MIXED, "--algo.mixed_policy_dapo.zero_batch", "true")
    assert "algo.mixed_policy_dapo.zero_batch needs log-probs of a guiding policy" in message
    assert "set guide.model_name_or_path" in message
    assert problems(*MIXED, "--algo.mixed_policy_dapo.zero_batch", "false") == []
    assert problems(*GUIDE, "--algo.mixed_policy_dapo.zero_batch", "true") == []


def test_the_policy_has_a_part_in_every_group(problems):
    assert problems(*GUIDE, "--guide.samples_per_prompt", "3") == []
    (message,) = problems(*GUIDE, "--guide.samples_per_prompt", "4")
    assert message.startswith("guide.samples_per_prompt must be below rollout.n_samples_per_prompt")
    assert "got 4 and 4" in message
    assert problems(*GUIDE, "--guide.samples_per_prompt", "0")


def test_shared_gpus_and_ranks_that_hold_no_whole_copy(problems):
    (message,) = problems(*GUIDE, "--train.colocate_all", "--vllm.num_engines", "2")
    assert "guide.model_name_or_path and train.colocate_all exclude each other" in message
    tp2 = ("--megatron.tensor_parallel_size", "2")
    (message,) = problems(*GUIDE, *tp2, "--guide.num_gpus_per_node", "3")
    assert "multiple of the ranks of one copy of the policy" in message and "got 3 and 2" in message
    assert problems(*GUIDE, *tp2, "--guide.num_gpus_per_node", "4") == []


def renamed(tokenizer: dict[str, Any], **model: Any) -> dict[str, Any]:
    return {**tokenizer, "model": {**tokenizer["model"], **model}}


def test_a_tokenizer_that_cannot_be_read_is_said_with_its_file(problems, run_dir):
    (run_dir / "guide/tokenizer.json").write_text(json.dumps({"model": None}))
    found = problems(*GUIDE)
    assert all("guide/tokenizer.json" in message for message in found)
    assert "cannot be read as a tokenizer" in found[0] and "model must be a map, got null" in found[1]


@pytest.mark.parametrize(
    ("tokenizer", "difference"),
    [
        (renamed(TOKENIZER, merges=[["a", "b"]]), None),  # another form of the same
        (renamed(TOKENIZER, merges=[]), "the same tokens and other merges"),
        (renamed(TOKENIZER, vocab={"a": 1, "b": 0, "ab": 2}), "2 token ids mean different tokens, id 0 is 'b' and 'a'"),
        ({**TOKENIZER, "added_tokens": []}, "1 token ids mean different tokens, id 3 is None and '<end>'"),
    ],
)
def test_a_token_is_the_same_to_both(problems, run_dir, tokenizer, difference):
    write_model(run_dir / "guide", tokenizer)
    found = problems(*GUIDE)
    assert len(found) == (difference is not None), found
    if difference is not None:
        assert "must have the tokenizer of actor.model_name_or_path" in found[0] and difference in found[0]
        assert "use a guide of the policy's family" in found[0]


def test_tokenizers_in_other_files(problems, run_dir):
    (run_dir / "guide/tokenizer.json").unlink()
    (message,) = problems(*GUIDE)
    assert message.startswith("guide.model_name_or_path:") and "holds no tokenizer" in message
    (run_dir / "guide/tokenizer.model").write_bytes(b"x")
    (message,) = problems(*GUIDE)
    assert "guide has tokenizer.model and" in message
    (run_dir / "model/tokenizer.json").unlink()
    for same in (True, False):
        (run_dir / "model/tokenizer.model").write_bytes(b"x" if same else b"y")
        assert bool(problems(*GUIDE)) != same


@pytest.mark.parametrize(
    ("changes", "words", "wanted"),
    [
        ({"vocab_size": 104}, (), "got 104 and 101; use a guide of the policy's family, or resize"),
        ({"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 32}, ("--megatron.tensor_parallel_size", "2"),
         "the model of guide.model_name_or_path has 9"),
        ({"max_position_embeddings": 128}, (), "data.max_len must not exceed the model's max_position_embeddings"),
    ],
)  # fmt: skip
def test_the_guides_model(problems, run_dir, changes, words, wanted):
    write_model(run_dir / "guide", **changes)
    found = problems(*GUIDE, *words)
    assert any(wanted in message for message in found), found


def test_the_placement_and_the_printed_configuration(load: Callable[..., Any], tmp_path: Path):
    table = placement_table(load(*GUIDE, "--guide.num_engines", "2"))
    assert "guide: in the host memory of the policy's ranks, from " in table
    assert "rollout of the guide: 2 vLLM engines x tp 1" in table
    assert "1 responses to a prompt, the policy's engines make 3" in table
    assert "guide" not in placement_table(load(*MIXED))
    for words, ranks in (([], 0), (["--guide.num_gpus_per_node", "8"], 8)):
        config = load(*GUIDE, *words)
        shown = yaml.safe_load(format_config(config))
        assert ("num_gpus_per_node" in shown["guide"]) == bool(words) and config.guide_ranks == ranks
