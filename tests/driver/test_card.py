"""The model card beside the final checkpoint."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import yaml

from openrlhf_ext import __version__
from openrlhf_ext.config import build_config
from openrlhf_ext.driver.about import CARD, write_card
from openrlhf_ext.reporting import MetricsWriter

SNAPSHOT = "/cache/hub/models--Qwen--Qwen2.5-0.5B/snapshots/060db6499f32"


def card_of(folder: Path, base: str = SNAPSHOT, **more: Any) -> str:
    """The card of a run of four steps with two evaluations, which has downloaded its model or was
    given a folder."""
    (folder / "mine").mkdir(exist_ok=True)
    (folder / "train.jsonl").write_text("{}\n")
    given: dict[str, Any] = {
        "actor.model_name_or_path": "Qwen/Qwen2.5-0.5B",
        "data.prompt_dataset": str(folder / "train.jsonl"),
        "eval.dataset": "openai/gsm8k",
        "algo.advantage.estimator": "dapo",
        "algo.dapo.clip_high": 0.3,
        "reward.remote_url": "http://me:passw0rd@grader:80/f",
        "logger.wandb.key": "a1b2c3",
        "rollout.batch_size": 8,
        "rollout.n_samples_per_prompt": 4,
        "train.batch_size": 32,
        "ckpt.output_dir": str(folder / "mine"),
        "logger.metrics_path": str(folder / "mine/metrics.jsonl"),
    } | more
    config = build_config(given, origin="test", files=False)
    config = config.model_copy(
        update={"actor": config.actor.model_copy(update={"model_name_or_path": base})}
    )
    with MetricsWriter(folder / "mine/metrics.jsonl") as metrics:
        for step, accuracy in enumerate((0.25, None, None, None, 0.75)):
            if step:
                metrics.write(step, {"reward/mean": step / 10, "accuracy/mean": 0.5})
            if accuracy is not None:
                metrics.write(step, {"eval/accuracy": accuracy, "eval/accuracy_stderr": 0.0125})
    write_card(config)
    return (folder / "mine" / CARD).read_text()


def test_method_base_data_and_numbers_without_secrets_or_folders_of_the_machine(tmp_path):
    card = card_of(tmp_path)
    head = yaml.safe_load(card.split("---\n")[1])
    assert head["base_model"] == "Qwen/Qwen2.5-0.5B" and head["library_name"] == "transformers"
    assert (
        head["tags"] == ["openrlhf_ext", "reinforcement-learning", "dapo"] and "license" not in head
    )
    assert (
        "`Qwen/Qwen2.5-0.5B` (revision 060db6499f32)" in card
        and f"openrlhf_ext {__version__}" in card
    )
    assert "Steps: 4." in card
    mean = "0.150 +- 0.050 in the first 2 steps, 0.350 +- 0.050 in the last 2 steps"
    assert f"| training reward | {mean} |" in card
    assert (
        "| held-out accuracy | 0.250 +- 0.013 after step 0, 0.750 +- 0.013 after step 4 |" in card
    )
    digest = hashlib.sha256(b"{}\n").hexdigest()
    assert "| clip_high | 0.3 |" in card and "| rollout.batch_size | 8 |" in card
    assert f"| data.prompt_dataset | train.jsonl | {digest} |" in card
    assert "| eval.dataset | openai/gsm8k | not one file |" in card
    assert not [word for word in ("a1b2c3", "passw0rd", str(tmp_path), "/cache") if word in card]


def test_a_local_base_is_named_and_not_given_to_the_hub_and_a_new_run_writes_anew(tmp_path):
    assert "revision 060db6499f32" in card_of(tmp_path)
    card = card_of(tmp_path, "/models/start")
    assert "`start`, trained" in card and "base_model:" not in card and "/models" not in card


def test_the_readme_of_somebody_else_stays(tmp_path, caplog):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / CARD).write_text("my notes")
    with caplog.at_level(logging.WARNING):
        assert card_of(tmp_path) == "my notes"
    assert "is not of a run and stays" in caplog.text


def test_the_card_of_an_adapter_says_what_it_is(tmp_path):
    head = yaml.safe_load(card_of(tmp_path, **{"ds.lora.rank": 8}).split("---\n")[1])
    assert (head["library_name"], head["base_model_relation"]) == ("peft", "adapter")


def test_a_run_that_went_on_with_another_method_says_which_steps_were_whose(tmp_path):
    (tmp_path / "mine").mkdir()
    given = {
        "algo.advantage.estimator": "grpo",
        "actor.adam.lr": 3e-4,
        "data.prompt_dataset": "/a/x.jsonl",
    }
    events = [
        {"event": "start", "resume_step": 0, "options": given},
        {
            "event": "start",
            "resume_step": 2,
            "options": given
            | {
                "algo.advantage.estimator": "dapo",
                "actor.adam.lr": 1e-4,
                "data.prompt_dataset": "/b/y.jsonl",
            },
        },
    ]
    lines = (json.dumps({"step": 0, "time": 1.0, **event}) + "\n" for event in events)
    (tmp_path / "mine/events.jsonl").write_text("".join(lines))
    card = card_of(tmp_path)
    assert yaml.safe_load(card.split("---\n")[1])["tags"][2:] == ["grpo", "dapo"]
    assert "| steps 1 to 2 | `actor.adam.lr` 0.0003, `algo.advantage.estimator` grpo, " in card
    assert "| from step 3 | `actor.adam.lr` 0.0001, `algo.advantage.estimator` dapo, " in card
    assert "`data.prompt_dataset` y.jsonl" in card and "/b/" not in card
    assert "Estimator `dapo` (algo.advantage.estimator), from step 3, with these options:" in card
