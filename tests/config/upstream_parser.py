"""OpenRLHF's command-line parser: it lives in the main block of a module that imports Ray and
vLLM."""

from __future__ import annotations

import argparse
import ast
import importlib.util
from datetime import datetime
from importlib.metadata import distribution
from pathlib import Path


def upstream_parser(command: str = "train_ppo_ray") -> argparse.ArgumentParser:
    """Runs the statements of the main block up to the parsing, and nothing else of the module."""
    assert importlib.util.find_spec("openrlhf") is not None
    path = Path(str(distribution("openrlhf").locate_file(f"openrlhf/cli/{command}.py")))
    main = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.If)][-1]
    statements = []
    for node in main.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "args":
            break
        statements.append(node)
    names: dict = {"argparse": argparse, "datetime": datetime}
    exec(compile(ast.Module(body=statements, type_ignores=[]), str(path), "exec"), names)
    return names["parser"]
