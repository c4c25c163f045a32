"""Small programming problems with asserts, for reward_code.py: a task to see code answers graded,
not a benchmark.

    python examples/python/code_task.py --output_dir runs/code/data
    python -m openrlhf_ext.cli.train_ppo_ray --config configs/real_model.yaml \\
        --actor.model_name_or_path "$(python examples/python/real_model.py)" \\
        --data.prompt_dataset runs/code/data/train.jsonl --eval.dataset runs/code/data/heldout.jsonl
        \\ --reward.remote_url examples/python/reward_code.py --rollout.max_new_tokens 96
        --data.max_len 192 \\ --train.max_minutes 20 --ckpt.output_dir runs/code/policy

``question`` asks for one function ``f``, ``answer`` has three asserts. A problem is a rule with a
number in it; one in eight, by a hash of its text, is held out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openrlhf_ext.outputs import in_one_piece

RULES: dict[str, Callable[[int, int], Any]] = {
    "returns x plus {}": lambda x, n: x + n,
    "returns {} minus x": lambda x, n: n - x,
    "returns x times {}": lambda x, n: x * n,
    "returns the remainder of x divided by {}": lambda x, n: x % n,
    "returns True if x is greater than {}, else False": lambda x, n: x > n,
    "returns True if x is divisible by {}, else False": lambda x, n: x % n == 0,
    "returns the larger of x and {}": lambda x, n: max(x, n),
    "returns a list with x repeated {} times": lambda x, n: [x] * n,
    "returns the square of x plus {}": lambda x, n: x * x + n,
    "returns the digits of x times {} as a string": lambda x, n: str(x * n),
}
NUMBERS = range(2, 26)
HELDOUT_SHARE = 8


def problems(seed: int) -> list[dict[str, str]]:
    """All of them, in an order of the seed."""
    rng = random.Random(seed)
    found = []
    for rule, function in RULES.items():
        for number in NUMBERS:
            inputs = rng.sample(range(40), 3)
            asserts = "\n".join(f"assert f({x}) == {function(x, number)!r}" for x in inputs)
            question = (
                f"Write a Python function f(x) that {rule.format(number)}. Give only the code."
            )
            found.append({"question": question, "answer": asserts})
    rng.shuffle(found)
    return found


def is_heldout(problem: dict[str, str]) -> bool:
    return hashlib.sha256(problem["question"].encode()).digest()[0] % HELDOUT_SHARE == 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output_dir", type=Path, required=True, help="folder for train.jsonl and heldout.jsonl"
    )
    parser.add_argument("--seed", type=int, default=42, help="same seed, same files")
    arguments = parser.parse_args(argv)
    found = problems(arguments.seed)
    for name, heldout in (("train", False), ("heldout", True)):
        records = [problem for problem in found if is_heldout(problem) == heldout]
        with in_one_piece(arguments.output_dir / f"{name}.jsonl") as partial:
            partial.write_text(
                "".join(json.dumps(record) + "\n" for record in records), encoding="utf-8"
            )
        print(f"{name}: {arguments.output_dir / name}.jsonl ({len(records)} problems)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
