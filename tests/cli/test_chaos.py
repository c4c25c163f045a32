"""What the command refuses before anything starts, and its two-minute form."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from openrlhf_ext.cli import chaos
from openrlhf_ext.cli.chaos import main
from openrlhf_ext.locks import FolderLock
from tests.e2e.jobs import JOB_S


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """What the command says, with status 2, and nothing is started."""
    monkeypatch.setattr(chaos, "toy", lambda folder: folder.mkdir(parents=True) or words(tmp_path))
    monkeypatch.setattr(chaos, "make_all", lambda *_: pytest.fail("it began"))

    def refused(*more: str) -> str:
        try:
            status = main(
                [*more, *(() if "--output" in more else ("--output", str(tmp_path / "out")))]
            )
        except SystemExit as error:  # of the parser
            status = error.code
        assert status == 2
        return capsys.readouterr().err

    return refused


def given(folder: Path) -> dict[str, dict]:
    (folder / "prompts.jsonl").write_text('{"input": "1 + 1 = "}\n' * 64)
    (folder / "reward.py").write_text(
        "def reward_func(queries, prompts, labels): return {'rewards': 0, 'scores': 0}\n"
    )
    (folder / "policy").mkdir(exist_ok=True)
    config = {
        "model_type": "qwen2",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 99,
        "hidden_size": 128,
        "intermediate_size": 64,
        "max_position_embeddings": 4096,
    }
    (folder / "policy/config.json").write_text(json.dumps(config))
    return {
        "actor": {"model_name_or_path": str(folder / "policy")},
        "reward": {"remote_url": str(folder / "reward.py")},
        "data": {"prompt_dataset": str(folder / "prompts.jsonl")},
        "train": {"batch_size": 32, "micro_batch_size": 8},
        "rollout": {"batch_size": 8, "n_samples_per_prompt": 4},
    }


def words(folder: Path) -> list[str]:
    return [f"--{s}.{k}={v}" for s, options in given(folder).items() for k, v in options.items()]


def test_a_configuration_that_writes_elsewhere_is_refused_by_name(refused, tmp_path):
    config = given(tmp_path) | {"ckpt": {"output_dir": "/somewhere/else"}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    said = refused(str(tmp_path / "run.yaml"))
    assert (
        f"ckpt.output_dir ({tmp_path}/run.yaml:" in said
        and "is /somewhere/else, outside --output" in said
    )
    assert "logger.metrics_path (command line) is /x/m.jsonl" in refused(
        "--logger.metrics_path", "/x/m.jsonl"
    )
    assert "logger.wandb.key" in refused("--logger.wandb.key", "secret")


def test_a_folder_in_use_names_its_holder_and_one_that_is_not_empty_is_refused(refused, tmp_path):
    lock = FolderLock(tmp_path / "run", take_over=False, remedy="")
    said = refused("--output", str(tmp_path / "run"))
    assert f"is in use by pid {os.getpid()}" in said
    lock.close()
    assert "is not empty" in refused("--output", str(tmp_path / "run"))
    (tmp_path / "file").touch()
    assert "cannot be a folder of runs (File exists)" in refused("--output", str(tmp_path / "file"))
    assert "cannot be a folder of runs (Not a directory)" in refused(
        "--output", str(tmp_path / "file/below")
    )


def test_faults_that_cannot_happen_here_are_refused_with_the_reason(refused, tmp_path, monkeypatch):
    monkeypatch.setattr(chaos, "abilities", lambda: set())
    assert "--only network_cut needs root" in refused("--only", "kill_rank,network_cut")
    assert "kill_reward_model needs a run with reward_model" in refused(
        "--only", "kill_reward_model"
    )
    assert "no fault 'kill_rnk'; did you mean kill_rank?" in refused("--only", "kill_rnk")
    assert "--only names no fault" in refused("--only", " ,")
    assert not (tmp_path / "out/toy").exists(), "the corrected command may have the same folder"
    assert "must be at least 1, got 0" in refused("--minutes", "0")
    assert "must be a whole number, got 'x'" in refused("--seed", "x")
    assert "did you mean --minutes" in refused("--minute", "3")


def test_what_needs_root_is_left_out_of_the_draw_without_it():
    without, with_it = chaos.chosen({"reward"}, None), chaos.chosen({"reward", "root"}, None)
    assert {"network_cut", "shm_full", "checkpoints_read_only"} <= set(with_it) - set(without)
    assert "kill_critic" not in with_it and "kill_rank" in without


def test_all_faults_are_listed_with_what_they_need(capsys):
    assert main(["--list"]) == 0
    lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert lines.keys() == chaos.FAULTS.keys() and lines["network_slow"].startswith("netem")


def test_a_yaml_is_the_run_wherever_it_stands_or_is_refused(refused, tmp_path, monkeypatch):
    config = given(tmp_path) | {"ckpt": {"output_dir": "/somewhere/else"}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    said = refused("--minutes", "1", str(tmp_path / "run.yaml"))
    assert f"{tmp_path}/run.yaml must be a single file before all options" in said
    monkeypatch.setattr(chaos, "toy", lambda folder: pytest.fail("the YAML is the run"))
    assert "is /somewhere/else, outside --output" in refused("--config", str(tmp_path / "run.yaml"))
    assert "is /somewhere/else, outside --output" in refused(f"--config={tmp_path / 'run.yaml'}")


class Made:
    """A campaign whose runs take no time; what is wrong with each."""

    def __init__(self, *wrong: list[str], missed: bool = False) -> None:
        self._wrong, self.drawn, self.evaluates_every = iter(wrong), [], -1
        self._row = {"fault": "kill_rank", "phase": "sampling", "step": 1, "result": "restarted"}
        self._row |= {"missed": "the phase did not come"} if missed else {}

    def undisturb(self) -> tuple[float, list[str], int]:
        return 3.0, next(self._wrong), 6

    def trial(self, folder: Path, drawn: list[Any], restarts: int) -> dict[str, Any]:
        self.drawn.append((folder.name, restarts, drawn))
        about = {"wrong": next(self._wrong), "left": [], "seconds": 6.0, "undisturbed_seconds": 3.0}
        return {"faults": [self._row], **about}


def test_status_and_page_say_whether_all_held(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(chaos.dataclasses, "replace", lambda campaign, **_: campaign)
    held, failed = Made([], []), Made([], ["a step is lost"])
    assert chaos.make_all(held, ["kill_rank"], 3, 0.0, tmp_path) == 0
    assert held.drawn[0][:2] == ("trial0", 0), "one at least, however little time there is"
    assert json.loads((tmp_path / "chaos.json").read_text())["effective"] == 0.5
    assert (
        chaos.make_all(failed, ["kill_rank"], 3, 0.0, tmp_path) == 1 and failed.drawn == held.drawn
    )
    assert not json.loads((tmp_path / "chaos.json").read_text())["held"]
    assert {drawn.phase for _, _, all_drawn in held.drawn for drawn in all_drawn}.isdisjoint(
        {"evaluation"}
    )
    assert chaos.make_all(Made([], [], missed=True), ["kill_rank"], 3, 0.0, tmp_path) == 1, (
        "nothing was done"
    )
    assert chaos.make_all(Made(["no model"]), ["kill_rank"], 3, 0.0, tmp_path) == 1
    assert json.loads((tmp_path / "chaos.json").read_text())["undisturbed"] == ["no model"]
    said = capsys.readouterr().out
    assert "no fault could be done to a run" in said
    assert (
        "1 of 1 runs" in said
        and "DID NOT HOLD: a step is lost" in said
        and f"no model ({tmp_path})" in said
    )


@pytest.mark.e2e
def test_the_toy_holds_against_an_engine_that_dies_and_a_rank_that_hangs(tmp_path):
    """The command as a user types it; the engine is replaced, the rank named, the bits are the
    undisturbed run's."""
    command = ["chaos", "--minutes", "1", "--seed", "550", "--only", "kill_engine,stop_rank"]
    done = subprocess.run(
        [sys.executable, "-m", "openrlhf_ext", *command, "--output", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=3 * JOB_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out/chaos.json").read_text())
    assert found["held"] and 0 < found["effective"] < 1
    killed, stopped = found["trials"][0]["faults"]
    assert (killed["fault"], killed["phase"], killed["result"]) == (
        "kill_engine",
        "sampling",
        "engine replaced",
    )
    assert (stopped["fault"], stopped["phase"], stopped["result"]) == (
        "stop_rank",
        "training",
        "ended with 1",
    )
    text = (tmp_path / "out/trial0" / stopped["log"]).read_text()
    assert re.search(r"rank \d waited in vain in '.+'(?s:.+)\nNot answering: rank \d\.\n", text), (
        text
    )
    assert 15 < stopped["detected_s"] < 100 and stopped["samples_again"] >= 0
    assert "1 of 1 runs with 2 faults held" in done.stdout or len(found["trials"]) > 1
