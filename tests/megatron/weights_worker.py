"""What the ranks of the weight tests run."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch.distributed as dist
from megatron.core import parallel_state

from openrlhf_ext.megatron.distributed import initialize_distributed
from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.megatron.model import hf_weights
from openrlhf_ext.megatron.policy import MegatronPolicy
from openrlhf_ext.megatron.settings import ModelSettings
from openrlhf_ext.options.sections import Megatron
from tests.megatron.slow_disk import let_others_wait, monitors, until
from tests.patience import PATIENCE_S

_SMALL_BUCKET_BYTES = 6000  # 11 rows of 64 entries in a piece


def policy_of(model: str, layout: dict, ranks: int, dtype: str = "fp32") -> MegatronPolicy:
    policy_settings = ModelSettings(
        model, ParallelLayout(ranks, **layout), Megatron(param_dtype=dtype)
    )
    initialize_distributed(policy_settings.layout, PATIENCE_S, 1234)
    return MegatronPolicy(policy_settings)


def round_trips(models: list[str], layouts: list[dict], ranks: int, target: str) -> list[str]:
    """Loads and saves every model in every layout, on a disk that is slower than any timeout;
    returns the folders.

    Most tensors are larger than the bucket, so that they travel in several pieces.
    """
    folders, addresses = [], None
    for model in models:
        for layout in layouts:
            folder = Path(target) / f"{Path(model).name}-{json.dumps(layout, sort_keys=True)}"
            link = Path(target) / f"start-{os.environ['RANK']}"
            link.symlink_to(model)
            policy = policy_of(str(link), layout, ranks)
            # somebody moves the start model while it is trained: the final one has all of its files
            link.unlink()
            addresses = addresses or monitors()
            policy.export_rows = partial(policy.exporter().rows, _SMALL_BUCKET_BYTES)
            if dist.get_rank() == 0:
                policy.export_rows = partial(_slowly, policy.export_rows, addresses)
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


# ---- memory


def _anonymous_bytes() -> int:
    """Memory of this process that no file stands behind (mapped checkpoint pages belong to the page
    cache)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("no RssAnon in /proc/self/status")


@contextmanager
def peak_growth():
    """Yields a list that holds the largest growth of anonymous memory, in bytes, when the body is
    done."""
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


def measure(
    model: str, layouts: list[dict], ranks: int, bucket: int, target: str
) -> list[dict[str, int]]:
    """For each layout bytes above the rank's own shard while loading, exporting and saving, and the
    shard's."""
    hf_weights.BUCKET_BYTES = bucket
    return [_measure(model, layout, ranks, bucket, target) for layout in layouts]


def _measure(model: str, layout: dict, ranks: int, bucket: int, target: str) -> dict[str, int]:
    policy = policy_of(model, layout, ranks)
    policy.export_rows = partial(policy.exporter().rows, bucket)

    def export() -> None:
        for _ in policy.export_rows():
            pass

    export()  # warms allocators and connections up
    growth = {}
    for name, work in {
        "load": partial(hf_weights.load_hf, policy.chunks, policy.shape, model),
        "export": export,
        "save": partial(policy.save_hf, target),
    }.items():
        with peak_growth() as grown:
            work()
        growth[name] = grown[0]
        dist.barrier()
    parallel_state.destroy_model_parallel()
    return growth | {
        "shard": sum(p.numel() * 4 for chunk in policy.chunks for p in chunk.parameters())
    }
