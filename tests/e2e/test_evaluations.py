"""Held-out sets of a run, beside training; the final checkpoint gives the same numbers through
`evaluate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from openrlhf_ext.cli.report import main as report
from tests.e2e.jobs import ONE_RANK, Job, Task

REWARD = """
def reward_func(queries, prompts, labels, **kwargs):
    number = sum(map(ord, queries[0][len(prompts[0]):]))  # of another completion almost surely another one
    return {"rewards": number, "scores": float(number % 2)}
"""


def set_of(run: dict, name: str) -> dict:
    prefix = f"eval/{name}/"
    return {key.removeprefix(prefix): value for key, value in run.items() if key.startswith(prefix)}


def test_two_sets_beside_training_end_where_the_command_does(tmp_path: Path) -> None:
    task = Task.make(tmp_path, prompts=24)
    (tmp_path / "own.py").write_text(REWARD)
    lines = (tmp_path / "prompts.jsonl").read_text().splitlines(keepends=True)
    # of the first file one prompt is too long: places in the file, and seeds, stay those of the
    # whole file
    long = json.dumps({"question": "9" * 60, "answer": "#### 1"}) + "\n"
    (tmp_path / "sums.jsonl").write_text(lines[0] + long + "".join(lines[1:4]))
    (tmp_path / "more.jsonl").write_text("".join(lines[4:7]))
    given = task.options(
        "run",
        **ONE_RANK,
        data__max_len=48,
        train__max_staleness=1,
        eval__async_enable="true",
        eval__steps=1,
        eval__dataset=f"sums={tmp_path}/sums.jsonl,more={tmp_path}/more.jsonl",
        eval__n_samples_per_prompt="sums=4,more=2",
        eval__temperature="sums=1,more=0.7",
        eval__max_new_tokens="sums=8",
        eval__remote_url=f"sums={tmp_path}/own.py",
        ckpt__best_metric_key="accuracy/mean",
        ckpt__save_steps=1,
        ckpt__keep_best=2,
        ckpt__max_num=1,
    )
    job = Job(given, tmp_path / "log.txt")
    assert job.finish() == 0, job.text
    records = task.metrics("run")
    evaluations = {record["step"]: record for record in records if "eval/accuracy" in record}
    assert sorted(evaluations) == [0, 1, 2, 3], "each step's, whichever step was made meanwhile"
    sums, more = set_of(evaluations[3], "sums"), set_of(evaluations[3], "more")
    assert (sums["samples"], more["samples"]) == (16, 6) and {
        "pass@1",
        "pass@2",
        "pass@4",
    } <= sums.keys()
    assert evaluations[3]["eval/accuracy"] == pytest.approx(
        (sums["accuracy"] + more["accuracy"]) / 2
    )
    steps = [record for record in records if "time/step" in record]
    assert any("time/wait_eval" in record for record in steps)
    assert all(record["entropy/completion_mean"] > 0 for record in steps)
    kept = json.loads((tmp_path / "checkpoints/run/best.json").read_text())
    best = sorted((-record["accuracy/mean"], record["step"]) for record in steps)[:2]
    assert [kept["step"], kept["next"][0]["step"]] == [step for _, step in best]

    words = [
        "--model",
        str(tmp_path / "run"),
        "--data",
        str(tmp_path / "sums.jsonl"),
        "--reward",
        str(tmp_path / "own.py"),
        "--input_key",
        "question",
        "--label_key",
        "answer",
        "--engine",
        "vllm",
        "--n",
        "4",
        "--temperature",
        "1",
        "--max_new_tokens",
        "8",
        "--seed",
        "42",
        "--num_workers",
        "1",
        "--kv_cache_mib",
        "64",
        "--json",
        str(tmp_path / "evaluated.json"),
        "--out",
        str(tmp_path / "out"),
    ]
    command = Job(words, tmp_path / "evaluate.txt", module="openrlhf_ext.cli.evaluate")
    assert command.finish() == 0, command.text
    evaluated = [
        json.loads(line) for line in (tmp_path / "out/sums.jsonl").read_text().splitlines()[1:]
    ]
    fitting = [row for row in evaluated if len(row["prompt"]) < 60]
    assert len(evaluated) == 5 and len(fitting) == 4, "the command has room for the long prompt"
    completions = [completion for row in fitting for completion in row["completions"]]
    assert sums["accuracy"] == pytest.approx(sum(each["score"] for each in completions) / 16)
    assert sums["response_length_mean"] == pytest.approx(
        sum(each["tokens"] for each in completions) / 16
    )
    assert sums["reward_mean"] == pytest.approx(sum(each["reward"] for each in completions) / 16)
    for k in (2, 4):
        solved = [sum(each["score"] >= 1 for each in row["completions"]) for row in fitting]
        chances = [1.0 if 4 - right < k else 1 - _none(4, right, k) for right in solved]
        assert sums[f"pass@{k}"] == pytest.approx(sum(chances) / 4)
    assert 0 < sums["accuracy"] < 1, "else the numbers would agree whatever the seeds"

    page = tmp_path / "page.html"
    assert report([str(tmp_path / "run"), "--output", str(page)]) == 0
    text = page.read_text()
    assert (
        '"eval/sums/accuracy"' in text
        and '"eval/more/accuracy"' in text
        and '"pass@k of sums"' in text
    )


def _none(samples: int, right: int, k: int) -> float:
    """The chance that none of k drawn samples is right, one draw after the other."""
    chance = 1.0
    for drawn in range(k):
        chance *= (samples - right - drawn) / (samples - drawn)
    return chance
