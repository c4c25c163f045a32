"""What a train step costs with and without computing a prompt once for all of its responses, by
length of the prompt.

    python benchmarks/shared_prompts.py --output benchmarks/results/shared_prompts_cpu.json     #
    five minutes, one core

One policy of 20 million parameters, random weights, fp32, one rank; the same rows by both ways in
turns. CPU seconds of the process, so other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from benchmarks.record import load

if TYPE_CHECKING:
    from openrlhf_ext.megatron.policy import MegatronPolicy

RESULT = record.RESULTS / "shared_prompts_cpu.json"
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
GROUP, PROMPTS = 8, 2
LENGTHS = ((20, 200), (110, 110), (160, 60), (400, 50))  # tokens of a prompt, of each response


def table() -> str:
    """docs/performance.md: by lengths."""
    lines = [
        "| prompt | response | tokens that are not computed again | CPU seconds of a train "
        "step, each prompt once | as often as there are responses | ratio |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for row in load(RESULT.name)["lengths"]:
        once, again = row["seconds"]["shared"], row["seconds"]["alone"]
        lines.append(
            f"| {row['prompt']} | {row['response']} | {row['shared_fraction']:.0%} | {once:.2f} "
            f"| {again:.2f} | {row['ratio']:.2f} |"
        )
    return "\n".join(lines)


TEXTS = {"table": table}


def build(path: Path, shares: bool) -> MegatronPolicy:
    """One rank's policy."""
    from openrlhf_ext.megatron.layout import ParallelLayout
    from openrlhf_ext.megatron.policy import MegatronPolicy
    from openrlhf_ext.megatron.settings import ModelSettings
    from openrlhf_ext.options.sections import Actor, Megatron, Train

    megatron = Megatron(param_dtype="fp32", share_prompts_enable=shares)
    train = Train(micro_batch_size=GROUP * PROMPTS)
    return MegatronPolicy(
        ModelSettings(str(path), ParallelLayout(1), megatron, train=train, optimizer=Actor())
    )


def measure(
    policies: dict[str, MegatronPolicy], prompt: int, response: int, repeats: int
) -> dict[str, Any]:
    """Both ways in turns, after one step of each that is not counted."""
    import numpy as np
    import torch

    from openrlhf_ext.algorithms import RolloutBatch, get_algorithm
    from openrlhf_ext.megatron.step.batch import sequence_batch

    generator, rows = np.random.default_rng(0), GROUP * PROMPTS
    prompts = generator.integers(2, CONFIG["vocab_size"], (PROMPTS, prompt), np.int32)
    sequences = [
        np.concatenate(
            [prompts[row // GROUP], generator.integers(2, CONFIG["vocab_size"], response, np.int32)]
        )
        for row in range(rows)
    ]
    batch = sequence_batch(sequences, [[(prompt, prompt + response)]] * rows)
    logprobs, entropies = policies["alone"].logprobs(batch)
    algorithm = get_algorithm("grpo")
    samples = RolloutBatch(
        tokens=batch.targets_N,
        lengths=batch.counts_B,
        rewards=torch.arange(rows).remainder(2).float(),
        group_ids=torch.arange(rows) // GROUP,
        old_logprobs=logprobs,
        entropies=entropies,
        truncated=torch.zeros(rows, dtype=torch.bool),
        group_size=GROUP,
    )
    shaped = algorithm.prepare(logprobs, algorithm.shape(samples)).lean()
    spent: dict[str, list[float]] = {way: [] for way in policies}
    counts = {}
    for _ in range(1 + repeats):
        for way, policy in policies.items():
            policy.schedule.take_count()
            started = time.process_time()
            policy.train_step(batch, shaped, algorithm)
            spent[way].append(time.process_time() - started)
            counts[way] = policy.schedule.take_count()
    spent = {way: seconds[1:] for way, seconds in spent.items()}
    ratios = [once / again for once, again in zip(spent["shared"], spent["alone"], strict=True)]
    return {
        "prompt": prompt,
        "response": response,
        "shared_fraction": counts["shared"].repeated
        / (counts["shared"].real + counts["shared"].repeated),
        "seconds": {way: statistics.median(seconds) for way, seconds in spent.items()},
        "ratio": statistics.median(ratios),
        "of_each_repeat": spent,
    }


def main() -> None:
    """Measures, and writes the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--lengths", nargs="+", default=LENGTHS, type=_lengths, metavar="PROMPT:RESPONSE"
    )
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    from openrlhf_ext import patches

    patches.apply()
    from benchmarks.weight_sync import make_checkpoint
    from openrlhf_ext.megatron.distributed import initialize_distributed
    from openrlhf_ext.megatron.layout import ParallelLayout

    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    initialize_distributed(ParallelLayout(1), 600, 1)
    with tempfile.TemporaryDirectory() as folder:
        path = make_checkpoint(Path(folder) / "policy", **CONFIG)
        policies = {"shared": build(path, True), "alone": build(path, False)}
        found = []
        for prompt, response in args.lengths:
            found.append(measure(policies, prompt, response, args.repeats))
            print(
                json.dumps(
                    {name: value for name, value in found[-1].items() if name != "of_each_repeat"}
                )
            )
    if args.output:
        record.write(
            args.output,
            {
                "what": "CPU seconds of a train step with and without megatron.share_prompts_enable; "
                "medians, and the median ratio of neighbors",
                **record.environment("torch", "megatron-core"),
                "settings": {
                    "group": GROUP,
                    "prompts": PROMPTS,
                    "repeats": args.repeats,
                    "model": CONFIG,
                },
                "lengths": found,
            },
        )


def _lengths(text: str) -> tuple[int, int]:
    prompt, response = text.split(":")
    return int(prompt), int(response)


def free_port() -> int:
    """One that nobody listens at."""
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


if __name__ == "__main__":
    main()
