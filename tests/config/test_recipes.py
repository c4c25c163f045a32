from __future__ import annotations

import json
from pathlib import Path

import pytest

from openrlhf_ext.cli.train_ppo_ray import dry_run
from openrlhf_ext.config import load_config
from openrlhf_ext.driver import preflight

RECIPES = sorted((Path(__file__).parents[2] / "configs/recipes").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_hold_once_model_data_and_reward_are_given(run_dir: Path, recipe: Path):
    config_json = run_dir / "model/config.json"
    config_json.write_text(json.dumps(json.loads(config_json.read_text()) | {"max_position_embeddings": 1 << 17}))
    record = json.dumps({"question": "1+1", "answer": "#### 2"}) + "\n"
    (run_dir / "train.jsonl").write_text(record * 1024)
    config = load_config(
        ["--config", str(recipe), "--actor.model_name_or_path", "model", "--data.prompt_dataset", "train.jsonl",
         "--reward.remote_url", "reward.py"]
    )  # fmt: skip
    assert config.warnings == ()
    found = preflight.findings(config)
    assert [v.message for v in found.violations if v.options != ("actor.model_name_or_path",)] == []  # no weights here
    assert found.warnings == ()
    assert dry_run(config) == 0, "every rank of the layout can be built"


def test_the_quickstarts_options_run_without_an_evaluation(run_dir: Path):
    (run_dir / "train.jsonl").write_text((json.dumps({"question": "1+1", "answer": "#### 2"}) + "\n") * 32)
    quickstart = RECIPES[0].parents[1] / "quickstart.yaml"
    words = ["--actor.model_name_or_path", "model", "--data.prompt_dataset", "train.jsonl"]
    config = load_config(["--config", str(quickstart), *words, "--reward.remote_url", "reward.py"])
    assert [warning.partition(":")[0] for warning in config.warnings] == [
        f"eval.{leaf} has no effect" for leaf in ("steps", "temperature", "n_samples_per_prompt")
    ]
    assert all("set eval.dataset to evaluate" in warning for warning in config.warnings)
