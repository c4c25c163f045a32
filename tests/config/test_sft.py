"""The options of train_sft: OpenRLHF's, option by option, and one report of what is wrong with
them."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest

from openrlhf_ext.cli.train_sft import main
from openrlhf_ext.config.sft import SupervisedConfig
from openrlhf_ext.config.sft_rules import launcher
from openrlhf_ext.config.show import format_options
from openrlhf_ext.options import ConfigError, value_of
from openrlhf_ext.options.table import table_of
from tests.config.conftest import MODEL, load_supervised

ROOT = Path(__file__).parents[2]
TABLE = table_of(SupervisedConfig)


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(
        json.dumps({**MODEL, "max_position_embeddings": 2048})
    )
    (tmp_path / "examples.jsonl").write_text('{"q": "1+1?", "a": "2"}\n{"q": "1+2?", "a": "3"}\n')
    return [
        "--model.model_name_or_path",
        str(tmp_path / "model"),
        "--data.dataset",
        str(tmp_path / "examples.jsonl"),
        "--data.input_key",
        "q",
        "--data.output_key",
        "a",
        "--ckpt.output_dir",
        str(tmp_path / "out"),
        "--ckpt.path",
        str(tmp_path / "ckpt"),
    ]


def faults(words: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        load_supervised(words)
    return [violation.message for violation in raised.value.violations]


LAUNCHED = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_PORT": "29500",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
}


@pytest.mark.parametrize(
    ("changes", "ranks", "said"),
    [
        ({}, 4, ""),
        ({}, None, ""),
        ({"WORLD_SIZE": "8"}, 4, ""),
        ({"LOCAL_WORLD_SIZE": None}, 2, ""),
        ({"WORLD_SIZE": None, "LOCAL_WORLD_SIZE": None}, 3, ""),  # the command starts ranks itself
        (
            {},
            3,
            "model.num_gpus_per_node 3 contradicts the launcher, which started 4 ranks "
            "(WORLD_SIZE)",
        ),
        ({"LOCAL_WORLD_SIZE": None}, 3, "model.num_gpus_per_node 3 contradicts the launcher"),
        (
            {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": None},
            2,
            "model.num_gpus_per_node 2 contradicts the launcher",
        ),
    ],
)
def test_what_a_launcher_says_is_held_against_the_options(words, monkeypatch, changes, ranks, said):
    for name, value in (LAUNCHED | changes).items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(
            name, value
        )
    config = load_supervised([*words, "--train.batch_size", "24", "--train.micro_batch_size", "1"])
    changed = config.model.model_copy(update={"num_gpus_per_node": ranks})
    told = "\n".join(
        fault.message for fault in launcher(config.model_copy(update={"model": changed}))
    )
    assert told.startswith(said) and bool(told) == bool(said)


@pytest.mark.parametrize("value", ["two", "-1", "", "1.0", "x" * 1000])
def test_variables_of_a_launcher_that_are_no_numbers_are_one_report(
    words, monkeypatch, capsys, value
):
    for name in LAUNCHED:
        monkeypatch.setenv(name, value)
    assert main(words) == 2
    told = capsys.readouterr().err
    assert told.startswith("5 problems in the configuration:") and len(told) < 2000
    assert all(
        f"- {name} must be a whole number, as a launcher sets it" in told for name in LAUNCHED
    )


class TestOpenRLHF:
    @pytest.fixture
    def actions(self) -> dict[str, argparse.Action]:
        pytest.importorskip("openrlhf", reason="compares with the installed OpenRLHF")
        from tests.config.upstream_parser import upstream_parser

        found = {
            a.option_strings[0].removeprefix("--"): a for a in upstream_parser("train_sft")._actions
        }
        found.pop("-h")
        return found

    def test_every_option_is_known_and_only_those_count_as_its_own(self, actions):
        assert len(actions) == 77
        assert {name for name, option in TABLE.items() if not option.info.added} == set(actions)

    def test_defaults_and_forms(self, actions):
        changed = set()
        for name, action in actions.items():
            default = tuple(action.default) if isinstance(action.default, list) else action.default
            if default != TABLE[name].default:
                changed.add(name)
            forms = {"*": "many", "+": "many", 2: "pair", None: "one", 0: "flag"}
            assert TABLE[name].arity == forms[action.nargs], name
        assert changed == {"logger.wandb.run_name", "muon.no_nesterov", "eval.split"}, (
            "a time; a second flag for muon.nesterov; a held-out split where there is one"
        )


def test_a_configuration(words, tmp_path):
    config = load_supervised(
        [*words, "--ds.ring_attn_size", "1", "--model.gradient_checkpointing_enable"]
    )
    assert config.logger.metrics_path == str(tmp_path / "out/metrics.jsonl")
    assert (config.train.batch_size, config.train.micro_batch_size, config.train.max_epochs) == (
        128,
        8,
        2,
    )
    assert config.megatron.recompute == "full" and config.adam.lr == 5e-6 and config.world_size == 1
    assert (config.lr_warmup_ratio, config.max_norm) == (0.03, 1.0)
    (tmp_path / "again.yaml").write_text(format_options(config))
    assert (
        load_supervised(["--config", str(tmp_path / "again.yaml")]).model_dump()
        == config.model_dump()
    )


def test_sizes_that_deepspeed_is_given(words):
    config = load_supervised(
        [
            *words,
            "--ds.zero_stage",
            "3",
            "--ds.packing_samples",
            "--model.num_gpus_per_node",
            "2",
            "--ds.tensor_parallel_size",
            "2",
        ]
    )
    assert config.layout.tensor_parallel_size == 2 and config.layout.data_parallel_size == 1
    assert any("ds.zero_stage" in line for line in config.warnings)


def test_an_option_that_no_command_supports_is_not_called_one_of_another_command(words):
    (found,) = faults([*words, "--actor.muon.lr", "1"])
    assert (
        found.startswith("unknown option actor.muon.lr (command line); ")
        and "train_ppo_ray" not in found
    )
    (found,) = faults([*words, "--train.rollback_on", "nan"])
    assert found.startswith(
        "unknown option train.rollback_on (command line); train_ppo_ray has this option"
    ), found


def test_all_faults_in_one_report(words, tmp_path):
    (tmp_path / "broken.jsonl").write_text(json.dumps({"q": "1+1?", "a": 2}) + "\n")
    found = faults(
        [
            *words,
            "--adam.lr",
            "abc",
            "--eval.dataset",
            str(tmp_path / "broken.jsonl"),
            "--data.multiturn",
            "--megatron.tensor_parallel_size",
            "3",
            "--model.lora",
            "4",
            "--adam.learning_rate",
            "1",
            "--ds.load_in_4bit",
            "--ds.lora.rank",
            "8",
            "--fp8.enable",
            "--optim",
            "muon",
            "--fp8.rollout_enable",
            "--ckpt.async_enable",
        ]
    )
    text = "\n".join(found)
    assert "adam.lr: expected number >= 0, got abc (command line)" in found
    assert "unknown option model.lora" in text
    assert "unknown option adam.learning_rate (command line); did you mean adam.lr?" in found
    assert (
        "unknown option ckpt.async_enable (command line); train_ppo_ray has this option, but this "
        "command does not" in text
    )
    assert "adapters with FP8 layers are not supported: got fp8.enable" in text
    assert "ds.load_in_4bit is not supported" in text and "optim is not supported" in text
    assert (
        "must divide the model's attention heads: got 3, the model of model.model_name_or_path has"
        in text
    )
    assert "model.num_gpus_per_node must be a multiple of megatron.tensor_parallel_size" in text
    assert "under 'a'; both must be texts" in text
    assert "data.multiturn needs data.apply_chat_template" in text
    assert (
        "data.multiturn reads whole chats from data.input_key: leave data.output_key a out" in text
    )
    assert "fp8.rollout_enable is for rollout engines" in text
    assert "actor." not in text and "prompt_dataset" not in text and "critic" not in text, (
        "names of another command"
    )


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        ({"q": [{"role": "user", "content": "1+1?"}]}, "the last one from the assistant"),
        ({"q": "1+1?"}, "has no chat under 'q'"),
    ],
)
def test_a_chat_ends_in_an_answer(record, fault, words, tmp_path):
    (tmp_path / "examples.jsonl").write_text(json.dumps(record) + "\n")
    without = [word for word in words if word not in ("--data.output_key", "a")]
    assert any(fault in found for found in faults([*without, "--data.apply_chat_template"]))


def test_sequences_fit_an_attention_window(words, tmp_path):
    windowed = {
        **MODEL,
        "max_position_embeddings": 2048,
        "model_type": "mistral",
        "sliding_window": 512,
    }
    (tmp_path / "model/config.json").write_text(json.dumps(windowed))
    load_supervised([*words, "--data.max_len", "512"])
    assert (
        "got 513 > 512 tokens; set data.max_len to at most 512"
        in faults([*words, "--data.max_len", "513"])[0]
    )


def test_an_answer_is_required(words):
    without = [word for word in words if word not in ("--data.output_key", "a")]
    assert any(found.startswith("data.output_key is required") for found in faults(without))
    assert load_supervised([*without, "--model.pretrain_mode_enable"]).model.pretrain_mode_enable


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            ["--data.tokenizer_chat_template", "{{ x }}"],
            "data.tokenizer_chat_template has no effect",
        ),
        (["--model.pretrain_mode_enable"], "data.output_key has no effect"),
    ],
)
def test_what_is_not_read_is_said(more, said, words):
    assert any(said in line for line in load_supervised([*words, *more]).warnings)


def test_recomputation_is_asked_for_once(words):
    both = [*words, "--model.gradient_checkpointing_enable", "--megatron.recompute", "none"]
    assert any(
        found.startswith("model.gradient_checkpointing_enable and megatron.recompute")
        for found in faults(both)
    )


def test_help_is_of_this_command(capsys):
    with pytest.raises(SystemExit):
        load_supervised(["--help", "model"])
    shown = capsys.readouterr().out
    assert (
        shown.startswith("usage: openrlhf-ext train_sft") and "--model.num_gpus_per_node" in shown
    )


STATED = {
    "adam.betas": (0.9, 0.95), "adam.lr": 1e-6, "adam.weight_decay": 0.1, "lr_scheduler": "cosine",
    "lr_warmup_ratio": 0.005, "max_norm": 0.1, "train.batch_size": 1, "train.max_epochs": 1, "train.seed": 3407,
    "data.max_len": 5500, "ckpt.save_steps": 500,
    "ds.lora.target_modules": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}  # fmt: skip
"""Of supervised fine-tuning in Simoni et al., arXiv 2508.03772 v5, section 6 and listing 1."""
RANKS = {"llama3.1_8b": 128, "qwen2.5_3b": 64}


@pytest.mark.parametrize(
    "recipe", sorted((ROOT / "configs/sft").glob("*.yaml")), ids=lambda path: path.stem
)
def test_a_recipe_is_what_its_source_states(recipe, tmp_path):
    record = {
        "question": [{"role": "system", "content": "Think."}, {"role": "user", "content": "1+1?"}],
        "solution": [{"role": "assistant", "content": "<answer>2</answer>"}],
    }
    (tmp_path / "examples.jsonl").write_text(json.dumps(record) + "\n")
    config = load_supervised(
        ["--config", str(recipe), "--data.dataset", str(tmp_path / "examples.jsonl")]
    )
    stated = recipe.read_text().partition("--- stated")[2].partition("--- ours")[0]
    names = re.findall(r"^([\w.]+):", stated, re.M)
    assert {name: value_of(config, name) for name in names} == STATED | {
        "ds.lora.rank": RANKS[recipe.stem]
    }
