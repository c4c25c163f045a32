from __future__ import annotations

import math

import pytest

from openrlhf_ext.reporting import ProgressLine, names

FULL = {
    names.REWARD_MEAN: 0.51234, names.ACCURACY_MEAN: 0.25, names.ENTROPY_MEAN: 1.5, names.RESPONSE_LENGTH_MEAN: 31.46,
    names.KL_ROLLOUT: 3.2e-5, names.TOKENS_PER_SECOND: 1234.5, names.TIME_GENERATE: 1.0, names.TIME_GRADE: 0.01,
    names.TIME_LOGPROB: 0.5, names.TIME_TRAIN: 0.75, names.TIME_SYNC: 0.1, names.TIME_STEP: 2.4,
}  # fmt: skip


def lines_of(total: int | None, *steps: tuple[int, dict[str, float]]) -> list[str]:
    lines: list[str] = []
    progress = ProgressLine(total, lines.append)
    for step, metrics in steps:
        progress.show(step, metrics)
    return lines


def test_a_line_shows_every_phase() -> None:
    header, line = lines_of(150, (7, FULL))
    assert line.split() == ["7/150", "0.512", "0.250", "1.500", "31.5", "3.2e-05", "1234", "1.00", "0.01", "0.50",
                            "0.75", "0.10", "2.40"]  # fmt: skip
    assert len(header.split()) == len(line.split())


def test_columns_stay_aligned() -> None:
    extreme = {**FULL, names.REWARD_MEAN: -10.0, names.TOKENS_PER_SECOND: 99999.0}
    lines = lines_of(150, (1, FULL), (150, extreme), (3, {}))
    assert len({len(line) for line in lines}) == 1
    assert all("\n" not in line for line in lines)


def test_missing_and_nonfinite_values_are_shown_as_such() -> None:
    _, line = lines_of(3, (2, {names.REWARD_MEAN: math.nan, names.ENTROPY_MEAN: math.inf}))
    assert line.split() == ["2/3", "nan", "-", "inf"] + ["-"] * 9


def test_the_header_comes_every_twenty_lines() -> None:
    lines = lines_of(None, *((step, FULL) for step in range(1, 42)))
    headers = [index for index, line in enumerate(lines) if "reward" in line]
    assert headers == [0, 21, 42]
    assert lines[1].startswith("1/?") or lines[1].lstrip().startswith("1/?")


def test_standard_output_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    ProgressLine(2).show(1, FULL)
    assert capsys.readouterr().out.count("\n") == 2
