"""Tables of docs/algorithms.md and docs/methods.md from the record of `benchmarks/algorithms.py`.

python benchmarks/record.py --pages                # section "Speed" of docs/methods.md
python benchmarks/algorithm_tables.py              # column "cost" of docs/algorithms.md
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record

OVERVIEW = record.ROOT / "docs/algorithms.md"
OVERVIEW_ROW = re.compile(
    r"^(\| \[`(\w+)`\]\(methods\.md#\2\) \|(?:[^|]*\|){4} )([^|]*)( \|[^|]*\|)$", re.MULTILINE
)
"""A row of the overview: method, unit, change, needs, when, cost, source."""


def parts() -> dict[str, Any]:
    return record.load("algorithms.json")["parts"]


def shape_tokens() -> int:
    """Tokens of the batch that the part `shape` ran on."""
    settings = record.load("algorithms.json")["settings"]
    return settings["prompts"] * settings["size"] * settings["positions"]


def speed() -> str:
    """docs/methods.md: `shape` and `loss` of every method, and `prepare`."""
    found = record.load("algorithms.json")
    millions = parts()["loss"]["_tokens"] / 1e6
    about = (
        f"`shape` ran on {shape_tokens() / 1e6:.1f} million tokens in float32, `loss` with backward "
        f"on {millions:.1f} million tokens beside plain clipped PPO on the same tensors "
        f"({found['device']}, wall clock, {found['threads']} threads). The record has seconds and "
        "memory."
    )
    prepared = [
        f"`{name}` {entry['prepare_seconds']['min']:.2f} s"
        for name, entry in parts()["loss"].items()
        if isinstance(entry, dict) and "prepare_seconds" in entry
    ]
    ends = (
        f"`prepare` of those {millions:.1f} million tokens, besides the forward pass it needs: "
        f"{', '.join(prepared)}."
    )
    return "\n\n".join([record.wrapped(about), record.wrapped(ends)])


TEXTS = {"speed": speed}


def overview_cost(name: str) -> str:
    """Cell of the overview: `shape` per token, and `loss` against plain PPO."""
    shape, loss = parts()["shape"].get(name), parts()["loss"].get(name)
    if shape is None or loss is None:
        return "-"
    return f"{shape['seconds']['min'] / shape_tokens() * 1e9:.0f} ns, {loss['ratio']:.1f}x"


def updated(document: str) -> str:
    """The overview with the costs of the record."""
    if not OVERVIEW_ROW.search(document):
        raise ValueError("the document has no overview of the methods")
    return OVERVIEW_ROW.sub(lambda row: row[1] + overview_cost(row[2]) + row[4], document)


def main() -> None:
    OVERVIEW.write_text(updated(OVERVIEW.read_text()))


if __name__ == "__main__":
    main()
