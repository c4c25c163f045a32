"""``run_node.sh`` as a user starts it, with a few of its steps and without GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from openrlhf_ext.config import load_config
from tests.gpu import node
from tests.gpu.kit import NotHere
from tests.launch import launch
from tests.models import make_tiny_policy
from tests.patience import PATIENCE_S, until

ROOT = Path(__file__).resolve().parent.parent.parent


def run_node(out: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = ["bash", str(ROOT / "tests/gpu/run_node.sh"), "--out", str(out), *arguments]
    environment = os.environ | {"PYTHON": sys.executable}
    return subprocess.run(
        command, env=environment, cwd=out.parent, capture_output=True, text=True, timeout=PATIENCE_S
    )


def test_steps_pass_or_say_why_they_are_skipped(tmp_path):
    run = run_node(tmp_path / "node", "--cpu", "--only", "doctor", "nccl")
    assert run.returncode == 0, run.stdout + run.stderr
    lines = run.stdout.splitlines()
    assert (
        lines[0].startswith("PASS  doctor")
        and lines[1].startswith("SKIP  nccl")
        and "needs GPUs" in lines[1]
    )
    page = (tmp_path / "node/results.md").read_text()
    assert (
        "| doctor | PASS |" in page
        and "| nccl | SKIP |" in page
        and f"torch {node.versions()['torch']}" in page
    )
    assert "Packages (extra cpu)" in (tmp_path / "node/doctor.log").read_text()


def test_a_step_that_fails_is_named_and_the_rest_goes_on(tmp_path):
    (tmp_path / "model").mkdir()
    run = run_node(
        tmp_path / "node",
        "--cpu",
        "--only",
        "convert_check",
        "quickstart",
        "--model",
        f"{tmp_path}/model",
    )
    assert run.returncode == 1, run.stdout + run.stderr
    failed, skipped, _ = run.stdout.splitlines()
    assert failed.startswith("FAIL  convert_check") and "config.json cannot be read" in failed, (
        failed
    )
    assert skipped.startswith("SKIP  quickstart")
    assert "| convert_check | FAIL |" in (tmp_path / "node/results.md").read_text()


def test_without_gpus_it_says_how_to_try_it(tmp_path):
    run = run_node(tmp_path / "node", "--only", "doctor")
    assert run.returncode == 1 and "torch sees no GPU, 1 to 8 are needed; --cpu" in run.stderr


def test_a_step_that_hangs_is_ended_with_what_it_started(tmp_path, monkeypatch):
    child = tmp_path / "child"
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(child)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    popen = subprocess.Popen
    monkeypatch.setattr(
        node.subprocess, "Popen", lambda _, **named: popen([sys.executable, str(slow)], **named)
    )
    monkeypatch.setitem(node.STEPS, "doctor", (node.doctor, 5.0))
    result = node.run_step(node.Node(tmp_path, True, 2, None), "doctor")
    assert result.status == "FAIL" and "not done after its limit of 5 s" in result.why
    pid = int(child.read_text())
    until(
        lambda: not node.psutil.pid_exists(pid) or node.psutil.Process(pid).status() == "zombie",
        "its end",
    )


JOBS = (
    "engine_tp1",
    "engine_tp2",
    "colocated",
    "separate_engines",
    "sleep_and_wake",
    "drift_check",
    "quickstart",
)


class Asked(Exception):
    """Holds the options that a job would have been started with."""


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_every_job_is_one_that_a_node_of_so_many_gpus_can_run(tmp_path, monkeypatch, gpus):
    def ask(options, *_):
        raise Asked(options)

    monkeypatch.setattr(node, "_train", ask)
    monkeypatch.setattr(node, "_command", lambda _: "")
    make_tiny_policy(tmp_path / "quickstart/start")
    (tmp_path / "quickstart/data").mkdir()
    for name in ("train", "heldout"):
        (tmp_path / f"quickstart/data/{name}.jsonl").write_text(
            '{"question": "1 + 1 = ", "answer": "2"}\n' * 32
        )
    for name in JOBS:
        if gpus == 1 and name in ("engine_tp2", "separate_engines"):
            with pytest.raises(NotHere, match="needs two GPUs, there is one"):
                node.STEPS[name][0](node.Node(tmp_path, False, gpus, None))
            continue
        with pytest.raises(Asked) as asked:
            node.STEPS[name][0](node.Node(tmp_path, False, gpus, None))
        config = load_config(asked.value.args[0])
        ranks = config.actor.num_gpus_per_node
        engines = config.vllm.num_engines * config.vllm.tensor_parallel_size
        assert ranks == engines if config.train.colocate_all else ranks + engines <= gpus, name
        assert config.megatron.param_dtype == "bf16"
        assert gpus > 1 or (
            config.train.colocate_all and config.ds.enable_sleep and config.vllm.enable_sleep
        ), name
        if name == "colocated":
            assert ranks == gpus and config.megatron.pipeline_parallel_size == min(2, gpus)


def test_two_ranks_exchange_what_the_first_call_of_a_group_carries():
    found, _ = launch("tests.gpu.nccl_pair", "run", 2, megabytes=1)
    assert (
        found["p2p_first_gib_per_second"] > 0 and found["p2p_after_a_reduction_first_seconds"] > 0
    )


def test_metrics_of_all_steps_become_one_number():
    records = [
        {"kl/rollout": 0.1, "time/step": 9.0},
        {"kl/rollout": 0.3, "time/step": 2.0},
        {"eval/accuracy": 0.5},
    ]
    assert node.measured(records) == {"kl/rollout": 0.3, "time/step": 5.5, "eval/accuracy": 0.5}
