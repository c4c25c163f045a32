"""Folders of runs, as the writers leave them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openrlhf_ext.reporting import EventLog, HeldOutWriter, MetricsWriter, SampleWriter
from openrlhf_ext.run.ledger import USED_UP, digest, hash_of, open_ledger

HOSTILE = "</script><img src=x onerror=document.title='taken'>"


def make_run(
    folder: Path,
    steps: int = 40,
    *,
    seed: int = 0,
    ranks: int = 2,
    names: Sequence[str] = (),
    options: dict[str, Any] | None = None,
    samples: bool = True,
    events: bool = True,
) -> Path:
    """A run that learned; ``names`` are metrics besides the usual ones."""
    chance, clock = random.Random(seed), iter(range(10**9))
    with MetricsWriter(folder / "metrics.jsonl", now=lambda: 1.79e9 + next(clock)) as metrics:
        for step in range(1, steps + 1):
            metrics.write(step, _record(step / steps, chance, ranks, names))
            if step % 10 == 0:
                metrics.write(
                    step, {"eval/accuracy": 0.3 + 0.5 * step / steps, "eval/accuracy_stderr": 0.01}
                )
    if events:
        _events(
            folder / "events.jsonl", steps, {"algo.advantage.estimator": "dapo"} | (options or {})
        )
        _ledger(folder / "ledger.jsonl", steps)
    if samples:
        writer = SampleWriter(
            folder / "samples.jsonl", None, steps, lambda ids: [_TEXTS[i] for i in ids], 2
        )
        for step in filter(writer.groups_due, range(1, steps + 1)):
            writer.write(step, [_completion(step, chance, right) for right in (False, True)])
        writer.close()
        _held_out(folder / "eval_samples.jsonl", steps, chance)
    return folder


def _held_out(path: Path, steps: int, chance: random.Random) -> None:
    """The same prompt in every evaluation, without the policy's numbers."""
    writer = HeldOutWriter(path, None, steps, lambda ids: [_TEXTS[i] for i in ids], 2)
    for step in filter(writer.groups_due, range(10, steps + 1, 10)):
        own = _completion(0, chance, right=step > steps / 2)
        for key in ("logprobs", "advantages", "loss_mask", "token_weights"):
            del own[key]
        writer.write(step, [own | {"prompt": "How many are 2 and 2?"}])
    writer.close()


def _record(
    done: float, chance: random.Random, ranks: int, names: Sequence[str]
) -> dict[str, float]:
    noise = chance.gauss(0, 0.05)
    record = {
        "reward/mean": done + noise,
        "accuracy/mean": done + noise,
        "entropy/mean": math.exp(-2 * done) + noise,
        "response/length_mean": 400 + 300 * done + 400 * noise,
        "kl/rollout": 1e-4 * (1 + noise),
        "loss/policy": noise / 10,
        "grad_norm": 1 + noise,
        "memory/rank_max_gib": 40 + done,
        "tokens/generated": 9e5,
        "throughput/tokens_per_second": 9000 + 500 * noise,
    }
    seconds = {"generate": 60, "grade": 2, "logprob": 12, "shape": 1, "train": 40, "sync": 4}
    record |= {f"time/{phase}": value * (1 + noise) for phase, value in seconds.items()}
    record["time/step"] = sum(seconds.values()) * (1 + noise) + 3
    for rank in range(ranks):
        record |= {
            f"rank/{rank}/memory_gib": 40 + rank % 3,
            f"rank/{rank}/time_train": 40.0,
            f"rank/{rank}/time_logprob": 9,
        }
    return record | {name: abs(noise) if name.endswith("stderr") else noise for name in names}


def _events(path: Path, steps: int, options: dict[str, Any]) -> None:
    clock = iter(range(10**9))
    with EventLog(path, now=lambda: 1.79e9 + next(clock)) as events:
        events.note(
            "start",
            options=options,
            set=list(options),
            versions={"torch": "2.13.0"},
            layout={"ranks": 64, "tensor": 4},
            hardware={"host": "node0", "gpus": ["H100"] * 8},
            resume_step=0,
        )
        events.note("ready", steps=steps, processes={"policy rank 0": {"host": "node0", "pid": 7}})
        events.step = steps // 4
        events.note(
            "engine_replaced", engines=[1], of="rollout engine", restarts=1, why="they hang"
        )
        events.note("groups_dropped", filtered=3, late=1)
        events.step = steps // 2
        events.note("failure", error="RuntimeError: CUDA error")
        events.note("restart", number=1, most=2)
        events.note("resumed", resume_step=steps // 2, path="ckpt/global_step20")
        for step in range(steps // 2, steps + 1, max(1, steps // 8)):
            events.step = step
            events.note(
                "checkpoint", of_step=step, path=f"ckpt/global_step{step}", mib=9.0, seconds=2.0
            )
            events.note("evaluation", accuracy=0.5, stderr=0.01, samples=64.0)
        seconds = {
            "GEMM": 3.0,
            "attention": 1.0,
            "head": 0.5,
            "optimizer": 0.5,
            "communication": 0.25,
            "idle": 0.75,
        }
        events.note(
            "profile",
            rank=0,
            seconds=seconds,
            wall=6.0,
            trace="profile/step5_rank0.json.gz",
            host="node0",
        )
        events.note("end", path="ckpt")


def _ledger(path: Path, steps: int) -> None:
    """Of two prompts a step, of which every fourth is filtered, in one episode."""
    found = [[number, digest(f"{number}", None)] for number in range(2 * steps)]
    lines = open_ledger(path, 0)
    about = {
        "prompts": 2 * steps,
        "episodes": 1,
        "skipped_overlong": 1,
        "episode": hash_of(of for _, of in found),
    }
    lines.append({"step": 0, **about, "drawn": 0, "waiting": []})
    for step in range(1, steps + 1):
        first, second = found[2 * step - 2 : 2 * step]
        parts = (
            {"trained": [first], "filtered": [second]} if step % 2 else {"trained": [first, second]}
        )
        lines.append({"step": step, **parts, "drawn": 2 * step, "waiting": []})
    lines.append({"end": steps, "why": USED_UP, "drawn": 2 * steps, "waiting": []})
    lines.close()


_TEXTS = [
    "<reasoning>",
    "first",
    ",",
    " add",
    " 3",
    " and",
    " 4",
    "\n",
    HOSTILE,
    " 世界",
    " so",
    " it",
    " is",
    " 7",
    ".",
]


def _completion(step: int, chance: random.Random, right: bool) -> dict[str, Any]:
    ids = list(range(len(_TEXTS))) * 3
    logprobs = [-1 - chance.random() for _ in ids]
    return {
        "group": step,
        "prompt": f"What is 3 + 4? {HOSTILE}",
        "label": "7",
        "token_ids": ids,
        "reward": float(right),
        "score": float(right),
        "truncated": not right,
        "from_guide": False,
        "logprobs": logprobs,
        "rollout_logprobs": [value - 0.01 * chance.gauss(0, 1) ** 3 for value in logprobs],
        "loss_mask": [int(place < 40) for place in range(len(ids))],
        "token_weights": [float(place > 0) for place in range(len(ids))],
        "entropies": [3 * chance.random() ** 4 for _ in ids],
        "advantages": [(1 if right else -1) * (0.5 + chance.random()) for _ in ids],
    }
