"""The commands of examples/scripts are valid, as the scripts themselves word them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from openrlhf_ext.config import RunConfig, load_config
from tests.models import make_tiny_policy
from tests.patience import PATIENCE_S

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
        subprocess.run(
            ["bash", str(tmp_path / "scripts" / script.name), *arguments], env=env, check=True, timeout=PATIENCE_S
        )
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
    calls = run_script(ROOT / "examples/scripts/quickstart.sh", "--megatron.tensor_parallel_size", "2")
    config = load(training_options(calls), tmp_path)
    assert config.warnings == ()
    assert config.algo.advantage.estimator == "gtpo_entropy"
    assert (config.megatron.tensor_parallel_size, config.world_size) == (2, 2), "the user's words count"
    assert config.data.max_samples == 1280 and config.rollout.batch_size == 32
    out = tmp_path / "out"
    assert config.actor.model_name_or_path == str(out / "warm_start") and config.ckpt.output_dir == str(out / "policy")
    modules = [call[1] if call[0] == "-m" else call[0] for call in calls]
    assert modules == ["examples/python/toy_policy.py", "openrlhf_ext.cli.evaluate", "openrlhf_ext.cli.train_ppo_ray",
                       "-", "openrlhf_ext.cli.evaluate"]  # fmt: skip
    before, after = (call[2:] for call in calls if call[:2] == ["-m", "openrlhf_ext.cli.evaluate"])
    assert before[:2] == ["--model", str(out / "warm_start")] and after[:2] == ["--model", str(out / "policy")]
    assert after[after.index("--expect_accuracy") + 1] == "0.5" and after[after.index("--expect_stderr") + 1] == "0.01"


def test_the_quickstart_is_two_data_parallel_ranks_by_itself(run_script, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load(training_options(run_script(ROOT / "examples/scripts/quickstart.sh")), tmp_path)
    assert (config.megatron.tensor_parallel_size, config.world_size, config.vllm.num_engines) == (1, 2, 1)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_are_valid_bash(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=PATIENCE_S)
    assert "set -euo pipefail" in script.read_text()


@pytest.fixture
def call_script(tmp_path: Path):
    """Runs a script of the cluster with programs that write their words down; returns (exit status, lines, errors)."""
    programs = tmp_path / "venv/bin"
    programs.mkdir(parents=True)
    written = 'printf "%s\\n" "${0##*/} $*" >>"$CALLS"'
    after_the_nodes = '[[ $* != *train_recipe* ]] || until (($(grep -c ray_node "$CALLS") == 2)); do sleep 0.05; done'
    outputs = {"python": written, "ray": written, "srun": f"{after_the_nodes}; {written}"}
    for name, output in (outputs | {"scontrol": "printf 'n1\\nn2\\n'"}).items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{output}\n")
        (programs / name).chmod(0o755)
    calls = tmp_path / "calls"

    def call(script: str, *arguments: str, **env: str) -> tuple[int, list[str], str]:
        calls.write_text("")
        env = os.environ | env | {
            "CALLS": str(calls), "OPENRLHF_EXT_VENV": str(tmp_path / "venv"), "PATH": f"{programs}:{os.environ['PATH']}"
        }  # fmt: skip
        command = ["bash", str(ROOT / "examples/scripts" / script), *arguments]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S)
        return done.returncode, calls.read_text().splitlines(), done.stderr

    return call


def test_a_recipe_gets_model_data_and_reward_and_the_users_words_count(call_script) -> None:
    status, (line,), _ = call_script("train_recipe.sh", "gsm8k_grpo", "/m", "d.jsonl", "r.py", "--train.seed", "7")
    assert status == 0 and line == (
        f"python -m openrlhf_ext.cli.train_ppo_ray --config {ROOT}/configs/recipes/gsm8k_grpo.yaml "
        "--actor.model_name_or_path /m --data.prompt_dataset d.jsonl --reward.remote_url r.py --train.seed 7"
    )
    for words in ((), ("gsm8k_grpo", "/m"), ("absent", "/m", "d.jsonl", "r.py")):
        status, lines, errors = call_script("train_recipe.sh", *words)
        assert (status, lines) == (2, []) and "RECIPE MODEL DATA REWARD" in errors and "gsm8k_grpo" in errors


def test_a_node_starts_ray_or_joins_it(call_script) -> None:
    start = "--num-gpus 8 --disable-usage-stats --block"
    assert call_script("ray_node.sh", "head", NODE_GPUS="8")[1] == [f"ray start --head --port 6379 {start}"]
    joined = call_script("ray_node.sh", "join", "n1", NODE_GPUS="8", RAY_PORT="7000")
    assert joined[1] == [f"ray start --address n1:7000 {start}"]
    assert call_script("ray_node.sh", "join", NODE_GPUS="8")[0] == 2
    status, lines, errors = call_script("ray_node.sh", "head", NODE_GPUS="0")
    assert (status, lines) == (1, []) and "no GPU" in errors


def test_a_slurm_job_checks_then_starts_every_node_then_trains(call_script) -> None:
    words = ("gsm8k_grpo", "/m", "d.jsonl", "r.py")
    status, lines, errors = call_script("slurm_recipe.sh", *words, SLURM_SUBMIT_DIR=str(ROOT), SLURM_JOB_NODELIST="n")
    assert status == 0, errors
    assert lines[0].startswith("python ") and lines[0].endswith("--dry_run")
    nodes = [line for line in lines if "ray_node.sh" in line]
    assert sorted(line.split("ray_node.sh ")[1] for line in nodes) == ["head", "join n1"]
    assert sum("train_recipe.sh" in line and line.endswith(" ".join(words)) for line in lines) == 1
