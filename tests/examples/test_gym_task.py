"""Problem files from reasoning-gym, here from a stand-in for its wheel: the ordinary tests use
local files only."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import gym_task
import pytest

from tests.patience import PATIENCE_S

SOURCES = {
    "__init__": "import nowhere  # as the real one imports what its other families need",
    "coaching/__init__": "",
    "factory": """
FAMILIES = {}
def create_dataset(name, **settings):
    return FAMILIES[name](**settings)
""",
    "arithmetic/__init__": "import nowhere",
    "arithmetic/sums": """
from ..factory import FAMILIES
class Sums:
    def __init__(self, seed, size, most=10):
        self.seed, self.most = seed, most
    def __getitem__(self, index):
        a, b = divmod((self.seed + index) % self.most**2, self.most)
        word = ["What is", "Compute"][index // self.most**2 % 2]
        return {"question": f"{word} {a} + {b}?", "answer": str(a + b), "metadata": {"expression": f"{a} + {b}"}}
FAMILIES["sums"] = Sums
""",
    "arithmetic/words": """
from ..factory import FAMILIES
FAMILIES["words"] = lambda seed, size: [{"question": "?", "answer": "a word", "metadata": {}}]
""",
    "logic/zebra": "import nowhere",
}


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    (tmp_path / "cache/wheels").mkdir(parents=True)
    with zipfile.ZipFile(
        tmp_path / "cache/wheels/reasoning_gym-0.1.25-py3-none-any.whl", "w"
    ) as wheel:
        for name, source in SOURCES.items():
            wheel.writestr(f"reasoning_gym/{name}.py", source)
    paths = ["--output_dir", str(tmp_path / "data"), "--cache_dir", str(tmp_path / "cache")]

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, gym_task.__file__, *paths, *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)

    return run


def test_what_is_held_out_is_not_trained_in_other_words(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    done = run(
        "--family", "sums", "--train_size", "500", "--heldout_size", "30", "--set", "most=12"
    )
    assert done.returncode == 0, done.stderr
    train, heldout = (
        [json.loads(line) for line in (tmp_path / f"data/{name}.jsonl").read_text().splitlines()]
        for name in ("train", "heldout")
    )
    assert (
        len(train) == 500 and len({record["question"] for record in heldout}) == len(heldout) == 30
    )

    def asked(record: dict[str, str]) -> str:
        return record["question"].removeprefix("What is ").removeprefix("Compute ")

    assert not {asked(record) for record in train} & {asked(record) for record in heldout}
    assert {"question": "What is 11 + 11?", "answer": "22"} in train + heldout, (
        "the family's parameter counts"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--family", "nothing"], "has no family 'nothing'"),
        (["--family", "zebra"], "needs a package that is not installed: No module named 'nowhere'"),
        (["--family", "words"], "only families of numbers are graded here; an answer was 'a word'"),
        (["--family", "sums", "--set", "least=1"], "sums of reasoning-gym==0.1.25 does not take"),
        (["--family", "sums", "--set", "most"], "--set takes NAME=VALUE: got most"),
        (["--family", "sums", "--heldout_size", "5000"], "the family has hardly more than"),
    ],
)
def test_what_cannot_be_made_is_said(
    words: list[str], said: str, run: Callable[..., Any], tmp_path: Path
) -> None:
    done = run(*words)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "data").exists()


def test_a_question_belongs_to_one_split() -> None:
    data = [{"question": f"Q{i}", "answer": str(i), "metadata": {}} for i in range(200)]
    splits = [
        [p["question"] for p in islice(gym_task.problems(data, heldout), 20)]
        for heldout in (False, True)
    ]
    assert not set(splits[0]) & set(splits[1])
