"""Files of a checkpoint are complete or known to be wrong."""

from __future__ import annotations

import hashlib
import json
import subprocess

import pytest

from openrlhf_ext.checkpoints import (
    CheckpointError,
    CheckpointStore,
    FileEntry,
    check_files,
    read_manifest,
    write_file,
)
from openrlhf_ext.checkpoints.files import deal_files, read_plain
from openrlhf_ext.checkpoints.tensors import TensorIndex


def test_the_entry_says_what_sha256sum_says(tmp_path):
    entry = write_file(tmp_path, "a/b.bin", [b"one", memoryview(b"two")])
    assert (entry.path, entry.size, entry.sha256) == (
        "a/b.bin",
        6,
        hashlib.sha256(b"onetwo").hexdigest(),
    )
    printed = subprocess.run(
        ["sha256sum", tmp_path / "a/b.bin"], capture_output=True, text=True, check=True
    ).stdout
    assert printed.startswith(entry.sha256)
    assert check_files(tmp_path, [entry]) == []


def test_every_kind_of_damage_names_the_file(tmp_path):
    entries = {
        name: write_file(tmp_path, name, [b"content " * 9])
        for name in ("short", "long", "flipped", "gone", "good")
    }
    (tmp_path / "short").write_bytes(b"content ")
    (tmp_path / "long").write_bytes(b"content " * 10)
    (tmp_path / "flipped").write_bytes(b"Content " + b"content " * 8)
    (tmp_path / "gone").unlink()
    problems = check_files(tmp_path, entries.values())
    expected = {
        "short": "truncated: 8 bytes, the manifest says 72",
        "long": "longer than written: 80 bytes",
        "flipped": "corrupted: its SHA-256",
        "gone": "No such file",
    }
    for name, words in expected.items():
        assert any(str(tmp_path / name) in p and words in p for p in problems), (name, problems)
    assert len(problems) == 4


def test_a_full_disk_is_an_error_with_the_file_and_the_reason(tmp_path):
    target = tmp_path / "full"
    target.symlink_to("/dev/full")
    with pytest.raises(
        CheckpointError, match=r"cannot write .*full after .* bytes: .*No space left on device"
    ):
        write_file(tmp_path, "full", [b"x" * (1 << 20)])


def test_ranks_share_bytes_and_not_files():
    """A checkpoint has a large and a small file of every rank, one after the other."""
    sizes = {"tensors": 1000, "json": 1}
    files = [
        FileEntry(f"rank{r}.{kind}", size, "") for r in range(4) for kind, size in sizes.items()
    ]
    shares = deal_files(files, 4)
    assert sorted(f.path for share in shares for f in share) == sorted(f.path for f in files)
    assert [sum(f.size for f in share) for share in shares] == [1001] * 4
    assert deal_files(files[:1], 3) == [[files[0]], [], []]


NESTED = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "text",
    [
        NESTED,
        '{"!": "tensor", "dtype": "float32", "shape": [3], "data": "AAAA"}',
        '{"!": "array", "dtype": 1}',
        "[NaN",
        '{"!": "tensor", "dtype": "uint8", "shape": [99999999999999999999], "data": "AAAA"}',
        '{"!": "dict", "items": 3}',
        '{"!": "array", "dtype": "bfloat16", "shape": [1], "data": "AAA="}',
        '{"!": "bytes", "data": 7}',
    ],
)
def test_a_crafted_state_is_an_error_of_the_checkpoint(tmp_path, text):
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(CheckpointError, match="state.json is not a state written by this program"):
        read_plain(tmp_path / "state.json")


@pytest.mark.parametrize(
    "path", ["../../x.safetensors", "/etc/passwd", "a/../../x", "", "a//b", ".", "a\\b", 3]
)
def test_no_manifest_and_no_index_names_a_file_outside(tmp_path, path):
    entry = {"path": path, "size": 1, "sha256": "0"}
    content = {
        "format": "openrlhf_ext checkpoint",
        "version": 1,
        "step": 1,
        "files": [entry],
        "about": {},
    }
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="must be a list, each entry .*inside of the folder"):
        read_manifest(tmp_path)
    index = {"w": {"dtype": "F32", "shape": [1], "pieces": [[[0], [1], 0, 1, path]]}}
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="index.json is not an index of tensors"):
        TensorIndex.read(tmp_path / "index.json")


@pytest.mark.parametrize(
    "text", [NESTED, "[]", "3", '{"parts": 3}', '{"parts": ["x"], "files": [3], "about": {}}']
)
def test_a_crafted_note_of_a_pending_checkpoint_ends_nothing(tmp_path, text):
    folder = tmp_path / "global_step3.incomplete"
    (folder / "written").mkdir(parents=True)
    (folder / "written/x.json").write_text("[]")
    (folder / "pending.json").write_text(text)
    CheckpointStore(tmp_path, keep=1).clean()
    assert not folder.exists()
