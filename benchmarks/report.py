"""Size of the page about three runs of 2,000 steps, and how long Chromium takes to load it.

python benchmarks/report.py --output benchmarks/results/report_cpu.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from openrlhf_ext.cli.report import main as report
from openrlhf_ext.reporting import METRICS
from tests.tools.report.browser import CHROMIUM, Browser
from tests.tools.report.runs import make_run

RUNS, STEPS, RANKS, LOADS = 3, 2000, 64, 5
# two frames after everything in the window has been drawn
LOADED = """new Promise(r => requestAnimationFrame(() => requestAnimationFrame(
    () => r(document.querySelectorAll('path').length))))"""


def measure() -> dict[str, object]:
    """Seconds and bytes of one page with every documented metric."""
    own = {"step", "time", "nonfinite", "label"}
    names = [
        metric.name
        for metric in METRICS
        if not metric.name.endswith("/*") and metric.name not in own
    ]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        runs = [
            make_run(
                root / f"run{seed}",
                STEPS,
                seed=seed,
                ranks=RANKS,
                names=names,
                options={"train.seed": seed},
            )
            for seed in range(RUNS)
        ]
        page, started = root / "report.html", time.perf_counter()
        assert report([*map(str, runs), "--output", str(page)]) == 0
        made, loads = time.perf_counter() - started, []
        with Browser(root / "profile") as browser:
            for _ in range(LOADS):
                started = time.perf_counter()
                browser.open(page, 1366)
                assert browser.value(LOADED) >= 2 * RUNS
                loads.append(time.perf_counter() - started)
        return {
            "runs": RUNS,
            "steps": STEPS,
            "metrics": len(names),
            "ranks": RANKS,
            "bytes": page.stat().st_size,
            "seconds_to_make": round(made, 2),
            "seconds_to_load": {
                "median": round(statistics.median(loads), 2),
                "most": round(max(loads), 2),
                "loads": LOADS,
            },
        }


def main() -> None:
    """Measures and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/report_cpu.json"))
    arguments = parser.parse_args()
    browser = subprocess.run(
        [str(CHROMIUM), "--version"], capture_output=True, text=True, check=True
    ).stdout.strip()
    found = {
        "what": "openrlhf_ext.cli.report of made-up runs, every documented metric in every step; "
        "loaded in Chromium",
        **record.environment(),
        "browser": browser,
        "page": measure(),
    }
    record.write(arguments.output, found)
    print(json.dumps(found["page"], indent=2))


if __name__ == "__main__":
    main()
