"""The driver's side of a step runs as the benchmark has it, and replayed experts do not pass
through it."""

from __future__ import annotations

import argparse

import pytest

from benchmarks import scale

TRAVELS = ("receive", "batch", "send", "shards", "ship")


def arguments(*more: str) -> argparse.Namespace:
    small = [
        "--mini_batch",
        "32",
        "--group_size",
        "8",
        "--mean_length",
        "64",
        "--longest",
        "256",
        "--threads",
        "1",
    ]
    return scale.parser().parse_args([*small, *more])


def test_a_step_has_every_stage_and_says_what_travels() -> None:
    found = scale.step(arguments("--prompt_length", "32"), 64)
    names = [
        "receive",
        "batch",
        "send",
        "collect",
        "rollout",
        "shape",
        "metrics",
        "shards",
        "ship",
        "plan",
    ]
    assert list(found["stages"]) == names
    assert all(
        found["stages"][name]["bytes"] > 4 * found["tokens"] for name in ("receive", "send", "ship")
    )


@pytest.mark.slow
def test_experts_stay_in_the_store_until_a_checkpoint_wants_them() -> None:
    """100 MB of experts: what travels adds less than a fifth of them to the process, a checkpoint
    adds all."""
    args = arguments("--mean_length", "4096", "--longest", "8192", "--replay", "384")
    found = scale.in_a_process(args, 64, args.replay)
    experts = found["tokens"] * args.replay
    assert sum(found["stages"][name]["peak_bytes"] for name in TRAVELS) < 0.2 * experts
    assert found["checkpoint"]["own_bytes"] > 0.9 * experts
