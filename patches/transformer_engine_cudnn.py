"""Gives TransformerEngine the cuDNN that torch came with, all of its libraries.

Dependency: transformer-engine 2.11.0.

Wrong there: where a CUDA toolkit is installed, common/__init__.py:367 loads ``libcudnn.so`` alone,
and the other ones only where there is none (common/__init__.py:374-378). But its core,
``libtransformer_engine.so``, names ``libcudnn_graph.so.9``, ``libcudnn_ops.so.9`` and five more by
plain names (``readelf -d``), and torch's wheel has loaded only ``libcudnn.so.9`` by then, which
opens the others when they are first used. So the loader takes the rest from where the system has
them, of another version, and torch then refuses cuDNN as a whole ("compiled against (9, 19,
0) but found runtime version (9, 14, 0)": seen on an H200, with CUDNN_HOME set to torch's).

Changes: before the body of ``transformer_engine`` runs, every ``libcudnn*.so.9`` of NVIDIA's wheel
is loaded, so that the names above are those of libraries that are there. On machines with a GPU
only, and only where the wheel is.

Remove when: TransformerEngine loads all of cuDNN from one place, or its core finds the wheel by a
path.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from openrlhf_ext.fp8 import wheel_folder
from openrlhf_ext.patches.base import Patch
from openrlhf_ext.patches.environment import has_cuda
from openrlhf_ext.patches.import_hooks import patch_finder

_NEEDED = ("_graph.", "_ops.")


def _install() -> None:
    patch_finder.run_around("transformer_engine", _with_the_cudnn_of_torch)


@contextmanager
def _with_the_cudnn_of_torch(_: ModuleType) -> Iterator[None]:
    """Loads the libraries of the wheel for good.

    Raises:
        PatchRefused: TransformerEngine is not of a version that this was written for.
        OSError: one of the libraries cannot be loaded.
    """
    if _need()[0]:
        PATCH.require_known_version()
        for library in _libraries():
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    yield


def _libraries() -> list[Path]:
    """Those that the others need by plain names (``readelf -d``: graph, and ops, which needs graph)
    come first:
    LD_LIBRARY_PATH, where modules or conda set it, counts more than the wheel's own path, and would
    bring a second copy of them."""
    folder = wheel_folder("cudnn")
    found = [] if folder is None else sorted((folder / "lib").glob("libcudnn*.so.9"))
    return sorted(
        found, key=lambda library: [name in library.name for name in _NEEDED], reverse=True
    )


def _need() -> tuple[bool, str]:
    if not has_cuda():
        return False, "no CUDA device, TransformerEngine is not used"
    if not _libraries():
        return False, "torch's cuDNN is not of NVIDIA's wheel"
    return True, "TransformerEngine would take parts of another cuDNN, if the system has one"


PATCH = Patch(
    name="transformer_engine_cudnn",
    dependency="transformer-engine",
    versions=("2.11.0",),
    problem=(
        "common/__init__.py:367 loads libcudnn.so alone beside a CUDA toolkit; its core needs "
        "seven more by plain names, which the loader takes from the system"
    ),
    change="every libcudnn*.so.9 of torch's wheel is loaded first, graph and ops ahead; nothing is "
    "done without a GPU",
    removal="TransformerEngine loads all of cuDNN from one place, or its core finds the wheel by a "
    "path",
    install=_install,
    need=_need,
)
