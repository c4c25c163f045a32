"""Files of a checkpoint are complete or known to be wrong."""

from __future__ import annotations

import hashlib
import subprocess

import pytest

from openrlhf_ext.checkpoints import CheckpointError, FileEntry, check_files, write_file
from openrlhf_ext.checkpoints.files import deal_files


def test_the_entry_says_what_sha256sum_says(tmp_path):
    entry = write_file(tmp_path, "a/b.bin", [b"one", memoryview(b"two")])
    assert (entry.path, entry.size, entry.sha256) == ("a/b.bin", 6, hashlib.sha256(b"onetwo").hexdigest())
    printed = subprocess.run(["sha256sum", tmp_path / "a/b.bin"], capture_output=True, text=True, check=True).stdout
    assert printed.startswith(entry.sha256)
    assert check_files(tmp_path, [entry]) == []


def test_every_kind_of_damage_names_the_file(tmp_path):
    entries = {
        name: write_file(tmp_path, name, [b"content " * 9]) for name in ("short", "long", "flipped", "gone", "good")
    }
    (tmp_path / "short").write_bytes(b"content ")
    (tmp_path / "long").write_bytes(b"content " * 10)
    (tmp_path / "flipped").write_bytes(b"Content " + b"content " * 8)
    (tmp_path / "gone").unlink()
    problems = check_files(tmp_path, entries.values())
    expected = {
        "short": "truncated: 8 bytes, the manifest says 72", "long": "longer than written: 80 bytes",
        "flipped": "corrupted: its SHA-256", "gone": "No such file",
    }  # fmt: skip
    for name, words in expected.items():
        assert any(str(tmp_path / name) in p and words in p for p in problems), (name, problems)
    assert len(problems) == 4


def test_a_full_disk_is_an_error_with_the_file_and_the_reason(tmp_path):
    target = tmp_path / "full"
    target.symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match=r"cannot write .*full after .* bytes: .*No space left on device"):
        write_file(tmp_path, "full", [b"x" * (1 << 20)])


def test_ranks_share_bytes_and_not_files():
    """A checkpoint has a large and a small file of every rank, one after the other."""
    sizes = {"tensors": 1000, "json": 1}
    files = [FileEntry(f"rank{r}.{kind}", size, "") for r in range(4) for kind, size in sizes.items()]
    shares = deal_files(files, 4)
    assert sorted(f.path for share in shares for f in share) == sorted(f.path for f in files)
    assert [sum(f.size for f in share) for share in shares] == [1001] * 4
    assert deal_files(files[:1], 3) == [[files[0]], [], []]
