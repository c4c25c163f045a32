from __future__ import annotations

import json

import pytest

from openrlhf_ext.tools.study import runs
from openrlhf_ext.tools.study.runs import Places, Rows, execute, finished, missing, read_rows, runs_of
from openrlhf_ext.tools.study.settings import Study


@pytest.mark.parametrize("changed", [False, True])
def test_a_run_during_which_its_code_was_changed_does_not_count(tmp_path, monkeypatch, changed):
    """With a stand-in for the processes, which edits the reward file meanwhile."""
    reward = tmp_path / "reward.py"
    reward.write_text("# one\n")
    task = {"policy": "policy", "train": "train.jsonl", "heldout": "heldout.jsonl", "steps": 1, "seeds": 1}
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
    assert bool(missing(everything, finished(study, everything, read_rows(places)))) is changed
    assert ("was changed while the study ran" in told[0]) is changed
