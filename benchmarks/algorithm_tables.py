"""Tables of docs/algorithms.md and docs/methods.md from the records of `benchmarks/algorithms.py`.

    python benchmarks/algorithm_tables.py                                               # prints the
    section "Speed" python benchmarks/algorithm_tables.py --write docs/algorithms.md docs/methods.md
    python benchmarks/algorithm_tables.py --check docs/algorithms.md docs/methods.md

A part (`shape`, `loss`, `conflict`) is taken from the first record that has it. `--write` replaces
what stands between `<!-- speed -->` and `<!-- /speed -->`, and the column `cost` of the overview;
`--check` fails where they differ.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]

TOKEN_KINDS = {
    "text": "text with shared beginnings and ends",
    "small": "random ids of a vocabulary of 8",
    "shared": "every token in conflict",
    "distinct": "none in conflict",
}
SECTION = re.compile(r"(?<=<!-- speed -->\n).*?(?=<!-- /speed -->)", re.DOTALL)
OVERVIEW_ROW = re.compile(
    r"^(\| \[`(\w+)`\]\(methods\.md#\2\) \|(?:[^|]*\|){4} )([^|]*)( \|[^|]*\|)$", re.MULTILINE
)
"""A row of the overview: method, unit, change, needs, when, cost, source."""


class Records:
    """Parts of several records, by name; the first record that has a part provides it."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._records = [(path.name, json.loads(path.read_text())) for path in paths]

    def part(self, name: str) -> Record:
        return next(
            (record["parts"][name] for _, record in self._records if name in record["parts"]), {}
        )

    def conditions(self, name: str) -> str:
        """Clock, threads, processor and file of the record that provides a part."""
        for file, record in self._records:
            if name in record["parts"]:
                threads = "1 thread" if record["threads"] == 1 else f"{record['threads']} threads"
                clock = {"wall": "wall clock", "cpu": "processor time"}[record["clock"]]
                return f"{clock}, {threads}, {record['device']}, `{file}`"
        raise KeyError(name)

    def tokens(self, name: str) -> int:
        """Tokens of the batch that the parts `shape` and `loss` ran on."""
        if name == "loss":
            return self.part("loss")["_tokens"]
        settings = next(
            record["settings"] for _, record in self._records if name in record["parts"]
        )
        return settings["prompts"] * settings["size"] * settings["positions"]


def cost_line(records: Records) -> str:
    """What the overview's column `cost` was measured on."""
    return (
        f"`shape` ran on {records.tokens('shape') / 1e6:.1f} million tokens in float32 "
        f"({records.conditions('shape')}),\n`loss` with backward on "
        f"{records.tokens('loss') / 1e6:.1f} million tokens ({records.conditions('loss')}) "
        "beside plain clipped PPO\non the same tensors. The record has seconds and memory.\n"
    )


def prepare_line(records: Records) -> str:
    loss = records.part("loss")
    took = [
        f"`{name}` {entry['prepare_seconds']['min']:.2f} s"
        for name, entry in loss.items()
        if isinstance(entry, dict) and "prepare_seconds" in entry
    ]
    tokens = records.tokens("loss") / 1e6
    return (
        f"`prepare` of those {tokens:.1f} million tokens, besides the forward pass it needs: "
        f"{', '.join(took)}.\n"
    )


def conflict_line(records: Records) -> str:
    speedups = [
        f"{records.part('conflict')[kind]['speedup']:.0f}x ({words})"
        for kind, words in TOKEN_KINDS.items()
    ]
    return (
        "Conflict masks at 8 x 16 x 1,024 against the textbook triple loop "
        f"({records.conditions('conflict')}):\n" + ", ".join(speedups) + ".\n"
    )


def speed_section(records: Records) -> str:
    parts = (cost_line, prepare_line, conflict_line)
    return "\n".join(part(records) for part in parts)


def overview_cost(records: Records, name: str) -> str:
    """Cell of the overview: `shape` per token, and `loss` against plain PPO."""
    shape, loss = records.part("shape").get(name), records.part("loss").get(name)
    if shape is None or loss is None:
        return "-"
    return f"{shape['seconds']['min'] / records.tokens('shape') * 1e9:.0f} ns, {loss['ratio']:.1f}x"


def updated(document: str, records: Records) -> str:
    """The document with the numbers of the records."""
    if not SECTION.search(document) and not OVERVIEW_ROW.search(document):
        raise ValueError("the document has neither a <!-- speed --> section nor the overview")
    document = SECTION.sub(lambda _: speed_section(records), document)
    return OVERVIEW_ROW.sub(lambda m: m[1] + overview_cost(records, m[2]) + m[4], document)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = sorted((Path(__file__).parent / "results").glob("algorithms*.json"))
    parser.add_argument(
        "records",
        nargs="*",
        type=Path,
        default=default,
        help="default: benchmarks/results/algorithms*",
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", type=Path, nargs="+", metavar="DOCUMENT", default=[])
    action.add_argument("--check", type=Path, nargs="+", metavar="DOCUMENT", default=[])
    args = parser.parse_args()
    records = Records(args.records)
    for path in args.write:
        path.write_text(updated(path.read_text(), records))
    old = [
        str(path) for path in args.check if updated(path.read_text(), records) != path.read_text()
    ]
    if old:
        sys.stderr.write(
            f"{', '.join(old)}: other numbers than the records have; run this with --write\n"
        )
        return 1
    if not args.write and not args.check:
        sys.stdout.write(speed_section(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
