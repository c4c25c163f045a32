"""``openrlhf-ext explain``: see what a method does to the tokens of a group of completions.

    openrlhf-ext explain --algorithm gtpo_entropy --rollouts examples/data/explain_rollouts.jsonl
    openrlhf-ext explain --algorithm gtpo_conflict --rollouts FILE --group 2
    openrlhf-ext explain --algorithm dapo --rollouts RUN/samples.jsonl --step 40

The whole file is shaped as one batch, as in training; one group of it is shown. Options without a
default take their published values. Exit status: 0; 2 if the input is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openrlhf_ext.cli.main import CommandParser, show, silence_libraries
from openrlhf_ext.tools.explain.picture import render
from openrlhf_ext.tools.explain.rollouts import read_rollouts
from openrlhf_ext.user_code import users_part

_ABOUT_INPUT = (ValueError, OSError)


def main(argv: Sequence[str] | None = None) -> int:
    silence_libraries()
    arguments = _parser().parse_args(argv)
    try:
        rollouts = read_rollouts(Path(arguments.rollouts), arguments.step)
        from openrlhf_ext.algorithms.registry import algorithm_of_file  # these import torch
        from openrlhf_ext.tools.explain.quantities import explain

        if arguments.module_path:
            algorithm_of_file(arguments.module_path)
        explanation = explain(
            rollouts, arguments.algorithm, parse_options(arguments.option), arguments.group
        )
    except Exception as error:
        if not (
            (users := users_part("".join(traceback.format_exception(error))))
            or isinstance(error, _ABOUT_INPUT)
        ):
            raise
        show(f"explain: {users or error}", file=sys.stderr)
        return 2
    try:
        show(render(explanation), errors="replace")
    except BrokenPipeError:
        # head has seen enough; without this, the flush at exit would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("explain", __doc__.split("\n")[0])
    add = parser.add_argument
    add(
        "--algorithm",
        required=True,
        metavar="NAME",
        help="method, as in --algo.advantage.estimator",
    )
    add(
        "--module_path",
        metavar="FILE.py",
        help="file that registers your own method, which --algorithm names",
    )
    add(
        "--rollouts",
        required=True,
        metavar="FILE.jsonl",
        help="one completion per line; see docs/explain.md",
    )
    add(
        "--step",
        type=int,
        metavar="N",
        help="for a run's samples.jsonl: the step to show (default: the last of the file)",
    )
    add("--group", metavar="ID", help="the group to show (default: the first of the file)")
    add(
        "--option",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="options of the method",
    )
    return parser


def parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    """``["alpha1=1.0", "entropy_axis=row"]`` as a mapping; values are JSON, or text where they are
    not."""
    options: dict[str, Any] = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not (key and sign):
            raise ValueError(f"--option takes KEY=VALUE, got {pair!r}")
        if key in options:
            raise ValueError(f"--option {key} is given twice")
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = value
    return options


if __name__ == "__main__":
    sys.exit(main())
