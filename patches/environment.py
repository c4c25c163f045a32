"""Facts about the machine and the installed kernels that decide whether a patch is needed."""

from __future__ import annotations

import importlib.util


def has_module(name: str) -> bool:
    """Whether a top-level module can be found. Does not import it."""
    return importlib.util.find_spec(name) is not None


def has_cuda() -> bool:
    """Whether this process sees a CUDA device. Imports torch: call it only where torch is about to be imported."""
    import torch

    return torch.cuda.is_available()


def has_transformer_engine() -> bool:
    """Whether NVIDIA TransformerEngine is installed."""
    return has_module("transformer_engine")


def has_nvidia_apex() -> bool:
    """Whether NVIDIA apex is installed with its extensions.

    The distribution called "apex" on the public package index is an unrelated project; only NVIDIA's, built from
    source, brings the extension module `amp_C`.
    """
    return has_module("amp_C")
