"""``python benchmarks/input_tables.py`` writes the generated tables of docs/algorithms.md to
standard output."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import markdown_table
from openrlhf_ext.algorithms import Inputs, LossBatch, RolloutBatch
from openrlhf_ext.algorithms.groups import Groups, Partition
from openrlhf_ext.algorithms.segments import Segments

_HOLDERS = {
    "inputs": Inputs,
    "inputs.batch": RolloutBatch,
    "inputs.groups": Groups,
    "inputs.part": Partition,
    "inputs.segments": Segments,
    "shaped": LossBatch,
}
_SHAPE = re.compile(r"(\([BNQ](?: \+ 1)?,\))[ ,]*")
_DTYPE = re.compile(r"(bool|integer|int64|float64|floating point)\b(?: scalars)?[ ,:.]*")


def tables() -> Iterator[str]:
    """One table for each holder: what its docstring lists under ``Attributes:``, and its
    properties."""
    for name, holder in _HOLDERS.items():
        rows = [(f"`{attribute}`", *_split(text)) for attribute, text in attributes(holder)]
        table = markdown_table(["name", "shape", "dtype", "meaning"], rows)
        yield f"\n`{name}`, a `{holder.__name__}`:\n\n{table}\n"


def attributes(holder: type) -> Iterator[tuple[str, str]]:
    """Names and texts."""
    _, _, listed = (inspect.getdoc(holder) or "").partition("Attributes:\n")
    # lines that continue a text have no deeper indentation than its name
    for name, text in re.findall(r"^    (\w+): (.*(?:\n    (?!\w+: ).*)*)", listed, re.MULTILINE):
        yield name, " ".join(text.split())
    for name, member in vars(holder).items():
        if isinstance(member, property) and not name.startswith("_"):
            yield name, " ".join((inspect.getdoc(member) or "").partition("\n\n")[0].split())


def _split(text: str) -> tuple[str, str, str]:
    shape = _SHAPE.match(text)
    rest = text[shape.end() :] if shape else text
    dtype = _DTYPE.match(rest)
    meaning = rest[dtype.end() :] if dtype else rest
    return shape[1] if shape else "", dtype[1] if dtype else "", meaning


if __name__ == "__main__":
    sys.stdout.write("".join(tables()))
