"""What the doctor looks at on a machine with GPUs: driver, cuDNN, compiler, and if TransformerEngine fits torch."""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from openrlhf_ext.patches.base import installed_version

OLDEST_CUDNN = (9, 18)
"""Older ones give NaN in the backward pass of packed sequences with context parallelism on Hopper
(TransformerEngine, issue 2186)."""
OLDEST_DRIVER = {13: 580, 12: 525}
"""By CUDA's major version: NVIDIA's table of minor-version compatibility."""
_COMMAND_S = 30.0
_IMPORT_S = 300.0  # of TransformerEngine, from shared storage that has not read it before
_TOOLKIT = "/usr/local/cuda"


@dataclass(frozen=True)
class GpuHost:
    """What was found.

    Attributes:
        driver: the kernel module's version; None: nvidia-smi did not say.
        cudnn: version that torch has loaded.
        cudnn_libraries: every libcudnn.so that a process may load.
        compiler: path of gcc, which Triton calls at run time; None: there is none.
        python_header: path of Python.h, which Triton compiles against; None: there is none.
        transformer_engine: versions of its distributions that are installed, by name.
        engine_error: why TransformerEngine cannot be imported; None: it can, or it is not installed.
        ptrace_scope: Yama's, see `rollout.sync.cuda_ipc`.
    """

    cuda: str
    driver: str | None
    cudnn: tuple[int, int, int]
    cudnn_libraries: tuple[str, ...]
    compiler: str | None
    python_header: str | None
    transformer_engine: Mapping[str, str]
    engine_error: str | None = None
    ptrace_scope: int = 0

    @property
    def rows(self) -> list[tuple[str, str]]:
        engine = ", ".join(f"{name} {version}" for name, version in self.transformer_engine.items())
        return [
            ("CUDA of torch", self.cuda),
            ("driver", self.driver or "unknown"),
            ("cuDNN", f"{'.'.join(map(str, self.cudnn))} ({', '.join(self.cudnn_libraries) or 'not found as a file'})"),
            ("gcc", self.compiler or "absent"),
            ("Python.h", self.python_header or "absent"),
            ("TransformerEngine", engine or "absent"),
            ("ptrace_scope", str(self.ptrace_scope)),
        ]

    def problems(self) -> Iterator[str]:
        """One sentence for each thing that would crash, lie or crawl."""
        cuda_major = int(self.cuda.split(".")[0])
        oldest = OLDEST_DRIVER.get(cuda_major)
        if self.driver is None:
            yield "nvidia-smi does not tell the driver's version: the driver is not installed as it should be"
        elif oldest is not None and int(self.driver.split(".")[0]) < oldest:
            yield f"the driver is {self.driver}, torch's CUDA {self.cuda} needs {oldest} or newer"
        if self.cudnn[:2] < OLDEST_CUDNN:
            yield (
                f"cuDNN {'.'.join(map(str, self.cudnn))} is loaded, {'.'.join(map(str, OLDEST_CUDNN))} or newer is "
                "needed: older ones give NaN with packed sequences and context parallelism on Hopper"
            )
        if len(self.cudnn_libraries) > 1:
            yield (
                f"there are {len(self.cudnn_libraries)} cuDNNs ({', '.join(self.cudnn_libraries)}) and "
                "TransformerEngine prefers that of the system to torch's: remove all but one, or unset CUDNN_HOME, "
                "CUDNN_PATH, CUDA_HOME, CUDA_PATH or LD_LIBRARY_PATH, where it looks first"
            )
        if self.compiler is None:
            yield "gcc is missing, Triton compiles a launcher with it on every node: install it"
        if self.python_header is None:
            where = sysconfig.get_path("include")
            yield f"Python.h is missing ({where}), Triton compiles against it: install python3-dev"
        if self.ptrace_scope > 1:  # with 1 the policy allows it
            yield (
                f"kernel.yama.ptrace_scope is {self.ptrace_scope}: CUDA IPC, by which a policy hands its weights to "
                "engines on the same GPUs (train.colocate_all), is refused; run sysctl kernel.yama.ptrace_scope=1, or "
                "use --vllm.sync_backend gloo there"
            )
        yield from self._engine_problems(cuda_major)

    def _engine_problems(self, cuda_major: int) -> Iterator[str]:
        found = self.transformer_engine
        cores = [name for name in found if re.fullmatch(r"transformer-engine-cu\d+", name)]
        wanted = f"transformer-engine-cu{cuda_major}"
        if found and cores != [wanted]:
            yield (
                f"TransformerEngine's core must be {wanted} alone, as torch's CUDA is {self.cuda}: found "
                f"{', '.join(cores) or 'none'}; uninstall the others (uv installs cu12 beside cu13, pip does not)"
            )
        if found and "transformer-engine-torch" not in found:
            yield "transformer-engine-torch is missing: TransformerEngine cannot be used without it"
        if len(set(found.values())) > 1:
            described = ", ".join(f"{name} {version}" for name, version in found.items())
            yield f"the parts of TransformerEngine must be of one version, it refuses others: {described}"
        if self.engine_error is not None:
            yield (
                f"TransformerEngine cannot be imported ({self.engine_error}), and Megatron would be silent about it: "
                "its torch extension must be compiled against the torch that is installed; remove .setup/"
                "transformer_engine in the environment and run the set-up again"
            )


def examine_gpu_host() -> GpuHost:
    """Look at this machine. Imports torch, and has it load cuDNN."""
    import torch

    from openrlhf_ext.rollout.sync.cuda_ipc import ptrace_scope

    number = torch.backends.cudnn.version() or 0
    names = ("transformer-engine", "transformer-engine-torch", "transformer-engine-cu12", "transformer-engine-cu13")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    engine = {name: version for name in names if (version := installed_version(name)) is not None}
    return GpuHost(
        cuda=torch.version.cuda or "0",
        driver=_driver(),
        cudnn=(number // 10000, number // 100 % 100, number % 100),
        cudnn_libraries=tuple(sorted(_cudnn_libraries())),
        compiler=shutil.which("gcc"),
        python_header=str(header) if header.is_file() else None,
        transformer_engine=engine,
        engine_error=_engine_error() if engine else None,
        ptrace_scope=ptrace_scope(),
    )


def _driver() -> str | None:
    answer = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return answer.splitlines()[0].strip() if answer else None


def _cudnn_libraries() -> set[str]:
    """Torch's own, and those where TransformerEngine 2.11 looks first (its common/__init__.py:301-332)."""
    roots = [os.environ.get(name) for name in ("CUDNN_HOME", "CUDNN_PATH", "CUDA_HOME", "CUDA_PATH")]
    patterns = [f"{root}/**/libcudnn.so*" for root in (*roots, _TOOLKIT) if root]
    patterns += [f"{folder}/libcudnn.so*" for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    if (spec := find_spec("nvidia")) is not None:
        patterns += [f"{root}/*/lib/libcudnn.so*" for root in spec.submodule_search_locations or ()]
    found = [file for pattern in patterns for file in glob.glob(pattern, recursive=True) if "stub" not in file]
    for line in _output("ldconfig", "-p").splitlines():
        if line.strip().startswith("libcudnn.so"):
            found.append(line.split("=>")[-1].strip())
    return {str(Path(file).resolve()) for file in found}


def _engine_error() -> str | None:
    """What an import of TransformerEngine says, in a process of its own: it loads libraries for good.

    torch comes first, as in a run: alone, it takes nvrtc and curand of a toolkit that it finds, and then does not look
    for cuBLAS and cudart, which torch has loaded in a run (TransformerEngine 2.11 common/__init__.py:374).
    """
    command = [sys.executable, "-c", "import torch, transformer_engine.pytorch"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_S)
    except subprocess.TimeoutExpired:
        return f"no end after {_IMPORT_S:.0f} s"
    if answer.returncode == 0:
        return None
    return (answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"])[-1]


def _output(*command: str) -> str:
    """What a command prints; nothing where it does not exist or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
