"""A driver that ends, hangs or is ended in ways that it cannot report: exit code, event, message,
and nothing left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import psutil
import pytest

from openrlhf_ext.driver.guard import Guard
from openrlhf_ext.reporting.lines import read_lines
from tests.e2e.jobs import Task
from tests.patience import PATIENCE_S, SOONER_S, until


def run(case: str, folder: Path) -> tuple[int, str, list[dict]]:
    """Exit code, what it printed, and events of a case of ``guarded``; nothing may be left of its
    processes."""
    command = [sys.executable, "-m", "tests.driver.guarded", case, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SOONER_S)
    for noted in (
        path
        for path in folder.iterdir()
        if path.name in ("raylet", "child", "gcs", "orphan", "gcs_server")
    ):
        assert not psutil.pid_exists(int(noted.read_text())), f"{noted.name} was left behind"
    events = folder / "events.jsonl"
    return (
        done.returncode,
        done.stderr,
        [line for _, line in read_lines(events)] if events.exists() else [],
    )


@pytest.mark.parametrize(
    ("case", "code", "event", "words"),
    [
        (
            "ended_by_ray",
            137,
            "failure",
            r"Ray's raylet \(pid \d+\) has died, .* \(logs: /tmp/ray/logs\)",
        ),
        ("stopped", 137, "failure", r"Ray's gcs_server \(pid \d+\) has been stopped for \d+ s"),
        ("stops_itself", 137, "failure", r"the driver \(pid \d+\) has been stopped for \d+ s"),
        ("hung_up", 129, "interrupted", r"SIGHUP: the run had not begun"),
        (
            "deaf_to_signals",
            143,
            "interrupted",
            r"did not end after SIGTERM, which came 4 s ago; it was starting",
        ),
        ("interrupted_while_it_imports", 143, "interrupted", r"SIGTERM: the run had not begun"),
        (
            "killed",
            137,
            "failure",
            r"killed by SIGKILL, often by the kernel's out-of-memory .* training step 5",
        ),
        ("raises", 1, "failure", r"KeyError: 'nobody expected this'"),
    ],
)
def test_who_ended_the_driver_is_said_and_written_down(case, code, event, words, tmp_path):
    ended, text, events = run(case, tmp_path)
    assert (ended, [told["event"] for told in events]) == (code, [event]), text
    (told,) = events
    assert re.search(words, text) and (told.get("error") or told["why"]) in text, text
    if code in (129, 143):
        assert "no checkpoint is in ckpt: the run has to begin again" in text


_COUNTED = """
import os, sys, torch
PARENT = os.getpid()
def refused(name):
    def asked(*_, **__):
        if os.getpid() == PARENT:
            print(f"the parent called torch.cuda.{name}")
            os._exit(99)
        return 0
    return asked
NAMES = ("is_available", "_lazy_init", "init", "get_device_properties", "get_device_name", "current_device")
for name in (*NAMES, "mem_get_info"):
    setattr(torch.cuda, name, refused(name))
import glob
real = glob.glob
glob.glob = lambda pattern, **more: ["/dev/nvidia0"] if "nvidia" in str(pattern) else real(pattern, **more)
from openrlhf_ext.cli import train_ppo_ray
def train(config, watched, restart):
    torch.cuda.is_available()  # the driver may
    watched.ended(0)
    return 0
train_ppo_ray.train = train
sys.exit(train_ppo_ray.main(sys.argv[1:]))
"""


def test_the_parent_of_the_driver_never_starts_cuda(tmp_path):
    """One call would end every run on GPUs: "Cannot re-initialize CUDA in forked subprocess".
    Whatever stands in front of the driver's process is run, the choice of a layout for this
    machine's GPU included."""
    options = Task.make(tmp_path).options("out", megatron__layout="auto")
    command = [
        sys.executable,
        "-c",
        _COUNTED,
        *options[: options.index("--megatron.tensor_parallel_size")],
    ]
    command += options[options.index("--megatron.tensor_parallel_size") + 2 :]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_a_terminal_has_one_line_of_status_that_is_rewritten_and_gone_before_anything_else_is_shown(
    tmp_path,
):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    command = [sys.executable, "-m", "tests.driver.guarded", "busy", str(tmp_path)]
    environment = os.environ | {"BUSY_S": "4.5", "TERM": "xterm"}
    job = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    text = b""
    with contextlib.suppress(OSError):  # EIO: the other side is closed
        while piece := os.read(ours, 4096):
            text += piece
    os.close(ours)
    assert job.wait(SOONER_S) == 0, text
    # what a terminal erases is rewritten, so each piece begins an empty line
    pieces = text.decode().replace("\r\n", "\n").split("\r\x1b[K")
    status = [piece for piece in pieces if piece.startswith("training step 2: ")]
    assert len(status) >= 2 and len(set(status)) == len(status), text
    assert all(len(piece) < 60 and "\n" not in piece for piece in status), (
        "else it would wrap, and stay"
    )
    assert status[0].startswith("training step 2: 2 s (left: about 58 s of the step, 3 min"), status
    others = [
        line for piece in pieces if piece and piece not in status for line in piece.splitlines()
    ]
    assert [line[9:] for line in others if " INFO " in line][:2] == [
        "INFO starts",
        "INFO a record",
    ], others
    assert re.fullmatch(
        r"..:..:.. INFO the run has ended: 0 steps, \d s in this command", others[2]
    ), others


def test_a_driver_that_is_deaf_in_a_native_call_is_ended_after_its_deadline_and_the_run_starts_again(
    tmp_path,
):
    code, text, (event,) = run("stuck", tmp_path)
    assert code == 0 and "restart 1 of 1" in text, text
    assert re.search(
        r"stuck, and did not notice its own deadline, 1 s ago: it was training step 3 .at most "
        r"0.2 s",
        text,
    )
    assert "guarded.py" in event["error"] and "in deaf" in event["error"], "where it was"


def test_a_run_whose_folder_was_removed_fails_by_itself_and_writes_nothing_more(tmp_path):
    code, text, events = run("loses_its_folder", tmp_path)
    assert (code, events) == (1, []) and "restart 1 of" not in text, text
    assert (
        "FileDisplaced: " in text
        and "ckpt/.lock is not the file that this process has opened" in text
    ), text
    assert "the run has" not in text, "no last words: the numbers there may be another run's"


def test_what_outlives_its_parent_ends_with_the_run(tmp_path):
    assert run("leaves_an_orphan", tmp_path)[0] == 0 and (tmp_path / "orphan").exists()


def test_all_threads_of_the_driver_share_one_heap(tmp_path):
    """Or it grows with the steps: what one thread frees no other one gets."""
    assert run("has_threads", tmp_path)[0] == 0
    heaps = (tmp_path / "heaps").read_text().count("<heap nr")
    assert heaps <= 2, "Python's imports may have had one more"


def test_a_put_into_the_store_of_a_stopped_raylet_ends(tmp_path):
    code, text, (event,) = run("put_to_a_stopped_raylet", tmp_path)
    assert (
        code == 137
        and "put_to_a_stopped_raylet" in event["error"]
        and "training step 3" in event["error"]
    ), text


def test_a_shutdown_of_ray_without_an_answer_costs_a_finished_run_nothing(tmp_path):
    code, text, events = run("shut_down_with_a_stopped_gcs", tmp_path)
    assert (code, events) == (0, []) and "the run had ended, but the driver had not" in text, text


def test_the_driver_dies_with_its_parent(tmp_path):
    command = [sys.executable, "-m", "tests.driver.guarded", "deaf_to_signals", str(tmp_path)]
    parent = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    until((tmp_path / "deaf").exists, "the driver")
    (driver,) = psutil.Process(parent.pid).children()
    parent.kill()
    parent.wait(PATIENCE_S)
    until(
        lambda: not driver.is_running() or driver.status() == psutil.STATUS_ZOMBIE,
        "the driver's end",
    )


@pytest.fixture
def listening():
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    guard = Guard()
    guard.listen()
    yield guard
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_sigterm_waits_for_a_step_as_long_as_it_may_and_the_first_signal_counts(listening):
    listening.hold(PATIENCE_S)
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        listening.release()
    assert listening.received == signal.SIGTERM


def test_a_step_that_takes_too_long_is_given_up(listening):
    listening.hold(0.1)
    os.kill(os.getpid(), signal.SIGTERM)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        time.sleep(PATIENCE_S)
    assert time.monotonic() - started < SOONER_S


def test_ctrl_c_waits_for_nothing(listening):
    listening.hold(PATIENCE_S)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(PATIENCE_S)
