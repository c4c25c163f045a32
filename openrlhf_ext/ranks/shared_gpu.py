"""Whether a policy rank and the engine that shares its GPU fit into its memory together, before
either runs out of it. vLLM takes its share of the whole device for itself, whatever others hold:
what it leaves must hold the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

_GIB = 1 << 30
RESERVE_BYTES = 3 * _GIB
"""CUDA contexts of both processes, NCCL's buffers, fragments: never given up. An estimate, not
measured on a GPU.

They are outside of the engine's share: vLLM measures what is there after NCCL has started, and asks
for its share of the whole device besides (vllm 0.32.0 v1/worker/gpu_worker.py:535)."""
ASLEEP_BYTES = 2 * _GIB
"""What an engine keeps while it sleeps: its context, NCCL's buffers, CUDA graphs. An estimate
too."""

Parts = Mapping[str, int]
"""What is on a GPU, in bytes, by part."""


def shared_parts(
    engine: Parts, states: Parts, staging: int, *, policy_sleeps: bool, engine_sleeps: bool
) -> tuple[dict[str, int], dict[str, int]]:
    """What a shared GPU holds while the engine samples, and while the policy is trained,
    activations apart.

    A run checks this sum at its start, ``plan`` and ``--dry_run`` make it beforehand. ``states``
    are parameters, gradients and optimizer states of the rank and what its layers keep, ``staging``
    the buffers from which weights are sent.
    """
    both = {
        "buffers of the weight sync": staging,
        "CUDA contexts and NCCL (estimate)": RESERVE_BYTES,
    }
    resident = {"the engine asleep (estimate)": ASLEEP_BYTES} if engine_sleeps else engine
    return {**engine, **({} if policy_sleeps else states), **both}, {**states, **resident, **both}


class SharedGpuTooSmall(RuntimeError):
    """A policy rank and the engine on its GPU do not fit together; the message adds up what they
    need."""


@dataclass(frozen=True)
class SharedGpu:
    """What stays on a GPU of ``device`` bytes that a policy rank and an engine, which takes a share
    while it is awake, share."""

    device: int
    engine: float
    states: int
    staging: int
    policy_sleeps: bool
    engine_sleeps: bool

    def check(self) -> None:
        sampling, training = shared_parts(
            {f"the engine ({self.engine:g} of the device)": int(self.engine * self.device)},
            {"parameters, gradients and optimizer states": self.states},
            self.staging,
            policy_sleeps=self.policy_sleeps,
            engine_sleeps=self.engine_sleeps,
        )
        for doing, parts in (("sampling", sampling), ("training, without activations", training)):
            if sum(parts.values()) > self.device:
                raise SharedGpuTooSmall(self._message(doing, parts))

    def _message(self, doing: str, parts: dict[str, int]) -> str:
        rows = "\n".join(f"  {size / _GIB:7.1f} GiB  {what}" for what, size in parts.items())
        missing = [
            name
            for name, on in (
                ("--ds.enable_sleep", self.policy_sleeps),
                ("--vllm.enable_sleep", self.engine_sleeps),
            )
            if not on
        ]
        sleep = f"add {' and '.join(missing)}, " if missing else ""
        return (
            "policy and engine do not fit on the GPU that they share (train.colocate_all) while "
            f"{doing}: they need {sum(parts.values()) / _GIB:.1f} of {self.device / _GIB:.1f} "
            f"GiB\n{rows}\nLower --vllm.gpu_memory_utilization or --weight_sync.bucket_mib, "
            f"{sleep}or lay the policy out over more ranks (megatron.tensor_parallel_size, "
            "megatron.pipeline_parallel_size)"
        )


def device_bytes() -> int | None:
    """Memory of this process's GPU; None without one."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


def state_bytes(parameters: int, itemsize: int, replicas: int, on_host: bool) -> int:
    """Parameters, fp32 gradients and Adam's states, over so many replicas, of a rank; fp32
    parameters are their own master weights. ``on_host``: Adam's states are in host memory."""
    optimizer = 0 if on_host else 8 if itemsize == 4 else 12
    return parameters * (itemsize + 4) + optimizer * parameters // replicas
