"""Answers that are programs: graded in a whole run, and by `evaluate`, in processes that survive
what they do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from openrlhf_ext.cli.evaluate import main as evaluate
from openrlhf_ext.options.sections import Reward
from openrlhf_ext.rewards.pool import RewardPool
from tests.e2e.jobs import ONE_RANK, Job, Task
from tests.patience import PATIENCE_S

EXAMPLES = Path(__file__).parents[2] / "examples/python"
REWARD = EXAMPLES / "reward_code.py"


@pytest.mark.e2e
def test_a_run_on_programming_problems(tmp_path: Path) -> None:
    """A random policy writes no program; each completion is run all the same, and is a zero, not a
    failure."""
    task = Task.make(tmp_path)
    command = [
        sys.executable,
        str(EXAMPLES / "code_task.py"),
        "--output_dir",
        str(tmp_path / "data"),
    ]
    subprocess.run(command, check=True, timeout=PATIENCE_S)
    options = task.options(
        "run",
        **ONE_RANK,
        data__prompt_dataset=tmp_path / "data/train.jsonl",
        data__max_len=128,
        data__max_samples=8,
        rollout__batch_size=4,
        train__batch_size=16,
        reward__remote_url=REWARD,
        reward__max_failures=0,
    )
    job = Job(options, tmp_path / "log")
    assert job.finish() == 0, job.text
    steps = task.metrics("run")
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["reward_log/asserts_passed"] == 0 == step["reward/failures"] for step in steps)


HOSTILE = (
    "import sys; sys.exit(0)",
    "while True: pass",
    "import os\nwhile True: os.fork()",
    "x = bytearray(10**10)",
    "import os; os.kill(os.getppid(), 9)",
    "open('{folder}/made', 'w').write('x')",
    "print('passed')",
    "class A:\n  def __eq__(self, other): return True\ndef f(x): return A()",
)


def test_evaluate_grades_saved_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a user types to grade completions of another sampler: right ones, in a fence too, and
    hostile ones."""
    right = "def f(x):\n    return x + 5\n"
    texts = [right, f"Here it is:\n```python\n{right}```\nDone.", "I cannot do that.", *HOSTILE]
    (tmp_path / "data.jsonl").write_text(
        json.dumps({"question": "x plus 5?", "answer": "assert f(1) == 6"}) + "\n"
    )
    completions = [text.replace("{folder}", str(tmp_path)) for text in texts]
    (tmp_path / "completions.jsonl").write_text(
        json.dumps({"problem": 0, "completions": completions}) + "\n"
    )
    words = {"data": "data.jsonl", "completions": "completions.jsonl", "json": "result.json"}
    given = [word for name, file in words.items() for word in (f"--{name}", str(tmp_path / file))]
    assert evaluate([*given, "--reward", str(REWARD), "--max_failures", "0"]) == 0, (
        capsys.readouterr().err
    )
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["accuracy"] == pytest.approx(2 / len(texts)) and not (tmp_path / "made").exists()


def test_the_worker_that_grades_hostile_answers_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("REWARD_CODE_SECONDS", "1")
    with RewardPool(Reward(remote_url=str(REWARD), num_workers=1, timeout_s=PATIENCE_S)) as pool:
        pool.check()
        before = [worker.pid for worker in pool._workers]
        grades = [
            pool.submit("", "", "assert f(1) == 6", code.format(folder=tmp_path))
            for code in HOSTILE
        ]
        assert [grade.result().reward for grade in grades] == [0.0] * len(HOSTILE)
        assert (
            pool.submit("", "", "assert f(1) == 6", "def f(x): return x + 5").result().reward == 1.0
        )
        assert [worker.pid for worker in pool._workers] == before
    assert not (tmp_path / "made").exists()
