"""``openrlhf-ext ledger RUN_DIR``: whether every prompt of a run was trained exactly once (docs/checkpoints.md).

The run may still go on. Exit status: 0 = every prompt drawn is trained once, waits, or is named with the reason why it
is not; 1 = prompts are lost, doubled or unknown; 2 = there is no ledger, or it is damaged.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from openrlhf_ext.cli.main import CommandParser
from openrlhf_ext.inputs import InputError
from openrlhf_ext.run.ledger import LEDGER, Audit


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser("ledger", __doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, metavar="RUN_DIR", help="folder of a run's metrics.jsonl")
    try:
        audit = Audit(parser.parse_args(argv).folder / LEDGER)
    except InputError as error:
        print(f"ledger: {error}; supervised runs and runs of earlier releases have none", file=sys.stderr)
        return 2
    print("\n".join([*audit.lines, *audit.faults]))
    return 1 if audit.faults else 0


if __name__ == "__main__":
    sys.exit(main())
