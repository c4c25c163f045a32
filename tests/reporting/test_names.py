from __future__ import annotations

from pathlib import Path

import pytest

from openrlhf_ext.reporting import METRICS, is_documented, progress
from openrlhf_ext.rewards.grading import RESERVED_LOG_KEYS

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_document_shows_the_table_as_it_is() -> None:
    rows = [f"| `{metric.name}` | {metric.unit} | {metric.meaning} |" for metric in METRICS]
    table = "\n".join(["| name | unit | meaning |", "|---|---|---|", *rows])
    assert table in DOCUMENT.read_text(), f"paste this into it:\n{table}"


def test_document_lists_the_reserved_keys() -> None:
    listed = ", ".join(f"`{key}`" for key in sorted(RESERVED_LOG_KEYS))
    assert listed in DOCUMENT.read_text()


def test_names_are_unique_and_what_is_shown_is_documented() -> None:
    table = [metric.name for metric in METRICS]
    assert len(set(table)) == len(table)
    shown = {column.metric for column in progress.COLUMNS} | {
        name for panel in progress.PANELS for name in panel[:2]
    }
    assert [name for name in shown - {None} if not is_documented(name)] == []


@pytest.mark.parametrize(
    "name", ["reward/mean", "reward_log/format", "algorithm/entropy_correct", "step"]
)
def test_documented(name: str) -> None:
    assert is_documented(name)


@pytest.mark.parametrize("name", ["reward", "reward/median", "reward_log", ""])
def test_not_documented(name: str) -> None:
    assert not is_documented(name)
