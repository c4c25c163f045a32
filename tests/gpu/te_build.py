"""TransformerEngine on a GPU machine without a network: checks the bundle, builds its torch part,
installs it.

Call 2. What the other checks import is in ``<bundle>/te`` (``use``). What took minutes to build is
in ``<bundle>/built``: the wheel, and ``built.json`` which says for what. Bring that folder back,
put it into the bundle of the next call, and nothing is built there.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.gpu.bundle import ROOT, read_manifest, unpack, verify
from tests.gpu.kit import Machine, NotHere

JOBS = 16
# the patches first, as in a run: without them TransformerEngine takes parts of another cuDNN than
# torch's
_SMOKE = """
from openrlhf_ext import patches
patches.apply()
import json, torch, transformer_engine, transformer_engine.pytorch as te, transformer_engine_torch as tex
torch.manual_seed(0)
layer = te.Linear(256, 512, params_dtype=torch.bfloat16, device="cuda")
plain = torch.nn.Linear(256, 512, dtype=torch.bfloat16, device="cuda")
plain.load_state_dict(layer.state_dict(), strict=False)
x = torch.randn(128, 256, dtype=torch.bfloat16, device="cuda")
difference = (layer(x) - plain(x)).abs().max().item()
print(json.dumps({"version": transformer_engine.__version__, "cudnn_of_te": tex.get_cudnn_version(),
                  "cudnn_of_torch": torch.backends.cudnn.version(), "linear_max_abs_difference": difference}))
"""


def build(machine: Machine) -> dict:
    """Check ``build`` of call 2.

    Raises:
        NotHere: there is no GPU, no bundle or no ``nvcc``.
        BundleError: the bundle is damaged or made for another Python or torch.
        RuntimeError: the build or the first use failed; the text ends with the end of the log.
        TimeoutError: it took longer than the check may take.
    """
    machine.need_gpu("TransformerEngine")
    if machine.bundle is None:
        raise NotHere(
            "TransformerEngine's sources come with a bundle: bash tests/gpu/bundle.sh makes it"
        )
    if nvcc() is None:
        raise NotHere(
            "building TransformerEngine's torch part needs nvcc (on PATH or in CUDA_HOME), to "
            "know the CUDA"
        )
    started, deadline = time.perf_counter(), time.monotonic() + machine.seconds
    if "transformer_engine" not in read_manifest(machine.bundle):
        raise NotHere(
            "this is a whole bundle, without TransformerEngine: carry the other one in a later call"
        )
    manifest = verify(machine.bundle)
    checked = time.perf_counter()
    wheel = built_wheel(machine.bundle)
    reused = wheel is not None
    if wheel is None:
        wheel = _build_wheel(machine.bundle, deadline)
    built = time.perf_counter()
    install(machine.bundle, wheel)
    installed = time.perf_counter()
    found = json.loads(
        _run([sys.executable, "-c", _SMOKE], machine.bundle, deadline, paths(machine.bundle))[-1]
    )
    if not found["linear_max_abs_difference"] < 0.1:  # of values of about 1 in bf16; also a NaN
        raise RuntimeError(
            f"TransformerEngine's Linear does not compute what torch's does: {found}"
        )
    if found["version"].split("+")[0] != manifest["transformer_engine"]:
        raise RuntimeError(
            f"TransformerEngine {manifest['transformer_engine']} was carried, {found} is imported"
        )
    return {
        "checksums_seconds": checked - started,
        "build_seconds": built - checked,
        "build_reused": reused,
        "install_seconds": installed - built,
        "first_use_seconds": time.perf_counter() - installed,
        "wheel_bytes": wheel.stat().st_size,
        "bring_back": str(wheel.parent),
        **found,
    }


def use(bundle: Path | None) -> None:
    """Lets this process and those it starts import what the bundle has; before Megatron is
    imported, which looks for TransformerEngine only once."""
    for path in reversed(paths(bundle)):
        if path not in sys.path:
            sys.path.insert(0, path)
    os.environ["PYTHONPATH"] = os.pathsep.join(_joined(paths(bundle), os.environ))


def paths(bundle: Path | None) -> list[str]:
    """What of the bundle goes on the path."""
    folders = [] if bundle is None else [bundle / "te", bundle / "site"]
    return [str(folder.resolve()) for folder in folders if folder.is_dir()]


def nvcc() -> str | None:
    """CUDA's compiler, where TransformerEngine's build looks for it (its build_tools/utils.py,
    nvcc_path)."""
    places = [*filter(None, [os.environ.get("CUDA_HOME")]), "/usr/local/cuda"]
    return shutil.which("nvcc") or next(
        filter(None, (shutil.which(f"{place}/bin/nvcc") for place in places)), None
    )


# ---- the wheel


def built_wheel(bundle: Path) -> Path | None:
    """The wheel of an earlier build, if it was made for this Python and this torch and is whole."""
    record = bundle / "built" / "built.json"
    if not record.is_file():
        return None
    made = json.loads(record.read_text())
    wheel = record.parent / made["wheel"]
    if made != _record(wheel):
        return None
    return wheel


def _record(wheel: Path) -> dict[str, Any]:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest() if wheel.is_file() else None
    python = "{}.{}".format(*sys.version_info)
    return {"wheel": wheel.name, "sha256": digest, "python": python, "torch": torch.__version__}


def _build_wheel(bundle: Path, deadline: float) -> Path:
    """Compiles the torch part: C++ only, 28 files."""
    target = bundle / "built"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    (sdist,) = (bundle / "transformer_engine").glob("transformer_engine_torch-*.tar.gz")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--verbose",
        "--no-build-isolation",
        "--no-deps",
        "--no-index",
    ]
    jobs = str(min(JOBS, os.cpu_count() or 1))
    settings = {"MAX_JOBS": jobs, "NVTE_FRAMEWORK": "pytorch", "NVTE_PYTORCH_FORCE_BUILD": "TRUE"}
    # TE looks for cudnn.h and cublasLt.h in CUDA's own folder only (its build_tools/utils.py,
    # get_cuda_include_dirs)
    settings["CPATH"] = os.pathsep.join(
        _joined(header_folders(Path(sysconfig.get_path("purelib"))), os.environ, "CPATH")
    )
    _run([*command, "--wheel-dir", str(target), str(sdist)], bundle, deadline, environment=settings)
    (wheel,) = target.glob("*.whl")
    (target / "built.json").write_text(json.dumps(_record(wheel), indent=1) + "\n")
    return wheel


def header_folders(site_packages: Path) -> list[str]:
    """Headers in NVIDIA's wheels; the first ones of those that are there twice are torch's."""
    names = ("cu13", "cudnn", "nccl")
    return [
        str(path)
        for name in names
        if (path := site_packages / "nvidia" / name / "include").is_dir()
    ]


def install(bundle: Path, wheel: Path) -> None:
    """``<bundle>/te``: TransformerEngine's Python part, its core and its torch part with what says
    their versions."""
    source, target = bundle / "transformer_engine", bundle / "te"
    shutil.rmtree(target, ignore_errors=True)
    unpack([*source.glob("*.whl"), wheel], target)
    for info in (source / "core").glob("*.dist-info"):
        shutil.copytree(info, target / info.name)
    library = target / "transformer_engine" / "wheel_lib" / "libtransformer_engine.so"
    library.parent.mkdir(exist_ok=True)
    with lzma.open(source / "core" / "core.so.xz") as compressed, library.open("wb") as file:
        shutil.copyfileobj(compressed, file, 1 << 20)


# ---- commands


def _run(
    command: Sequence[str],
    bundle: Path,
    deadline: float,
    path: Sequence[str] = (),
    environment: Mapping | None = None,
) -> list[str]:
    """The lines that the command printed; everything is in ``<bundle>/te_build.log`` too."""
    more = {"PYTHONPATH": os.pathsep.join(_joined(path, os.environ)), **(environment or {})}
    with (bundle / "te_build.log").open("w+") as log:
        # a process group of its own: a compiler outlives the pip that started it
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | more,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(max(1.0, min(deadline - time.monotonic(), 86_400)))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise TimeoutError(
                f"{' '.join(command[:4])} ... was not done in time:\n{_end(log)}"
            ) from None
        if code:
            raise RuntimeError(f"{' '.join(command[:4])} ... ended with {code}:\n{_end(log)}")
        log.seek(0)
        return log.read().strip().splitlines()


def _end(log: Any) -> str:
    log.seek(0)
    return log.read()[-6000:]


def _joined(
    first: Sequence[str], environment: Mapping[str, str], name: str = "PYTHONPATH"
) -> list[str]:
    """These paths, then those that the environment names and that are not among them."""
    theirs = [path for path in environment.get(name, "").split(os.pathsep) if path]
    return [*first, *(path for path in theirs if path not in first)]
