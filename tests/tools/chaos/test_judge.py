"""What is wrong with a disturbed run is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from openrlhf_ext.tools.chaos import judge
from openrlhf_ext.tools.chaos.trial import described, summary

RECORDS = [
    {"step": 0, "eval/accuracy": 0.5},
    *({"step": s, "loss/policy": 0.1 * s, "time/step": s} for s in (1, 2)),
]


def made(folder: Path, records: list[dict] = RECORDS, bit: float = 0.0) -> Path:
    (folder / "run").mkdir(parents=True)
    (folder / "tmp/ray").mkdir(parents=True)
    (folder / "run/metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    save_file({"a": torch.ones(3), "b": torch.ones(2) + bit}, folder / "run/model.safetensors")
    return folder


@pytest.fixture
def whole(tmp_path):
    return made(tmp_path / "whole")


def test_an_equal_run_is_right_whatever_its_times(tmp_path, whole):
    got = made(tmp_path / "got", [record | {"time/step": 9} for record in RECORDS])
    assert (
        judge.outcome(whole, got, exact=True) == judge.files(whole, got) == judge.ledger(got) == []
    )


def test_a_wrong_bit_is_said_where_bits_are_promised(tmp_path, whole):
    got = made(tmp_path / "got", bit=1.2e-7)
    assert judge.outcome(whole, got, exact=True) == ["1 of 2 tensors of the final weights differ"]
    assert judge.outcome(whole, got, exact=False) == []


def test_another_number_is_said_with_its_step(tmp_path, whole):
    got = made(tmp_path / "got", [*RECORDS[:-1], RECORDS[-1] | {"loss/policy": 0.3}])
    assert judge.outcome(whole, got, exact=True) == ["loss/policy is another one from step 2 on"]


def test_records_that_a_removed_run_folder_had_are_lost_to_the_run_alone(tmp_path, whole):
    got = made(tmp_path / "got", RECORDS[2:])
    (got / "removed").mkdir()
    (got / "removed/metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in RECORDS)
    )
    assert judge.outcome(whole, got, exact=True) == []
    (got / "removed/metrics.jsonl").write_text(json.dumps(RECORDS[0]) + "\n")
    assert judge.outcome(whole, got, exact=True) == [
        "metrics.jsonl has the steps [0, 2], not [0, 1, 2]"
    ]


@pytest.mark.parametrize(
    "records", [[*RECORDS, RECORDS[-1]], RECORDS[:-1]], ids=["doubled", "lost"]
)
def test_a_step_that_is_there_twice_or_not_at_all_is_said(tmp_path, whole, records):
    (said,) = judge.outcome(whole, made(tmp_path / "got", records), exact=False)
    assert (
        said
        == f"metrics.jsonl has the steps {[record['step'] for record in records]}, not [0, 1, 2]"
    )


def test_weights_that_are_missing_are_said(tmp_path, whole):
    got = made(tmp_path / "got")
    (got / "run/model.safetensors").unlink()
    assert judge.outcome(whole, got, exact=False) == ["the final weights are missing"]


def test_a_traceback_is_said():
    text = "INFO all is well\nTraceback (most recent call last):\n  File ...\nKeyError: 3\n"
    assert "KeyError: 3" in judge.terminal(text)[0] and judge.terminal("Traceback is a word") == []


def test_files_of_a_kind_that_no_undisturbed_run_leaves_are_said(tmp_path, whole):
    (whole / "tmp/socket_0a1b2c3d").touch()
    got = made(tmp_path / "got")
    for name in ("socket_9f8e7d6c", "half_written"):
        (got / "tmp" / name).touch()
    assert judge.files(whole, got) == ["half_written"]


def test_lines_and_summary_say_what_did_not_hold():
    row = {
        "fault": "kill_rank",
        "phase": "sync",
        "step": 2,
        "result": "restarted",
        "detected_s": 1.25,
        "recovered_s": 20.0,
        "samples_again": 32,
    }
    missed = {"fault": "kill_critic", "phase": "end", "step": 6, "missed": "the phase did not come"}
    good = {
        "faults": [row, missed],
        "wrong": [],
        "left": ["socket"],
        "seconds": 60.0,
        "undisturbed_seconds": 20.0,
    }
    bad = {
        "faults": [row],
        "wrong": ["a step is lost"],
        "left": [],
        "seconds": 20.0,
        "undisturbed_seconds": 20.0,
    }
    first, second, left, third = described(good | {"wrong": ["a step is lost"]})
    assert first.split(None, 2)[:2] == ["kill_rank", "sync"]
    assert first.endswith("restarted, detected 1.2 s, recovered 20.0 s, 32 samples again")
    assert second.endswith("the phase did not come") and left == "  left in TMPDIR: socket"
    assert third == "  DID NOT HOLD: a step is lost"
    assert summary([good]) == {
        "held": True,
        "faults": 1,
        "effective": 1 / 3,
        "sentence": "1 of 1 runs with 1 faults held; effective training time 33%",
    }
    assert (
        summary([good, bad])["sentence"]
        == "1 of 2 runs with 2 faults held; effective training time 50%"
    )
    assert not summary([good, bad])["held"]
