"""The commands of examples/scripts are valid, as the scripts themselves word them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from openrlhf_ext.config import RunConfig, load_config
from tests.models import make_tiny_policy

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path for path in (ROOT / "examples/scripts").glob("*.sh") if path.name != "setup_env.sh")
# stands in for the interpreter: writes the arguments of every call down, and prints what a script may read from it
STUB = """#!/usr/bin/env bash
printf '%s\\0' "$@" >"$CALLS/$(ls "$CALLS" | wc -l)"
echo 0.5 0.01
"""


@pytest.fixture
def run_script(tmp_path: Path):
    """Runs a script without its set-up; returns the arguments of each call of Python."""

    def run(script: Path, *arguments: str) -> list[list[str]]:
        (tmp_path / "scripts").mkdir()
        (tmp_path / "calls").mkdir()
        stub = tmp_path / "python"
        stub.write_text(STUB)
        stub.chmod(0o755)
        (tmp_path / "scripts/setup_env.sh").write_text(f'ROOT="{ROOT}" VENV_PYTHON="{stub}"\nsetup_env() {{ :; }}\n')
        (tmp_path / "scripts" / script.name).write_text(script.read_text())
        env = os.environ | {"CALLS": str(tmp_path / "calls"), "QUICKSTART_DIR": str(tmp_path / "out")}
        subprocess.run(["bash", str(tmp_path / "scripts" / script.name), *arguments], env=env, check=True, timeout=120)
        calls = sorted((tmp_path / "calls").iterdir(), key=lambda path: int(path.name))
        return [path.read_text().split("\0")[:-1] for path in calls]

    return run


def training_options(calls: list[list[str]]) -> list[str]:
    (options,) = [call[2:] for call in calls if call[:2] == ["-m", "openrlhf_ext.cli.train_ppo_ray"]]
    return options


def load(options: list[str], tmp_path: Path) -> RunConfig:
    """The configuration, where what an earlier command of the script writes is there."""
    make_tiny_policy(tmp_path / "out/warm_start")
    (tmp_path / "out/data").mkdir()
    record = json.dumps({"question": "1 + 1 = ", "answer": "#### 2"}) + "\n"
    for name in ("train", "heldout"):
        (tmp_path / f"out/data/{name}.jsonl").write_text(record * 2000)
    return load_config(options)


def test_the_quickstart_trains_what_it_says(run_script, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    calls = run_script(ROOT / "examples/scripts/quickstart.sh", "--megatron.tensor_parallel_size", "1")
    config = load(training_options(calls), tmp_path)
    assert config.warnings == ()
    assert config.algo.advantage.estimator == "gtpo_entropy"
    assert (config.megatron.tensor_parallel_size, config.world_size) == (1, 2), "the user's words count"
    assert config.data.max_samples == 1280 and config.rollout.batch_size == 32
    out = tmp_path / "out"
    assert config.actor.model_name_or_path == str(out / "warm_start") and config.ckpt.output_dir == str(out / "policy")
    modules = [call[1] if call[0] == "-m" else call[0] for call in calls]
    assert modules == ["examples/python/toy_policy.py", "openrlhf_ext.cli.evaluate", "openrlhf_ext.cli.train_ppo_ray",
                       "-", "openrlhf_ext.cli.evaluate"]  # fmt: skip
    before, after = (call[2:] for call in calls if call[:2] == ["-m", "openrlhf_ext.cli.evaluate"])
    assert before[:2] == ["--model", str(out / "warm_start")] and after[:2] == ["--model", str(out / "policy")]
    assert after[after.index("--expect_accuracy") + 1] == "0.5" and after[after.index("--expect_stderr") + 1] == "0.01"


def test_the_quickstart_is_two_tensor_parallel_ranks_by_itself(run_script, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load(training_options(run_script(ROOT / "examples/scripts/quickstart.sh")), tmp_path)
    assert (config.megatron.tensor_parallel_size, config.world_size, config.vllm.num_engines) == (2, 2, 1)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_are_valid_bash_and_use_the_set_up(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=60)
    assert "set -euo pipefail" in script.read_text() and "setup_env" in script.read_text()
