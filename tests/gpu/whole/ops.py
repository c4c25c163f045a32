"""Which of torch's custom ops vLLM's Python names, and which its libraries define. Needs
readelf."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection, Iterable
from pathlib import Path

Op = tuple[str, str]
"""Namespace and name: ``torch.ops.NAMESPACE.NAME``."""
_NAMED = re.compile(r"\btorch\s*\.\s*ops\s*\.\s*(\w+)\s*\.\s*(\w+)")
_TEXT = re.compile(r"(?m)^  \[ *[0-9a-f]+\]  (\w+(?:\(|$))")


def named(package: Path) -> dict[Op, list[str]]:
    """Each op that a module below the folder names, with all such modules."""
    found: dict[Op, list[str]] = {}
    for path in sorted(package.rglob("*.py")):
        for op in set(_NAMED.findall(path.read_text())):
            found.setdefault(op, []).append(str(path.relative_to(package)))
    return found


def defined(libraries: Iterable[Path], of: Collection[Op]) -> set[Op]:
    """Those ``of`` which a library has the namespace and the schema, ``name(Tensor a) -> ()``,
    among its texts."""
    found: set[Op] = set()
    for library in libraries:
        command = ["readelf", "--string-dump=.rodata", str(library)]
        dump = subprocess.run(
            command, check=True, capture_output=True, text=True, errors="replace", timeout=600
        ).stdout
        texts = set(_TEXT.findall(dump))
        found |= {(space, name) for space, name in of if space in texts and f"{name}(" in texts}
    return found
