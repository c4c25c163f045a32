"""What a study on a real model starts from: SmolLM2-135M-Instruct, and problems of reasoning-gym in
a seed's own order.

    python examples/python/real_task.py --seed 0 --output_dir runs/start/policy --data_dir
    runs/start/data

The policy is a link to the cached model (real_model.py), the same for every seed; the problems are
those of gym_task.py, two numbers from 0 to 10. What is held out is held out for every seed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import gym_task
import real_model
from toy_policy import default_cache_dir

HELDOUT = 224  # the family has 228 distinct ones


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, required=True, help="of the problems")
    parser.add_argument("--output_dir", type=Path, required=True, help="link to the model")
    parser.add_argument(
        "--data_dir", type=Path, required=True, help="folder for train.jsonl and heldout.jsonl"
    )
    parser.add_argument(
        "--cache_dir", type=Path, default=default_cache_dir(), help="cache (or OPENRLHF_EXT_CACHE)"
    )
    arguments = parser.parse_args()
    try:
        model = real_model.cached_model(arguments.cache_dir.resolve())
    except real_model.NotFetched as error:
        print(f"real_task: {error}", file=sys.stderr)
        return 1
    arguments.output_dir.parent.mkdir(parents=True, exist_ok=True)
    arguments.output_dir.unlink(missing_ok=True)
    arguments.output_dir.symlink_to(model)
    words = [
        "--output_dir",
        arguments.data_dir,
        "--cache_dir",
        arguments.cache_dir,
        "--seed",
        arguments.seed,
    ]
    return gym_task.main([*map(str, words), "--heldout_size", str(HELDOUT)])


if __name__ == "__main__":
    sys.exit(main())
