"""Two Ray nodes, an engine on each; one node is killed and comes back, and no number of the run
depends on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.cluster_utils import Cluster
from safetensors.torch import load_file

from openrlhf_ext.driver.cluster import start_with_retries
from openrlhf_ext.reporting.lines import read_lines
from tests.e2e.jobs import ONE_RANK, REWARD, Job, Task

# while a new engine starts, steps take longer, so that some are left for it
SLOWED = """
import os, time

def slowed(function):
    def graded(*arguments, **options):
        time.sleep(0.4 * os.path.exists(os.path.join(os.path.dirname(__file__), "slow")))
        return function(*arguments, **options)
    return graded
"""
STEPS = 8


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The head has room for the policy's rank and an engine."""
    # this GPU is made up; Ray takes it for hidden
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    made = Cluster()
    start_with_retries(lambda: made.add_node(num_gpus=1, num_cpus=2))
    yield made
    made.shutdown()


def events(out: Path, kind: str) -> list[dict[str, Any]]:
    path = out / "events.jsonl"
    return (
        [record for _, record in read_lines(path) if record["event"] == kind]
        if path.exists()
        else []
    )


@pytest.mark.e2e
def test_a_node_is_killed_and_comes_back_and_the_run_ends_in_the_bits_of_an_undisturbed_one(
    tmp_path: Path, nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Task.make(
        tmp_path, prompts=8 * STEPS, reward=SLOWED + REWARD.replace("def", "@slowed\ndef")
    )
    common = {**ONE_RANK, "train__full_determinism_enable": True}
    elastic = {
        "vllm__num_engines": 2,
        "vllm__min_engines": 1,
        "vllm__max_restarts": 0,
        "vllm__hang_timeout_s": 60,
    }

    def add_node() -> Any:
        return start_with_retries(lambda: nodes.add_node(num_cpus=1))

    second, out = add_node(), tmp_path / "disturbed"
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    job = Job(task.options("disturbed", **common, **elastic), tmp_path / "disturbed.log")
    job.wait_until(
        lambda: (out / "metrics.jsonl").exists() and len(task.metrics("disturbed")) > 1, "a step"
    )
    nodes.remove_node(second, allow_graceful=False)
    (tmp_path / "slow").touch()
    job.wait_until(lambda: events(out, "engine_lost"), "the loss of an engine")
    job.wait_until(
        lambda: task.metrics("disturbed")[-1].get("engines/alive") == 1, "a step with one engine"
    )
    add_node()
    job.wait_until(lambda: events(out, "engine_joined"), "an engine that is taken in")
    (tmp_path / "slow").unlink()
    assert job.finish() == 0, job.text
    (lost,), (joined,) = events(out, "engine_lost"), events(out, "engine_joined")
    assert lost["engine"] == joined["engine"] and (lost["alive"], joined["alive"]) == (1, 2)
    alive = [
        int(record["engines/alive"])
        for record in task.metrics("disturbed")
        if "engines/alive" in record
    ]
    assert len(alive) == STEPS and alive[0] == alive[-1] == 2 and 1 in alive, alive

    monkeypatch.delenv("RAY_ADDRESS")
    job = Job(task.options("alone", **common), tmp_path / "alone.log")
    assert job.finish() == 0, job.text
    one, other = (
        load_file(tmp_path / name / "model.safetensors") for name in ("alone", "disturbed")
    )
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    for metric in (
        "reward/mean",
        "loss/policy",
        "grad_norm",
        "tokens/generated",
        "weight_sync/version",
    ):
        assert (
            len(
                {
                    tuple(r.get(metric) for r in task.metrics(name))
                    for name in ("alone", "disturbed")
                }
            )
            == 1
        ), metric
