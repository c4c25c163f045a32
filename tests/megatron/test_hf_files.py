"""Hugging Face checkpoints on disk when the process that writes them is killed."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from openrlhf_ext.inputs import InputError
from openrlhf_ext.megatron.model.hf_files import HFCheckpoint, finish_interrupted
from tests.models import save_tensors

OLD = {f"layer{i}": torch.full((100,), float(i)) for i in range(4)}
NEW = {name: tensor + 0.5 for name, tensor in OLD.items()}
SHARDS = {1: 1 << 20, 4: 400}  # number: bytes


class Killed(BaseException):
    """The process has ended: nothing handles this."""


@pytest.fixture
def source(tmp_path) -> Path:
    (tmp_path / "source").mkdir()
    (tmp_path / "source/config.json").write_text("{}")
    return tmp_path / "source"


def weights(folder: Path) -> dict[str, Tensor] | None:
    """What a loader finds; None if there is no checkpoint."""
    if not (folder / "config.json").exists():
        return None
    checkpoint = HFCheckpoint(folder)
    return {name: checkpoint.read(name) for name in sorted(checkpoint.names)}


def same(found: dict[str, Tensor] | None, expected: dict[str, Tensor]) -> bool:
    return (
        found is not None
        and found.keys() == expected.keys()
        and all(found[n].equal(expected[n]) for n in expected)
    )


def killed_after(changes: int, monkeypatch, function, *arguments) -> bool:
    """Calls a function until it has changed the names of so many files; whether it came that
    far."""
    with monkeypatch.context() as patch:
        left = itertools.count(changes, -1)

        def limited(change):
            def one(*arguments, **more):
                if next(left) == 0:
                    raise Killed
                return change(*arguments, **more)

            return one

        for name in ("rename", "replace", "unlink", "rmdir"):
            patch.setattr(os, name, limited(getattr(os, name)))
        try:
            function(*arguments)
        except Killed:
            return True
    return False


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 4), (4, 1), (4, 4)])
def test_a_kill_while_files_are_replaced_costs_neither_checkpoint(
    source, tmp_path, monkeypatch, before, after
):
    seen = set()
    for changes in itertools.count():
        target = tmp_path / f"out{changes}"
        save_tensors(OLD, source, target, SHARDS[before])
        (target / "metrics.jsonl").write_text("{}")
        killed = killed_after(
            changes, monkeypatch, save_tensors, NEW, source, target, SHARDS[after]
        )
        found = weights(target)
        assert found is None or same(found, OLD) or same(found, NEW), (
            f"a mixed checkpoint after {changes} changes"
        )
        # the next start may be killed as well
        killed_after(changes // 2, monkeypatch, finish_interrupted, target)
        finish_interrupted(target)
        whole = weights(target)
        seen |= {"old"} if same(whole, OLD) else {"new"} if same(whole, NEW) else {"neither"}
        assert (target / "metrics.jsonl").read_text() == "{}" and not [
            p for p in target.iterdir() if p.is_dir()
        ]
        assert len(list(target.glob("model*.safetensors"))) in (before, after)
        if not killed:
            break
    assert changes > 5 and seen == {"old", "new"}


def test_a_new_folder_appears_whole(source, tmp_path, monkeypatch):
    target = tmp_path / "out"
    for changes in itertools.count():
        if not killed_after(changes, monkeypatch, save_tensors, OLD, source, target):
            break
        assert not target.exists()
        finish_interrupted(target)
        assert [path.name for path in tmp_path.iterdir()] == ["source"]
    assert changes > 0 and same(weights(target), OLD)


def test_the_sizes_of_all_files_are_returned(source, tmp_path):
    for _ in range(2):  # a new folder, and one that exists
        sizes = save_tensors(OLD, source, tmp_path / "out", SHARDS[4])
        assert sizes == {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
        assert "model-00004-of-00004.safetensors" in sizes and "config.json" in sizes


@pytest.mark.parametrize("name", ["../taken", "/tmp/taken", "a/../../b", "..", "", "x" * 300])
def test_a_journal_that_names_files_elsewhere_is_refused(source, tmp_path, name):
    target = tmp_path / "out"
    save_tensors(OLD, source, target)
    (target / ".complete").mkdir()
    (target / ".complete/taken").write_text("x")
    (target / ".complete/files.json").write_text(json.dumps({"taken": 1, name: 1}))
    with pytest.raises(
        InputError,
        match="files.json: .* must be the path of a file inside of the folder.*; remove ",
    ):
        finish_interrupted(target)
    assert same(weights(target), OLD) and {p.name for p in tmp_path.iterdir()} == {"source", "out"}


@pytest.mark.parametrize(
    ("index", "complaint"),
    [
        ([1], "must be a JSON object, got a list"),
        (
            {"weight_map": ["layer0"]},
            "weight_map must be a map, each value the name of a file in the same folder",
        ),
        (
            {"weight_map": {"layer0": "/etc/passwd"}},
            "weight_map must be a map, each value the name of a file",
        ),
        (
            {"weight_map": {"layer0": "../source/a"}},
            "weight_map must be a map, each value the name of a file",
        ),
        ({}, "needs weight_map, has no keys"),
    ],
)
def test_an_index_names_files_of_its_folder(source, tmp_path, index, complaint):
    save_tensors(OLD, source, tmp_path / "out", SHARDS[4])
    (tmp_path / "out/model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=f"model.safetensors.index.json: {complaint}"):
        HFCheckpoint(tmp_path / "out")
