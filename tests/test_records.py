"""Numbers of README and docs/performance.md come from records; pages say which records are older
than the code."""

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


REMOVED = {
    name: found["removed_program"]
    for name in COMMITTED
    if "removed_program" in (found := json.loads((record.RESULTS / name).read_text()))
}


def test_every_record_says_what_it_measures():
    assert set(record.MEASURES) == set(COMMITTED) - set(REMOVED), "benchmarks/record.py: MEASURES"
    for name in COMMITTED:
        found = record.load(name)
        text = (record.RESULTS / name).read_text()
        assert record.commits(found), f"{name} names no commit"
        assert '"device"' in text or '"hardware"' in text, f"{name} names no machine"
        assert found["measures"], f"{name} does not say what it measures"
        assert "still_holds" not in text, f"{name}: only its digests say whether a record holds"


def test_what_records_measure_exists():
    for name, paths in record.MEASURES.items():
        assert paths and all((record.ROOT / path).exists() for path in paths), name


def test_a_record_without_a_program_names_the_program_and_its_last_commit():
    for name, removed in REMOVED.items():
        assert not (record.ROOT / removed["path"]).exists(), name
        state = record.state(name)
        assert state.startswith(f"Measured by `{removed['path']}` at commit"), name
        assert f"`{removed['last_commit']}`" in state.replace("\n", " "), name


def region_records(page: str) -> set[str]:
    """The records that the regions of a page are made from."""
    return {
        name
        for region in record.REGION.finditer(page)
        for name in record._made(region[2], region[3])[1]
    }


def test_every_record_stands_in_a_page_with_its_state():
    found = set().union(*(region_records(page.read_text()) for page in record.PAGES))
    assert found >= set(COMMITTED)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Another checkout: a file of code, and the record of one of its functions."""
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(record, "MEASURES", {"speed.json": ("code.py",)})
    (tmp_path / "code.py").write_text('def f():\n    """Why."""\n    return 1\n')
    record.write(tmp_path / "speed.json", {"commit": "0123456789abcdef", "date": "2026-11-29"})
    return tmp_path


def test_changed_code_makes_a_record_old_and_comments_do_not(checkout):
    file, told = checkout / "code.py", "Measured at commit `0123456789ab` (2026-11-29)."
    file.write_text('# a comment\ndef f():\n    """Another reason."""\n    return (1)\n')
    assert record.unlike("speed.json", record.load("speed.json")) == ([], [])
    assert record.state("speed.json") == told
    file.write_text("def f():\n    return 2\n")
    assert record.unlike("speed.json", record.load("speed.json")) == (["code.py"], [])
    assert record.filled("<!-- begin: record.speed -->\nx\n<!-- end -->").splitlines()[1:-1] == [
        f"{told} Since then `code.py` changed. The numbers describe that commit."
    ]
    file.unlink()
    assert record.unlike("speed.json", record.load("speed.json")) == (["code.py"], [])


def test_a_part_that_is_measured_again_does_not_renew_the_others(checkout):
    path = checkout / "speed.json"
    (checkout / "code.py").write_text("def f():\n    return 2\n")
    record.write(path, {"commit": "fedcba987"}, kept=True)
    assert record.unlike(path.name, record.load(path.name)) == (["code.py"], [])
    record.write(path, {"commit": "fedcba987"}, kept=True)
    assert len(record.load(path.name)["measures"]["code.py"]) == 2
    record.write(path, {"commit": "fedcba987"})
    assert record.unlike(path.name, record.load(path.name)) == ([], [])


def test_a_digest_that_was_never_recorded_is_not_taken_for_the_present_one(checkout):
    path = checkout / "speed.json"
    for measures in ({}, {"code.py": None}):
        path.write_text(json.dumps({"commit": "fedcba987", "measures": measures}))
        assert record.unlike(path.name, record.load(path.name)) == ([], ["code.py"])
        assert "The record has no digest of `code.py`." in record.state(path.name)
    record.write(path, record.load(path.name), kept=True)
    assert record.unlike(path.name, record.load(path.name)) == ([], ["code.py"])


def test_the_text_of_a_removed_program_comes_from_its_record(checkout):
    removed = {"path": "benchmarks/gone.py", "last_commit": "abcdef012345"}
    found = {"commit": "fedcba987", "removed_program": removed | {"texts": {"table": "| 7 s |"}}}
    (checkout / "gone_cpu.json").write_text(json.dumps(found))
    page = "<!-- begin: gone.table -->\n| 6 s |\n<!-- end -->"
    assert record.filled(page).splitlines()[1:-1] == [
        "| 7 s |",
        "",
        "Measured by `benchmarks/gone.py` at commit `fedcba987`. The program was removed after commit "
        "`abcdef012345`; the record stays as",
        "measured, and the code may have changed since.",
    ]
    with pytest.raises(ValueError, match="has the text 'other' of benchmarks/gone.py"):
        record.filled(page.replace("table", "other"))


@pytest.mark.parametrize("page", record.PAGES, ids=lambda page: page.name)
def test_what_is_made_from_records_is_what_they_say(page):
    text = page.read_text()
    assert record.filled(text) == text, f"{page.name}: python benchmarks/record.py --pages"


@pytest.mark.parametrize("name", ["README.md", "docs/performance.md"])
def test_no_measured_number_stands_outside_of_what_is_made_from_a_record(name):
    text = record.REGION.sub("", (record.ROOT / name).read_text())
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    numbers = [
        found
        for line in text.splitlines()
        for found in MEASURED.findall(line)
        if found not in SETTINGS
    ]
    assert not numbers, f"{name}: {numbers} come from no record (benchmarks/record.py, TEXTS)"


# set by us or the machine, not measured
SETTINGS = {"5 %", "75 %", "6 s", "400 s", "100 s"}


def test_a_number_that_differs_from_its_record_is_found(monkeypatch):
    page, load = (record.ROOT / "docs/performance.md").read_text(), record.load
    assert record.filled(page) == page, (
        "and the benchmarks have been imported with what they import"
    )
    spoiled = json.loads(
        json.dumps(load("end_to_end_cpu.json")).replace('"median": ', '"median": 1')
    )

    def changed(name: str) -> dict:
        found = load(name)  # which notes what a text is made from
        return spoiled if name == "end_to_end_cpu.json" else found

    monkeypatch.setattr(record, "load", changed)
    assert record.filled(page) != page
