from __future__ import annotations

from pathlib import Path

import pytest

from openrlhf_ext.inputs import InputError
from openrlhf_ext.tools.evaluate.problems import Store, read_results

SETTINGS = {"n": 2, "model": "abc"}
ANSWER = {
    "tokens": 3,
    "truncated": False,
    "reward": 1.0,
    "score": 1.0,
    "graded": True,
    "extra_logs": {},
    "vote": 0,
}
RESULTS = [
    {
        "problem": place,
        "prompt": "Q",
        "label": "A",
        "completions": [{"text": "ä\n" * place, **ANSWER}],
    }
    for place in range(3)
]


def test_a_file_cut_anywhere_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.jsonl"
    with Store(path, SETTINGS) as store:
        store.append(RESULTS)
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        assert len(read_results(path, SETTINGS)) == max(0, whole[:size].count(b"\n") - 1)
        assert path.read_bytes() == whole[:size], "a look changes nothing"
        with Store(path, SETTINGS) as store:
            assert store.results == RESULTS[: max(0, whole[:size].count(b"\n") - 1)]
            store.append(RESULTS[len(store.results) :])
        assert path.read_bytes() == whole


def test_other_settings_are_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with Store(path, SETTINGS) as store:
        store.append(RESULTS)
    before = path.read_bytes()
    complaint = (
        r"holds results of other settings \(n was 2, is 3\): give these settings, or another --out"
    )
    with pytest.raises(ValueError, match=complaint):
        Store(path, SETTINGS | {"n": 3})
    path.with_name("notes.jsonl").write_text("my notes\n")
    with pytest.raises(ValueError, match="does not hold results of an evaluation"):
        Store(path.with_name("notes.jsonl"), SETTINGS)
    assert path.read_bytes() == before and path.with_name("notes.jsonl").read_text() == "my notes\n"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not JSON"),
        (
            '{"problem": 0, "prompt": "Q", "completions": []}',
            "completions must be a list of at least one, each a map",
        ),
        (
            '{"problem": 0, "prompt": "Q", "completions": [{"text": "1", "reward": "high"}]}',
            "reward .a finite number.",
        ),
    ],
)
def test_a_line_that_is_no_graded_problem_is_named(
    tmp_path: Path, line: str, complaint: str
) -> None:
    path = tmp_path / "results.jsonl"
    with Store(path, SETTINGS) as store:
        store.append(RESULTS[:1])
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(InputError, match=f"results.jsonl, line 3: .*{complaint}"):
        Store(path, SETTINGS)
