"""A value has the type that it has in the file, whoever reads it."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from openrlhf_ext.config.files import DatasetRef, dataset_refs, resolve_path
from openrlhf_ext.config.records import (
    Wanted,
    open_source,
    read_records,
    record_fault,
    records_of,
    scan_records,
)
from openrlhf_ext.inputs import InputError

DATES = ["2024-03-05", "2024-03-05 10:00:00"]
VALUES = [*DATES, 5, 2.5, 9007199254740993, True, {"city": "Paris"}, {"k": 3}, ["a"], "007"]


def labels(path: Path | str, split: str | None = "train", **more: Any) -> list[Any]:
    return [
        record["a"] for record in read_records(str(path), split, Wanted("q", "a"), 10**6, **more)
    ]


def lines(path: Path, values: list[Any], start: str = "") -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        start
        + "".join(json.dumps({"q": str(i), "a": value}) + "\n" for i, value in enumerate(values))
    )
    return path


def same(found: list[Any], values: list[Any]) -> bool:
    return found == values and [*map(type, found)] == [*map(type, values)]


def test_json_values_are_what_they_are(tmp_path: Path):
    assert same(labels(lines(tmp_path / "a.jsonl", VALUES)), VALUES)
    (tmp_path / "a.json").write_text(json.dumps([{"q": "1", "a": value} for value in VALUES]))
    assert same(labels(tmp_path / "a.json"), VALUES)


def test_a_folder_of_files_is_read_as_the_files_are(tmp_path: Path):
    lines(tmp_path / "data/train.jsonl", VALUES)
    lines(tmp_path / "data/test.jsonl", VALUES[:2])
    assert same(labels(tmp_path / "data"), VALUES) and same(
        labels(tmp_path / "data", "test"), VALUES[:2]
    )
    assert labels(tmp_path / "data", None) == VALUES[:2], "eval.split is a held-out one by default"
    with pytest.raises(InputError, match="data has no split 'dev'; it has "):
        labels(tmp_path / "data", "dev")


def test_files_of_another_form_in_a_folder_are_said_not_to_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    lines(tmp_path / "data/part1.jsonl", VALUES)
    pyarrow.parquet.write_table(
        pyarrow.table({"q": ["1"], "a": ["2"]}), tmp_path / "data/part2.parquet"
    )
    (tmp_path / "data/dataset_infos.json").write_text("{}")
    assert labels(tmp_path / "data") == ["2"]
    said = f"{tmp_path}/data: only its parquet files are read, not other formats: part1.jsonl"
    assert caplog.messages.count(said) == 1


def test_fields_of_csv_are_texts(tmp_path: Path):
    (tmp_path / "a.csv").write_text('q,a\n1,007\n2,1.10\n3,True\n4,NA\n5,"a,b\nc"\n')
    assert labels(tmp_path / "a.csv") == ["007", "1.10", "True", "NA", "a,b\nc"]


def test_a_byte_order_mark_is_read(tmp_path: Path):
    assert labels(lines(tmp_path / "a.jsonl", ["x"], "\ufeff")) == ["x"]
    (tmp_path / "a.json").write_text('\ufeff[{"q": "1", "a": "x"}]')
    (tmp_path / "a.csv").write_text("\ufeffq,a\n1,x\n")
    assert labels(tmp_path / "a.json") == labels(tmp_path / "a.csv") == ["x"]


def test_tables_keep_integers_and_json_columns(tmp_path: Path):
    table = pyarrow.Table.from_pylist([{"q": "1", "a": 9007199254740993}, {"q": "2", "a": 5}])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert labels(tmp_path / "a.parquet") == [9007199254740993, 5]
    features = datasets.Features({"q": datasets.Value("string"), "a": datasets.Json()})
    rows = [{"q": "1", "a": {"x": 1}}, {"q": "2", "a": [2]}]
    datasets.Dataset.from_list(rows, features=features).to_parquet(str(tmp_path / "b.parquet"))
    assert labels(tmp_path / "b.parquet") == [{"x": 1}, [2]]


def test_what_a_chat_does_not_read_is_said_or_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    chat, chats = [{"role": "user", "content": "1+1?"}], Wanted("q", "a", chat=True)
    path = tmp_path / "tools.jsonl"
    path.write_text(
        "".join(json.dumps({"q": chat, "a": "2", "tools": [{}]}) + "\n" for _ in range(3))
    )
    assert len([*read_records(str(path), "train", chats, 10)]) == 3
    said = f"{path}: the key 'tools' is not read: put the tools into a system message"
    assert caplog.messages.count(said) == 1
    fault = record_fault({"q": json.dumps(chat), "a": "2"}, chats)
    assert fault is not None and "a list of messages under 'q' that is written as text" in fault
    for text in ("[1, 2] is a list", "[1, 2]", '[{"role": 1}]', json.dumps(chat)):
        assert (
            record_fault({"q": text, "a": "2"}, Wanted("q", "a", chat=text != json.dumps(chat)))
            is None
        )


@pytest.mark.parametrize("name", ["a.tsv", "a.jsonl.gz"])
def test_forms_that_are_not_read_are_named(tmp_path: Path, name: str):
    (tmp_path / name).write_text("q\ta\n")
    with pytest.raises(
        InputError, match=rf"{name}: \.\w+ files are not supported: convert it to \.jsonl"
    ):
        [*records_of(str(tmp_path / name))]


@pytest.mark.parametrize(
    ("label", "said"),
    [
        (datetime.datetime(2024, 1, 2), "a datetime"),
        ({"when": datetime.date(2024, 1, 2)}, "a map"),
        (b"x", "a bytes"),
        (float("nan"), "a number"),
    ],
)
def test_labels_that_no_grader_can_be_sent_are_refused(label, said):
    fault = record_fault({"q": "1", "a": label}, Wanted("q", "a"))
    assert (
        fault is not None
        and f"has {said} under 'a' that JSON cannot represent" in fault
        and "write it as" in fault
    )


def test_answers_to_train_on_may_be_texts_and_lists_of_messages_in_one_file(tmp_path: Path):
    chat = [{"role": "user", "content": "1 + 1"}], [{"role": "assistant", "content": "2"}]
    path = tmp_path / "mixed.jsonl"
    path.write_text("".join(json.dumps({"q": q, "a": a}) + "\n" for q, a in (("1", "1"), chat)))
    (ref,) = dataset_refs(str(path))
    wanted = Wanted("q", "a", chat=True, answers=True)
    assert scan_records(open_source(ref, None), wanted).faults == []


def test_saved_data_sets_have_their_splits(tmp_path: Path):
    rows = [{"q": "1", "a": "2024-03-05"}]
    datasets.DatasetDict({"test": datasets.Dataset.from_list(rows)}).save_to_disk(
        tmp_path / "saved"
    )
    assert labels(tmp_path / "saved", None) == labels(tmp_path / "saved", "test") == ["2024-03-05"]
    with pytest.raises(InputError, match="saved has no split 'train'; it has test"):
        labels(tmp_path / "saved")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "one")
    assert labels(tmp_path / "one") == ["2024-03-05"]


def test_an_at_belongs_to_a_folder_of_a_folder(tmp_path: Path):
    (tmp_path / "data").mkdir()
    lines(tmp_path / "data/inner/train.jsonl", VALUES)
    assert labels(f"{tmp_path}/data@inner") == VALUES
    file = lines(tmp_path / "a.jsonl", ["x"])
    with pytest.raises(InputError, match=r"a.jsonl@0.5: only a folder or a hub name can have an @"):
        labels(f"{file}@0.5")


def test_a_path_that_exists_wins_over_separators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    odd = lines(tmp_path / "a, b@1/x,y.jsonl", ["x"])
    plain = lines(tmp_path / "plain.jsonl", ["y"])
    assert [ref.path for ref in dataset_refs(f"{odd},{plain}")] == [str(odd), str(plain)]
    assert labels(f"{plain},{odd}") == ["y", "x"]
    monkeypatch.chdir(tmp_path)
    assert resolve_path("a, b@1/x,y.jsonl, plain.jsonl", "input") == f"{odd},{plain}"
    assert resolve_path("one=a, b@1/x,y.jsonl,two=plain.jsonl", "input") == f"one={odd},two={plain}"
    assert [*dataset_refs("org/set@part,org/other")] == [
        DatasetRef("org/set", "part"),
        DatasetRef("org/other", None),
    ]


def test_shares_interleave_as_openrlhfs_reader_does(tmp_path: Path):
    from openrlhf.datasets.utils import blending_datasets

    strategy: Any = SimpleNamespace(is_rank_0=lambda: True, print=lambda *_: None)
    paths = [
        str(lines(tmp_path / f"{name}.jsonl", [f"{name}{i}" for i in range(20)])) for name in "ab"
    ]
    value = ",".join(paths)
    for probabilities in (None, "0.3,0.7"):
        theirs = blending_datasets(value, probabilities, strategy, 7, max_count=15)
        ours = [
            r["a"] for r in read_records(value, "train", Wanted("q", "a"), 15, probabilities, 7)
        ]
        assert ours == theirs.select(range(min(15, len(theirs))))["a"]


def test_sources_are_named_in_faults(tmp_path: Path):
    lines(tmp_path / "a.jsonl", ["x", None])
    with pytest.raises(InputError, match=r"a.jsonl, line 2 has an empty 'a'; fix or remove it"):
        labels(tmp_path / "a.jsonl")
    assert open_source(DatasetRef(str(tmp_path / "a.jsonl"), None), None).files
