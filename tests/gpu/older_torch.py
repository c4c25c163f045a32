"""What torch 2.11 lacks of what our code, written for 2.13, asks for: a machine lent for the checks
may have it.

``adapt`` changes the process that calls it. In a whole bundle this file is
``site/sitecustomize.py`` too, which every process imports as it starts: there the changes are made
when torch's modules are imported, also in Ray's workers, and processes without torch stay without.
Standard library only.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import inspect
import sys
from typing import Any


def adapt() -> None:
    """``varlen_attn`` takes ``enable_gqa`` too, and an NCCL transfer can be asked for its error."""
    for name, change in _CHANGES.items():
        change(importlib.import_module(name))


def _grouped_queries(varlen: Any) -> None:
    """In 2.11 ``varlen_attn`` has no such argument (torch/nn/attention/varlen.py:159) and hands
    fewer key-value heads on to the flash kernels, which take them; in 2.13 the argument only lets
    them pass (varlen.py:295)."""
    given = varlen.varlen_attn
    if "enable_gqa" in inspect.signature(given).parameters:
        return

    def varlen_attn(*args: Any, enable_gqa: bool = False, **named: Any) -> Any:
        return given(*args, **named)

    varlen.varlen_attn = varlen_attn


def _error_of_a_transfer(c10d: Any) -> None:
    """In 2.11 ``Work.exception`` raises TypeError, whatever there is to say (seen on an H200); in
    2.13 it answers. A check with a lost peer would need that answer, and two GPUs."""
    import torch

    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13):
        c10d.Work.exception = lambda work: None


_CHANGES = {
    "torch.nn.attention.varlen": _grouped_queries,
    "torch.distributed.distributed_c10d": _error_of_a_transfer,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the others find these modules, and changes each once it is there."""

    def __init__(self) -> None:
        self._changes = dict(_CHANGES)

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in self._changes:
            return None
        change = self._changes.pop(name)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None, name
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, _Finder())
