"""A toy of gated delta nets beside the quickstart's dense toy, on a CPU: seconds of a step and what it
learns.

    python benchmarks/hybrid.py                       # some 15 minutes on two idle cores

Both are warm-started by the same teachers on the same problems (examples/python/toy_policy.py) and
trained by the quickstart's recipe, with the same seeds, in turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples/python"))

import toy_policy

from benchmarks import curves, record
from benchmarks.harness import markdown_table
from openrlhf_ext.reporting import read_metrics

RESULT = record.RESULTS / "hybrid_cpu.json"
SEEDS = range(11, 14)
STEPS = 24
TIMES = ("generate", "logprob", "train", "sync", "step")
KINDS = ("dense", "hybrid")
DENSE_MODEL = toy_policy.build_model


def hybrid_model(settings: toy_policy.PolicySettings, tokenizer: Any) -> Any:
    """Three layers of gated delta net and one of gated attention, of the dense toy's sizes."""
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    dense = DENSE_MODEL(settings, tokenizer)
    head = settings.hidden_size // settings.heads
    config = Qwen3_5TextConfig(
        **{
            name: getattr(dense.config, name)
            for name in (
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
                "max_position_embeddings",
                "initializer_range",
                "tie_word_embeddings",
                "pad_token_id",
                "eos_token_id",
            )
        },
        head_dim=head,
        linear_num_key_heads=settings.kv_heads,
        linear_num_value_heads=settings.heads,
        linear_key_head_dim=head,
        linear_value_head_dim=head,
    )
    torch.manual_seed(settings.seed)
    model = Qwen3_5ForCausalLM(config)
    model.generation_config = dense.generation_config
    return model


def policy(kind: str, work: Path) -> tuple[Path, int]:
    """The folder of a warm-started policy, with problems beside it in ``data``, and its
    parameters."""
    place = work / kind
    dense = curves.RECIPES["quickstart"].prepare(place)
    if kind == "dense":
        folder = dense
    else:
        folder = place / "hybrid"
        if not (folder / "config.json").exists():
            toy_policy.build_model = hybrid_model
            toy_policy.build_policy(folder, log=True)
    from transformers import AutoModelForCausalLM

    return folder, AutoModelForCausalLM.from_pretrained(folder).num_parameters()


def measured(work: Path) -> dict[str, Any]:
    policies = {kind: policy(kind, work) for kind in KINDS}
    recipe = curves.RECIPES["quickstart"]
    options = recipe.options | {"data.max_samples": STEPS * 32, "train.max_staleness": 0}
    lines: dict[str, list[list[dict[str, Any]]]] = {kind: [] for kind in KINDS}
    for seed in SEEDS:
        for kind, (folder, _) in policies.items():
            run = replace(recipe, options=options)
            (out,) = curves.runs(run, folder, work / kind, [seed])
            lines[kind].append(read_metrics(out / "metrics.jsonl"))
    return {
        kind: {"parameters": policies[kind][1], **summary(runs)} for kind, runs in lines.items()
    }


def summary(runs: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Held-out accuracies of each seed, and medians of the seconds of steps from the second on."""
    evaluations = [
        [line["eval/accuracy"] for line in lines if "eval/accuracy" in line] for lines in runs
    ]
    steps = [line for lines in runs for line in lines if "time/train" in line and line["step"] > 1]
    return {
        "accuracy_before": [found[0] for found in evaluations],
        "accuracy_after": [found[-1] for found in evaluations],
        "kl_rollout": max(line["kl/rollout"] for line in steps),
        "seconds": {
            part: statistics.median(line[f"time/{part}"] for line in steps) for part in TIMES
        },
    }


def hybrid_table() -> str:
    """docs/models.md: both toys."""
    rows = []
    for kind, found in record.load(RESULT.name)["toys"].items():
        before, after = (
            ", ".join(f"{100 * value:.1f}" for value in found[f"accuracy_{when}"])
            for when in ("before", "after")
        )
        seconds = " + ".join(f"{found['seconds'][part]:.2f}" for part in TIMES[:-1])
        step = f"{found['seconds']['step']:.2f} ({seconds})"
        rows.append(
            [kind, f"{found['parameters']:,}", before, after, step, f"{found['kl_rollout']:.1g}"]
        )
    header = [
        "toy",
        "parameters",
        "held-out accuracy, %",
        f"after {STEPS} steps",
        "seconds of a step (generate + logprob + train + sync)",
        "largest kl/rollout",
    ]
    return markdown_table(header, rows)


TEXTS = {"toys": hybrid_table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/hybrid"))
    asked = parser.parse_args()
    about = record.environment(*curves.PACKAGES)
    record.write(RESULT, about | {"toys": measured(asked.work.resolve())})


if __name__ == "__main__":
    main()
