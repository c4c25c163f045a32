from __future__ import annotations

from pathlib import Path

import pytest

from openrlhf_ext.config import format_config, load_config, placement_table
from openrlhf_ext.config.estimator import algorithm_options


@pytest.mark.parametrize(
    "words",
    [
        [],
        [
            "--algo.advantage.estimator",
            "dapo",
            "--algo.dapo.length_penalty",
            "{kind: dapo, on: correct, l_max: 9}",
        ],
        [
            "--actor.eps_clip",
            "0.2",
            "--algo.advantage.is_correction_level",
            "token",
            "--actor.adam.lr",
            "1e-5",
        ],
        [
            "--data.input_template",
            "Q: {}\nA: 'é'",
            "--algo.gspo.dual_clip",
            "null",
            "--eval.dataset",
            "org/name",
        ],
    ],
)
def test_the_printed_configuration_loads_back_to_the_same_run(load, run_dir: Path, words):
    config = load(*words)
    (run_dir / "saved.yaml").write_text(format_config(config))
    again = load_config(["--config", "saved.yaml"])
    assert again.model_dump() == config.model_dump()
    assert algorithm_options(again) == algorithm_options(config)
    assert again.warnings == config.warnings


def test_values_that_were_set_say_where(load):
    text = format_config(load("--train.seed", "7"))
    assert "  seed: 7  # set: command line (default: 42)\n" in text
    assert "  num_gpus_per_node: 2  # set: run.yaml:3 (default: 8)\n" in text
    assert "  num_nodes: 1\n" in text
    assert "# algorithm: grpo {}\n" in text


def test_what_the_estimator_decides_is_not_shown_as_openrlhf_default(load):
    assert "eps_clip" not in format_config(load())
    assert "eps_clip: 0.2  # set: command line" in format_config(load("--actor.eps_clip", "0.2"))


def test_secrets_are_hidden(load):
    assert "s3cret" not in format_config(load("--logger.wandb.key", "s3cret"))


def test_the_table_places_every_rank_and_engine(load):
    text = placement_table(
        load(
            "--actor.num_nodes",
            "2",
            "--actor.num_gpus_per_node",
            "4",
            "--megatron.tensor_parallel_size",
            "2",
            "--megatron.pipeline_parallel_size",
            "2",
            "--vllm.num_engines",
            "2",
            "--vllm.tensor_parallel_size",
            "2",
            "--rollout.batch_size",
            "16",
            "--megatron.decoder_last_pipeline_num_layers",
            "1",
        )
    )
    assert "policy: 8 ranks = tp 2 x cp 1 x pp 2 x dp 2 (order tp-cp-ep-pp-dp), bf16" in text
    assert "vocabulary 101, padded to 102 (51 per tensor-parallel rank)" in text
    rows = [line.split() for line in text.splitlines()]
    ranks = [row for row in rows if len(row) == 8 and "-" in row[0]]
    assert [row[0] for row in ranks] == ["0-1", "2-3", "4-5", "6-7"], "those of a node on one line"
    assert ranks[3] == ["6-7", "1", "2-3", "0-1", "0", "1", "1", "3"] and ranks[2][-1] == "0-2"
    wide = placement_table(
        load(
            "--actor.num_nodes",
            "20",
            "--actor.num_gpus_per_node",
            "8",
            "--rollout.batch_size",
            "40",
            "--train.batch_size",
            "160",
        )
    )
    assert (
        "120-127    15   0-7   0   0   0  120-127     0-3\n  ... and so on, up to rank 159" in wide
    )
    assert "16 prompts x 4 responses = 64 samples" in text
    assert "2 optimizer steps of 32 samples, distributed to 2 data-parallel ranks by length" in text
    assert "micro-batches of at most 1 samples, 16 or more on a rank" in text


def test_the_table_counts_no_micro_batches_that_depend_on_lengths(load):
    odd = ["--rollout.batch_size", "3", "--train.batch_size", "12", "--train.micro_batch_size", "8"]
    assert "at most 8 samples, 1 or more on a rank" in placement_table(load(*odd))
    packed = placement_table(
        load("--train.dynamic_batch_enable", "--train.max_tokens_per_gpu", "512")
    )
    assert "micro-batches of at most 512 tokens on a rank" in packed


def test_a_model_on_the_hub_has_layers_where_its_config_is_in_the_checkout(load):
    text = placement_table(load("--actor.model_name_or_path", "org/name"))
    assert "?" in text and "vocabulary" not in text
    text = placement_table(load("--actor.model_name_or_path", "Qwen/Qwen2.5-7B-Instruct"))
    assert "28 layers, 28 heads" in text and "0-27" in text
