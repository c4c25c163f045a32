"""What docs/science.md says was found is what the committed studies found."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
STUDIES = ROOT / "benchmarks" / "results" / "studies"
RESULTS = STUDIES / "claims"


def test_every_number_of_the_document_is_in_the_committed_table():
    text = (ROOT / "docs" / "science.md").read_text()
    shown = (
        text.split("<!-- results: begin -->")[1]
        .split("<!-- results: end -->")[0]
        .strip()
        .splitlines()
    )
    table = (RESULTS / "table.md").read_text().splitlines()
    assert len([line for line in shown if line.startswith("| ")]) > 5
    assert not [line for line in shown if line.startswith("|") and line not in table]


@pytest.mark.parametrize("study", sorted(path.name for path in STUDIES.iterdir()))
def test_the_committed_table_is_of_the_committed_runs(study):
    rows = [json.loads(line) for line in (STUDIES / study / "runs.jsonl").read_text().splitlines()]
    assert len({row["key"] for row in rows}) == len(rows) and not any(
        "error" in row for row in rows
    )
    assert all(
        row["commit"] and not row["commit"].endswith("-dirty") and row["hardware"] for row in rows
    )
    table = (STUDIES / study / "table.md").read_text()
    # one run may be that of two cells, such as one at its only and one at several learning rates
    said, planned = map(int, re.search(r"^(\d+) of (\d+) runs", table, re.MULTILINE).groups())
    assert len(rows) <= said < 1.2 * len(rows) + 1 and ("not complete" in table) == (said < planned)
