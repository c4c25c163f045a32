from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openrlhf_ext.reporting import MetricsWriter, read_metrics

NAMES = st.text(min_size=1).filter(lambda name: name not in {"step", "time", "nonfinite", "label"})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "metrics.jsonl"


@given(metrics=st.dictionaries(NAMES, st.floats() | st.integers(-(2**60), 2**60)))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_what_is_written_is_read(path: Path, metrics: dict[str, float]) -> None:
    with MetricsWriter(path, now=lambda: 12.5) as writer:
        written = writer.write(1, metrics)
    (record,) = read_metrics(path)
    np.testing.assert_equal(record, {"step": 1, "time": 12.5, **metrics})
    np.testing.assert_equal(written, record)


def test_each_step_is_on_disk_before_the_next(path: Path) -> None:
    with MetricsWriter(path) as writer:
        for step in range(1, 4):
            writer.write(step, {"reward/mean": step / 2})
            assert [record["step"] for record in read_metrics(path)] == list(range(1, step + 1))


def test_every_line_is_plain_json_and_nonfinite_values_are_named(path: Path) -> None:
    with MetricsWriter(path) as writer:
        writer.write(1, {"a": math.nan, "b": -math.inf, "c": 1.0})
    record = json.loads(
        path.read_text(), parse_constant=lambda text: pytest.fail(f"{text} is not JSON")
    )
    assert (record["a"], record["b"], record["c"]) == (None, None, 1.0)
    assert record["nonfinite"] == {"a": "nan", "b": "-inf"}


def test_scalars_of_torch_and_numpy_are_numbers(path: Path) -> None:
    metrics = {"a": torch.tensor(0.5), "b": np.float32(0.25), "c": torch.tensor([2]), "d": True}
    with MetricsWriter(path) as writer:
        record = writer.write(1, metrics)
    assert [record[name] for name in "abcd"] == [0.5, 0.25, 2, 1]


def test_a_label_stands_in_every_record_and_stays_when_a_run_goes_on(path: Path) -> None:
    for resume_step in (0, 2):
        with MetricsWriter(path, resume_step, label="FP8 current hybrid fp32, EMULATED") as writer:
            for step in range(resume_step + 1, 4):
                writer.write(step, {"a": math.nan})
    lines = path.read_text().splitlines()
    assert len(lines) == 3 and all(
        json.loads(line)["label"].endswith(", EMULATED") for line in lines
    )
    assert {record["label"] for record in read_metrics(path)} == {
        "FP8 current hybrid fp32, EMULATED"
    }
    with MetricsWriter(path) as writer:
        assert "label" not in writer.write(1, {"a": 1.0})
        with pytest.raises(ValueError, match="label"):
            writer.write(2, {"label": 1.0})


@pytest.mark.parametrize("value", ["1", None, [1.0], {}])
def test_what_is_not_a_number_is_refused_by_name(path: Path, value: object) -> None:
    with (
        MetricsWriter(path) as writer,
        pytest.raises(TypeError, match="'grad_norm' must be one number"),
    ):
        writer.write(1, {"grad_norm": value})


@pytest.mark.parametrize("name", ["step", "time", "nonfinite"])
def test_names_of_the_writer_are_refused(path: Path, name: str) -> None:
    with MetricsWriter(path) as writer, pytest.raises(ValueError, match=name):
        writer.write(1, {name: 1})


def write_steps(path: Path, steps: range, value: float, resume_step: int = 0) -> None:
    with MetricsWriter(path, resume_step) as writer:
        for step in steps:
            writer.write(step, {"value": value})


def test_resuming_keeps_the_steps_before_and_sets_the_later_ones_aside(path: Path) -> None:
    write_steps(path, range(0, 6), value=1.0)
    write_steps(path, range(4, 7), value=2.0, resume_step=3)
    steps_and_values = [(r["step"], r["value"]) for r in read_metrics(path)]
    assert steps_and_values == [(0, 1), (1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2)]
    aside = read_metrics(path.with_name("metrics.jsonl.superseded.1"))
    assert [r["step"] for r in aside] == [4, 5]


def test_a_new_run_sets_the_old_one_aside_and_loses_nothing(path: Path) -> None:
    for value in (1.0, 2.0, 3.0):
        write_steps(path, range(0, 2), value)
    assert [r["value"] for r in read_metrics(path)] == [3.0, 3.0]
    for number in (1, 2):
        old = read_metrics(path.with_name(f"metrics.jsonl.superseded.{number}"))
        assert [r["value"] for r in old] == [number, number]


def test_an_unfinished_last_line_is_left_out_and_replaced(path: Path) -> None:
    write_steps(path, range(1, 3), value=1.0)
    with path.open("a") as file:
        file.write('{"step": 3, "val')
    assert [r["step"] for r in read_metrics(path)] == [1, 2]
    write_steps(path, range(3, 4), value=2.0, resume_step=2)
    assert [(r["step"], r["value"]) for r in read_metrics(path)] == [(1, 1), (2, 1), (3, 2)]


@pytest.mark.parametrize("line", ["{broken", "[1]", '{"value": 1}'])
def test_a_broken_line_is_named(path: Path, line: str) -> None:
    write_steps(path, range(1, 2), value=1.0)
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match="metrics.jsonl, line 2"):
        read_metrics(path)
