from __future__ import annotations

import shutil
from pathlib import Path

import pytest


def test_outputs_must_be_writable(run_dir: Path, problems):
    (run_dir / "file").touch()
    for option in ("ckpt.output_dir", "ckpt.path", "logger.tensorboard_dir", "logger.metrics_path"):
        (message,) = problems(f"--{option}", "file/below/x", *([] if option != "ckpt.output_dir" else
                              ["--logger.metrics_path", "m", "--logger.figure_path", "f"]))  # fmt: skip
        assert message.startswith(f"{option} must be writable") and "is a file" in message
    assert problems("--ckpt.output_dir", "not/yet/there") == []


@pytest.mark.parametrize(
    ("words", "writes", "reads"),
    [
        (["--ckpt.output_dir", "model"], "ckpt.output_dir, logger.metrics_path, logger.figure_path", "actor.model"),
        (["--ckpt.output_dir", "link"], "ckpt.output_dir, logger.metrics_path, logger.figure_path", "actor.model"),
        (["--ckpt.path", "model"], "ckpt.path", "actor.model"),
        (["--logger.metrics_path", "model/config.json"], "logger.metrics_path", "actor.model"),
        (["--logger.metrics_path", "train.jsonl"], "logger.metrics_path", "data.prompt_dataset"),
        (["--logger.figure_path", "reward.py"], "logger.figure_path", "reward.remote_url"),
        (["--eval.dataset", "data", "--ckpt.path", "data/below"], "ckpt.path", "eval.dataset"),
        (["--eval.dataset", "data", "--logger.metrics_path", "data/m.jsonl"], "logger.metrics_path", "eval.dataset"),
    ],
)
def test_what_is_read_is_not_written(run_dir: Path, problems, words, writes, reads):
    (run_dir / "link").symlink_to("model")
    (run_dir / "data").mkdir()
    (message,) = problems(*words)
    assert message.startswith(f"{writes} would write into") and f"read by {reads}" in message


def test_the_critic_is_neither_overwritten_nor_written_over_the_policy(run_dir: Path, problems):
    shutil.copytree(run_dir / "model", run_dir / "critic")
    shutil.copytree(run_dir / "model", run_dir / "out_critic")
    words = ["--algo.advantage.estimator", "gae", "--critic.num_gpus_per_node", "2", "--ckpt.output_dir"]
    other = ["--critic.model_name_or_path", "critic"]
    assert problems(*words, "out", *other) == []
    assert "read by critic.model_name_or_path" in problems(*words, "critic", *other)[0]
    over = [*words, "out", "--actor.model_name_or_path", "out_critic"]
    assert problems(*over) == []
    (message,) = problems(*over, "--critic.save_value_network")
    assert message.startswith("critic.save_value_network would write into the folder of the model")


def test_a_model_is_not_a_checkpoint_that_may_be_moved(run_dir: Path, problems):
    shutil.copytree(run_dir / "model", run_dir / "ckpt/checkpoints_ppo_ray/global_step5_hf")
    shutil.copytree(run_dir / "model", run_dir / "ckpt/checkpoints_ppo_ray/start")
    words = ["--actor.model_name_or_path", "ckpt/checkpoints_ppo_ray/global_step5_hf"]
    (message,) = problems(*words)
    assert message.startswith("actor.model_name_or_path must not be a checkpoint in ckpt.path")
    assert problems(*words, "--ckpt.path", "elsewhere") == []
    assert problems("--actor.model_name_or_path", "ckpt/checkpoints_ppo_ray/start") == []


def test_outputs_may_lie_beside_and_below_a_model_and_above_the_inputs(problems):
    assert problems("--ckpt.output_dir", ".") == []
    assert problems("--ckpt.output_dir", "model/tuned", "--ckpt.path", "model/checkpoints") == []


def test_file_outputs_are_two_files(problems):
    (message,) = problems("--logger.metrics_path", "model")
    assert message.startswith("logger.metrics_path must be a file, ") and message.endswith("model is a folder")
    (message,) = problems("--logger.metrics_path", "m", "--logger.figure_path", "m")
    assert "logger.metrics_path and logger.figure_path must be different files" in message
