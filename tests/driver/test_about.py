"""What the first event of a run says."""

from __future__ import annotations

import json
import os

from openrlhf_ext import compat
from openrlhf_ext.config import RunConfig
from openrlhf_ext.config.upstream import upstream_args
from openrlhf_ext.driver.about import about_run


def test_options_without_secrets_versions_machine_and_layout(tmp_path):
    given = {
        "logger": {"wandb": {"key": "a1b2c3"}},
        "reward": {"remote_url": "http://me:passw0rd@grader:80/f,https://me:passw0rd@other/f"},
        "actor": {"num_nodes": 2, "num_gpus_per_node": 4},
        "megatron": {"tensor_parallel_size": 2},
        "ckpt": {"path": str(tmp_path), "load_enable": True},
    }
    told = about_run(RunConfig.model_validate(given))
    text = json.dumps(told, allow_nan=False)
    assert "a1b2c3" not in text and "passw0rd" not in text
    assert told["options"]["logger.wandb.key"] == "(hidden)"
    assert (
        told["options"]["reward.remote_url"]
        == "http://(hidden)@grader:80/f,https://(hidden)@other/f"
    )
    assert told["options"]["ckpt.max_mem"] == "inf" and "ds.zero_stage" not in told["options"]
    assert (told["layout"]["ranks"], told["layout"]["tensor"], told["layout"]["data"]) == (8, 2, 4)
    assert (
        told["versions"]["torch"]
        and told["hardware"]["memory_gib"] > 0
        and told["resume_step"] == 0
    )
    (tmp_path / "global_step7").mkdir()
    (tmp_path / "global_step7/manifest.json").write_text("{}")
    assert about_run(RunConfig.model_validate(given))["resume_step"] == 7


def test_wandb_is_told_no_secret_and_finds_its_key(monkeypatch):
    told = []
    monkeypatch.setattr("openrlhf_ext.compat.WandbLogger", told.append)
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.delenv("WANDB_API_KEY")
    given = {
        "logger": {"wandb": {"key": "a1b2c3", "project": "p"}},
        "reward": {"remote_url": "http://me:passw0rd@grader:80/f"},
    }
    args = upstream_args(RunConfig.model_validate(given))
    compat.build_sinks(args)
    (shown,) = told
    assert (
        "a1b2c3" not in str(shown)
        and "passw0rd" not in str(shown)
        and shown.logger.wandb.project == "p"
    )
    assert os.environ["WANDB_API_KEY"] == "a1b2c3" and args.logger.wandb.key == "a1b2c3"
