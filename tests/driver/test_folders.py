"""One run per folder: who holds it, who may take it over, and that a run which is refused has moved
nothing."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from openrlhf_ext.checkpoints import CheckpointStore
from openrlhf_ext.cli.train_ppo_ray import main
from openrlhf_ext.config import ConfigError, RunConfig
from openrlhf_ext.driver import guard
from openrlhf_ext.driver.guard import Guard, run_with_restarts
from openrlhf_ext.locks import FolderLock
from openrlhf_ext.outputs import FileDisplaced
from openrlhf_ext.reporting import EventLog
from openrlhf_ext.run.checkpoints import checkpoint_store, clean_up, own_folders, resumption
from tests.e2e.jobs import Task
from tests.patience import PATIENCE_S

HOLD = """
import os, sys, time
from pathlib import Path
from openrlhf_ext.locks import FolderLock
lock = FolderLock(Path(sys.argv[1]), False, "")
if sys.argv[2:] and not os.fork():
    time.sleep(1)  # what a killed driver leaves for a moment
    os._exit(0)
print("held", flush=True)
time.sleep(3600)
"""


def killed_holder(folder: Path, *words: str) -> int:
    """The id of a process that was killed while it had the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), *words], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    process.send_signal(signal.SIGKILL)
    process.wait(PATIENCE_S)
    return process.pid


def config(folder: Path, **ckpt: object) -> RunConfig:
    paths = {"path": str(folder / "steps"), "output_dir": str(folder / "out")}
    return RunConfig(
        ckpt={**paths, **ckpt}, logger={"metrics_path": str(folder / "out/metrics.jsonl")}
    )


def test_the_command_is_refused_where_another_run_is(tmp_path, capsys):
    task = Task.make(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/metrics.jsonl").write_text('{"step": 1}\n')
    before = sorted(tmp_path.rglob("*"))
    lock = FolderLock(tmp_path / "out", False, "")
    capsys.readouterr()
    assert main([*task.options("out"), "--ckpt.take_over_lock"]) == 2, (
        "of a living holder nothing is taken over"
    )
    assert re.search(
        rf"^1 problem in the configuration:\n- ckpt.output_dir and logger.metrics_path "
        rf"{tmp_path / 'out'} is in use by "
        rf"pid {os.getpid()} on {re.escape(socket.gethostname())} since [-\d]+ [:\d]+: wait until "
        rf"it has ended, or",
        capsys.readouterr().err,
    )
    left = {path for path in tmp_path.rglob("*") if path.name != ".lock"}
    assert left == {*before, tmp_path / "checkpoints", tmp_path / "checkpoints/out"}, (
        "nothing was moved"
    )
    lock.close()


def test_a_run_holds_all_of_its_folders_and_gives_them_back(tmp_path):
    with own_folders(config(tmp_path)):
        with pytest.raises(
            ConfigError,
            match=r"2 problems[\s\S]*- ckpt.path .*steps is in use by[\s\S]*- ckpt.output",
        ):
            with own_folders(config(tmp_path)):
                pass
        elsewhere = config(tmp_path / "b", path=str(tmp_path / "steps"))
        with pytest.raises(ConfigError, match=r"1 problem .*\n- ckpt.path"), own_folders(elsewhere):
            pass
    with own_folders(config(tmp_path)):
        assert json.loads((tmp_path / "steps/.lock").read_text())["pid"] == os.getpid()
    assert (tmp_path / "steps/.lock").read_text() == ""


@pytest.mark.parametrize("words", [(), ("fork",)], ids=["alone", "with a child that ends later"])
def test_what_a_killed_run_of_this_host_held_is_taken_over(tmp_path, caplog, words):
    pid = killed_holder(tmp_path / "steps", *words)
    with own_folders(config(tmp_path)):
        assert f"{tmp_path / 'steps'} was in use by pid {pid} on " in caplog.text
        assert "has ended: it is taken over" in caplog.text


def test_what_a_run_of_another_host_held_needs_an_option(tmp_path):
    (tmp_path / "steps").mkdir()
    holder = {"host": "node-17", "pid": os.getpid(), "since": "2031-01-02 03:04:05"}
    (tmp_path / "steps/.lock").write_text(json.dumps(holder))
    told = (
        r"was in use by pid \d+ on node-17 since 2031-01-02 03:04:05, and this host .* "
        r"--ckpt.take_over_lock, or "
    )
    with pytest.raises(ConfigError, match=told), own_folders(config(tmp_path)):
        pass
    assert json.loads((tmp_path / "steps/.lock").read_text()) == holder
    with own_folders(config(tmp_path, take_over_lock=True)):
        pass


@pytest.mark.parametrize(
    "text", ["{", '{"host": 1}', json.dumps({"host": "x", "pid": 10**60, "since": ""})[:-1]]
)
def test_a_name_that_cannot_be_read_is_no_holder(tmp_path, text):
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps/.lock").write_text(text)
    with own_folders(config(tmp_path)):
        pass


def test_without_locks_of_the_file_system_the_name_decides(tmp_path, monkeypatch, caplog):
    def flock(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    killed_holder(tmp_path / "steps")
    monkeypatch.setattr(fcntl, "flock", flock)
    with own_folders(config(tmp_path)):
        assert "on a file system without locks (No locks available)" in caplog.text
        with (
            pytest.raises(ConfigError, match=rf"in use by pid {os.getpid()} on "),
            own_folders(config(tmp_path)),
        ):
            pass


@pytest.mark.parametrize("asked", [False, True])
def test_a_restart_goes_on_from_a_checkpoint_of_its_own_run_only(tmp_path, caplog, asked):
    """Also one that saves none, and one whose first attempt failed before it had saved any."""
    for half in ("global_step49", "global_step50.incomplete"):
        (tmp_path / "steps" / half).mkdir(parents=True)
    store, seen = CheckpointStore(tmp_path / "steps", keep=9), []

    def attempt(config, restart):
        seen.append((config.ckpt.load_enable, [path.name for path in store.checkpoints()]))
        (tmp_path / f"steps/global_step{50 + restart}").mkdir()
        return 1

    run = config(tmp_path, load_enable=asked).model_copy(
        update={"train": RunConfig(train={"max_restarts": 2}).train}
    )
    with own_folders(run):
        run_with_restarts(run, attempt)
    before = ["global_step49"] * asked
    first = [*before, "global_step50"]
    assert seen == [(asked, before), (True, first), (True, [*first, "global_step51"])]
    aside = sorted(path.name for path in (tmp_path / "steps").glob("superseded.1/*"))
    assert aside == [] if asked else ["global_step49"]
    assert ("ckpt.load_enable is off: moved to" in caplog.text) == (not asked)


def removed(folder: Path) -> None:
    shutil.rmtree(folder)


def renamed(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def replaced(folder: Path) -> None:
    removed(folder)
    folder.mkdir()


def linked_elsewhere(folder: Path) -> None:
    renamed(folder)
    (folder.parent / "other").mkdir()
    folder.symlink_to(folder.parent / "other")


@pytest.mark.parametrize("what", ["steps", "out"])
@pytest.mark.parametrize("lose", [removed, renamed, replaced, linked_elsewhere])
def test_a_run_that_has_lost_a_folder_fails_and_touches_nothing_of_who_is_there_now(
    tmp_path, monkeypatch, lose, what
):
    """The first run, whose folder somebody takes away; a second one has begun there."""
    run = config(tmp_path)
    with own_folders(run), EventLog(tmp_path / "out/events.jsonl") as events:
        lose(tmp_path / what)
        for folder in ("global_step2", "global_step4", "global_step5.incomplete"):
            (tmp_path / "steps" / folder).mkdir(parents=True)
        (tmp_path / "out").mkdir(exist_ok=True)
        theirs = sorted(tmp_path.rglob("*"))
        store = checkpoint_store(
            run.model_copy(update={"ckpt": run.ckpt.model_copy(update={"max_num": 1})})
        )
        told = (
            rf"{tmp_path / what}.* was removed, renamed or replaced, .*Begin again in another "
            rf"folder"
        )
        acts = [
            Guard().check,
            lambda: store.begin(6),
            store.rotate,
            store.clean,
            lambda: store.abandon(5),
            lambda: store.mark_best({"step": 4, "metric": "m", "value": 1.0}),
        ]
        acts += [lambda: events.note("evaluation")] if what == "out" else []
        for act in acts:
            with pytest.raises(FileDisplaced, match=told):
                act()
        clean_up(run)
        assert re.search(told, resumption(run)), (
            "and not: to go on from the checkpoint of the other run"
        )
        tried = []
        assert (
            run_with_restarts(restarting(run), lambda *_: tried.append(1) or 1) == 1
            and len(tried) == 1
        )
        guard._Parent._note(run, 3, "failure", error="")
        assert sorted(tmp_path.rglob("*")) == theirs


def restarting(run: RunConfig) -> RunConfig:
    return run.model_copy(update={"train": RunConfig(train={"max_restarts": 2}).train})


def test_a_network_that_does_not_answer_takes_no_folder_away(tmp_path, monkeypatch):
    stat = os.stat

    def hiccup(path, **more):
        if str(path).endswith("steps/.lock"):
            raise OSError(errno.EIO, "Input/output error")
        return stat(path, **more)

    with own_folders(config(tmp_path)):
        monkeypatch.setattr(os, "stat", hiccup)
        Guard().check()
