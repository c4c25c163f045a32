from __future__ import annotations

import json

import pytest

from benchmarks.study import runs
from benchmarks.study.runs import (
    Places,
    Rows,
    execute,
    finished,
    maker_job,
    missing,
    read_rows,
    runs_of,
)
from benchmarks.study.settings import Study


@pytest.mark.parametrize("changed", [False, True])
def test_a_run_during_which_its_code_was_changed_does_not_count(tmp_path, monkeypatch, changed):
    """With a stand-in for the processes, which edits the reward file meanwhile."""
    reward = tmp_path / "reward.py"
    reward.write_text("# one\n")
    task = {
        "policy": "policy",
        "train": "train.jsonl",
        "heldout": "heldout.jsonl",
        "steps": 1,
        "seeds": 1,
    }
    cell = {"task": "t", "options": {"reward.remote_url": str(reward)}}
    study = Study.model_validate({"tasks": {"t": task}, "cells": {"a": cell}})
    places, told = Places(tmp_path / "out"), []

    def processes(jobs, workers):
        for job in jobs:
            places.result(job.name).write_text(json.dumps({"steps": {}, "evaluations": []}))
            if changed:
                reward.write_text("# two\n")
            job.done(None, 1.0)

    monkeypatch.setattr(runs, "run_jobs", processes)
    everything, rows = runs_of(study, study.arms), Rows(places)
    failed = execute(study, everything, places, rows, workers=1, device="cpu", told=told.append)
    rows.close()
    (row,) = read_rows(places)
    assert failed == int(changed) and ("error" in row) is changed
    assert (
        bool(missing(study, everything, finished(study, everything, read_rows(places)))) is changed
    )
    assert ("was changed while the study ran" in told[0]) is changed


def test_equal_arms_of_two_cells_are_one_run():
    """One at its only learning rate, and one of those of another cell."""
    task = {
        "policy": "policy",
        "train": "train.jsonl",
        "heldout": "heldout.jsonl",
        "steps": 1,
        "seeds": 1,
    }
    cells = {"a": {"options": {"actor.adam.lr": 1e-4}}, "b": {"learning_rates": [1e-5, 1e-4]}}
    study = Study.model_validate(
        {"tasks": {"t": task}, "cells": {k: {"task": "t"} | cell for k, cell in cells.items()}}
    )
    everything = runs_of(study, study.arms)
    assert [run.name for run in missing(study, everything, {})] == ["a-s0", "b@1e-05-s0"]
    row = {"key": runs.key_of(study, everything[0]), "cell": "a", "learning_rate": None, "seed": 0}
    done = finished(study, everything, [row])
    assert [(each["cell"], each["learning_rate"]) for each in done.values()] == [
        ("a", None),
        ("b", 1e-4),
    ]


def test_a_policy_is_made_again_when_its_maker_is_another(tmp_path):
    maker = tmp_path / "make.py"
    maker.write_text("# one\n")
    task = {"maker": f"{maker} --size 1", "steps": 1, "seeds": 1}
    study = Study.model_validate({"tasks": {"t": task}, "cells": {"a": {"task": "t"}}})
    places, told = Places(tmp_path), []

    def make():
        return maker_job(study, "t", 0, places, told.append)

    places.made("t", 0).mkdir(parents=True)
    make().done("killed", 1.0)
    make().done(None, 1.0)
    assert make() is None
    maker.write_text("# two\n")
    assert make() is not None
