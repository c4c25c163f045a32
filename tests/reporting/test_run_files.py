"""events.jsonl and samples.jsonl: what a run leaves beside its metrics, also one that is killed or
goes on."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from openrlhf_ext.inputs import InputError
from openrlhf_ext.reporting import EventLog, HeldOutWriter, SampleWriter, chosen_groups
from openrlhf_ext.reporting.lines import read_lines
from openrlhf_ext.tools.explain.rollouts import read_rollouts
from tests.patience import PATIENCE_S


def records(path: Path) -> list[dict]:
    return [record for _, record in read_lines(path)]


def kinds(path: Path) -> list[tuple[str, int]]:
    return [(record["event"], record["step"]) for record in records(path)]


# ---- events


def first_part(path: Path) -> None:
    """A run that wrote a checkpoint after step 2, and failed in step 4."""
    with EventLog(path) as events:
        events.note("start", resume_step=0)
        for step in (2, 3):
            events.step = step
            events.note("checkpoint", path=f"step{step}")
        events.step = 4
        events.note("engine_replaced", engines=[0])
        events.note("failure", error="it broke")


def test_a_resumed_run_moves_events_of_repeated_steps_aside_and_keeps_what_became_of_the_run(
    tmp_path,
):
    path = tmp_path / "events.jsonl"
    first_part(path)
    with EventLog(path, goes_on=True) as events:
        events.note("start", resume_step=2)
        events.repeat_from(2)
        events.note("resumed", resume_step=2)
    assert kinds(path) == [
        ("start", 0),
        ("checkpoint", 2),
        ("failure", 4),
        ("start", 0),
        ("resumed", 2),
    ]
    assert kinds(Path(f"{path}.superseded.1")) == [("checkpoint", 3), ("engine_replaced", 4)]


def test_a_new_run_in_a_used_folder_moves_all_events_aside(tmp_path):
    path = tmp_path / "events.jsonl"
    first_part(path)
    with EventLog(path) as events:
        events.note("start")
    assert kinds(path) == [("start", 0)] and len(kinds(Path(f"{path}.superseded.1"))) == 5


def test_an_event_that_the_documentation_does_not_know_is_refused(tmp_path):
    with (
        EventLog(tmp_path / "events.jsonl") as events,
        pytest.raises(KeyError, match="unknown event 'oops'"),
    ):
        events.note("oops")


# ---- lines


def test_a_run_killed_in_the_middle_of_a_line_can_be_read_and_goes_on(tmp_path):
    """The child appends for ever, and is killed when a reader has seen lines."""
    path = tmp_path / "events.jsonl"
    code = (
        "import sys; from openrlhf_ext.reporting import EventLog; log = EventLog(sys.argv[1])\n"
        "while True: log.note('failure', error='x' * 100000)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(path)])
    try:
        while not (path.exists() and path.stat().st_size > 10**6):
            assert child.poll() is None
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(PATIENCE_S)
    with path.open("ab") as file:  # whatever the kill hit: now it is in the middle of a line
        file.write(b'{"event": "end", "st')
    whole = len(records(path))
    assert whole >= 10
    with EventLog(path, goes_on=True) as events:
        events.note("start")
    assert len(records(path)) == whole + 1 and records(path)[-1]["event"] == "start"


def test_a_line_that_the_disk_refuses_is_said_with_the_file_and_leaves_nothing(tmp_path):
    path = tmp_path / "events.jsonl"
    code = f"""
import resource, signal
from openrlhf_ext.reporting.lines import JsonLines
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
lines = JsonLines({str(path)!r}, keep=lambda _: True)
lines.append({{"a": 1}})
resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
for _ in range(2):
    try:
        lines.append({{"a": "x" * 100}})
    except OSError as error:
        print(error)
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert ran.stdout.count(str(path)) == 2, ran.stdout + ran.stderr
    assert path.read_text() == '{"a": 1}\n'


@pytest.mark.parametrize(
    "broken", [b"[1]", b"{", b"\xff", b"[" * 5000, b'{"step": "x"}', b'{"event": []}']
)
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_broken_line_is_named_and_moved_aside_by_the_next_run(tmp_path, caplog, broken, goes_on):
    path = tmp_path / "events.jsonl"
    path.write_bytes(
        b'{"event": "start", "step": 0}\n' + broken + b'\n{"event": "profile", "step": 2}\n'
    )
    with EventLog(path, goes_on=goes_on) as log:
        log.repeat_from(2)
        log.note("end", path="x")
    kept = ["start", "profile", "end"] if goes_on else ["end"]
    assert [record["event"] for record in records(path)] == kept
    aside = b"".join(
        file.read_bytes() for file in sorted(tmp_path.glob("events.jsonl.superseded.*"))
    )
    assert broken in aside, "nothing is lost"


def test_readers_name_the_broken_line(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"step": 1}\n[1]\n{"step": 2}\n')
    with pytest.raises(
        InputError, match=r"events.jsonl, line 2: must be a JSON object, got a list"
    ):
        list(read_lines(path))


# ---- completions


def completion(group: int, tokens: int, **more: object) -> dict:
    numbers = {
        "logprobs": [-0.123456] * tokens,
        "entropies": [0.5] * tokens,
        "advantages": [1.0] * tokens,
    }
    facts = {
        "group": group,
        "prompt": "1+1=",
        "token_ids": [7] * tokens,
        "reward": 1.0,
        "score": 1.0,
    }
    return {**facts, "truncated": False, "from_guide": False, **numbers, **more}


def test_completions_are_those_that_explain_reads(tmp_path):
    path = tmp_path / "samples.jsonl"
    writer = SampleWriter(path, 5, 20, lambda ids: [f"t{i}" for i in ids], 2)
    for step in filter(writer.groups_due, range(1, 11)):
        labeled = completion(step, 3, label=["7", 1.23456, None], environment=[0, 1, 0])
        writer.write(
            step, [labeled, completion(step, 2, logprobs=[1e-9, 0.0], entropies=[-1e-9, 0.1])]
        )
    writer.close()
    with path.open("a") as file:
        file.write('{"step": 15, "gro')  # is being written
    assert [record["step"] for record in records(path)] == [1, 1, 5, 5, 10, 10]
    last = read_rollouts(path)
    assert [rollout.record["step"] for rollout in last] == [10, 10]
    assert last[0].record["logprobs"] == [-0.123456] * 3 and last[0].record["tokens"] == ["t7"] * 3
    assert last[0].record["label"] == ["7", 1.23456, None] and last[0].record["environment"] == [
        0,
        1,
        0,
    ]
    assert last[1].record["entropies"] == [0.0, 0.1] and last[1].record["logprobs"] == [0.0, 0.0]
    assert [rollout.record["step"] for rollout in read_rollouts(path, 5)] == [5, 5]
    with pytest.raises(ValueError, match="--step 4 is not in .*; its steps are 1, 5, 10"):
        read_rollouts(path, 4)


def test_what_is_not_finite_is_null_and_completions_of_repeated_steps_are_moved_aside(tmp_path):
    path = tmp_path / "samples.jsonl"
    for resume_step in (0, 2):
        writer = SampleWriter(path, 1, 4, lambda ids: ["t"] * len(ids), 2, resume_step)
        for step in range(resume_step + 1, 5):
            writer.write(step, [completion(step, 2, entropies=[math.nan, 0.1])])
        writer.close()
    assert [record["step"] for record in records(path)] == [1, 2, 3, 4]
    assert [record["step"] for record in records(Path(f"{path}.superseded.1"))] == [3, 4]
    assert records(path)[0]["entropies"] == [None, 0.1]


def test_evaluations_that_are_kept_are_as_far_apart_as_steps_that_are_kept(tmp_path):
    path = tmp_path / "eval_samples.jsonl"

    def kept(writer: HeldOutWriter, steps: range) -> list[int]:
        for step in filter(lambda step: writer.groups_due(step) == 2, steps):
            writer.write(step, [completion(step, 2)])
        return [record["step"] for record in records(path)]

    for every, wanted in ((None, [0, 6, 12, 18]), (7, [0, 9, 18]), (-1, [])):
        # each starts anew: the step 0 of the one before is not its own
        with HeldOutWriter(path, every, 100, lambda ids: ["t"] * len(ids), 2) as writer:
            assert kept(writer, range(0, 20, 3)) == wanted
            writer.repeat_from(10)
            again = [15] if every is None else []
            assert kept(writer, range(12, 17, 3)) == [s for s in wanted if s <= 10] + again


@pytest.mark.parametrize(
    ("every", "steps", "due"),
    [(None, 1000, 21), (None, 7, 7), (-1, 1000, 0), (300, 1000, 4), (2000, 1000, 1)],
)
def test_steps_whose_completions_are_kept(tmp_path, every, steps, due):
    writer = SampleWriter(tmp_path / "samples.jsonl", every, steps, lambda ids: [], 2)
    assert sum(writer.groups_due(step) == 2 for step in range(1, steps + 1)) == due
    assert sum(writer.groups_due(step) is None for step in range(1, steps + 1)) == steps - due
    writer.close()


def test_a_thousand_steps_of_long_completions_stay_in_tens_of_megabytes(tmp_path):
    """Groups of 16 completions of up to 8,192 tokens: those that are kept, and 21 times their
    size."""
    lengths = [16 * tokens for tokens in (8192, 3000, 4100, 900, 2000)]
    assert chosen_groups(lengths, 2) == [1, 3]
    assert chosen_groups(lengths, 0) == [0, 1, 2, 3, 4], "all, if all are asked for"
    assert chosen_groups([5, 6, 7], 1) == [0]
    assert chosen_groups([200_000, 150_000], 2) == [1], (
        "none is small enough: the shortest one, never none"
    )
    writer = SampleWriter(
        tmp_path / "samples.jsonl", None, 1000, lambda ids: [" longer"] * len(ids), 2
    )
    for group in chosen_groups(lengths, 2):
        writer.write(
            1,
            [completion(group, lengths[group] // 16, token_ids=[151_643] * (lengths[group] // 16))]
            * 16,
        )
    writer.close()
    assert 21 * os.path.getsize(tmp_path / "samples.jsonl") < 80e6
    assert json.loads((tmp_path / "samples.jsonl").read_text().split("\n")[0])["step"] == 1
