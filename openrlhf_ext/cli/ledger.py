"""``openrlhf-ext ledger RUN_DIR``: whether every prompt of a run was trained exactly once
(docs/checkpoints.md).

The run may still be in progress. Exit status: 0 = every prompt drawn is trained once, is waiting,
or has a recorded reason why it is not; 1 = prompts are lost, duplicated or unknown; 2 = there is no
ledger, or it is damaged.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from openrlhf_ext.cli.main import CommandParser, show
from openrlhf_ext.inputs import InputError
from openrlhf_ext.run.ledger import LEDGER, Audit

_SHOWN = 100


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser("ledger", __doc__.split("\n")[0])
    parser.add_argument(
        "folder", type=Path, metavar="RUN_DIR", help="folder of a run's metrics.jsonl"
    )
    path = parser.parse_args(argv).folder / LEDGER
    none = (
        f"{path} is not a file; RUN_DIR is the folder of a run; supervised runs and runs of "
        "earlier releases have none"
    )
    try:
        if not path.is_file():  # to open a named pipe waits for ever
            raise InputError(none)
        audit = Audit(path)
    except InputError as error:
        show(f"ledger: {error}", file=sys.stderr)
        return 2
    more = [f"and {len(audit.faults) - _SHOWN} more"] if len(audit.faults) > _SHOWN else []
    show("\n".join([*audit.lines, *audit.faults[:_SHOWN], *more]))
    return 1 if audit.faults else 0


if __name__ == "__main__":
    sys.exit(main())
