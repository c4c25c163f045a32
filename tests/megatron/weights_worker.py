"""What the ranks of the weight tests run."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch.distributed as dist
from megatron.core import parallel_state

from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.megatron.policy import MegatronPolicy, PolicySettings, initialize_distributed
from openrlhf_ext.megatron.weight_map import hf_shapes
from openrlhf_ext.megatron.weights import export_hf, load_hf, model_rules
from tests.megatron.slow_disk import let_others_wait, monitors, until


def policy_of(model: str, layout: dict, ranks: int, dtype: str = "fp32") -> MegatronPolicy:
    policy_settings = PolicySettings(model, ParallelLayout(ranks, **layout), param_dtype=dtype)
    initialize_distributed(policy_settings.layout, 60, 1234)
    return MegatronPolicy(policy_settings)


def round_trips(models: list[str], layouts: list[dict], ranks: int, target: str) -> list[str]:
    """Loads and saves every model in every layout, on a disk that is slower than any timeout; returns the folders."""
    folders, addresses = [], None
    for model in models:
        for layout in layouts:
            folder = Path(target) / f"{Path(model).name}-{json.dumps(layout, sort_keys=True)}"
            policy = policy_of(model, layout, ranks)
            addresses = addresses or monitors()
            if dist.get_rank() == 0:
                policy.export = partial(_slowly, policy.export, addresses)
            policy.save_hf(folder)
            until((folder / "config.json").exists, f"{folder} is complete")
            folders.append(str(folder))
            parallel_state.destroy_model_parallel()
    return folders


def _slowly(export: Callable[[], Iterable], addresses: list) -> Iterator:
    for number, item in enumerate(export()):
        if number in (0, 5):
            let_others_wait(addresses)
        yield item
    let_others_wait(addresses)


def errors_of(models: list[str]) -> list[str]:
    """The messages with which models refuse to load, each on one rank."""
    messages = []
    for model in models:
        try:
            policy_of(model, {}, 1)
            messages.append("")
        except ValueError as error:
            messages.append(f"{type(error).__name__}: {error}")
        parallel_state.destroy_model_parallel()
    return messages


# ---- memory ---------------------------------------------------------------------------------------------------------


def _anonymous_bytes() -> int:
    """Memory of this process that no file stands behind (mapped checkpoint pages belong to the page cache)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("no RssAnon in /proc/self/status")


@contextmanager
def peak_growth():
    """Yields a list that holds the largest growth of anonymous memory, in bytes, when the body is done."""
    start, peak, done, result = _anonymous_bytes(), 0, threading.Event(), []

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.0005):
            peak = max(peak, _anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield result
    finally:
        done.set()
        thread.join()
        result.append(max(peak, _anonymous_bytes()) - start)


def measure(model: str, layout: dict, ranks: int) -> dict[str, int]:
    """Bytes above the rank's own shard while loading and while exporting, and what they are to be compared with."""
    policy = policy_of(model, layout, ranks)
    for _ in export_hf(policy.chunks, policy.shape):  # warms allocators and connections up
        pass
    with peak_growth() as load:
        load_hf(policy.chunks, policy.shape, model)
    dist.barrier()
    with peak_growth() as export:
        for _ in export_hf(policy.chunks, policy.shape):
            pass
    rules = {rule for chunk in policy.chunks for rule in model_rules(chunk, policy.shape)}
    sizes = [4 * sum(_volume(s) for s in hf_shapes(rule, policy.shape)) for rule in rules]
    shard = sum(p.numel() * 4 for chunk in policy.chunks for p in chunk.parameters())
    return {"load": load[0], "export": export[0], "largest_rule": max(sizes), "shard": shard}


def _volume(shape: tuple[int, ...]) -> int:
    volume = 1
    for size in shape:
        volume *= size
    return volume
