"""Methods on several seeds, with intervals and verdicts.

    bash examples/scripts/study.sh configs/studies/smoke.yaml
    bash examples/scripts/study.sh configs/studies/claims.yaml --plan
    bash examples/scripts/study.sh configs/studies/claims.yaml --only dapo gtpo_entropy --workers 4

The same command goes on where it was ended, killed or not; runs that failed are tried again.
Results in runs/studies/NAME: runs.jsonl (a line for each run), cells.csv, table.md, figures,
study.html. docs/science.md says more. Exit status: 0; 1 if a run failed; 2 if the study is wrong;
130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.study.runs import Places, Rows, Run, execute, finished, missing, read_rows, runs_of
from benchmarks.study.settings import StudyError, only, read_study
from openrlhf_ext import patches
from openrlhf_ext.cli.main import CommandParser, silence_libraries
from openrlhf_ext.groups.processes import die_with
from openrlhf_ext.imports import without_collection
from openrlhf_ext.outputs import in_one_piece

_KINDS = {"local": "training", "stack": "stack", "probe": "probe"}
"""What a run is: the module that does it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    silence_libraries()
    arguments = _parser().parse_args(argv)
    if arguments.run:
        return _perform(arguments.run)
    try:
        return _study(arguments)
    except StudyError as error:
        for line in str(error).splitlines():
            print(f"study: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("study: interrupted; the same command goes on", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("study", __doc__.split("\n")[0])
    parser.prog = "bash examples/scripts/study.sh"
    add = parser.add_argument
    add(
        "study",
        nargs="?",
        type=Path,
        metavar="STUDY.yaml",
        help="what to compare: configs/studies has some",
    )
    add(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        help="runs at a time (default: the cores)",
    )
    add(
        "--device",
        default="cpu",
        choices=["cpu", "cuda"],
        help="of the models; several runs share a GPU",
    )
    add(
        "--only",
        nargs="+",
        default=[],
        metavar="CELL",
        help="these cells; the report has all that are there",
    )
    instead = parser.add_mutually_exclusive_group().add_argument
    instead(
        "--plan",
        action="store_true",
        help="time a short trial of every task; say how long the study takes and what it can see",
    )
    instead(
        "--probe",
        metavar="CELL",
        help="instead of runs: the angles between the gradients of all methods of its task and "
        "that of this cell",
    )
    instead(
        "--report",
        action="store_true",
        help="run nothing; write tables and figures of the rows that are there",
    )
    add("--out", type=Path, help="folder of rows and results (default: runs/studies/NAME)")
    add("--run", type=Path, help=argparse.SUPPRESS)
    return parser


def _study(arguments: argparse.Namespace) -> int:
    from benchmarks.study.plan import plan  # SciPy, which the processes of runs do without
    from benchmarks.study.report import write_report
    from benchmarks.study.verdicts import needed

    if arguments.study is None or arguments.workers < 1:
        raise StudyError(
            f"give a STUDY.yaml, and --workers of 1 or more; got {arguments.study} and "
            f"{arguments.workers}"
        )
    study = read_study(arguments.study)
    arms = only(study, arguments.only)
    name = arguments.study.stem
    places = Places((arguments.out or Path("runs") / "studies" / name).resolve())
    rows = Rows(places)
    try:
        if arguments.plan:
            _print(plan(study, arms, places, workers=arguments.workers, device=arguments.device))
            return 0
        if arguments.probe:
            from benchmarks.study.probe import probe  # needs transformers

            workers, device = arguments.workers, arguments.device
            _print(
                probe(
                    study,
                    arms,
                    arguments.probe,
                    places,
                    workers=workers,
                    device=device,
                    told=_print,
                )
            )
            return 0
        failed = 0
        tried: set[Run] = set()
        while not arguments.report:
            done = finished(study, runs_of(study, study.arms), read_rows(places))
            runs = needed(study, runs_of(study, arms), list(done.values()))
            left = [run for run in missing(study, runs, done) if run not in tried]
            there = sum(run in done and "error" not in done[run] for run in runs)
            if tried and not left:
                break
            _print(f"{there} of {len(runs)} runs are there; {len(left)} to go in {places.folder}")
            failed += execute(
                study,
                left,
                places,
                rows,
                workers=arguments.workers,
                device=arguments.device,
                told=_print,
            )
            tried.update(runs)  # when the best learning rates are known, there are further ones
    finally:
        rows.close()
    everything = runs_of(study, study.arms)
    counted = list(finished(study, everything, read_rows(places)).values())
    planned = needed(study, everything, counted)
    files = write_report(study, name, counted, len(planned), places.folder)
    _print((places.folder / "table.md").read_text())
    _print(*files)
    return 1 if failed else 0


def _perform(path: Path) -> int:
    """What the process of one run does."""
    given = json.loads(path.read_text())
    die_with(given["parent"])
    patches.apply()
    with without_collection():
        module = importlib.import_module(f"benchmarks.study.{_KINDS[given['kind']]}")
    result = module.run_assignment(given)
    result["weights"] = _digest(Path(given["policy"]))
    with in_one_piece(Path(given["result"])) as partial:
        partial.write_text(json.dumps(result))
    return 0


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _print(*lines: Any) -> None:
    print(*lines, sep="\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
