"""Two Ray nodes, a policy rank on each, started as the scripts for real clusters do; one dies and comes back."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import psutil
import pytest

from tests.e2e.jobs import Job, Task
from tests.e2e.test_resume import EXACT, HOLDING_REWARD, hold_after
from tests.patience import PATIENCE_S, until

ROOT = Path(__file__).resolve().parents[2]
NODES = ("127.0.0.1", "127.0.0.2")  # Ray takes them for two machines
SCRIPT = f"""#!/usr/bin/env bash
set -euo pipefail
source {ROOT}/examples/scripts/launch.sh
ray_address='' nodes=({" ".join(NODES)})
on_node() {{ "${{@:2}}"; }}
launch "$@"
"""


def processes_with(name: str, value: str) -> list[psutil.Process]:
    """The living processes that began with this variable, whoever their parent is."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def policy_ranks(node: str, folder: Path) -> list[psutil.Process]:
    there = [process for process in processes_with("NODE_NAME", node) if process.environ()["RUN_FOLDER"] == str(folder)]
    return [process for process in there if "ray::PolicyActor" in " ".join(process.cmdline())]


@pytest.mark.e2e
def test_a_node_that_is_killed_joins_again_and_the_run_ends_as_if_undisturbed(tmp_path, monkeypatch) -> None:
    task = Task.make(tmp_path, reward=HOLDING_REWARD)
    same = {"megatron__tensor_parallel_size": 1, "ckpt__save_steps": 1}
    determined = "--train.full_determinism_enable"
    whole = [*task.options("whole", **same, ckpt__path=tmp_path / "whole_ckpt"), determined]
    assert Job(whole, tmp_path / "whole.log").finish() == 0, (tmp_path / "whole.log").read_text()

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # the nodes get this checkout by name: another one may be installed in the environment
    settings = {"RAY_PORT": port, "NODE_GPUS": 1, "FORWARD": "PYTHONPATH", "PYTHONPATH": ROOT}
    for name, value in (settings | {"OPENRLHF_EXT_VENV": sys.prefix}).items():
        monkeypatch.setenv(name, str(value))
    # tests/conftest.py empties it: `ray start --num-gpus 1` refuses then (ray 2.55, resource_and_label_spec.py)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "two_nodes.sh").write_text(SCRIPT)
    nodes = {"actor__num_nodes": 2, "actor__num_gpus_per_node": 1, "train__max_restarts": 1}
    options = [*task.options("cut", **same, **nodes, ckpt__path=tmp_path / "cut_ckpt"), determined]
    hold_after(task, 1)
    job = Job(options, tmp_path / "cut.log", program=("bash", str(tmp_path / "two_nodes.sh")))
    job.wait_until((tmp_path / "held1").exists, "the second step")
    folder = tmp_path / "cut"
    assert [len(policy_ranks(node, folder)) for node in NODES] == [1, 1]
    victims = [process for process in processes_with("RUN_FOLDER", str(folder)) if NODES[1] in node_of(process)]
    assert any("raylet" in " ".join(process.cmdline()) for process in victims)
    for process in victims:
        process.kill()
    psutil.wait_procs(victims, timeout=PATIENCE_S)
    hold_after(task, 99)
    job.wait_for(rf"{NODES[1]} joins again")
    assert job.finish() == 0, job.text

    assert "restart 1 of 1" in job.text and "cut_ckpt/global_step1" in job.text
    expected, got = task.metrics("whole"), task.metrics("cut")
    assert [record["step"] for record in got] == [record["step"] for record in expected] == [1, 2, 3]
    for name in EXACT:
        assert [record[name] for record in got] == [record[name] for record in expected], name
    until(lambda: not processes_with("RUN_FOLDER", str(folder)), "the end of all processes of the nodes")
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    ready = [event["processes"] for event in events if event["event"] == "ready"]
    assert [sorted(names) for names in ready] == [["policy rank 0", "policy rank 1", "rollout engine 0"]] * 2
    for name, process in [item for names in ready for item in names.items()]:
        assert list((folder / "logs").glob(f"*/worker-*-{process['pid']}.err")), f"no log of {name}"


def node_of(process: psutil.Process) -> str:
    try:
        return process.environ().get("NODE_NAME", "")
    except psutil.NoSuchProcess:
        return ""
