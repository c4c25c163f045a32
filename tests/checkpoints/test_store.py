"""The folder of checkpoints: what is kept, what a killed run leaves, what is refused."""

from __future__ import annotations

import json
import shutil
from threading import Timer

import pytest

from openrlhf_ext.checkpoints import (
    CheckpointError,
    CheckpointStore,
    Manifest,
    read_manifest,
    write_file,
)
from tests.patience import PATIENCE_S


def save(store: CheckpointStore, step: int, size: int = 10) -> None:
    folder = store.begin(step)
    store.commit(Manifest(step, (write_file(folder, "policy/data", [b"x" * size]),)))
    store.rotate()


def names(store: CheckpointStore) -> list[str]:
    return sorted(p.name for p in store.folder.iterdir())


def test_a_checkpoint_appears_when_it_is_complete(tmp_path):
    store = CheckpointStore(tmp_path / "ckpt", keep=3)
    folder = store.begin(4)
    entry = write_file(folder, "policy/data", [b"x"])
    assert store.checkpoints() == []
    path = store.commit(Manifest(4, (entry,), {"model": "m"}))
    assert store.checkpoints() == [path] and read_manifest(path) == Manifest(
        4, (entry,), {"model": "m"}
    )


def test_the_newest_n_and_the_best_are_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 10):
        save(store, step)
        (tmp_path / f"global_step{step}_hf").mkdir()
        if step == 1:
            store.mark_best({"step": 1, "metric": "eval/accuracy", "value": 0.5})
    for step in (11, 12):
        save(store, step)
    assert names(store) == [
        "best.json",
        "global_step1",
        "global_step10_hf",
        "global_step11",
        "global_step12",
        "global_step1_hf",
        "global_step2_hf",
    ]
    assert store.best() == {"step": 1, "metric": "eval/accuracy", "value": 0.5}


def test_the_space_limit_never_costs_the_newest(tmp_path):
    store = CheckpointStore(tmp_path, keep=5, max_bytes=2500)
    for step in (1, 2, 3):
        save(store, step, size=1000)
    assert names(store) == ["global_step2", "global_step3"]
    save(store, 4, size=9000)
    assert names(store) == ["global_step4"]


def test_what_a_killed_run_left_is_removed_and_the_rest_untouched(tmp_path):
    store = CheckpointStore(tmp_path, keep=3)
    save(store, 1)
    write_file(store.begin(2), "policy/data", [b"half"])
    (tmp_path / "global_step2_hf.incomplete").mkdir()
    store.clean()
    assert names(store) == ["global_step1"]


def test_a_file_that_is_not_here_stops_the_commit_and_costs_nothing(tmp_path):
    store = CheckpointStore(tmp_path, keep=3, visible_s=0.3)
    save(store, 1)
    entry = write_file(tmp_path / "another host", "policy/data", [b"x"])
    store.begin(2)
    with pytest.raises(CheckpointError, match="storage that all nodes and the driver share"):
        store.commit(Manifest(2, (entry,)))
    store.abandon(2)
    assert [p.name for p in store.checkpoints()] == ["global_step1"]


def test_a_damaged_checkpoint_in_the_way_is_kept_aside(tmp_path):
    store = CheckpointStore(tmp_path, keep=3)
    save(store, 1)
    save(store, 1)
    assert names(store) == ["global_step1", "global_step1.superseded.1"]
    assert [p.name for p in store.checkpoints()] == ["global_step1"]


def test_a_new_run_finds_no_checkpoints_of_another(tmp_path):
    store = CheckpointStore(tmp_path, keep=3)
    assert store.set_aside_all() is None
    (tmp_path / "metrics.jsonl").write_text("")
    for number in (1, 2):
        save(store, 1)
        store.mark_best({"step": 1, "metric": "eval/accuracy", "value": 0.1})
        assert store.set_aside_all() == tmp_path / f"superseded.{number}"
        assert store.checkpoints() == [] and store.best() is None
    assert names(store) == ["metrics.jsonl", "superseded.1", "superseded.2"]


def test_an_old_checkpoint_that_cannot_be_deleted_is_reported_and_never_half_there(
    tmp_path, monkeypatch, caplog
):
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)
    folder = store.begin(2)
    store.commit(Manifest(2, (write_file(folder, "policy/data", [b"x"]),)))

    def busy(path):
        (path / "manifest.json").unlink()
        raise OSError("Device or resource busy: .nfs0001")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        store.rotate()
    assert [p.name for p in store.checkpoints()] == ["global_step2"]
    assert "global_step1 could not be deleted" in caplog.text and ".nfs0001" in caplog.text
    store.clean()
    assert names(store) == ["global_step2"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            None,
            "holds no manifest.json: it is no resumable checkpoint of this program, or not a "
            "complete one",
        ),
        ("{", "manifest.json: not JSON"),
        (
            '{"format": "torch_dist", "version": 1}',
            "is of format 'torch_dist' version 1, this program reads",
        ),
        ('{"format": "openrlhf_ext checkpoint", "version": 1}', "needs step, files, about"),
        ("[1]", "must be a JSON object"),
    ],
)
def test_foreign_folders_are_refused_by_name(tmp_path, text, words):
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError) as error:
        read_manifest(tmp_path)
    assert words in str(error.value) and str(tmp_path) in str(error.value)


def test_the_manifest_is_json(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 3)
    content = json.loads((tmp_path / "global_step3/manifest.json").read_text())
    assert (content["step"], content["files"][0]["path"], content["files"][0]["size"]) == (
        3,
        "policy/data",
        10,
    )


def test_a_file_may_appear_late(tmp_path):
    store = CheckpointStore(tmp_path, keep=3, visible_s=PATIENCE_S)
    folder = store.begin(1)
    entry = write_file(folder, "policy/data", [b"x"])
    (folder / "policy").rename(tmp_path / "on its way")
    Timer(0.3, (tmp_path / "on its way").rename, (folder / "policy",)).start()
    assert store.commit(Manifest(1, (entry,))) == tmp_path / "global_step1"


@pytest.mark.parametrize(
    "text", ["", "[]", '{"step": "x", "metric": "m", "value": 1}', '{"step": 1, "metric": "m"}']
)
def test_a_best_json_that_cannot_be_used_is_named_and_stops_no_save(tmp_path, caplog, text):
    store = CheckpointStore(tmp_path, keep=1)
    (tmp_path / "best.json").write_text(text)
    for step in (1, 2):
        save(store, step)
    assert f"{tmp_path}/best.json" in caplog.text and "is moved to" in caplog.text
    assert names(store) == ["best.json.superseded.1", "global_step2"] and store.best() is None
    store.mark_best({"step": 2, "metric": "m", "value": 0.5})
    assert store.best() == {"step": 2, "metric": "m", "value": 0.5}
