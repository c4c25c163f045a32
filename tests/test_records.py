"""Numbers of README and docs/performance.md come from records, which are not older than what they measure."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks import record

COMMITTED = sorted(path.name for path in record.RESULTS.glob("*.json"))
# 1.5 s, 90 %, 3.1 GiB, 4,345 tokens/s: what somebody measured
MEASURED = re.compile(
    r"\d[\d.,]*(?:%| %| s\b| min(?:utes)?\b| GiB\b| MiB\b| times\b|x faster| tokens/s\b)"
)


def test_every_record_says_what_it_measures():
    assert COMMITTED == sorted(record.MEASURES), "benchmarks/record.py: MEASURES"
    for name in COMMITTED:
        text = (record.RESULTS / name).read_text()
        assert '"commit' in text, f"{name} names no commit"
        assert '"device"' in text or '"hardware"' in text, f"{name} names no machine"


@pytest.mark.parametrize("name", COMMITTED)
def test_a_record_is_not_older_than_what_it_measures(name):
    found = record.load(name)
    files = record.changed(found)
    assert not files, f"{name}: {files} changed: measure again, or say why it holds (benchmarks/record.py --holds)"
    assert set(found.get("still_holds", found)["measures"]) == set(record.MEASURES[name])
    assert len(found.get("still_holds", {"why": "measured with these files"})["why"]) > 20


def test_why_a_record_still_holds_keeps_the_reasons_of_earlier_changes(tmp_path):
    path = tmp_path / COMMITTED[0]
    path.write_text(json.dumps({"commit": "of then"}))
    for why in ("Other messages.", "Other names.", "Other messages."):
        record.holds(path, why)
    assert json.loads(path.read_text())["still_holds"]["why"] == "Other messages. Other names."


def test_changed_code_makes_a_record_old_and_comments_do_not(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "ROOT", tmp_path)
    file = tmp_path / "code.py"
    file.write_text('def f():\n    """Why."""\n    return 1\n')
    found = {"measures": record.digests(["code.py"])}
    file.write_text('# a comment\ndef f():\n    """Another reason."""\n    return (1)\n')
    assert record.changed(found) == []
    file.write_text("def f():\n    return 2\n")
    assert record.changed(found) == ["code.py"]
    file.unlink()
    assert record.changed(found) == ["code.py"]


@pytest.mark.parametrize("page", record.PAGES, ids=lambda page: page.name)
def test_what_is_made_from_records_is_what_they_say(page):
    text = page.read_text()
    assert record.filled(text) == text, f"{page.name}: python benchmarks/record.py --pages"


@pytest.mark.parametrize("name", ["README.md", "docs/performance.md"])
def test_no_measured_number_stands_outside_of_what_is_made_from_a_record(name):
    text = record.REGION.sub("", (record.ROOT / name).read_text())
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    numbers = [found for line in text.splitlines() for found in MEASURED.findall(line) if found not in SETTINGS]
    assert not numbers, f"{name}: {numbers} come from no record (benchmarks/record.py, TEXTS)"


# set by us or the machine, not measured
SETTINGS = {"5 %", "75 %", "6 s", "400 s", "100 s"}


def test_a_number_that_differs_from_its_record_is_found(monkeypatch):
    page, load = (record.ROOT / "docs/performance.md").read_text(), record.load
    assert record.filled(page) == page, "and the benchmarks have been imported with what they import"
    spoiled = json.loads(json.dumps(load("end_to_end_cpu.json")).replace('"median": ', '"median": 1'))
    monkeypatch.setattr(record, "load", lambda name: spoiled if name == "end_to_end_cpu.json" else load(name))
    assert record.filled(page) != page
