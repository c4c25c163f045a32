"""A run as it is seen from outside."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import psutil
import pytest

from openrlhf_ext.tools.chaos import watch
from openrlhf_ext.tools.chaos.faults import Drawn
from openrlhf_ext.tools.chaos.watch import Run
from tests.patience import PATIENCE_S, until

# a rank under the title that Ray gives it, and events and records as they are asked for by files
RUN = """
import pathlib, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
(folder / "run").mkdir()
rank = subprocess.Popen(["ray::PolicyActor", "-c", "import sys; sys.stdin.read()"], executable=sys.executable,
                        stdin=subprocess.PIPE)
print("begun", flush=True)
while not (folder / "end").exists():
    time.sleep(0.02)
rank.kill()
"""
LEAVES = """
import subprocess, sys
code = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
"""


def started(folder: Path, code: str) -> Run:
    folder.mkdir(exist_ok=True)
    return Run([sys.executable, "-c", code, str(folder)], folder, evaluates_every=2, isolated=False)


def write(folder: Path, name: str, *records: dict) -> None:
    (folder / "run" / name).write_text("".join(json.dumps(record) + "\n" for record in records))


def test_phases_are_read_from_titles_events_and_records(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "_LOOK_S", 0.0)
    run = started(tmp_path / "it", RUN)
    until(lambda: "begun" in run.log.read_text(), "the run")
    assert run.phase() == "start" and len(run.kinds["rank"]) == 1
    ready = {"event": "ready", "time": time.time(), "steps": 3}
    write(run.folder, "events.jsonl", ready | {"time": run.began - 1})
    assert run.phase() == "start", "that was an earlier start"
    write(run.folder, "events.jsonl", ready)
    assert run.phase() == "evaluation", "before the first step"
    write(run.folder, "metrics.jsonl", {"step": 0, "eval/accuracy": 0.5}, {"step": 1})
    assert (run.phase(), run.step) == ("sampling", 1)
    write(run.folder, "metrics.jsonl", {"step": 1}, {"step": 2})
    assert run.phase() == "evaluation"
    write(run.folder, "metrics.jsonl", {"step": 2}, {"step": 3})
    assert run.phase() == "end"
    write(run.folder, "metrics.jsonl", {"step": 1}, {"step": 2})
    for call, phase in {
        "fit": "training",
        "send_weights": "sync",
        "save_state": "saving",
        "save_model": "end",
    }.items():
        monkeypatch.setattr(watch, "title", lambda process, call=call: titled(run, process, call))
        assert run.phase() == phase
    assert run.reach("end", 2, "rank", time.monotonic() + PATIENCE_S)
    assert not run.reach("end", 3, "rank", time.monotonic() + 0.1), "at step 2"
    assert not run.reach("end", 2, "critic", time.monotonic() + 0.1), "there is none"
    monkeypatch.undo()
    write(run.folder, "events.jsonl", ready, {"event": "failure", "time": time.time()})
    assert run.phase() == "start", "it is about to begin again"
    (run.folder / "end").touch()
    assert run.finish(time.monotonic() + PATIENCE_S) == 0 and run.left() == []


# its ranks are the command once more
SUPERVISED = """
import pathlib, subprocess, sys
folder = pathlib.Path(sys.argv[1])
if (folder / "run").exists():
    print("a rank", flush=True)
    sys.stdin.read()
(folder / "run").mkdir()
rank = subprocess.Popen([sys.executable, *sys.orig_argv[1:]], stdin=subprocess.PIPE)
rank.wait()
"""


def test_ranks_of_a_supervised_run_are_found_and_what_they_do(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "_LOOK_S", 0.0)
    folder = tmp_path / "it"
    folder.mkdir()
    words = [sys.executable, "-c", SUPERVISED, str(folder), "openrlhf_ext.cli.train_sft"]
    run = Run(words, folder, evaluates_every=2, isolated=False)
    until(lambda: "a rank" in run.log.read_text(), "its rank")
    assert run.phase() == "start" and len(run.kinds["rank"]) == 1 and "driver" not in run.kinds
    write(folder, "events.jsonl", {"event": "ready", "time": time.time(), "steps": 3})
    for records, phase in (
        ([{"step": 0, "eval/loss": 1}], "training"),
        ([{"step": 2}], "evaluation"),
        ([{"step": 2, "eval/loss": 1}], "training"),
        ([{"step": 3}], "end"),
    ):
        write(folder, "metrics.jsonl", *records)
        assert run.phase() == phase
    run.kill()
    assert run.left() == []


def titled(run: Run, process: psutil.Process, call: str) -> str:
    return (
        f"ray::PolicyActor.{call} "
        if process in run.kinds["rank"]
        else f"{sys.executable} of pid {process.pid}"
    )


def test_a_process_that_is_left_is_named_with_its_ports_and_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "_GONE_S", 2.0)
    run = started(tmp_path / "it", LEAVES)
    assert run.finish(time.monotonic() + PATIENCE_S) == 0
    (said,) = run.left()
    assert re.fullmatch(r"process '.*python.*' \(ports \[\d+\]\)", said), said
    until(lambda: not run._living(), "its end")


def test_a_run_that_does_not_end_is_killed_with_all_that_it_started(tmp_path):
    run = started(tmp_path / "it", RUN)
    until(lambda: "begun" in run.log.read_text(), "the run")
    assert run.finish(time.monotonic() + 0.1) is None
    run.kill()
    assert run.left() == [] and run.command.returncode == -9


@pytest.mark.parametrize("text", ["", '{"step": 1}\n{"st'])
def test_a_line_that_is_being_written_is_left_out(tmp_path, text):
    (tmp_path / "metrics.jsonl").write_text(text)
    assert [record["step"] for record in watch.read_records(tmp_path / "metrics.jsonl")] == [
        1
    ] * bool(text)
    assert watch.read_records(tmp_path / "none") == []


# says what it can do: write to its checkpoints, write to /dev/shm, reach itself
ISOLATED = """
import json, pathlib, socket, sys, time
folder = pathlib.Path(sys.argv[1])
(folder / "checkpoints").mkdir()
server = socket.create_server(("127.0.0.1", 0), backlog=1000)
def can(what):
    try:
        what()
        return True
    except OSError:
        return False
while not (folder / "end").exists():
    told = {
        "save": can(lambda: (folder / "checkpoints/file").write_text("x")),
        "share": can(lambda: open("/dev/shm/own", "ab", 0).write(bytes(1 << 13))),
        "reach": can(lambda: socket.create_connection(server.getsockname(), timeout=0.2).close()),
    }
    (folder / "told.new").write_text(json.dumps(told))
    (folder / "told.new").rename(folder / "told")
    time.sleep(0.02)
"""


@pytest.mark.skipif(
    "root" not in watch.abilities(), reason="needs root: a network and a /dev/shm of a run's own"
)
def test_what_needs_root_is_done_to_the_run_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("openrlhf_ext.tools.chaos.faults._PAUSE_S", 1.0)
    folder = tmp_path / "it"
    folder.mkdir()
    run = Run(
        [sys.executable, "-c", ISOLATED, str(folder)], folder, evaluates_every=-1, isolated=True
    )

    def can(**expected: bool) -> None:
        until(
            lambda: (folder / "told").exists() and expected.items() <= told().items(), str(expected)
        )

    def told() -> dict[str, bool]:
        return json.loads((folder / "told").read_text())

    can(save=True, share=True, reach=True)
    until(lambda: run.look() or run.kinds.get("command"), "its processes")
    Drawn("network_gap", "sampling", 0, 0.0).inject(run)
    can(reach=True)
    for fault, lost in {
        "checkpoints_read_only": "save",
        "shm_full": "share",
        "network_cut": "reach",
    }.items():
        Drawn(fault, "sampling", 0, 0.0).inject(run)
        can(**{lost: False})
    (tmp_path / "it/checkpoints/file").write_text("outside it is as it was")
    (folder / "end").touch()
    assert run.finish(time.monotonic() + PATIENCE_S) == 0
    assert run.left() == ["left in /dev/shm: own"]
