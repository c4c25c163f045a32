"""Exact mode on a CPU: log-probs whose bits differ, CPU seconds, and steps of whole runs.

    python benchmarks/exact.py --model toy=FOLDER smollm2=FOLDER
    python benchmarks/exact.py --model toy=FOLDER --parts cost      # only that, again

``bits``: an engine samples unseeded requests, of which a third begin with the same tokens, with each
of ENGINES at each of TEMPERATURES, and the policy computes their log-probs with each of PACKINGS;
for comparison both sides plain, with the first ones. ``tp``: the toy on two ranks, and an engine of
two workers. ``cost``: CPU seconds of both ways, the best of REPEATS in turns. ``steps``: the recipe
of benchmarks/curves.py with this name in RECIPES, which brings its model, both ways in turns. Each
result has its own commit and machine in the record.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import curves, record
from benchmarks.harness import markdown_table, seconds_in_turns
from openrlhf_ext.groups.processes import die_with
from openrlhf_ext.reporting import read_metrics
from tests.exact import sides

RESULT = record.RESULTS / "exact_cpu.json"
WAYS = ("plain", "exact")
ALL = {"max_num_seqs": 120, "max_num_batched_tokens": 4096, "enable_prefix_caching": False}
CHUNKS = {"max_num_seqs": 8, "max_num_batched_tokens": 48, "enable_prefix_caching": True}
ENGINES = (  # of unlike seeds, so that each samples other tokens
    ALL | {"seed": 0},
    ALL | {"seed": 1, "max_num_seqs": 1},
    ALL | {"seed": 2, "enable_prefix_caching": True},
    CHUNKS | {"seed": 3},
)
PACKINGS = ({"rows": 4}, {"rows": 1}, {"rows": 4, "share": False}, {"rows": 4, "tokens": 4096})
REPEATS, PROCESS_S = 3, 7200.0
TIMES = ("generate", "logprob", "train", "sync", "step")
RECIPES = {"toy": "quickstart", "smollm2": "real_model"}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"train.max_staleness": 0},
    "exact": {
        "train.max_staleness": 0,
        "train.exact_rollout_enable": True,
    },
}


# --- processes of their own


def in_process(function: str, place: Path, given: dict[str, Any], ranks: int = 0) -> Any:
    """What a function of this file returned in a process, or on ranks that meet. Raises
    subprocess.CalledProcessError and TimeoutExpired."""
    from openrlhf_ext.rollout.launch import engine_env

    environment = os.environ | engine_env(
        use_gpu=False, model_path=given["model"], exact=given["exact"]
    )
    place.mkdir(parents=True, exist_ok=True)
    (place / "given.json").write_text(json.dumps(given))
    meeting = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *meeting * (ranks > 0), __file__, "--child", function, str(place)]
    subprocess.run(command, check=True, timeout=PROCESS_S, env=environment)
    return json.loads((place / "found.json").read_text())


def child(function: str, place: str) -> None:
    """The process of ``in_process``."""
    die_with(os.getppid())
    from openrlhf_ext import patches

    patches.apply()
    found = CHILDREN[function](json.loads(Path(place, "given.json").read_text()))
    if os.environ.get("RANK", "0") == "0":
        Path(place, "found.json").write_text(json.dumps(found))


def passes(given: dict[str, Any]) -> dict[str, list[float]]:
    """CPU seconds of passes over sampled rows, both ways, and of all products with weights."""
    from openrlhf_ext.sft.loss import Answers, SupervisedLoss

    (path,) = given["files"]
    sampled, works = json.loads(Path(path).read_text()), {}
    batch = sides.batch_of(sampled["prompts"], sampled["batches"][0][1])
    answers = Answers(batch.responses, batch.responses.tokens)
    for way in WAYS:
        policy = sides.policy_of(given, way == "exact", 4, tokens=2048)
        works[f"logprob {way}"] = partial(policy.logprobs, batch)
        works[f"train {way}"] = partial(
            policy.accumulate_gradients, batch, answers, SupervisedLoss()
        )
    works["products exact"] = partial(sides.make_products, policy)
    return seconds_in_turns(works, REPEATS, warm_up=1, clock=time.process_time)


CHILDREN = {"sample": sides.sample, "score": sides.score, "passes": passes}


# --- parts of the record


def bits(place: Path, given: dict[str, Any]) -> dict[str, Any]:
    """How log-probs differ, both sides exact and both plain; few checks of what is plain or
    tensor-parallel."""
    found = {}
    for way in WAYS:
        whole = way == "exact" and given["tp"] == 1
        engines, packings = (ENGINES, PACKINGS) if whole else (ENGINES[:1], PACKINGS[:1])
        given |= {"exact": way == "exact", "packings": packings, "files": []}
        for engine in engines:
            inside = place / f"{way}{len(given['files'])}"
            in_process("sample", inside, given | {"engine": engine})
            given["files"].append(str(inside / "found.json"))
        found[way] = in_process("score", place, given, given["tp"])
    return found


def cost(place: Path, given: dict[str, Any]) -> dict[str, Any]:
    """CPU seconds, the best of several."""
    seconds: dict[str, list[float]] = {f"sample {way}": [] for way in WAYS}
    given |= {"engine": ENGINES[0], "files": [str(place / "plain/found.json")]}
    for way in WAYS * REPEATS:
        found = in_process("sample", place / way, given | {"exact": way == "exact"})
        seconds[f"sample {way}"].append(found["cpu_s"])
    seconds |= in_process("passes", place, given | {"exact": True}, 1)
    return {name: min(values) for name, values in seconds.items()}


def steps(place: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Medians of the seconds of steps from the second on."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    recipe = curves.RECIPES[RECIPES[given["name"]]]
    models = {way: recipe.prepare(place / way) for way in WAYS}
    for seed in range(REPEATS):
        for way, lines in found.items():
            run = replace(recipe, options=recipe.options | OPTIONS[way])
            (folder,) = curves.runs(run, models[way], place / way, [seed])
            metrics = read_metrics(folder / "metrics.jsonl")
            lines += [line for line in metrics if "time/train" in line and line["step"] > 1]
    equal = {"bit_equal": min(line["rollout/bit_equal"] for line in found["exact"])}
    return equal | {
        f"{part} {way}": statistics.median(line[f"time/{part}"] for line in lines)
        for way, lines in found.items()
        for part in TIMES
    }


# --- the text


def bits_table() -> str:
    """docs/exact.md: how many log-probs differ."""
    rows = []
    for part, ranks in (("bits", 1), ("tp", 2)):
        for name, found in record.load(RESULT.name)[part].items():
            plain, exact = found["plain"][0], found["exact"]
            differ = sum(each["differ"] for each in exact)
            share = f"{plain['differ'] / plain['tokens']:.0%}"
            gaps = f"{plain['mean']:.2g}, {plain['largest']:.2g}"
            rows.append([name, ranks, f"{exact[0]['tokens']:,}", len(exact), differ, share, gaps])
    header = [
        "model",
        "ranks",
        "tokens",
        "packings",
        "differ",
        "plain: differ",
        "mean, largest gap",
    ]
    return markdown_table(header, rows)


def seconds_table(part: str, columns: tuple[str, ...]) -> str:
    """docs/exact.md: seconds, plain / exact."""
    rows = [
        [name, *(" / ".join(f"{found.get(f'{c} {w}', 0):.2f}" for w in WAYS) for c in columns)]
        for name, found in record.load(RESULT.name)[part].items()
    ]
    return markdown_table(["seconds, plain / exact", *columns], rows)


TEXTS = {
    "bits": bits_table,
    "cost": partial(seconds_table, "cost", ("sample", "logprob", "train")),
    "steps": partial(seconds_table, "steps", TIMES),
}
PARTS = {"bits": bits, "tp": bits, "cost": cost, "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", nargs="+", metavar="NAME=FOLDER")
    add("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    add("--tokens", type=int, default=20_000, help="sampled for each model and type")
    add("--work", type=Path, default=Path("runs/exact"))
    add("--child", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        return child(*asked.child)
    found = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for part in asked.parts:
        for name, model in (each.split("=") for each in asked.model):
            if name not in RECIPES and part in ("tp", "steps"):
                continue
            for kind in [""] if part == "steps" else sides.TYPES:
                place = asked.work.resolve() / f"{part}_{name}_{kind}"
                shutil.rmtree(place, ignore_errors=True)  # or earlier runs would be taken
                given = {
                    "name": name,
                    "model": model,
                    "type": kind,
                    "tp": 1 + (part == "tp"),
                    "tokens": asked.tokens // len(ENGINES) // len(sides.TEMPERATURES),
                }
                about = record.environment(*curves.PACKAGES)
                key = f"{name} {kind}".strip()
                found.setdefault(part, {})[key] = about | PARTS[part](place, given)
                record.write(RESULT, found, kept=True)


if __name__ == "__main__":
    main()
