from __future__ import annotations

import io
import logging
import math
import os
import subprocess
import sys

import pytest

from openrlhf_ext.reporting import ProgressLine, RunStatus, duration, read_metrics
from openrlhf_ext.reporting.lines import read_lines
from tests.patience import PATIENCE_S

FULL = {
    "reward/mean": 0.51234, "accuracy/mean": 0.25, "entropy/mean": 1.5, "response/length_mean": 31.46,
    "kl/rollout": 3.2e-5, "throughput/tokens_per_second": 1234.5, "time/generate": 1.0, "time/grade": 0.01,
    "time/logprob": 0.5, "time/train": 0.75, "time/sync": 0.1, "time/step": 2.4,
}  # fmt: skip


def lines_of(total: int | None, *steps: tuple[int, dict[str, float]]) -> list[str]:
    lines: list[str] = []
    progress = ProgressLine(total, lines.append)
    for step, metrics in steps:
        progress.show(step, metrics)
    return lines


def test_a_line_shows_every_phase() -> None:
    header, line = lines_of(150, (7, FULL))
    assert line.split() == [
        "7/150",
        "0.512",
        "0.250",
        "1.500",
        "31.5",
        "3.2e-05",
        "1234",
        "1.00",
        "0.01",
        "0.50",
        "0.75",
        "0.10",
        "2.40",
    ]
    assert len(header.split()) == len(line.split())


def test_columns_stay_aligned() -> None:
    extreme = {**FULL, "reward/mean": -10.0, "throughput/tokens_per_second": 99999.0}
    lines = lines_of(150, (1, FULL), (150, extreme), (3, {}))
    assert len({len(line) for line in lines}) == 1
    assert all("\n" not in line for line in lines)


def test_missing_and_nonfinite_values_are_shown_as_such() -> None:
    _, line = lines_of(3, (2, {"reward/mean": math.nan, "entropy/mean": math.inf}))
    assert line.split() == ["2/3", "nan", "-", "inf"] + ["-"] * 9


def test_a_label_ends_every_line() -> None:
    lines: list[str] = []
    progress = ProgressLine(3, lines.append, label="FP8 blockwise e4m3 fp32, EMULATED")
    for step in (1, 2, 3):
        progress.show(step, FULL)
    assert len(lines) == 4 and all(
        line.endswith("  FP8 blockwise e4m3 fp32, EMULATED") for line in lines[1:]
    )


def test_the_header_comes_every_twenty_lines() -> None:
    lines = lines_of(None, *((step, FULL) for step in range(1, 42)))
    headers = [index for index, line in enumerate(lines) if "reward" in line]
    assert headers == [0, 21, 42]
    assert lines[1].startswith("1/?") or lines[1].lstrip().startswith("1/?")


def test_standard_output_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    ProgressLine(2).show(1, FULL)
    assert capsys.readouterr().out.count("\n") == 2


def test_where_the_output_is_no_terminal_a_line_says_every_half_minute_what_is_being_done(
    caplog,
) -> None:
    caplog.set_level(logging.INFO, logger="openrlhf_ext")
    stream, clock = io.StringIO(), [0.0]
    status = RunStatus(stream, now=lambda: clock[0])
    status.phase("starting the rollout engines", 600.0)
    for second in range(150):
        clock[0] = float(second)
        if second == 70:
            status.step_ended(step=1, steps=4, seconds=50.0)
            status.phase("waiting for a batch of rollouts", 1800.0)
            status.detail("3 of 32 groups generated and graded, 120 tokens/s")
        status.tick()
    status.clear()
    assert caplog.messages == [
        "starting the rollout engines: 30 s of at most 10 min",
        "starting the rollout engines: 1 min of at most 10 min",
        "waiting for a batch of rollouts: 30 s (left: about 20 s of the step, 2 min of the run), "
        "3 of 32 groups generated and graded, 120 tokens/s",
        "waiting for a batch of rollouts: 1 min (left: about 0 s of the step, 1 min 40 s of the "
        "run), 3 of 32 groups generated and graded, 120 tokens/s",
    ]
    assert stream.getvalue() == "", "nothing is rewritten where it would stay"


def test_durations_are_said_as_people_say_them() -> None:
    assert [duration(s) for s in (0.4, 59.4, 59.6, 200, 3600, 7500)] == [
        "0 s",
        "59 s",
        "1 min",
        "3 min 20 s",
        "1 h",
        "2 h 5 min",
    ]


# ---- outputs that are gone

_TWO_STEPS = """
import logging, sys
from pathlib import Path
from openrlhf_ext.config import RunConfig
from openrlhf_ext.reporting import EventLog, TerminalHandler
from openrlhf_ext.run.records import Recorder
folder = Path(sys.argv[1])
logging.basicConfig(level=logging.INFO, handlers=[TerminalHandler()])
config = RunConfig(logger={"metrics_path": str(folder / "metrics.jsonl"), "figure_path": str(folder / "figure.png")})
with EventLog(folder / "events.jsonl") as events:
    recorder = Recorder(config, 9, 0, events)
    for step in range(1, 5):
        logging.info("before step %d", step)
        recorder.write(step, {"reward/mean": 1.0})
        print("a library's words", flush=True)
        print("and its warning", file=sys.stderr)
"""


@pytest.mark.parametrize("gone", ["closed pipe", "full disk"])
@pytest.mark.parametrize("which", [("stdout",), ("stderr",), ("stdout", "stderr")], ids="+".join)
def test_an_output_that_is_gone_is_an_event_and_the_run_goes_on(tmp_path, gone, which):
    reader, nowhere = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    bad = dict.fromkeys(which, nowhere if gone == "closed pipe" else full)
    command = [sys.executable, "-c", _TWO_STEPS, str(tmp_path)]
    done = subprocess.run(
        command,
        **({"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | bad),
        timeout=PATIENCE_S,
    )
    os.close(nowhere)
    os.close(full)
    assert done.returncode == 0, done
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    told = [
        event["why"]
        for _, event in read_lines(tmp_path / "events.jsonl")
        if event["event"] == "output_lost"
    ]
    reason = "Broken pipe" if gone == "closed pipe" else "No space left on device"
    assert sorted(told) == sorted(f"<{name}>: {reason}" for name in which), "each once"
