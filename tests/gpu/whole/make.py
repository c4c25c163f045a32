"""Makes a whole bundle: packages unpacked, slimmed, proven against the machine's torch, packed (nm,
readelf, strip).

What a dense model or a mixture on one Hopper GPU does not run is left out: 489 MB stay, and 46
compressed. It takes five minutes, and once two more for the toy policy.
"""

from __future__ import annotations

import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tests.gpu import bundle as bundles
from tests.gpu.bundle import ROOT, BundleError
from tests.gpu.fatbin import slim, slim_heads
from tests.gpu.whole import ops
from tests.gpu.whole.symbols import missing, symbols_of_torch

MOST_BYTES = 48_000_000
PART_BYTES = 24_000_000
DICTIONARY_BYTES = 128 << 20
_FA3 = "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
# for each, why a run on one Hopper GPU does without it
_LEFT_OUT = {
    "bin": "commands of packages: ours are modules",
    "tests": "of openrlhf",
    "vllm/vllm-rs": "a server in Rust",
    "vllm/benchmarks": "nothing imports them",
    "vllm/entrypoints/serve/instrumentator/static": "web pages",
    "vllm/third_party/fmha_sm100": "attention for Blackwell",
    "vllm/third_party/deep_gemm": "its C++ does not load in torch 2.11: VLLM_USE_DEEP_GEMM=0",
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": "Hopper takes FlashAttention 3",
    "vllm/_deepselect_C.abi3.so": "sparse attention on Blackwell",
    "vllm/_flashkda_C.abi3.so": "linear attention of Kimi",
    "vllm/_flashmla_C.abi3.so": "attention of DeepSeek",
    "vllm/_flashmla_extension_C.abi3.so": "the same",
    "vllm/_qutlass_C.abi3.so": "4 bits on Blackwell",
    "ray/jars": "Java",
    "ray/rllib": "a library on top of Ray's core, like the next ones",
    "ray/tune": "",
    "ray/train": "",
    "ray/data": "",
    "ray/serve": "",
    "ray/llm": "",
    "ray/air": "",
    "ray/dashboard/client": "web pages",
    "ray/core/libjemalloc.so": "profiles of memory",
}
# of the namespaces that only libraries left out define: the modules that alone may name them, and
# that no flight calls
_NOT_CALLED: dict[str, str | tuple[str, ...]] = {
    "_vllm_fa2_C": "vllm_flash_attn/flash_attn_interface.py",  # which takes FlashAttention 3 here
    "_flashkda_C": ("models/glm5next/", "models/kimi_k3/"),
    "_flashmla_C": "models/deepseek_v41/",
    "_flashmla_extension_C": "v1/attention/ops/flashmla.py",
    "deep_select": "model_executor/layers/indexer_topk.py",  # of DeepSeek
    "_qutlass_C": "_custom_ops.py",  # for 4 bits
}


def make(
    target: Path, python: str, torch: str, cuda: str, heads: Collection[int], cache: Path
) -> dict[str, Any]:
    """Fills the folder ``target``; its manifest.

    Args:
        heads: head sizes for which FlashAttention 3 stays.
        cache: keeps what torch's libraries define, 530 MB of download.

    Raises:
        BundleError: a proof failed, or it is larger than ``MOST_BYTES``.
        FatbinError: a library is not what is to be slimmed.
    """
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        site, toy = Path(folder) / "site", Path(folder) / "toy"
        with _told("packages"):
            packages = _unpacked(site, python)
        _prove_ops(site)
        with _told("slimming"):
            _slim(site, heads)
        _add_ours(site)
        with _told("symbols"):
            _prove_symbols(site, symbols_of_torch(python, torch, cuda, cache))
        with _told("toy policy"):
            _make_toy(toy)
        unpacked = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        with _told("compression"):
            _pack(Path(folder), target)
    return bundles.write_manifest(
        target,
        python,
        torch,
        most=MOST_BYTES,
        kind=bundles.WHOLE_KIND,
        commit=bundles.commit(),
        packages=packages,
        stand_ins=list(bundles.STAND_INS),
        host=list(bundles.OF_THE_HOST),
        architectures=bundles.ARCHITECTURES,
        heads=sorted(heads),
        unpacked_bytes=unpacked,
    )


class _told:
    """Says how long something took."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        print(f"{self._what}: {time.perf_counter() - self._started:.0f} s", flush=True)


# ---- packages


def _unpacked(site: Path, python: str) -> dict[str, str]:
    """Installs the wheels into ``site``; their versions."""
    versions = {name: bundles.pinned(name) for name in bundles.WHOLE}
    wheels = bundles.wheels_for(python)
    with tempfile.TemporaryDirectory(dir=site.parent) as folder:
        pins = (f"{name}=={version}" for name, version in versions.items())
        bundles.download(folder, *bundles.AS_PINNED, *wheels, *pins)
        # pip, not zip files: some wheels have what belongs elsewhere in .data, and it takes those
        # of another Python too
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            *bundles.AS_PINNED,
            "--no-index",
            "--no-compile",
        ]
        found = map(str, Path(folder).glob("*.whl"))
        subprocess.run([*command, *wheels, "--target", str(site), *found], check=True, timeout=1800)
    return versions


def _slim(site: Path, heads: Collection[int]) -> None:
    for name in _LEFT_OUT:
        path = site / name
        if not path.exists():
            raise BundleError(
                f"{name} was to be left out and is not in the packages: see tests/gpu/whole/make.py"
            )
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in [*site.glob("ray/**/tests"), *site.glob("ray/**/*.dist-info")]:
        shutil.rmtree(path)
    # for sm_90 only Marlin is PTX alone, which multiplies by weights of 4 bits
    for name in ("_C", "_moe_C"):
        library = site / f"vllm/{name}_stable_libtorch.abi3.so"
        print(f"{library.name}: {slim(library, bundles.ARCHITECTURES, strict=True)}")
    print(f"FlashAttention 3, head sizes {sorted(heads)}: {slim_heads(site / _FA3, heads)}")
    binaries = [path for path in site.rglob("*") if path.is_file() and _can_be_stripped(path)]
    subprocess.run(["strip", "--strip-unneeded", *binaries], check=True, timeout=600)


def _can_be_stripped(path: Path) -> bool:
    """Not vLLM's, which have nothing to strip, nor what a tool for wheels gave another path to its
    libraries: strip may break that."""
    with path.open("rb") as file:
        if file.read(4) != b"\x7fELF" or "/vllm/" in str(path) or ".libs/" in str(path):
            return False
        return b".libs\0" not in file.read()


def _add_ours(site: Path) -> None:
    """Stand-ins, and what torch 2.11 lacks."""
    for name in bundles.STAND_INS:
        (site / name).mkdir()
        shutil.copy(Path(__file__).with_name("stand_in.py"), site / name / "__init__.py")
    shutil.copy(Path(__file__).parents[1] / "older_torch.py", site / "sitecustomize.py")


def _prove_ops(site: Path) -> None:
    """Before anything is left out: `_C` too names ops that no library for CUDA defines.

    Raises:
        BundleError: a module of vLLM names an op that only a library to be left out defines.
    """
    package, gone = site / "vllm", {site / name for name in _LEFT_OUT}
    libraries, known = set(package.rglob("*.so")), ops.named(package)
    out = {path for path in libraries if gone & {path, *path.parents}}
    lost = [
        f"{module}: torch.ops.{space}.{name}"
        for space, name in sorted(ops.defined(out, known) - ops.defined(libraries - out, known))
        for module in known[space, name]
        if space not in _NOT_CALLED or not module.startswith(_NOT_CALLED[space])
    ]
    if lost:
        raise BundleError(
            f"vLLM's modules name {len(lost)} ops of libraries that are left out: "
            f"{'; '.join(lost[:5])}"
        )


def _prove_symbols(site: Path, known: Collection[str]) -> None:
    """
    Raises:
        BundleError: an extension would not load in the machine's torch.
    """
    lacking = {
        path: found
        for path in sorted((site / "vllm").rglob("*.so"))
        if (found := missing(path, known))
    }
    if lacking:
        named = "; ".join(
            f"{path.relative_to(site)}: {', '.join(found[:5])}" for path, found in lacking.items()
        )
        raise BundleError(f"the machine's torch lacks symbols that vLLM's extensions need: {named}")


def _make_toy(target: Path) -> None:
    """A policy that half knows arithmetic, and its problems (examples/python/toy_policy.py):
    minutes, then cached."""
    target.mkdir()
    script = [str(ROOT / "examples/python/toy_policy.py"), "--output_dir", str(target / "start")]
    command = [sys.executable, *script, "--data_dir", str(target / "data")]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, check=True, timeout=3600
    )


# ---- packing


def _pack(source: Path, target: Path) -> None:
    """``part-00`` and so on: one xz, in one thread with one large dictionary, Ray's three alike
    binaries side by side, and the filter for x86 (44.5 MB instead of 55 without these)."""
    filters = [
        {"id": lzma.FILTER_X86},
        {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": DICTIONARY_BYTES},
    ]
    with tempfile.TemporaryFile(dir=target) as file:
        with (
            lzma.open(file, "wb", filters=filters) as stream,
            tarfile.open(fileobj=stream, mode="w|") as archive,
        ):
            for path in _in_order(source):
                archive.add(path, str(path.relative_to(source)), recursive=False, filter=_anonymous)
        file.seek(0)
        _split(file, target)


def _in_order(source: Path) -> Iterator[Path]:
    def place(path: Path) -> tuple[bool, bool, str]:
        parts = path.relative_to(source).parts
        return parts[:2] != ("site", "ray"), parts[:2] != ("site", "vllm"), str(path)

    yield from sorted(source.rglob("*"), key=place)


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """The same archive from the same packages, whoever makes it and when."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = 1_500_000_000
    return entry


def _split(file: BinaryIO, target: Path) -> None:
    number = 0
    while content := file.read(PART_BYTES):
        (target / f"part-{number:02}").write_bytes(content)
        number += 1
