"""docs/troubleshooting.md quotes messages; each quoted text is in the source."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
QUOTED = re.findall(r"^### `(.+)`$", PAGE, flags=re.MULTILINE)
OF_OTHERS = {"CUDA out of memory"}  # torch's own


def texts() -> list[str]:
    """Every text that the package may say, no docstring or help, implicit concatenations as one;
    the scripts' lines."""
    found = []
    for path in (ROOT / "openrlhf_ext").rglob("*.py"):
        tree = ast.parse(path.read_text())
        about = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ]
        about += [
            n
            for n in ast.walk(tree)
            if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "option"
        ]
        unsaid = {part for node in about for part in ast.walk(node)}
        for node in ast.walk(tree):
            if node in unsaid:
                continue
            if isinstance(node, ast.JoinedStr):
                parts = (
                    str(part.value) if isinstance(part, ast.Constant) else "…"
                    for part in node.values
                )
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found + [script.read_text() for script in (ROOT / "examples/scripts").glob("*.sh")]


@pytest.fixture(scope="module")
def source() -> list[str]:
    return texts()


def test_the_page_quotes_messages():
    assert len(QUOTED) == PAGE.count("\n### ") >= 30


@pytest.mark.parametrize("quoted", sorted(set(QUOTED) - OF_OTHERS))
def test_a_quoted_message_is_in_the_source(source, quoted):
    pieces = [re.escape(piece.strip()) for piece in quoted.split("…") if piece.strip()]
    pattern = re.compile(r".*?…?.*?".join(pieces).replace(r"\ ", " "), re.DOTALL)
    assert any(pattern.search(text) for text in source), quoted
