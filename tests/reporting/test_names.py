from __future__ import annotations

from pathlib import Path

import pytest

from openrlhf_ext.reporting import METRICS, is_documented, progress
from openrlhf_ext.rewards.grading import RESERVED_LOG_KEYS

DOCS = Path(__file__).parents[2] / "docs"
REFERENCE = DOCS / "reference/metrics.md"
HEAD = """# Metrics, by name

<!-- Made from openrlhf_ext/reporting/names.py by `python -m tests.reporting.test_names`. -->

What a record is, and how to read the gauges: [metrics.md](../metrics.md). Names that end in `/*` are
families.

| name | unit | meaning |
|---|---|---|
"""


def reference() -> str:
    """docs/reference/metrics.md."""
    rows = (
        f"| `{metric.name}` | {metric.unit} | {metric.meaning.replace('|', chr(92) + '|')} |\n"
        for metric in METRICS
    )
    return HEAD + "".join(rows)


def test_the_reference_lists_the_metrics() -> None:
    assert REFERENCE.read_text() == reference(), "run `python -m tests.reporting.test_names`"


def test_document_lists_the_reserved_keys() -> None:
    text = " ".join((DOCS / "metrics.md").read_text().split())
    assert ", ".join(f"`{key}`" for key in sorted(RESERVED_LOG_KEYS)) in text


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


if __name__ == "__main__":
    REFERENCE.write_text(reference())
