"""What docs/science.md says was found is what the committed study found."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results" / "studies" / "claims"


def test_every_number_of_the_document_is_in_the_committed_table():
    text = (ROOT / "docs" / "science.md").read_text()
    shown = text.split("<!-- results: begin -->")[1].split("<!-- results: end -->")[0].strip().splitlines()
    table = (RESULTS / "table.md").read_text().splitlines()
    assert len([line for line in shown if line.startswith("| ")]) > 5
    assert not [line for line in shown if line.startswith("|") and line not in table]


def test_the_committed_table_is_of_the_committed_runs():
    rows = [json.loads(line) for line in (RESULTS / "runs.jsonl").read_text().splitlines()]
    assert len({row["key"] for row in rows}) == len(rows) and not any("error" in row for row in rows)
    assert all(row["commit"] and not row["commit"].endswith("-dirty") and row["hardware"] for row in rows)
    assert f"{len(rows)} of " in (RESULTS / "table.md").read_text()
