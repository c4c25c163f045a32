"""``openrlhf-ext report RUN_DIR ...``: one HTML page about one or more runs (docs/report.md).

    openrlhf-ext report runs/quickstart
    openrlhf-ext report runs/grpo runs/dapo --output compared.html --smooth 50

A run's folder is that of ``logger.metrics_path``. It may still be running. Exit status: 0; 2 if a
folder is not that of a run, or the page cannot be written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from openrlhf_ext.cli.main import CommandParser, positive, show, silence_libraries
from openrlhf_ext.outputs import write_text
from openrlhf_ext.run.corridor import make_corridor, written
from openrlhf_ext.tools.report.page import read_runs, write_page


def main(argv: Sequence[str] | None = None) -> int:
    silence_libraries()
    arguments = _parser().parse_args(argv)
    folders = [Path(folder) for folder in arguments.folders]
    output = Path(arguments.output) if arguments.output else folders[0] / "report.html"
    try:
        if arguments.write_corridor and not arguments.write_corridor.endswith(".json"):
            raise ValueError(
                f"--write_corridor {arguments.write_corridor}: the name must end in .json"
            )
        runs = read_runs(folders)
        write_text(output, write_page(runs, arguments.smooth))
        if arguments.write_corridor:
            write_text(Path(arguments.write_corridor), written(make_corridor(folders)))
    except (ValueError, OSError) as error:
        show(f"report: {error}", file=sys.stderr)
        return 2
    for run in runs:
        for sentence in run.missing:
            show(f"report: {run.name}: {sentence}", file=sys.stderr)
    show(f"report: {output} ({output.stat().st_size / 2**20:.1f} MiB)")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("report", __doc__.split("\n")[0])
    add = parser.add_argument
    add(
        "folders",
        nargs="+",
        metavar="RUN_DIR",
        help="folder of a run's metrics.jsonl; several are drawn together",
    )
    add("--output", metavar="FILE.html", help="the page (default: report.html in the first folder)")
    about = (
        "also write the corridor of these runs, which are trusted: bands for train.corridor "
        "(docs/faults.md)"
    )
    add("--write_corridor", metavar="FILE.json", help=about)
    about = "steps of the moving mean (default: a twentieth of the run); 1 = none"
    add("--smooth", type=positive, metavar="N", help=about)
    return parser


if __name__ == "__main__":
    sys.exit(main())
