from __future__ import annotations

import math
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from openrlhf_ext.reporting import MetricsWriter, write_figure
from openrlhf_ext.reporting.progress import moving_mean
from tests.patience import PATIENCE_S


def metrics_file(folder: Path, steps: int) -> Path:
    path = folder / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        for step in range(steps):
            train = {
                "reward/mean": step / 100,
                "entropy/mean": math.nan if step == 3 else 1.0,
                "response/length_mean": 30.0,
                "accuracy/mean": 0.5,
            }
            held_out = {"eval/accuracy": 0.4} if step % 10 == 0 else {}
            writer.write(step, {**train, **held_out})
    return path


def png_size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n") and content[12:16] == b"IHDR"
    assert content.endswith(b"IEND\xaeB`\x82")
    return struct.unpack(">II", content[16:24])


@pytest.mark.parametrize("steps", [0, 1, 5, 40])
def test_any_length_of_run_gives_a_png(tmp_path: Path, steps: int) -> None:
    target = tmp_path / "figures" / "run.png"
    write_figure(metrics_file(tmp_path, steps), target, title="toy policy")
    assert png_size(target) == (1000, 700)
    assert [entry.name for entry in target.parent.iterdir()] == ["run.png"]


def test_a_held_out_accuracy_has_its_standard_error(tmp_path: Path) -> None:
    drawn = []
    for errors in ({}, {"eval/accuracy_stderr": 0.05}):
        with MetricsWriter(tmp_path / f"{len(errors)}.jsonl", now=lambda: 1.0) as writer:
            writer.write(1, {"accuracy/mean": 0.5, "eval/accuracy": 0.4, **errors})
        write_figure(tmp_path / f"{len(errors)}.jsonl", tmp_path / "run.png")
        drawn.append((tmp_path / "run.png").read_bytes())
    assert drawn[0] != drawn[1]


def test_the_moving_mean_leaves_out_what_is_not_finite() -> None:
    assert moving_mean([1.0, math.nan, 3.0, math.inf], 2) == [1.0, 1.0, 3.0, 3.0]
    assert math.isnan(moving_mean([math.nan], 3)[0])


def test_a_failed_drawing_leaves_the_previous_figure(tmp_path: Path) -> None:
    target = tmp_path / "run.png"
    write_figure(metrics_file(tmp_path, 3), target)
    before = target.read_bytes()
    (tmp_path / "metrics.jsonl").write_text("broken\n")
    with pytest.raises(ValueError, match="line 1"):
        write_figure(tmp_path / "metrics.jsonl", target)
    assert target.read_bytes() == before


def test_a_reader_never_sees_half_a_figure(tmp_path: Path) -> None:
    source, target = metrics_file(tmp_path, 5), tmp_path / "run.png"
    write_figure(source, target)
    writer = threading.Thread(target=lambda: [write_figure(source, target) for _ in range(3)])
    writer.start()
    while writer.is_alive():
        assert png_size(target) == (1000, 700)
        time.sleep(0.005)
    writer.join()


def test_importing_reporting_does_not_import_matplotlib() -> None:
    program = (
        "import sys, openrlhf_ext.reporting; print({'matplotlib', 'torch', 'numpy'} & "
        "set(sys.modules))"
    )
    output = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    assert output.stdout.strip() == "set()"
