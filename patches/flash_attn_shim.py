"""Lets openrlhf be imported where flash-attn is not installed.

Dependency: openrlhf 0.11.2.

Wrong there: openrlhf/models/ring_attn_utils.py:3-4 imports five names from flash_attn unconditionally, and the module
is on the import path of the controller (openrlhf.models, openrlhf.cli.train_ppo_ray). flash-attn is a CUDA extension
that cannot be built without nvcc. None of the five is called unless an OpenRLHF actor packs sequences or uses ring
attention; our policy runs on Megatron and does neither.

Changes: while ring_attn_utils is being imported, and only then, sys.modules holds modules with these five names, each
of which raises when called. Afterwards they are taken away again, so that `import flash_attn` and
`importlib.util.find_spec("flash_attn")` keep failing for everybody else: transformers, deepspeed and vllm would
otherwise take it for the real package.

Remove when: openrlhf imports flash_attn inside the functions that use it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

from openrlhf_ext.patches.base import Patch
from openrlhf_ext.patches.environment import has_module
from openrlhf_ext.patches.import_hooks import patch_finder

VERSIONS = ("0.11.2",)
IMPORTER = "openrlhf.models.ring_attn_utils"

# module -> names that ring_attn_utils takes from it; the packages on the way have none.
SHIMMED_NAMES = {
    "flash_attn": (),
    "flash_attn.bert_padding": ("index_first_axis", "pad_input", "rearrange", "unpad_input"),
    "flash_attn.utils": (),
    "flash_attn.utils.distributed": ("all_gather",),
}


def _install() -> None:
    patch_finder.run_around(IMPORTER, _lend_shims)


def _need() -> tuple[bool, str]:
    if has_module("flash_attn"):
        return False, "flash-attn is installed"
    return True, "flash-attn is not installed, openrlhf imports it unconditionally"


PATCH = Patch(
    name="flash_attn_shim",
    dependency="openrlhf",
    versions=VERSIONS,
    problem="openrlhf/models/ring_attn_utils.py:3-4 imports flash_attn, which cannot be built without nvcc",
    change="lends ring_attn_utils five names that raise when called, for the time of its import only",
    removal="openrlhf imports flash_attn inside the functions that use it",
    install=_install,
    need=_need,
)


@contextmanager
def _lend_shims(module: ModuleType) -> Iterator[None]:
    needed, _ = _need()
    if not needed:
        yield
        return
    PATCH.require_known_version()
    shims = {name: _shim_module(name, functions) for name, functions in SHIMMED_NAMES.items()}
    sys.modules.update(shims)
    try:
        yield
    finally:
        for name in shims:
            sys.modules.pop(name, None)


def _shim_module(name: str, functions: tuple[str, ...]) -> ModuleType:
    is_package = any(other.startswith(f"{name}.") for other in SHIMMED_NAMES)
    shim = ModuleType(name, "Stands in for a flash-attn module while openrlhf is imported.")
    shim.__spec__ = ModuleSpec(name, loader=None, is_package=is_package)
    if is_package:
        shim.__path__ = []
    for function in functions:
        setattr(shim, function, _missing(f"{name}.{function}"))
    return shim


def _missing(function: str) -> Callable[..., NoReturn]:
    def raise_missing(*_args: object, **_kwargs: object) -> NoReturn:
        raise RuntimeError(
            f"{function} was called, but flash-attn is not installed: OpenRLHF's own sequence packing and ring "
            "attention need it. Install it on a CUDA machine, or leave both off (a Megatron policy needs neither)."
        )

    raise_missing.__name__ = raise_missing.__qualname__ = function.rpartition(".")[2]
    return raise_missing
