"""Runs the cells of a study, each in a process of its own, and keeps what they measured.

    bash examples/scripts/fp8_study.sh [--bundle DIR] [--minutes N] [--out DIR] [--render]
    [STUDY.yaml]

In the folder of --out: study.json, written after every cell, and study.md. The same command goes on
where the last one ended: cells that passed or need another machine stay, cells for which there was
no time come next, cells that failed come last. --render makes study.md again from study.json, on
any machine. Exit code 0: every cell passed or was skipped with its reason; 1: a cell failed, or
none passed; 2: time was up, and the same command goes on.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.fp8_study import runs
from benchmarks.fp8_study.cells import BF16, BUILD, Cell, cells_of
from benchmarks.fp8_study.report import write_report
from benchmarks.fp8_study.settings import RECIPES, SettingsError, read_study
from openrlhf_ext import patches
from openrlhf_ext.imports import without_collection
from openrlhf_ext.megatron.model.flops import peak_tflops
from tests.gpu import older_torch, te_build
from tests.gpu.kit import Machine
from tests.gpu.run import (
    LEAST_S,
    ROOT,
    TIME_WAS_UP,
    commit,
    ended_politely,
    finding,
    hardware,
    settle,
    supervised,
    versions,
    write,
)

JSON = "study.json"
_ABSENT = "not installed here"
_NEEDS = {
    "layers": ("megatron", "pydantic"),
    "engine": ("vllm", "transformers"),
    "mismatch": ("transformers",),
    "run": ("ray", "vllm", "openrlhf", "transformers"),
}
_NOT_YET = {"status": "not run", "error": "not run yet"}


# ---- one cell, in its own process


def measure(name: str, study: dict[str, Any], machine: Machine) -> dict[str, Any]:
    """What a cell measures."""
    cell = Cell.named(name)
    if cell.kind == BUILD:
        return te_build.build(machine)
    te_build.use(machine.bundle)
    patches.apply()
    older_torch.adapt()
    return _measured(cell, study, machine)


def _measured(cell: Cell, study: dict[str, Any], machine: Machine) -> dict[str, Any]:
    """Imports here: the layers need Megatron, which a machine for the products may lack."""
    if cell.kind == "layers":
        with without_collection():
            from benchmarks.fp8_study import layers

        return layers.measure(machine, cell, study)
    if cell.kind == "linear":
        from benchmarks.fp8_study import linear

        return linear.measure(machine, RECIPES[cell.way], study["linear"])
    if cell.kind == "engine":
        with without_collection():
            from benchmarks.fp8_study import rollouts

        return rollouts.measure(machine, cell.way, study)
    if cell.kind == "mismatch":
        return runs.mismatch(machine, study)
    if cell.kind == "run":
        return runs.whole_step(machine, cell.way, study)
    from benchmarks.fp8_study import products

    return products.recipes(machine, RECIPES[cell.way], study["products"])


def _machine(bundle: Path | None, seconds: float) -> Machine:
    on_gpu = torch.cuda.is_available()
    return Machine(torch.device("cuda", 0) if on_gpu else torch.device("cpu"), bundle, seconds)


# ---- the study


def run(study: dict[str, Any], out: Path, bundle: Path | None, minutes: float) -> int:
    """Runs what is not done yet, and says how it went. Returns the exit code."""
    on_gpu = torch.cuda.is_available()
    cells = cells_of(study, build=on_gpu and bundle is not None)
    head = _head(study, on_gpu)
    _require_peak(study, head["hardware"]["gpus"])
    report = _kept(out / JSON, head, cells)
    write(out / JSON, report)
    deadline = time.monotonic() + 60 * minutes
    for cell in _in_order(cells, report["cells"], bundle):
        row = _run_cell(cell, study, out, bundle, deadline - time.monotonic())
        row = _require_active(cell, row, report["cells"])
        if row["status"] == "not run" and report["cells"][cell.name]["status"] == "failed":
            continue  # what is known of it is worth more than that there was no time to try again
        report["cells"][cell.name] = row
        write(out / JSON, report)
        print(
            f"{cell.name:34} {row['status']:8} {row.get('seconds', 0.0):6.1f} s  {finding(row)}",
            flush=True,
        )
    page = write_report(out, report)
    counts = Counter(row["status"] for row in report["cells"].values())
    said = ", ".join(
        f"{counts[status]} {status}" for status in ("passed", "failed", "skipped", "not run")
    )
    print(f"{said}; {out / JSON}, {page}", flush=True)
    if counts["not run"]:
        print("the same command goes on where this one ended", flush=True)
    if counts["failed"]:
        return 1
    return 2 if counts["not run"] else 0 if counts["passed"] else 1


def _head(study: dict[str, Any], on_gpu: bool) -> dict[str, Any]:
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "emulated": not on_gpu,
        "hardware": hardware(),
        "versions": versions(),
        "commit": commit(),
        "settings": study,
    }


def _require_peak(study: dict[str, Any], found: list[dict[str, str]]) -> None:
    """MFU must be a share of what this GPU can do.

    Raises:
        SettingsError: its data sheet says something else.
    """
    known = peak_tflops(found[0].get("name", "")) if found else None
    asked = study["peak_bf16_tflops"]
    if known is not None and asked is not None and abs(asked / known - 1) > 0.01:
        raise SettingsError(
            f"peak_bf16_tflops must be that of this GPU, {found[0]['name']}: {known:g} by its "
            f"data sheet, got {asked:g}; give a STUDY.yaml with peak_bf16_tflops and "
            "peak_fp8_tflops, or null for no MFU"
        )


def _kept(file: Path, head: dict[str, Any], cells: Sequence[Cell]) -> dict[str, Any]:
    """The report of an earlier run of the same study, or a new one.

    Raises:
        SettingsError: the file has another study.
    """
    none: dict[str, Any] = {cell.name: _NOT_YET for cell in cells}
    if not file.exists():
        return {**head, "cells": none}
    earlier = json.loads(file.read_text())
    for what, mine, theirs in _identity(head, earlier):
        if mine != theirs:
            raise SettingsError(
                f"{file} was measured with {what} {theirs}, here it is {mine}: numbers of both "
                "do not belong into one study. Name another folder with --out, or remove this "
                "one"
            )
    return {**earlier, "cells": none | earlier["cells"]}


def _identity(head: dict[str, Any], earlier: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    def names(of: dict[str, Any]) -> Any:
        return [gpu.get("name") for gpu in of["hardware"]["gpus"]] or of["hardware"]["cpu"]

    pairs = [("commit", head["commit"]["commit"], earlier["commit"]["commit"])]
    pairs += [("hardware", names(head), names(earlier))]
    pairs += [("torch", head["versions"]["torch"], earlier["versions"]["torch"])]
    return pairs + [
        (f"setting {name} =", head["settings"][name], earlier["settings"].get(name))
        for name in head["settings"]
    ]


def _in_order(cells: Sequence[Cell], rows: dict[str, Any], bundle: Path | None) -> list[Cell]:
    """Those that are not done, failed ones last; TransformerEngine first, on every new machine."""
    installed = bundle is not None and (bundle / "te").is_dir()
    build = [cell for cell in cells if cell.kind == BUILD and not (installed and _done(rows, cell))]
    others = [cell for cell in cells if cell.kind != BUILD and not _done(rows, cell)]
    return build + sorted(others, key=lambda cell: rows[cell.name]["status"] == "failed")


def _done(rows: dict[str, Any], cell: Cell) -> bool:
    row = rows[cell.name]
    # what is not installed may be there the next time, and asking costs nothing
    return row["status"] == "passed" or (
        row["status"] == "skipped" and not row["error"].startswith(_ABSENT)
    )


def _run_cell(
    cell: Cell, study: dict[str, Any], out: Path, bundle: Path | None, left_s: float
) -> dict[str, Any]:
    if left_s < LEAST_S:
        return {"status": "not run", "seconds": 0.0, "error": TIME_WAS_UP}
    if missing := [
        package
        for package in _NEEDS.get(cell.kind, ())
        if importlib.util.find_spec(package) is None
    ]:
        # layers are what the study is about; the others say more where a run is possible
        status = "failed" if cell.kind == "layers" else "skipped"
        return {
            "status": status,
            "seconds": 0.0,
            "error": f"{_ABSENT}: {', '.join(missing)} (--bundle)",
        }
    allowed = cell.seconds(study)
    limit = min(allowed, left_s)
    command = [
        "benchmarks.fp8_study.run",
        "--cell",
        cell.name,
        "--seconds",
        str(limit),
        "--out",
        str(out),
    ]
    return supervised(
        [*command, *(["--bundle", str(bundle)] if bundle else [])],
        limit,
        allowed,
        environment=cell.environment,
    )


def _require_active(cell: Cell, row: dict[str, Any], rows: dict[str, Any]) -> dict[str, Any]:
    """FP8 layers that compute what BF16's do, to the last bit, are no FP8 layers."""
    plain = rows.get(cell.plain.name, {})
    if (
        cell.kind != "layers"
        or cell.way == BF16
        or row["status"] != "passed"
        or plain.get("status") != "passed"
    ):
        return row
    if row["measured"]["logprobs"] != plain["measured"]["logprobs"]:
        return row
    return row | {
        "status": "failed",
        "error": "log-probs are those of the layers without FP8: FP8 is not active",
    }


# ---- command line


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    out = args.out.resolve()
    bundle = args.bundle.resolve() if args.bundle else None
    if args.cell:
        study = json.loads((out / JSON).read_text())["settings"]
        settle(lambda: measure(args.cell, study, _machine(bundle, args.seconds)), args.result)
    if bundle is not None and not bundle.is_dir():
        raise SettingsError(
            f"--bundle must be a folder that bash tests/gpu/bundle.sh made, got {bundle}"
        )
    if args.render:
        if not (out / JSON).exists():
            raise SettingsError(
                f"--render needs {out / JSON}, which a study without --render writes"
            )
        print(write_report(out, json.loads((out / JSON).read_text())))
        return 0
    if not args.minutes > 0:
        raise SettingsError(f"--minutes must be above 0, got {args.minutes:g}")
    study = read_study(args.study, on_gpu=torch.cuda.is_available())
    # what a process with a GPU would dump is large
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with ended_politely():
        return run(study, out, bundle, args.minutes)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bash examples/scripts/fp8_study.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "study",
        nargs="?",
        type=Path,
        help="options over those of benchmarks/fp8_study/{gpu,cpu}.yaml",
    )
    parser.add_argument("--bundle", type=Path, help="folder that tests/gpu/bundle.sh made")
    parser.add_argument("--minutes", type=float, default=60.0, help="for this run")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "fp8_study")
    parser.add_argument(
        "--render", action="store_true", help="measure nothing: study.md from study.json"
    )
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SettingsError as problem:
        sys.exit(f"fp8_study: {problem}")
