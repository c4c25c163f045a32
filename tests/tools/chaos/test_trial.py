"""A campaign of a command that is not a training run, but ends and is killed as one."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from openrlhf_ext.tools.chaos import trial, watch
from openrlhf_ext.tools.chaos.faults import Drawn
from openrlhf_ext.tools.chaos.trial import DEADLINES, Campaign, run_command

# six steps of 50 ms: it goes on from the step that it finds, writes a step twice if it is spoiled,
# and says who failed
CODE = """
import json, pathlib, signal, sys, time
import numpy
from safetensors.numpy import save_file
folder, spoiled, words = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
(folder / "run").mkdir(exist_ok=True)
metrics, events = folder / "run/metrics.jsonl", folder / "run/events.jsonl"
def note(path, **facts):
    with path.open("a") as file:
        file.write(json.dumps(facts | {"time": time.time()}) + "\\n")
def ended(*_):
    note(events, event="interrupted")
    print("SIGTERM: to go on" if spoiled != "unnamed" else "it ended")
    sys.exit(143)
signal.signal(signal.SIGTERM, ended)
done = len(metrics.read_text().splitlines()) if "--ckpt.load_enable" in words else 0
note(events, event="ready", steps=6)
for step in range(done + (spoiled != "doubled" or not done), 7):
    time.sleep(0.05)
    note(metrics, step=step)
save_file({"a": numpy.ones(2) * (1 if spoiled != "bit" or not done else 1 + 1e-9)}, folder / "run/model.safetensors")
"""


def command(spoiled: str, folder: Path, words: list[str]) -> list[str]:
    folder.mkdir(exist_ok=True)
    return [
        sys.executable,
        "-c",
        CODE,
        str(folder),
        spoiled if folder.name != "undisturbed" else "",
        *words,
    ]


@pytest.mark.parametrize(
    ("spoiled", "says"),
    [
        ("", None),
        ("doubled", "metrics.jsonl has the steps"),
        ("bit", "1 of 1 tensors of the final weights differ"),
        ("unnamed", "term_command is not named: it ended"),
    ],
    ids=["right", "a doubled step", "a wrong bit", "an unnamed culprit"],
)
def test_a_run_that_is_ended_goes_on_and_is_judged(tmp_path, monkeypatch, spoiled, says):
    monkeypatch.setattr(watch, "_LOOK_S", 0.01)
    campaign = Campaign(partial(command, spoiled), tmp_path / "undisturbed")
    seconds, wrong, steps = campaign.undisturb()
    assert (wrong, steps) == ([], 6) and seconds > 0.3
    drawn = [Drawn("term_command", "sampling", 2, 0.0), Drawn("kill_critic", "sampling", 3, 0.0)]
    found = campaign.trial(tmp_path / "trial", drawn, restarts=0)
    row, missed = found["faults"]
    assert row["result"] == "ended with 143" and 0 < row["detected_s"] < row["recovered_s"]
    assert missed["missed"] == "the phase did not come" and found["statuses"] == [143, 0]
    assert found["compared"] == "bits"
    assert [] == found["wrong"] if says is None else found["wrong"][0].startswith(says), found


def test_what_came_of_a_fault_is_found_also_after_a_restart_has_moved_its_event_aside(tmp_path):
    (tmp_path / "run").mkdir()
    event = '{{"event": "{}", "time": {}}}\n'.format
    (tmp_path / "run/events.jsonl.superseded.1").write_text(event("engine_replaced", 11.0))
    (tmp_path / "run/events.jsonl").write_text(event("restart", 21.0))
    log = tmp_path / "log0"
    log.write_text("replacing rollout engines [0]\nthe run failed:\nrank 0 died\n")
    at = {"phase": "sampling", "log": log.name}
    rows = [
        at | {"fault": "kill_engine", "at": 10.0, "from": 0},
        at | {"fault": "kill_rank", "at": 20.0, "from": 30},
    ]
    assert trial._judge_rows(rows, SimpleNamespace(folder=tmp_path, log=log), 0) == []
    assert [(row["result"], row["detected_s"]) for row in rows] == [
        ("engine replaced", 1.0),
        ("restarted", 1.0),
    ]


def test_a_run_writes_below_its_folder_and_its_reward_function_is_the_counted_one(tmp_path):
    folder = tmp_path / "new/it"
    words = run_command(["--train.seed", "3"], "/users/reward.py", folder, ["--ckpt.load_enable"])
    given = dict(zip(words[3::2], words[4::2], strict=False))
    folders = (
        "ckpt.output_dir",
        "ckpt.path",
        "logger.metrics_path",
        "logger.figure_path",
        "reward.remote_url",
    )
    assert all(Path(given[f"--{name}"]).is_relative_to(folder) for name in folders)
    assert given["--train.seed"] == "3" and words[-1] == "--ckpt.load_enable"
    assert all(given[f"--{name}"] == str(limit) for name, limit in DEADLINES.items())
    assert "Spoiled('/users/reward.py'" in (folder / "reward.py").read_text()


@pytest.mark.parametrize("own", [["--train.step_timeout_s", "900"], ["--train.step_timeout_s=900"]])
def test_a_deadline_on_the_command_line_wins(tmp_path, own):
    words = run_command(own, None, tmp_path / "it", [])
    assert [word for word in words if word.startswith("--train.step_timeout_s")] == own[:1]
    assert "--vllm.hang_timeout_s" in words


def test_a_deadline_that_was_too_short_for_this_machine_is_named(tmp_path):
    said = "the run failed: engines were not ready within 120 s (--vllm.start_timeout_s)"
    for text, hint in (
        (said, " (chaos sets --vllm.start_timeout_s 120 unless they are given: give longer ones)"),
        ("vllm.start_timeout_s: starting\nthe run failed: of something else", ""),
    ):
        code = f"import sys; print({text!r}); sys.exit(1)"
        (undisturbed := tmp_path / str(len(text))).mkdir()
        campaign = Campaign(
            lambda folder, words, code=code: [sys.executable, "-c", code], undisturbed
        )
        _, wrong, _ = campaign.undisturb()
        log = campaign.undisturbed / "log0"
        assert wrong[-1] == f"the undisturbed run ended with 1; what it said: {log}{hint}"
