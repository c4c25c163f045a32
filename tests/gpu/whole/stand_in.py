"""Stands in for a package that vLLM imports as it starts and that a training run never calls
(tests/gpu/bundle.py:
STAND_INS): site/NAME/__init__.py of a whole bundle.

Every name of it, and of any module in it, is a class without content. What uses an object of one
learns that there is only this.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any


class _Any(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _Nothing(metaclass=_Any):
    def __init__(self, *args: Any, **named: Any) -> None:
        pass

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: Any) -> Any:
        """As a field of a model of vLLM's server, which `from vllm import LLM` imports."""
        from pydantic_core import core_schema

        return core_schema.any_schema()

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(f"{name} of {_NAME}, for which this bundle has only a stand-in")


class _Module(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        return (
            importlib.machinery.ModuleSpec(name, self, is_package=True)
            if name.startswith(_NAME + ".")
            else None
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


_NAME = __name__
sys.modules[_NAME].__class__ = _Module
sys.meta_path.append(_Finder())
