"""On the GPU machine: whether a whole bundle can be used here, and unpacks it once.
tests/gpu/environment.sh asks.

    python -m tests.gpu.whole.here FOLDER     prints the folder with site/ and toy/

All that is wrong is told at once, each in a line, before anything is unpacked; exit status 1.
Standard library and torch only; Python 3.8 can read this file too.
"""

from __future__ import annotations

import hashlib
import importlib.util
import lzma
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from tests.gpu import bundle as bundles
from tests.gpu.bundle import MANIFEST, BundleError

STAMP = "bundle.sha256"
SHM = Path("/dev/shm")
# What `openrlhf-ext doctor` warns below. Docker gives 64 MiB, where Ray puts its store on a disk
# (its _private/services.py:2223), and vLLM's queue to several workers alone takes 160 (envs.py,
# VLLM_MQ_MAX_CHUNK_BYTES_MB).
SHM_BYTES = 1 << 30


def main(arguments: Sequence[str]) -> int:
    bundle = Path(arguments[0])
    target = Path(os.environ.get("OPENRLHF_EXT_SITE") or "/tmp/openrlhf_ext_site").resolve()
    try:
        manifest = bundles.read_manifest(bundle)
        there = is_unpacked(bundle, target)
        found = list(problems(bundle, manifest, target, there))
        if not found and not there:
            unpack(bundle, manifest, target)
    except BundleError as problem:
        found = [str(problem)]
    if found:
        print(
            "\n".join(f"{os.environ.get('COMMAND', __name__)}: {line}" for line in found),
            file=sys.stderr,
        )
        return 1
    print(target)
    return 0


def is_unpacked(bundle: Path, target: Path) -> bool:
    """An earlier call did it: the parts need not be carried again."""
    stamp = target / STAMP
    return stamp.is_file() and stamp.read_text() == _digest(bundle)


def _digest(bundle: Path) -> str:
    return hashlib.sha256((bundle / MANIFEST).read_bytes()).hexdigest()


# ---- what is wrong


def problems(bundle: Path, manifest: dict[str, Any], target: Path, unpacked: bool) -> Iterator[str]:
    """Each in one line."""
    remedy = f"bash tests/gpu/bundle.sh {bundle} --whole"
    if manifest.get("kind") != bundles.WHOLE_KIND:
        yield f"{bundle} is no whole bundle, though it has parts of one: {remedy}"
        return
    known = {name: bundles.pinned(name) for name in bundles.WHOLE}
    names = sorted({*known, *manifest["packages"]})
    if other := list(filter(None, (_named(name, manifest["packages"], known) for name in names))):
        yield (
            f"{bundle} has other versions than requirements/gpu.lock of this checkout: "
            f"{'; '.join(other)}: {remedy}"
        )
    if not unpacked and (damage := bundles.damage(bundle, manifest)):
        yield damage
    python = "{}.{}".format(*sys.version_info)
    if python != manifest["python"]:
        yield (
            f"{bundle} is for Python {manifest['python']}, {sys.executable} is {python}: "
            f"{remedy} --python {python}"
        )
    yield from _torch_problems(bundle, manifest, remedy)
    free = shutil.disk_usage(SHM).free if SHM.is_dir() else 0
    if free < SHM_BYTES:
        yield (
            f"{SHM} has {free >> 20} MiB free, Ray and vLLM need {SHM_BYTES >> 20}: docker "
            "--shm-size, or remount it"
        )
    yield from _compiler_problems()
    if absent := [name for name in manifest["host"] if not _is_there(name)]:
        yield (
            f"{sys.executable} lacks what a bundle does not bring: {', '.join(absent)}; set "
            "PYTHON, or install them"
        )
    if target.exists() and any(target.iterdir()) and not (target / STAMP).is_file():
        yield (
            f"{target} holds something else than an unpacked bundle: "
            "OPENRLHF_EXT_SITE=/another/folder"
        )


def _named(name: str, theirs: dict[str, str], ours: dict[str, str]) -> str:
    mine, other = ours.get(name, "none"), theirs.get(name, "none")
    return "" if mine == other else f"{name} {other} instead of {mine}"


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a package above it
        return False


def _torch_problems(bundle: Path, manifest: dict[str, Any], remedy: str) -> Iterator[str]:
    try:
        import torch
    except ImportError as error:
        yield (
            f"{sys.executable} cannot import torch ({error}); PYTHON=/path/to/python names another"
        )
        return
    if torch.__version__ != manifest["torch"]:
        yield (
            f"{bundle} is for torch {manifest['torch']}, {sys.executable} has {torch.__version__}: "
            f"{remedy} --torch {torch.__version__}"
        )
    wanted = " or ".join(f"{number // 10}.{number % 10}" for number in manifest["architectures"])
    if not torch.cuda.is_available():
        yield f"torch sees no GPU here; {bundle} is for compute capability {wanted}"
        return
    major, minor = torch.cuda.get_device_capability()
    if major * 10 + minor not in manifest["architectures"]:
        name = torch.cuda.get_device_name()
        yield f"{bundle} is for GPUs of compute capability {wanted}, {name} has {major}.{minor}"


def _compiler_problems() -> Iterator[str]:
    """Triton compiles a launcher for every kernel (its runtime/build.py), with Python's headers."""
    compiler = os.environ.get("CC")
    if (
        shutil.which(compiler) is None
        if compiler
        else not (shutil.which("gcc") or shutil.which("clang"))
    ):
        yield (
            "Triton needs a C compiler, there is "
            f"{f'no {compiler} (CC)' if compiler else 'neither gcc nor clang'}"
        )
    header = Path(sysconfig.get_path("include", "posix_prefix")) / "Python.h"
    if not header.is_file():
        yield (
            f"Triton needs Python's headers, and there is no {header}: install the package of "
            "Python for developers"
        )


# ---- unpacking


class _Parts:
    """The parts, one after the other, as one file to read."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files: list[BinaryIO] = [path.open("rb") for path in paths]

    def read(self, count: int = -1) -> bytes:
        while self._files:
            content = self._files[0].read(count)
            if content:
                return content
            self._files.pop(0).close()
        return b""


def unpack(bundle: Path, manifest: dict[str, Any], target: Path) -> None:
    """``target`` with site/, toy/, compiled for this Python, and a stamp; it replaces an older
    one."""
    started = time.perf_counter()
    new = target.with_name(target.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    parts = _Parts([bundle / name for name in sorted(manifest["files"])])
    with lzma.open(parts) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:  # type: ignore[call-overload]
        archive.extractall(new, filter="tar")
    unpacked = time.perf_counter()
    _compile(new / "site", target / "site")
    (new / STAMP).write_text(_digest(bundle))
    shutil.rmtree(target, ignore_errors=True)
    new.rename(target)
    seconds = time.perf_counter() - unpacked
    print(
        f"{target}: unpacked in {unpacked - started:.0f} s, compiled in {seconds:.0f} s",
        file=sys.stderr,
    )


def _compile(site: Path, final: Path) -> None:
    """With all cores; else every process of the first run compiles the same thousands of
    modules."""
    command = [
        sys.executable,
        "-m",
        "compileall",
        "-q",
        "-j",
        "0",
        "-s",
        str(site),
        "-p",
        str(final),
        str(site),
    ]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600
    )
    if done.returncode:
        raise BundleError(
            f"{sys.executable} cannot compile all modules of the bundle:\n{done.stdout[-2000:]}"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
