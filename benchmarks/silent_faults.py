"""What notices silent faults, and how often clean runs raise an alarm.

    python benchmarks/silent_faults.py FOLDER --toy FOLDER [--clean 120] [--only NAME,...]

Writes a line for every trial into FOLDER/<lab>.jsonl, and goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import ray

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.silent import faults, lab  # noqa: E402
from openrlhf_ext.run.corridor import is_banded  # noqa: E402

TRUSTED = 20


def trials(name: str, clean: int, repeats: int) -> Iterator[tuple[str, int, lab.Fault | None]]:
    """Names, seeds, and faults of the trials of a lab: no two trials have a seed in common."""
    for seed in range(TRUSTED):
        yield "", 1000 + seed, None
    for number, fault in enumerate(faults.FAULTS):
        if fault.lab == name:
            for repeat in range(repeats):
                yield fault.name, 5000 + 10 * number + repeat, fault
    for seed in range(TRUSTED, TRUSTED + clean):
        yield "", 1000 + seed, None


def run(name: str, folder: Path, toy: Path, clean: int, repeats: int, only: set[str]) -> None:
    path = folder / f"{name}.jsonl"
    rows = map(json.loads, path.read_text().splitlines() if path.exists() else ())
    done = {(row["fault"], row["seed"]) for row in rows}
    wanted = [t for t in trials(name, clean, repeats) if t[:2] not in done and (not only or not t[0] or t[0] in only)]
    if not wanted:
        return
    with lab.Lab(name, folder / name, toy).opened() as opened, path.open("a") as out:
        for fault_name, seed, fault in wanted:
            outcome = opened.trial(seed, fault)
            row = {"fault": fault_name, **asdict(outcome)}
            row["records"] = [{n: v for n, v in r.items() if n == "step" or is_banded(n)} for r in outcome.records]
            out.write(json.dumps(row) + "\n")
            out.flush()
            logging.getLogger(__name__).warning("%s %d: %s", fault_name or "clean", seed, outcome.error or "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--toy", type=Path, required=True, help="what examples/python/toy_policy.py has made")
    parser.add_argument("--clean", type=int, default=100, help="runs beside the trusted ones (default: 100)")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--labs", default="full,lora")
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    ray.cloudpickle.register_pickle_by_value(lab)
    ray.cloudpickle.register_pickle_by_value(faults)
    for name in asked.labs.split(","):
        run(name, asked.folder, asked.toy, asked.clean, asked.repeats, set(filter(None, asked.only.split(","))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
