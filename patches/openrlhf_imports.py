"""Lets OpenRLHF's controller be imported without vLLM, DeepSpeed and what else only other processes
use.

Dependency: openrlhf 0.11.2.

Wrong there: the modules of the controller import, at their top, what they use in actors that the
controller only starts, or after those have started:
  trainer/ray/vllm_engine.py:7,11-12                 vllm (in the engine's process)
  trainer/ray/launcher.py:12,14                      OpenRLHF's own models, DeepSpeed
  datasets/utils.py:3, utils/utils.py:5              datasets, transformers
  utils/__init__.py:1                                math_utils (sympy)
That is eight seconds of a processor before the first actor can be started, and 1 GB of host memory.

Changes: these import statements, and no others, bind names that import their module when they are
first used. flash-attn, which openrlhf.models imports, is not needed any more.

Remove when: openrlhf imports these inside the functions that use them.
"""

from __future__ import annotations

import builtins
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import resolve_name
from types import ModuleType
from typing import Any

from openrlhf_ext.patches.base import Patch
from openrlhf_ext.patches.import_hooks import patch_finder

VERSIONS = ("0.11.2",)

# importing module -> what its import statements do not import yet
DEFERRED = {
    "openrlhf.datasets.utils": ("datasets",),
    "openrlhf.trainer.ray.launcher": ("openrlhf.models", "openrlhf.utils.deepspeed"),
    "openrlhf.trainer.ray.vllm_engine": ("vllm", "vllm.inputs", "vllm.utils"),
    "openrlhf.utils": ("openrlhf.utils.math_utils",),
    "openrlhf.utils.utils": ("transformers",),
}


def _install() -> None:
    for importer, modules in DEFERRED.items():
        patch_finder.run_around(importer, partial(deferring, PATCH, modules))


PATCH = Patch(
    name="openrlhf_imports",
    dependency="openrlhf",
    versions=VERSIONS,
    problem=(
        "trainer/ray/vllm_engine.py:7, launcher.py:12-14 and others import vLLM, DeepSpeed and "
        "flash-attn in the controller, which uses none of them"
    ),
    change="these import statements bind names that import their module when they are first used",
    removal="openrlhf imports these inside the functions that use them",
    install=_install,
    need=lambda: (True, "openrlhf's controller imports what only its actors use"),
)


class DeferredName:
    """Stands for a name of a module, which is imported at the first use: a call, an attribute,
    isinstance."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name

    def resolve(self) -> Any:
        """What it stands for."""
        return getattr(importlib.import_module(self._module), self._name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.resolve()(*args, **kwargs)

    def __getattr__(self, attribute: str) -> Any:
        # what looks at names (inspect, copy, typing) does not use them
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return getattr(self.resolve(), attribute)

    def __or__(self, other: object) -> DeferredName:
        """Of an annotation, which nobody reads."""
        return self

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, self.resolve())


@contextmanager
def deferring(patch: Patch, modules: tuple[str, ...], importer: ModuleType) -> Iterator[None]:
    """Runs the body of ``importer`` with an ``import`` that defers these modules; its functions get
    the usual one. Raises PatchRefused: the dependency is of a version that the patch was not
    written for."""
    patch.require_known_version()
    deferring = True

    def import_or_defer(
        name: str,
        globals: dict | None = None,
        locals: Any = None,
        fromlist: Any = (),
        level: int = 0,
    ) -> Any:
        absolute = (
            resolve_name("." * level + name, (globals or {})["__package__"]) if level else name
        )
        if deferring and absolute in modules:
            return _DeferredModule(absolute) if fromlist else _outermost(absolute)
        return builtins.__import__(name, globals, locals, fromlist, level)

    vars(importer)["__builtins__"] = vars(builtins) | {"__import__": import_or_defer}
    try:
        yield
    finally:
        deferring = False  # functions of the module keep this __import__
        vars(importer)["__builtins__"] = builtins


def _outermost(name: str) -> ModuleType:
    """What ``import a.b as c`` asks for its ``b``."""
    module: ModuleType = _DeferredModule(name)
    while "." in name:
        name, _, inner = name.rpartition(".")
        outer = ModuleType(name)
        setattr(outer, inner, module)
        module = outer
    return module


class _DeferredModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return DeferredName(self.__name__, name)
