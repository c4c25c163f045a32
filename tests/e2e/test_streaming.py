"""A streaming run that is killed at random: what was finished is not sampled again, no group is lost or used twice."""

from __future__ import annotations

import json
import random
from collections import Counter

import psutil
import pytest

from openrlhf_ext.checkpoints import CheckpointStore
from openrlhf_ext.checkpoints.plain import read_plain
from tests.e2e.jobs import Job, Task
from tests.patience import PATIENCE_S

PROMPTS, SAMPLES, KILLS = 64, 4, 2
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
    return {"rewards": number % 3 / 2, "scores": 0.5, "extra_logs": {"number": number, "square": number**2}}
"""
# short completions and many micro-batches: groups finish while the policy trains, whatever the machine is busy with
OPTIONS = {
    "train__max_staleness": 1, "train__micro_batch_size": 2, "rollout__max_new_tokens": 16, "vllm__max_requests": 16,
    "ckpt__save_steps": 1, "ckpt__max_num": 99,
}  # fmt: skip


@pytest.mark.e2e
def test_kills_at_random_points_cost_only_what_was_unfinished(tmp_path):
    task, chance, last = Task.make(tmp_path, prompts=PROMPTS, reward=REWARD), random.Random(3), 0
    store = CheckpointStore(tmp_path / "ckpt", keep=9)
    finished: dict[int, int] = {}  # prompt -> completions graded when it was saved as finished
    resumes = ()
    for kill in range(KILLS + 1):
        options = [*task.options("out", ckpt__path=tmp_path / "ckpt", **OPTIONS), *resumes]
        job = Job(options, tmp_path / f"{kill}.log")
        if kill == KILLS:
            assert job.finish() == 0, job.text
            break
        job.wait_until(lambda last=last: len(store.checkpoints()) > last, "another checkpoint")
        if kill == 0:  # so that there is something to lose
            job.wait_until(lambda: finished_groups(store), "a checkpoint with finished groups")
        else:  # somewhere in the steps that follow
            graded = len(graded_lines(task)) + chance.randrange(1, 12 * SAMPLES)
            job.wait_until(lambda at=graded: len(graded_lines(task)) >= at or steps_done(task) >= 7, "a random point")
        job.stop()
        psutil.wait_procs(job.seen.values(), timeout=PATIENCE_S)
        last, resumes = len(store.checkpoints()), ("--ckpt.load_enable",)
        counts = Counter(graded_lines(task))
        finished |= {number: counts[number] for number in finished_groups(store)}
    records = [record for record in task.metrics("out") if "loss/policy" in record]
    assert [record["step"] for record in records] == list(range(1, PROMPTS // 8 + 1))
    for key, power in (("number", 1), ("square", 2)):
        trained = sum(record[f"reward_log/{key}"] for record in records) * 8
        assert trained == pytest.approx(sum(i**power for i in range(PROMPTS))), "a group was lost or used twice"
    counts = Counter(graded_lines(task))
    assert finished, "no checkpoint held a finished group"
    for number, before in finished.items():
        assert counts[number] == before, f"prompt {number} was finished, and was sampled again"
    assert all(counts[number] >= SAMPLES for number in range(PROMPTS))


def finished_groups(store: CheckpointStore) -> list[int]:
    """The prompts whose groups the newest checkpoint holds, ready to be trained on."""
    saved = read_plain(store.checkpoints()[-1] / "controller.json")
    return [int(group["prompt"]["text"].split()[0]) for group in saved["finished"]]


def graded_lines(task: Task) -> list[int]:
    path = task.folder / "graded"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def steps_done(task: Task) -> int:
    path = task.folder / "out/metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return sum("loss/policy" in json.loads(line) for line in lines)
