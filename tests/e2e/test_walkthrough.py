"""The walkthrough as a user types it: two Ray nodes, a policy rank on each; one dies in a step, and
then the driver."""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.e2e.jobs import Job
from tests.patience import PATIENCE_S, until

ROOT = Path(__file__).resolve().parents[2]
NODES = ("127.0.0.1", "127.0.0.2")
# puts an untrained policy where the cache has the one of 1020 steps, which takes minutes: here it
# need know nothing
NOT_TRAINED = """
import json, pathlib, sys, toy_policy
settings = toy_policy.PolicySettings()
folder = pathlib.Path(sys.argv[1]) / f"toy_policy-{toy_policy.cache_key(settings)}"
tokenizer = toy_policy.build_tokenizer(settings.max_positions)
model = toy_policy.build_model(settings, tokenizer)
model.save_pretrained(folder)
tokenizer.save_pretrained(folder)
told = {"parameters": model.num_parameters(), "heldout_problems": 0}
told |= {f"heldout_accuracy_{how}": 0.0 for how in ("sampled", "greedy")}
(folder / toy_policy.MARKER).write_text(json.dumps(told))
"""


def processes_of(run: Path) -> list[psutil.Process]:
    """The living processes of a run's nodes, whoever their parent is."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.environ().get("RUN_FOLDER") == str(run)
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def free_port() -> int:
    """None that the kernel gives to others meanwhile (from 32768), nor Ray to its workers (10002 to
    19999)."""
    for port in random.sample(range(20000, 32768), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("100 ports are taken")


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.e2e
def test_a_node_and_the_driver_are_killed_and_the_run_goes_on_to_its_end(
    tmp_path, monkeypatch
) -> None:
    cache = tmp_path / "cache"
    make = [sys.executable, "-c", NOT_TRAINED, str(cache)]
    subprocess.run(make, cwd=ROOT / "examples/python", check=True, timeout=PATIENCE_S)
    port = free_port()
    # the nodes get this checkout by name: another one may be installed in the environment
    settings = {
        "RAY_PORT": port,
        "FORWARD": "PYTHONPATH",
        "PYTHONPATH": ROOT,
        "WALKTHROUGH_DIR": tmp_path,
    }
    settings |= {"OPENRLHF_EXT_CACHE": cache}
    for name, value in (settings | {"OPENRLHF_EXT_VENV": sys.prefix}).items():
        monkeypatch.setenv(name, str(value))
    # tests/conftest.py empties it: `ray start --num-gpus 1` refuses then (ray 2.60,
    # resource_and_label_spec.py)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    job = Job([], tmp_path / "log", program=("bash", str(ROOT / "examples/scripts/walkthrough.sh")))
    assert job.finish() == 0, job.text
    assert f"cached in {cache}" in job.text and "warm start" not in job.text
    run = tmp_path / "run"
    until(lambda: not processes_of(run), "the end of all processes of the nodes")

    # what it says on the way: two nodes were looked at, one was killed, joined, and the run went on
    # from a checkpoint
    for node in NODES:
        assert re.search(rf"^  {re.escape(node)} \(\w+\) +\S+ ", job.text, re.MULTILINE), job.text
    assert job.text.count("Everything needed is there.") == 3, (
        "this machine; the cluster, before each driver"
    )
    assert f"{NODES[1]} joins again" in job.text
    assert "restart 1 of 2" in job.text and "resumed from" in job.text
    assert "the driver was killed (status 137): restart 1 of 3 from the last checkpoint" in job.text
    assert (tmp_path / "layout.yaml").is_file() and '"state":"finished"' in (
        tmp_path / "report.html"
    ).read_text()
    assert json.loads((tmp_path / "evaluation.json").read_text())["pass_at_k"].keys() == {"1", "4"}

    # a rank on each node, before and after
    events = lines(run / "events.jsonl")
    told = [(event["event"], event.get("resume_step")) for event in events]
    assert [
        pair for pair in told if pair[0] in ("start", "failure", "restart", "resumed", "end")
    ] == [
        ("start", 0),
        ("failure", None),
        ("restart", None),
        ("resumed", 1),
        ("start", 2),
        ("resumed", 2),
        ("end", None),
    ]
    (failure,) = [event for event in events if event["event"] == "failure"]
    assert failure["step"] == 2, "the node died in a step"
    for ready in [event["processes"] for event in events if event["event"] == "ready"]:
        assert sorted(ready) == ["policy rank 0", "policy rank 1", "rollout engine 0"]
        logs = {
            name: list((run / "logs").glob(f"*/worker-*-{about['pid']}.err"))
            for name, about in ready.items()
        }
        assert sorted(logs[f"policy rank {rank}"][0].parent.name for rank in range(2)) == list(
            NODES
        )
        assert logs["rollout engine 0"]
    assert [record["step"] for record in lines(run / "metrics.jsonl")] == [1, 2, 3, 4], (
        "each step once"
    )
