"""What the command refuses before anything starts, and its two-minute form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from openrlhf_ext.cli import chaos
from openrlhf_ext.cli.chaos import main
from openrlhf_ext.locks import FolderLock
from tests.patience import PATIENCE_S


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """What the command says, with status 2, and nothing is started."""
    monkeypatch.setattr(chaos, "toy", lambda folder: words(tmp_path))
    monkeypatch.setattr(chaos, "make_all", lambda *_: pytest.fail("it began"))

    def refused(*more: str) -> str:
        try:
            status = main([*more, *(() if "--output" in more else ("--output", str(tmp_path / "out")))])
        except SystemExit as error:  # of the parser
            status = error.code
        assert status == 2
        return capsys.readouterr().err

    return refused


def given(folder: Path) -> dict[str, dict]:
    (folder / "prompts.jsonl").write_text('{"input": "1 + 1 = "}\n' * 64)
    (folder / "reward.py").write_text("def reward_func(queries, prompts, labels): return {'rewards': 0, 'scores': 0}\n")
    (folder / "policy").mkdir(exist_ok=True)
    config = {
        "model_type": "qwen2", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 99, "hidden_size": 128, "intermediate_size": 64, "max_position_embeddings": 4096,
    }  # fmt: skip
    (folder / "policy/config.json").write_text(json.dumps(config))
    return {
        "actor": {"model_name_or_path": str(folder / "policy")}, "reward": {"remote_url": str(folder / "reward.py")},
        "data": {"prompt_dataset": str(folder / "prompts.jsonl")}, "train": {"batch_size": 32, "micro_batch_size": 8},
        "rollout": {"batch_size": 8, "n_samples_per_prompt": 4},
    }  # fmt: skip


def words(folder: Path) -> list[str]:
    return [f"--{s}.{k}={v}" for s, options in given(folder).items() for k, v in options.items()]


def test_a_configuration_that_writes_elsewhere_is_refused_by_name(refused, tmp_path):
    config = given(tmp_path) | {"ckpt": {"output_dir": "/somewhere/else"}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    said = refused(str(tmp_path / "run.yaml"))
    assert f"ckpt.output_dir ({tmp_path}/run.yaml:" in said and "is /somewhere/else, outside of --output" in said
    assert "logger.metrics_path (command line) is /x/m.jsonl" in refused("--logger.metrics_path", "/x/m.jsonl")
    assert "logger.wandb.key" in refused("--logger.wandb.key", "secret")


def test_a_folder_in_use_names_its_holder_and_one_that_is_not_empty_is_refused(refused, tmp_path):
    lock = FolderLock(tmp_path / "run", take_over=False, remedy="")
    said = refused("--output", str(tmp_path / "run"))
    assert f"is in use by pid {os.getpid()}" in said
    lock.close()
    assert "is not empty" in refused("--output", str(tmp_path / "run"))


def test_faults_that_cannot_happen_here_are_refused_with_the_reason(refused, monkeypatch):
    monkeypatch.setattr(chaos, "abilities", lambda: set())
    assert "--only network_cut needs root" in refused("--only", "kill_rank,network_cut")
    assert "kill_reward_model needs a run with reward_model" in refused("--only", "kill_reward_model")
    assert "no fault 'kill_rnk'; did you mean kill_rank?" in refused("--only", "kill_rnk")
    assert "must be at least 1, got 0" in refused("--minutes", "0")
    assert "did you mean --minutes" in refused("--minute", "3")


def test_what_needs_root_is_left_out_of_the_draw_without_it():
    without, with_it = chaos.chosen({"reward"}, None), chaos.chosen({"reward", "root"}, None)
    assert {"network_cut", "shm_full", "checkpoints_read_only"} <= set(with_it) - set(without)
    assert "kill_critic" not in with_it and "kill_rank" in without


def test_all_faults_are_listed_with_what_they_need(capsys):
    assert main(["--list"]) == 0
    lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert lines.keys() == chaos.FAULTS.keys() and lines["network_slow"].startswith("netem")


@pytest.mark.e2e
def test_the_toy_holds_against_faults_of_a_seed(tmp_path):
    """The command as a user types it."""
    only = "kill_engine,kill_raylet,pause_rank,reward_forks"
    command = ["chaos", "--minutes", "1", "--seed", "5", "--only", only, "--output", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-m", "openrlhf_ext", *command], capture_output=True, text=True, timeout=10 * PATIENCE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out/chaos.json").read_text())
    assert found["held"] and found["faults"] >= 1 and 0 < found["effective"] < 1
    rows = [row for trial in found["trials"] for row in trial["faults"] if "missed" not in row]
    assert {row["fault"] for row in rows} <= set(only.split(","))
    for row in rows:
        assert row["result"] == "went on" or 0 < row["detected_s"] < 100, row
