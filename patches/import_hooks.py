"""One import hook for all patches: act around the import of a module, or load a package with
another loader."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType
from typing import Any

MARK = "changed_by_openrlhf_ext"
Wrapper = Callable[[ModuleType], AbstractContextManager[None]]
LoaderFactory = Callable[[str, str], SourceFileLoader]


class PatchFinder:
    """Meta path finder that finds nothing itself: it changes how some modules, found by others, are
    loaded."""

    def __init__(self) -> None:
        self._wrappers: dict[str, Wrapper] = {}
        self._loaders: dict[str, LoaderFactory] = {}

    def run_around(self, module_name: str, wrapper: Wrapper) -> None:
        """Run the body of `module_name` inside `wrapper(module)`, a context manager, when it is
        imported."""
        self._wrappers[module_name] = wrapper
        self._attach()

    def load_with(self, package: str, loader: LoaderFactory) -> None:
        """Load the source modules of `package`, itself included, with `loader(module_name,
        path)`."""
        self._loaders[package] = loader
        self._attach()

    def has_loader(self, package: str) -> bool:
        """Whether `load_with` was called for this package."""
        return package in self._loaders

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        wrapper, loader = self._wrappers.get(fullname), self._loader_of(fullname)
        if wrapper is None and loader is None:
            return None
        spec = self._ask_others(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        if loader is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = loader(spec.loader.name, spec.loader.path)
        if wrapper is not None:
            _wrap_execution(spec.loader, wrapper)
        return spec

    def _attach(self) -> None:
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def _loader_of(self, fullname: str) -> LoaderFactory | None:
        for package, loader in self._loaders.items():
            if fullname == package or fullname.startswith(f"{package}."):
                return loader
        return None

    def _ask_others(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        # Not only PathFinder: editable installs have finders of their own.
        for other in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            find_spec = getattr(other, "find_spec", None)
            spec = find_spec(fullname, path, target) if find_spec else None
            if spec is not None:
                return spec
        return None


def _wrap_execution(loader: Loader, wrapper: Wrapper) -> None:
    # Set on the loader instance, made for this one import: its class, and with it inspect.getsource
    # and pkgutil.get_data, stay as they are.
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        with wrapper(module):
            execute(module)

    loader.exec_module = exec_module  # type: ignore[method-assign]  # of this one instance, see above


patch_finder = PatchFinder()


def change_on_cpu(changes: Mapping[str, Callable[[Any], None]]) -> None:
    """Changes modules of vLLM on a CPU after their import. Also in a process that has imported
    them: one of several workers of an engine is spawned by vLLM, and gets here when it imports
    `rollout.worker_extension`."""
    for name, change in changes.items():
        if (module := sys.modules.get(name)) is not None:
            change_once(change, module)
        else:
            patch_finder.run_around(name, partial(_changing, change))


@contextmanager
def _changing(change: Callable[[Any], None], module: ModuleType) -> Iterator[None]:
    yield
    change_once(change, module)


def change_once(change: Callable[[Any], None], module: Any) -> None:
    """On a CPU. A worker's extension may be imported under two names, and a patch with it."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and not hasattr(module, MARK):
        setattr(module, MARK, True)
        change(module)
