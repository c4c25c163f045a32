"""An algorithm in a Python file of the user's own, outside of every package."""

from __future__ import annotations

import sys
import traceback
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from openrlhf_ext.algorithms.registry import algorithm_names


@cache
def algorithm_of_file(path: str) -> str:
    """Runs a Python file that registers one algorithm (`register_algorithm`); the name it has then.

    Its module is in `sys.modules`, under a name that other processes cannot import: what sends the algorithm to them
    sends the class by value.

    Raises:
        ValueError: the file cannot be run, or registers no algorithm or several.
    """
    before = set(algorithm_names())
    name = f"openrlhf_ext_own_{Path(path).stem}"
    spec = spec_from_file_location(name, path)
    sys.modules[name] = module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path} cannot be imported: {_place(error, path)}{type(error).__name__}: {error}") from error
    new = sorted(set(algorithm_names()) - before)
    if len(new) != 1:
        raise ValueError(f"{path} must register one algorithm with register_algorithm, got {', '.join(new) or 'none'}")
    return new[0]


def _place(error: BaseException, path: str) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f"line {lines[-1]}: " if lines else ""
