"""New runs stay inside of the frozen corridors, and a changed one leaves them: `bash tests/run.sh
-m curves`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.curves import CORRIDORS, RECIPES
from openrlhf_ext.reporting.lines import read_lines
from tests.e2e.jobs import Job

pytestmark = [pytest.mark.curves, pytest.mark.e2e, pytest.mark.slow]
SEED = 1  # of no run that the corridors were made of, or were held against


def ended(name: str, corridor: Path, folder: Path, **more: object) -> tuple[int, Job]:
    """The status of a run in ``folder/run``, and its job."""
    recipe = RECIPES[name]
    more |= {"train__seed": SEED, "train__corridor": corridor, "train__corridor_action": "fail"}
    command = recipe.command(recipe.prepare(folder), folder / "data", folder / "run", **more)
    job = Job([], folder / "log", program=command)
    return job.finish(), job


@pytest.mark.parametrize("name", sorted(path.stem for path in CORRIDORS.glob("*.json")))
def test_a_new_run_stays_inside_of_its_corridor(name: str, tmp_path: Path) -> None:
    frozen = CORRIDORS / f"{name}.json"
    status, job = ended(name, frozen, tmp_path)
    told = re.search(r"step \d+ is outside of the corridor(.|\n)*?(?=\n[^-]|\Z)", job.text)
    assert told is None, (
        f"{told[0]}\n(meant to be so? python benchmarks/curves.py makes new corridors)"
    )
    assert status == 0, job.text
    steps = {line["step"] for _, line in read_lines(tmp_path / "run/metrics.jsonl")}
    assert steps == {*range(json.loads(frozen.read_text())["steps"] + 1)}


@pytest.mark.parametrize(
    ("name", "option", "value", "metric"),
    [
        ("quickstart", "rollout.temperature", 0.7, "entropy/mean"),
        ("sft", "adam.lr", 3e-3, "update/rms"),
    ],
)
def test_a_changed_run_leaves_its_corridor(
    name: str, option: str, value: float, metric: str, tmp_path: Path
) -> None:
    frozen = json.loads((CORRIDORS / f"{name}.json").read_text())
    assert frozen["options"][option] != value
    # without these a run of another recipe is refused by name, before it starts
    frozen["options"][option] = value
    frozen["bands"].pop("lr")
    (tmp_path / "frozen.json").write_text(json.dumps(frozen))
    status, job = ended(
        name, tmp_path / "frozen.json", tmp_path, **{option.replace(".", "__"): value}
    )
    assert status == 1 and "[rank0]: Traceback" not in job.text, job.text
    told = re.search(
        rf"step (\d+) is outside of the corridor.*(?:\n- .*)*\n- {metric} is (\S+), trusted",
        job.text,
    )
    assert told, job.text
    (left,) = [
        line
        for _, line in read_lines(tmp_path / "run/events.jsonl")
        if line["event"] == "corridor_left"
    ]
    facts, at = left["metrics"][metric], int(told[1])
    assert (left["step"], float(told[2])) == (at, pytest.approx(facts["value"], rel=1e-3))
    band = frozen["bands"][metric]
    assert (facts["low"], facts["high"]) == (band["low"][at - 1], band["high"][at - 1])
