"""What plan predicts beside what others published, and how long it takes to rank 64 GPUs.

    OMP_NUM_THREADS=2 python benchmarks/plan.py --output benchmarks/results/plan_cpu.json

* `published`: `published_steps.json` has seconds that others published for steps of dense models,
  and for parts of steps, each with its source and with what we assume because the source does not
  tell it. Of the rows, sorted by name, every third one is fitted: the constants FITTED of plan's
  model are chosen so that the mean of |log(predicted / published)| is least. The others judge.
  `--published` writes nothing and prints the table.
* `ranking`: CPU seconds of ranking the 32B recipe on 64 H100.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from benchmarks.harness import markdown_table
from openrlhf_ext.config import load_config
from openrlhf_ext.planning.search import Planner
from openrlhf_ext.planning.seconds import Assumptions

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
ROWS = Path(__file__).with_name("published_steps.json")
FITTED = {
    "traffic": (10.0, 1000.0),
    "launch_us": (100.0, 3000.0),
    "memory": (0.3, 0.95),
    "fixed_s": (1.0, 60.0),
}
"""Constants of plan's model that are fitted, and what they may be; the sequences of the rows are
too short to tell ``attention``, and what a sync of others takes is their way of sending, not the
port's rate."""
FORMER = Assumptions(products=0.6, traffic=0.0, launch_us=0.0, memory=0.6, fixed_s=10.0)
"""What plan assumed before anything was fitted."""
KINDS = ("step", "rollout", "logprobs", "train", "sync")


@dataclasses.dataclass(frozen=True)
class Published:
    """A run of somebody else, as plan's options say it.

    Attributes:
        row: of ROWS; ``seconds`` are those published, by kind.
        fitted: whether the constants saw it.
    """

    row: dict[str, Any]
    planner: Planner
    fitted: bool

    def predicted(self, assumed: Assumptions) -> dict[str, float]:
        """Seconds of plan's model for the kinds that are published."""
        planner = dataclasses.replace(self.planner, assumed=assumed)
        seconds = planner.timed()
        found = dataclasses.asdict(seconds) | {"step": seconds.step}
        found["logprobs"] /= max(1, planner.work.scored_by)  # published is one model's pass
        return {kind: found[kind] for kind in self.row["seconds"]}

    def ratios(self, assumed: Assumptions) -> dict[str, float]:
        predicted = self.predicted(assumed)
        return {kind: predicted[kind] / seconds for kind, seconds in self.row["seconds"].items()}


@contextmanager
def published_rows() -> Iterator[list[Published]]:
    """All rows, sorted by name; of those of dense models every third one, from the first on, is
    fitted, and no mixture. Their models are there for so long."""
    read = json.loads(ROWS.read_text())
    with tempfile.TemporaryDirectory() as folder:
        for name, model in read["models"].items():
            (Path(folder) / name).mkdir()
            (Path(folder) / name / "config.json").write_text(json.dumps(model["config"]))
        rows = sorted(read["rows"], key=lambda row: row["id"])
        planners = {row["id"]: _planner(row, Path(folder)) for row in rows}
        dense = [name for name, planner in planners.items() if not planner.shape.num_experts]
        yield [Published(row, planners[row["id"]], row["id"] in dense[::3]) for row in rows]


def _planner(row: dict[str, Any], folder: Path) -> Planner:
    model = folder / row["model"]
    words = [
        "--actor.model_name_or_path",
        str(model if model.exists() else CONFIGS / "models" / row["model"]),
    ]
    for name, value in row["options"].items():
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    config = load_config(words, files=False)
    return Planner(config, row["gpu"], row.get("response_tokens"), row.get("prompt_tokens"))


def loss(rows: Sequence[Published], assumed: Assumptions) -> float:
    """Mean over rows of the mean over a row's kinds of |log(predicted / published)|."""
    return statistics.fmean(
        statistics.fmean(abs(math.log(ratio)) for ratio in one.ratios(assumed).values())
        for one in rows
    )


def fit(rows: Sequence[Published], start: Assumptions) -> Assumptions:
    """Constants with the least loss: one after the other is put to every value of its range, in
    steps of a tenth and with two digits, until none makes the loss smaller."""
    best, least = start, math.inf
    improved = True
    while improved:
        improved = False
        for name, (low, high) in FITTED.items():
            steps = math.ceil(math.log(high / low) / math.log(1.1))
            values = {
                float(f"{low * (high / low) ** (step / steps):.2g}") for step in range(steps + 1)
            }
            for value in sorted(values):
                tried = dataclasses.replace(best, **{name: value})
                if (found := loss(rows, tried)) < least - 1e-6:
                    best, least, improved = tried, found, True
    return best


def errors(rows: Sequence[Published], assumed: Assumptions) -> dict[str, Any]:
    """By kind: how many, and the median and the worst factor between predicted and published,
    whichever is larger."""
    found = {}
    for kind in KINDS:
        ratios = [one.ratios(assumed)[kind] for one in rows if kind in one.row["seconds"]]
        if not ratios:
            continue
        factors = [math.exp(abs(math.log(ratio))) for ratio in ratios]
        found[kind] = {
            "rows": len(ratios),
            "median": round(statistics.median(factors), 2),
            "worst": round(max(factors), 2),
            "low": round(min(ratios), 2),
            "high": round(max(ratios), 2),
        }
    return found


def published() -> dict[str, Any]:
    """Fits, and judges by the rows that the fit did not see: of dense models, and of mixtures."""
    with published_rows() as rows:
        mixtures = [one for one in rows if one.planner.shape.num_experts]
        fitted = [one for one in rows if one.fitted]
        judged = [one for one in rows if not (one.fitted or one in mixtures)]
        assumed = fit(fitted, dataclasses.replace(FORMER, products=Assumptions().products))
        seen = {_setting(one) for one in fitted}
        unlike = [
            one for one in judged if "step" in one.row["seconds"] and _setting(one) not in seen
        ]
        table = []
        for one in rows:
            predicted = {
                kind: float(f"{seconds:.3g}") for kind, seconds in one.predicted(assumed).items()
            }
            ratios = {kind: round(ratio, 2) for kind, ratio in one.ratios(assumed).items()}
            table.append(
                {"id": one.row["id"], "fitted": one.fitted, "predicted": predicted, "ratio": ratios}
            )
        steps = [math.exp(abs(math.log(one.ratios(assumed)["step"]))) for one in unlike]
        return {
            "constants": {name: getattr(assumed, name) for name in FITTED},
            "error": errors(judged, assumed),
            "mixtures": errors(mixtures, assumed)["step"],
            "former": errors(judged, FORMER),
            "unlike": {
                "rows": len(steps),
                "median": round(statistics.median(steps), 2),
                "worst": round(max(steps), 2),
            },
            "rows": table,
        }


def _setting(one: Published) -> tuple[Any, ...]:
    """What the same run at another version, or a repeated one, has in common."""
    lengths = ("rollout.max_new_tokens", "vllm.gpu_memory_utilization")
    options = sorted(
        (name, str(value)) for name, value in one.row["options"].items() if name not in lengths
    )
    return one.row["model"], one.row["gpu"], one.row["gpus"], *options


def table() -> str:
    """docs/scaling.md: every row, what the fit made of it, and the sources."""
    rows = {row["id"]: row for row in json.loads(ROWS.read_text())["rows"]}
    sources = list(dict.fromkeys(rows[name]["source"] for name in sorted(rows)))
    header = [
        "run",
        "model, GPUs, mean tokens of prompt + response",
        "published, s",
        "predicted",
        "ratio",
    ]
    lines = []
    for found in record.load("plan_cpu.json")["published"]["rows"]:
        row = rows[found["id"]]
        what = f"{row['model']}, {row['gpus']} {row['gpu']}"
        what += (
            f", {row['prompt_tokens']} + {row['response_tokens']}"
            if "response_tokens" in row
            else ""
        )
        name = (
            f"{found['id']} "
            f"[{sources.index(row['source']) + 1}]{', fitted' if found['fitted'] else ''}"
        )
        cells = [_cell(row["seconds"]), _cell(found["predicted"]), _cell(found["ratio"])]
        lines.append([name, what, *cells])
    named = [f"{number}. {source}" for number, source in enumerate(sources, 1)]
    return "\n".join([markdown_table(header, lines), "", *named])


def _cell(values: dict[str, float]) -> str:
    return ", ".join(f"{kind} {values[kind]:g}" for kind in KINDS if kind in values)


def verdict() -> str:
    """docs/scaling.md: how far off the seconds are."""
    whole = record.load("plan_cpu.json")
    found, ranking = whole["published"], whole["ranking"]
    error, former, constants, unlike = (
        found["error"],
        found["former"],
        found["constants"],
        found["unlike"],
    )
    step, sync = error["step"], error["sync"]
    parts = "; ".join(
        f"{kind} {error[kind]['median']:.2f} and {error[kind]['worst']:.2f} ({error[kind]['rows']})"
        for kind in ("rollout", "logprobs", "train")
    )
    fitted, mixtures = sum(row["fitted"] for row in found["rows"]), found["mixtures"]
    read = json.loads(ROWS.read_text())["rows"]
    dealt = {row["id"] for row in read if "megatron.expert_parallel_size" in row["options"]}
    slower = sum(row["ratio"]["step"] < 1 for row in found["rows"] if row["id"] in dealt)
    return record.wrapped(
        f"{len(found['rows'])} runs of others, {fitted} of them fitted, the others judge. **Of "
        f"{step['rows']} judged steps half are within a factor of {step['median']:.2f}, the "
        f"worst is off by {step['worst']:.2f}** (predicted / published {step['low']:.2f} to "
        f"{step['high']:.2f}); before the fit {former['step']['median']:.2f} and "
        f"{former['step']['worst']:.2f}. Some judged runs are fitted ones at another version or "
        f"repeated: the {unlike['rows']} that are like none of those have {unlike['median']:.2f} "
        f"and {unlike['worst']:.2f}. Parts of a step, median and worst factor (rows): {parts}. "
        f"Full broadcasts of weights by others took {1 / sync['high']:.1f} to "
        f"{1 / sync['low']:.0f} times the predicted seconds, which are those of the ports and of "
        f"our calls.\n\n**Of {mixtures['rows']} steps of mixtures of experts half are within a "
        f"factor of {mixtures['median']:.2f}, the worst is off by {mixtures['worst']:.2f}** "
        f"(predicted / published {mixtures['low']:.2f} to {mixtures['high']:.2f}); {slower} took "
        f"longer than predicted.\n\nMatrix products reach {Assumptions().products:.0%} of the "
        "peak, from what an H200 took for the layers of a 32B rank "
        f"(`benchmarks/results/gpu_h200.json`). The fit gave: decoding {constants['memory']:.0%} "
        "of the memory's rate; a layer's forward pass of a micro-batch moves "
        f"{constants['traffic']:g} bytes for each token and hidden entry beside its products, "
        f"and takes the host {constants['launch_us']:g} microseconds; {constants['fixed_s']:g} s "
        f"a step for the rest. These are plan's defaults. Ranking {ranking['layouts']:,} layouts "
        f"on {ranking['gpus']} GPUs took {ranking['cpu_seconds']:g} s of a core "
        "(`benchmarks/results/plan_cpu.json`)."
    )


TEXTS = {"published": table, "verdict": verdict}


def main() -> None:
    """Measures and writes, or prints what became of the published rows."""
    parser = argparse.ArgumentParser()
    to = parser.add_mutually_exclusive_group(required=True)
    to.add_argument("--output", type=Path)
    to.add_argument(
        "--published", action="store_true", help="print constants, errors and rows; write nothing"
    )
    arguments = parser.parse_args()
    if arguments.published:
        print(json.dumps(published(), indent=1))
        return
    words = ["--config", str(CONFIGS / "recipes/qwen2.5_32b_gtpo_entropy.yaml")]
    words += ["--actor.model_name_or_path", str(CONFIGS / "models/qwen2.5-32b")]
    planner, started = Planner(load_config(words, files=False)), time.process_time()
    found = planner.candidates(64)
    ranking = {
        "gpus": 64,
        "layouts": len(found),
        "cpu_seconds": round(time.process_time() - started, 1),
    }
    result = {**record.environment(), "published": published(), "ranking": ranking}
    record.write(arguments.output, result)


if __name__ == "__main__":
    main()
