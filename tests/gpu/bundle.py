"""Makes and checks what a GPU machine without a network needs besides the checkout:
``bash tests/gpu/bundle.sh``.

    python -m tests.gpu.bundle [FOLDER] [--whole] [--python 3.12] [--torch 2.11.0+cu130]

In the folder (default build/gpu_bundle), for the policy alone, and TransformerEngine:

    manifest.json         Python and torch it is for, versions, SHA-256 of every file below
    site/                 packages that torch and transformers do not bring, unpacked: goes on
    PYTHONPATH transformer_engine/   its wheel, the sdist of its torch part, its core for some
    architectures only (xz) goldens/              what the CPU computed, if tests/gpu/goldens.py
    exists te/, built/           not there yet: tests/gpu/te_build.py makes them on the GPU machine

With ``--whole`` (default build/gpu_whole), for a run with vLLM and Ray; TransformerEngine goes in
another call:

    manifest.json         the same, and the versions of all packages
    part-00, part-01 ...  an xz archive of site/ and toy/ (the quickstart's policy, start/, and its
    problems, data/)

The Python that runs this must be the project's (goldens, policy) with pip and wheel. Standard
library only, because the GPU machine checks the folder before it has anything else.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu.fatbin import FatbinError, slim

ROOT = Path(__file__).resolve().parent.parent.parent
MANIFEST = "manifest.json"
MOST_BYTES = 60_000_000
ARCHITECTURES = (90,)
# what our code and megatron-core import (safetensors, packaging, numpy come with transformers);
# without what they require, which is torch, numpy and packaging
ALONE = ("megatron-core", "einops", "fla-core", "psutil", "pyyaml")
WITH_REQUIREMENTS = ("pydantic", "pytest", "hypothesis")
# megatron-core says that it needs Python 3.12 and has wheels for 3.11 too, and pip may ask the
# Python that runs it
AS_PINNED = ("--no-deps", "--ignore-requires-python")
WHOLE_KIND = "whole"
# all that vLLM, Ray and our code import in a whole run, but for what is in the next two lists
WHOLE = (
    "vllm", "ray", "megatron-core", "openrlhf", "annotated-types", "antlr4-python3-runtime", "blake3", "cachetools",
    "cbor2", "compressed-tensors", "datasets", "dill", "distro", "einops", "fastapi", "httpcore2", "httpx2", "jiter",
    "jsonschema", "jsonschema-specifications", "lark", "latex2sympy2-extended", "loguru", "math-verify", "msgspec",
    "multiprocess", "openai", "partial-json-parser", "psutil", "pybase64", "pydantic", "pydantic-core", "pylatexenc",
    "pyyaml", "pyzmq", "referencing", "rpds-py", "setproctitle", "sniffio", "starlette", "torchdata", "truststore",
    "typing-inspection",
)  # fmt: skip
# imported and never called, see tests/gpu/whole/stand_in.py; together they would be 10 MB
STAND_INS = {
    "xgrammar": "output that follows a grammar; it brings tvm-ffi",
    "llguidance": "the same",
    "openai_harmony": "the chat format of gpt-oss; the module of oss-harmony",
}
# modules that they import too, and that the machine itself must have: its own fit its torch and its
# numpy
OF_THE_HOST = (
    "PIL", "accelerate", "aiohttp", "anyio", "attr", "click", "cloudpickle", "cpuinfo", "filelock", "fsspec",
    "google.protobuf", "grpc", "h11", "httpx", "huggingface_hub", "jinja2", "msgpack", "multidict", "numba", "numpy",
    "packaging", "pandas", "prometheus_client", "pyarrow", "regex", "requests", "safetensors", "sympy", "tensorboard",
    "tokenizers", "tqdm", "transformers", "triton", "typing_extensions", "uvloop", "xxhash", "yarl",
)  # fmt: skip
_PLATFORMS = (
    "manylinux_2_28",
    "manylinux_2_27",
    "manylinux_2_24",
    "manylinux_2_17",
    "manylinux2014",
)
# for the sdist's setup.py, which pip runs for the metadata: it asks torch for the CUDA version,
# which a CPU build lacks
_STAND_IN = {
    "torch/__init__.py": """
        __version__ = "{torch}"
        class version: cuda = "{cuda}"
        class _C: _GLIBCXX_USE_CXX11_ABI = True
        """,
    "torch/utils/__init__.py": "",
    "torch/utils/cpp_extension.py": """
        from setuptools import Extension as CppExtension
        from setuptools.command.build_ext import build_ext as BuildExtension
        """,
}


class BundleError(RuntimeError):
    """A bundle that is damaged, too large, or made for another Python or torch; the text says what
    to do."""


# ---- checking


def verify(bundle: Path) -> dict[str, Any]:
    """The manifest, if the bundle is whole and made for this Python and this torch. Imports torch.

    Raises:
        BundleError: naming what differs.
    """
    import torch

    manifest = read_manifest(bundle)
    here = {"python": "{}.{}".format(*sys.version_info), "torch": torch.__version__}
    if other := [
        f"{name} {manifest[name]}, here is {mine}"
        for name, mine in here.items()
        if manifest[name] != mine
    ]:
        remedy = (
            f"bash tests/gpu/bundle.sh --python {here['python']} --torch {here['torch']} {bundle}"
        )
        raise BundleError(
            f"{bundle} was made for {'; '.join(other)}. Make it again where there is a network: "
            f"{remedy}"
        )
    if problem := damage(bundle, manifest):
        raise BundleError(problem)
    return manifest


def damage(bundle: Path, manifest: dict[str, Any]) -> str | None:
    """What is wrong with the files of the folder, in one line."""
    damaged = [
        name
        for name, known in manifest["files"].items()
        if _digest(bundle / name) != known["sha256"]
    ]
    if not damaged:
        return None
    return (
        f"{bundle}: {len(damaged)} of {len(manifest['files'])} files are missing or not as they "
        f"were made, among them {', '.join(damaged[:5])}: carry it again"
    )


def read_manifest(bundle: Path) -> dict[str, Any]:
    """
    Raises:
        BundleError: the folder is no bundle.
    """
    try:
        return json.loads((bundle / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise BundleError(f"{bundle} is no bundle of tests/gpu/bundle.sh: {error}") from error


def write_manifest(
    bundle: Path, python: str, torch: str, *, most: int | None = None, **facts: Any
) -> dict[str, Any]:
    """Lists every file of the folder, and says what it is for.

    Raises:
        BundleError: together they have more than ``most`` bytes, or ``MOST_BYTES``.
    """
    most = MOST_BYTES if most is None else most
    paths = sorted(path for path in bundle.rglob("*") if path.is_file() and path.name != MANIFEST)
    sizes = {path: path.stat().st_size for path in paths}
    if (total := sum(sizes.values())) > most:
        largest = sorted(paths, key=lambda path: -sizes[path])[:5]
        named = ", ".join(
            f"{path.relative_to(bundle)} {sizes[path] / 1e6:.1f} MB" for path in largest
        )
        raise BundleError(
            f"{bundle} has {total / 1e6:.1f} MB, at most {most / 1e6:g} can be carried: the "
            f"largest are {named}"
        )
    files = {
        str(path.relative_to(bundle)): {"bytes": sizes[path], "sha256": _digest(path)}
        for path in paths
    }
    manifest = {"python": python, "torch": torch, **facts, "total_bytes": total, "files": files}
    (bundle / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


# ---- making


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the bundle in a folder beside the one asked for, which it then replaces."""
    args = _parse(arguments)
    cuda = _cuda_of(args.torch)
    new = args.folder.with_name(args.folder.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    if args.whole:
        from tests.gpu.whole.make import make

        manifest = make(new, args.python, args.torch, cuda, args.heads, args.cache)
    else:
        manifest = _make(new, args.python, args.torch, cuda, args.cache)
    shutil.rmtree(args.folder, ignore_errors=True)
    new.rename(args.folder)
    print(
        f"{args.folder}: {manifest['total_bytes'] / 1e6:.1f} MB for Python {args.python} and "
        f"torch {args.torch}"
    )
    return 0


def _make(target: Path, python: str, torch: str, cuda: str, cache: Path) -> dict[str, Any]:
    """Fills the folder; its manifest."""
    packages = _packages(target / "site", python)
    version = pinned("transformer-engine")
    _transformer_engine(target / "transformer_engine", version, torch, cuda, cache)
    made = _goldens(target / "goldens")
    return write_manifest(
        target,
        python,
        torch,
        commit=commit(),
        packages=packages,
        transformer_engine=version,
        architectures=ARCHITECTURES,
        goldens=made,
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bash tests/gpu/bundle.sh", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, help="default: build/gpu_bundle, or build/gpu_whole"
    )
    parser.add_argument(
        "--whole", action="store_true", help="vLLM, Ray and all they need, no TransformerEngine"
    )
    parser.add_argument(
        "--heads",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[64, 128],
        help="with --whole: head sizes that FlashAttention 3 keeps (default 64,128; also 96, "
        "192, 256, 512)",
    )
    parser.add_argument(
        "--python", choices=("3.11", "3.12"), default="3.12", help="of the GPU machine"
    )
    parser.add_argument(
        "--torch", default="2.11.0+cu130", help="torch.__version__ on the GPU machine"
    )
    caches = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    parser.add_argument(
        "--cache",
        type=Path,
        default=caches / "openrlhf_ext" / "gpu_bundle",
        help="where TransformerEngine's slimmed core is kept, and the symbols of torch",
    )
    args = parser.parse_args(arguments)
    args.folder = args.folder or ROOT / "build" / ("gpu_whole" if args.whole else "gpu_bundle")
    return args


def _cuda_of(torch: str) -> str:
    """'13.0' for '2.11.0+cu130'."""
    match = re.search(r"\+cu(\d\d)(\d)$", torch)
    if match is None:
        raise BundleError(
            f"--torch must be a CUDA build like 2.11.0+cu130 (torch.__version__ there), got {torch}"
        )
    return f"{match[1]}.{match[2]}"


def _packages(site: Path, python: str) -> list[str]:
    """Unpacks the wheels; their file names."""
    names = [[f"{name}=={pinned(name)}" for name in group] for group in (ALONE, WITH_REQUIREMENTS)]
    with tempfile.TemporaryDirectory() as folder:
        download(folder, *AS_PINNED, *wheels_for(python), *names[0])
        download(folder, *wheels_for(python), *names[1])
        return unpack(Path(folder).glob("*.whl"), site)


def unpack(wheels: Any, target: Path) -> list[str]:
    """Unpacks wheels without compiled parts to build or scripts to install; their names."""
    names = []
    for wheel in sorted(wheels):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)
        names.append(wheel.name)
    return names


def wheels_for(python: str) -> list[str]:
    tag = "cp" + python.replace(".", "")
    abis = [part for abi in (tag, "abi3", "none") for part in ("--abi", abi)]
    platforms = [part for name in _PLATFORMS for part in ("--platform", f"{name}_x86_64")]
    return [
        "--only-binary",
        ":all:",
        "--python-version",
        python,
        "--implementation",
        "cp",
        *abis,
        *platforms,
    ]


def _transformer_engine(target: Path, version: str, torch: str, cuda: str, cache: Path) -> None:
    target.mkdir()
    download(target, "--no-deps", "--only-binary", ":all:", f"transformer_engine=={version}")
    with tempfile.TemporaryDirectory() as stand_in:
        for name, text in _STAND_IN.items():
            path = Path(stand_in) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text).format(torch=torch, cuda=cuda))
        wanted = [
            "--no-deps",
            "--no-build-isolation",
            "--no-binary",
            ":all:",
            f"transformer_engine_torch=={version}",
        ]
        download(target, *wanted, PYTHONPATH=stand_in, NVTE_PYTORCH_FORCE_BUILD="TRUE")
    core = f"transformer_engine_cu{cuda.split('.')[0]}"
    kept = cache / "-".join([core, version, *(f"sm{number}" for number in ARCHITECTURES)])
    if not (kept / "core.so.xz").exists():
        _slimmed_core(kept, core, version)
    shutil.copytree(kept, target / "core")


def _slimmed_core(target: Path, package: str, version: str) -> None:
    """``core.so.xz`` and the ``dist-info`` of TransformerEngine's core; takes about a minute, and
    700 MB of disk."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        platform = ["--platform", "manylinux_2_28_x86_64", "--only-binary", ":all:"]
        download(folder, "--no-deps", *platform, f"{package}=={version}")
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            library = Path(
                archive.extract("transformer_engine/wheel_lib/libtransformer_engine.so", folder)
            )
            for name in archive.namelist():
                if name.split("/")[0].endswith(".dist-info"):
                    archive.extract(name, target)
        found = slim(library, ARCHITECTURES)
        print(f"{package} {version}: {found}")
        partial = target / "core.so.xz.partial"
        with library.open("rb") as source, lzma.open(partial, "wb", preset=6) as compressed:
            shutil.copyfileobj(source, compressed, 1 << 20)
        partial.rename(target / "core.so.xz")


def _goldens(target: Path) -> bool:
    """What tests/gpu/goldens.py computes on this machine, where there is such a file."""
    if not (Path(__file__).parent / "goldens.py").exists():
        return False
    command, hidden = (
        [sys.executable, "-m", "tests.gpu.goldens", str(target)],
        {"CUDA_VISIBLE_DEVICES": ""},
    )
    subprocess.run(command, cwd=ROOT, env=os.environ | hidden, check=True, timeout=1800)
    return True


def download(folder: str | Path, *arguments: str, **environment: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--dest",
        str(folder),
        *arguments,
    ]
    done = subprocess.run(
        command,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
    )
    if done.returncode:
        raise BundleError(
            f"{' '.join(command)} failed; it needs a package index, pip and wheel:\n"
            f"{done.stdout[-3000:]}"
        )


def pinned(name: str) -> str:
    """The version in setup.py, or, of what those need, in the lock."""
    pins = (ROOT / "setup.py").read_text() + (ROOT / "requirements" / "gpu.lock").read_text()
    match = re.search(rf'(?m)(?:"|^){re.escape(name)}(?:\[[^]]*])?==([^"\s;]+)', pins)
    if match is None:
        raise BundleError(f"neither setup.py nor gpu.lock pins a version of {name}")
    return match[1]


def commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    from tests.gpu import bundle  # its errors are of this module, not of __main__

    try:
        sys.exit(bundle.main())
    except (bundle.BundleError, FatbinError) as problem:
        sys.exit(f"bundle: {problem}")
