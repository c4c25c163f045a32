"""8-bit floating point with torch only: recipes, formulas and products; and where CUDA's compiler
and headers are, with which its libraries build kernels while they run."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

_USUAL = Path("/usr/local/cuda")


def wheel_folder(name: str = "cu13") -> Path | None:
    """A folder of NVIDIA's wheels, None: it is not installed. ``cu13`` has CUDA's ``bin/nvcc`` and
    ``include``, ``cudnn`` the ``lib`` of cuDNN."""
    spec = find_spec("nvidia")
    roots = [] if spec is None else list(spec.submodule_search_locations or ())
    return next((folder for root in roots if (folder := Path(root) / name).is_dir()), None)


def cuda_home() -> Path | None:
    """The toolkit that CUDA_HOME has to name; None: one is found without it, or there is none.
    DeepGEMM fails at its import without CUDA_HOME, nvcc on PATH and /usr/local/cuda (vllm 0.32.0
    third_party/deep_gemm/__init__.py:106)."""
    if named := os.environ.get("CUDA_HOME"):
        return Path(named)
    return None if shutil.which("nvcc") or _USUAL.is_dir() else wheel_folder()
