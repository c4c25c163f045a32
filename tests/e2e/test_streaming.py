"""A streaming run that is killed at random: what was finished is not sampled again, no group is
lost or used twice."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from openrlhf_ext.checkpoints import CheckpointStore
from openrlhf_ext.checkpoints.files import read_plain
from openrlhf_ext.run.ledger import USED_UP, Audit
from tests.e2e.jobs import ONE_RANK, Job, Task
from tests.e2e.test_resume import kill

PROMPTS, SAMPLES = 48, 4
# writes down every completion it grades; the record of a step tells which prompts were trained on;
# one prompt in sixteen takes its time, so that checkpoints meet groups in flight
REWARD = """
import time
from pathlib import Path

def reward_func(queries, prompts, labels, **kwargs):
    number = int(prompts[0].split()[0])
    time.sleep(0.6 * (number % 16 == 7))
    with open(Path(__file__).parent / "graded", "a") as file:
        file.write(f"{number}\\n")
    return {"rewards": number % 3 / 2, "scores": 0.5, "extra_logs": {"number": number}}
"""
# short completions and many micro-batches: groups finish while the policy trains, whatever the
# machine is busy with
OPTIONS = {
    **ONE_RANK,
    "train__max_staleness": 1, "train__micro_batch_size": 2, "rollout__max_new_tokens": 16, "vllm__max_requests": 16,
    "ckpt__save_steps": 1, "ckpt__max_num": 99,
    # entropies wait with the groups that are finished
    "algo__advantage__estimator": "grpo_s", "algo__entropies": "engine",
}  # fmt: skip


@pytest.mark.e2e
def test_a_kill_at_a_random_point_costs_only_what_was_unfinished(tmp_path):
    task = Task.make(tmp_path, prompts=PROMPTS, reward=REWARD)
    store = CheckpointStore(tmp_path / "ckpt", keep=9)
    options = task.options("out", ckpt__path=tmp_path / "ckpt", **OPTIONS)
    job = Job(options, tmp_path / "killed.log")
    job.wait_until(store.checkpoints, "a checkpoint")
    point = len(graded_lines(task)) + random.Random(3).randrange(1, 12 * SAMPLES)
    job.wait_until(lambda: len(graded_lines(task)) >= point, "a random point")
    job.wait_until(lambda: any(map(finished_groups, store.checkpoints())), "something to lose")
    kill(job)
    while not (finished := finished_groups(store.checkpoints()[-1])):
        shutil.rmtree(store.checkpoints()[-1])  # as if it had been killed a little earlier
    counts = Counter(graded_lines(task))
    # completions graded when it was saved as finished
    before = {number: counts[number] for number in finished}

    job = Job([*options, "--ckpt.load_enable"], tmp_path / "resumed.log")
    assert job.finish() == 0, job.text
    records = [record for record in task.metrics("out") if "loss/policy" in record]
    assert [record["step"] for record in records] == list(range(1, PROMPTS // 8 + 1))
    assert not any("rank/0/time_logprob" in record for record in records)
    # of weights of a step before, too
    assert max(record["mismatch/entropy_mean_abs"] for record in records) < 0.05
    audit = Audit(tmp_path / "out/ledger.jsonl")
    assert (
        audit.faults == []
        and audit.counts == {"trained": PROMPTS}
        and (audit.end, audit.proved) == (USED_UP, 1)
    )
    trained = sum(record["reward_log/number"] for record in records) * 8  # as the records have it
    assert trained == pytest.approx(sum(range(PROMPTS))), "a group was lost or used twice"
    counts = Counter(graded_lines(task))
    for number, graded in before.items():
        assert counts[number] == graded, f"prompt {number} was finished, and was sampled again"
    assert all(counts[number] >= SAMPLES for number in range(PROMPTS))


def finished_groups(checkpoint: Path) -> list[int]:
    """The prompts whose groups it holds, ready to be trained on."""
    saved = read_plain(checkpoint / "controller.json")
    return [int(group["prompt"]["text"].split()[0]) for group in saved["finished"]]


def graded_lines(task: Task) -> list[int]:
    path = task.folder / "graded"
    return [int(line) for line in path.read_text().split()] if path.exists() else []
