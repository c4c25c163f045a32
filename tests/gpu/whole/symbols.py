"""Whether an extension would load in a torch that is not here: its undefined symbols against
torch's own libraries.

Not proven, because it is not at hand where a bundle is made: that the driver has what is asked of
it (``cu...``), and cuBLAS (``cublas...``; 400 MB), which torch itself loads. Symbols of glibc and
of GCC's libraries carry a version: it must be no newer than what torch asks for. Needs nm.
"""

from __future__ import annotations

import ctypes
import lzma
import re
import subprocess
import tempfile
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path

from tests.gpu import bundle as bundles
from tests.gpu.bundle import BundleError

_ELSEWHERE = re.compile(r"cu(blas)?[A-Z]")
_PYTHON = re.compile(r"_?Py")
_VERSION = re.compile(r"(GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+)$")


def missing(library: Path, known: Collection[str]) -> list[str]:
    """What the library needs, weak symbols aside, and neither torch, the CUDA runtime nor Python
    defines."""
    newest = _newest(known)
    return [symbol for symbol in _undefined(library) if not _is_there(symbol, known, newest)]


def _is_there(symbol: str, known: Collection[str], newest: dict[str, tuple[int, ...]]) -> bool:
    name, _, version = symbol.partition("@")
    if match := _VERSION.match(version):
        return _numbers(match[2]) <= newest.get(match[1], ())
    if _PYTHON.match(name):  # of the stable ABI: what is in one Python is in the later ones
        return hasattr(ctypes.pythonapi, name)
    return name in known or _ELSEWHERE.match(name) is not None


def _newest(known: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Of each of the compiler's and the system's libraries the newest version that torch asks
    for."""
    found: dict[str, tuple[int, ...]] = {}
    for entry in known:
        if match := _VERSION.match(entry):
            found[match[1]] = max(found.get(match[1], ()), _numbers(match[2]))
    return found


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def symbols_of_torch(python: str, torch: str, cuda: str, cache: Path) -> frozenset[str]:
    """Names that torch's libraries and the CUDA runtime define, and versions like ``GLIBC_2.28``
    that torch asks for.

    Raises:
        BundleError: the package index has no such wheel, or has another build under this version.
    """
    kept = cache / f"torch-{torch}-python{python}.symbols.xz"
    if not kept.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            found = _read(Path(folder), python, torch, cuda)
            partial = Path(folder) / "symbols.xz"
            partial.write_bytes(lzma.compress("\n".join(sorted(found)).encode()))
            partial.rename(kept)
    return frozenset(lzma.decompress(kept.read_bytes()).decode().split("\n"))


def _read(folder: Path, python: str, torch: str, cuda: str) -> set[str]:
    runtime = "nvidia-cuda-runtime" + ("-cu12" if cuda.startswith("12.") else "")
    wanted = [f"torch=={torch.split('+')[0]}", f"{runtime}=={cuda}.*"]
    bundles.download(folder, "--no-deps", *bundles.wheels_for(python), *wanted)
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            if wheel.name.startswith("torch-"):
                _check_build(archive.read("torch/version.py").decode(), torch)
            libraries = [
                name for name in archive.namelist() if re.search(r"/lib/[^/]*\.so[.\d]*$", name)
            ]
            archive.extractall(folder, libraries)
        wheel.unlink()
    found = set()
    for library in folder.rglob("*.so*"):
        found |= set(_defined(library))
        found |= {
            version
            for symbol in _undefined(library)
            if _VERSION.match(version := symbol.partition("@")[2])
        }
    return found


def _check_build(text: str, torch: str) -> None:
    if f"__version__ = '{torch}'" not in text:
        found = re.search(r"__version__ = '(.*)'", text)
        raise BundleError(
            f"the package index's torch is {found and found[1]}, not {torch}: nothing can be proven"
        )


def _undefined(library: Path) -> Iterator[str]:
    """``name`` or ``name@version``; not the weak ones."""
    for line in _nm(library, "--undefined-only"):
        symbol, kind = line.split()[:2]
        if kind == "U":
            yield symbol


def _defined(library: Path) -> Iterator[str]:
    for line in _nm(library, "--defined-only"):
        yield line.split()[0].partition("@")[0]


def _nm(library: Path, which: str) -> list[str]:
    command = ["nm", "--dynamic", "--format=posix", "--with-symbol-versions", which, str(library)]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=600
    ).stdout.splitlines()
