"""Streaming with and without partial rollouts through the whole stack (colocated runs:
test_layouts.py).

In each of both modes the engine is killed once while it generates, see ``tests.e2e.modes``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from openrlhf_ext.reporting import is_documented
from tests.e2e.jobs import FORKED, JOB_S, Task

pytestmark = pytest.mark.e2e
PROMPTS, SAMPLES, STEPS = 32, 4, 4
RUNS = ("async", "resumed", "streaming")
ROOT = Path(__file__).resolve().parent.parent.parent
# writes down every response it grades, and tells the record of a step which questions were trained
# on
REWARD = """
from pathlib import Path

def reward_func(queries, prompts, labels, **kwargs):
    number = int(prompts[0].split()[0])
    with open(Path(__file__).parent / "graded", "a") as file:
        file.write(f"{prompts[0]}\\n")
    completion = queries[0][len(prompts[0]):]
    share = sum(c.isalnum() for c in completion) / max(1, len(completion))
    return {"rewards": share, "scores": float(share > 0.4), "extra_logs": {"number": number, "square": number**2}}
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Task:
    folder = tmp_path_factory.mktemp("modes")
    task = Task.make(folder, prompts=PROMPTS, reward=REWARD)
    held_out = [{"question": f"{i} - 1 = ", "answer": ""} for i in range(100, 104)]
    (folder / "held_out.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in held_out)
    )
    command = [sys.executable, "-m", "tests.e2e.modes", str(folder)]
    run = subprocess.run(
        command, cwd=ROOT, env=os.environ | FORKED, capture_output=True, text=True, timeout=JOB_S
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]
    return task


def steps_of(task: Task, name: str) -> list[dict]:
    records = [record for record in task.metrics(name) if "loss/policy" in record]
    first = STEPS + 1 if name == "resumed" else 1
    assert [record["step"] for record in records] == list(range(first, first + STEPS))
    for record in records:
        assert all(map(is_documented, record)), [key for key in record if not is_documented(key)]
        assert record["weight_sync/probe_diff"] < 1e-4
        assert "algorithm/correction_filtered" in record, "importance correction is on by default"
        assert 0 <= record["time/wait_rollouts"] <= record["time/step"]
        assert (
            record["groups/in_flight"] + record["groups/queued"] <= 16
            and record["groups/dropped_late"] == 0
        )
    return records


def test_without_partial_rollouts_every_completion_is_of_one_version_and_one_update_old_at_most(
    task,
):
    records = steps_of(task, "async")
    assert all(record["staleness/mixed_fraction"] == 0 for record in records)
    assert all(0 <= record["staleness/mean"] <= record["staleness/max"] <= 1 for record in records)
    assert records[0]["staleness/max"] == 0 and records[-1]["staleness/max"] == 1
    assert all(record["groups/trained_late"] == 0 for record in records)
    for record in records:
        is_on_policy = record["kl/rollout_max_abs"] < 1e-3
        assert is_on_policy == (record["staleness/max"] == 0), (
            "the stated versions are not those that sampled"
        )
    evaluations = [record["step"] for record in task.metrics("async") if "eval/accuracy" in record]
    assert evaluations == [0, 2, 4]


def test_a_killed_engine_is_replaced_in_the_middle_of_training_and_of_a_sync(task):
    restarts = {
        name: [record["engines/restarts"] for record in steps_of(task, name)] for name in RUNS
    }
    assert restarts == {"async": [1, 1, 1, 1], "resumed": [1, 1, 1, 1], "streaming": [1, 2, 2, 2]}


def test_with_partial_rollouts_weights_change_in_the_middle_of_requests(task):
    records = steps_of(task, "streaming")
    assert max(record["staleness/mixed_fraction"] for record in records) > 0, (
        "no sync met a request in flight"
    )
    assert all(0 <= record["staleness/mean"] <= record["staleness/max"] <= 3 for record in records)
    late = [record["staleness/max"] > 2 for record in records]
    assert [record["groups/trained_late"] > 0 for record in records] == late, (
        "what exceeds the bound is counted"
    )


def test_a_resumed_run_goes_on_with_the_next_prompts_and_versions(task):
    before, after = steps_of(task, "async"), steps_of(task, "resumed")
    assert after[0]["prompts/consumed"] >= 40 and after[-1]["prompts/consumed"] == 64
    assert all(0 <= record["staleness/mean"] <= record["staleness/max"] <= 1 for record in after)
    assert after[0]["weight_sync/version"] > before[-1]["weight_sync/version"]
    assert after[0]["kl/rollout_max_abs"] < 1e-3, "the engines have the weights of the checkpoint"


def test_drafts_change_nothing_and_are_counted(task):
    records = [record for name in RUNS for record in steps_of(task, name)]
    # of a policy that hardly repeats itself; tests/rollout/test_drafts.py has more
    assert any(0 <= record.get("rollout/accepted", -1) <= 3 for record in records)
    assert all(r["kl/rollout"] < 1e-9 for r in records if r["staleness/max"] == 0)


def test_every_sample_is_graded_once_and_trained_on_once(task):
    graded = Counter((task.folder / "graded").read_text().splitlines())
    for i in range(PROMPTS):
        more = graded[f"{i} + {i + 1} = "] - 3 * SAMPLES  # three passes over the prompts
        assert 0 <= more <= 2 * SAMPLES, (
            "what a killed engine had graded already is graded again, and nothing else"
        )
    for name in RUNS:
        records = steps_of(task, name)
        for key, power in (("number", 1), ("square", 2)):
            trained = sum(record[f"reward_log/{key}"] for record in records) * PROMPTS / STEPS
            assert trained == pytest.approx(sum(i**power for i in range(PROMPTS))), (name, key)
