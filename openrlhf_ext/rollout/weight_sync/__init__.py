"""How the policy hands its weights to the rollout engines: one file per transport, behind `WeightSender`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from openrlhf_ext.rollout.weight_sync.base import (
    EngineFailed,
    WeightReceiver,
    WeightSender,
    WeightStreamAborted,
    WeightStreamMismatch,
    WeightSyncError,
    WeightSyncTimeout,
    WeightTransferFailed,
)
from openrlhf_ext.rollout.weight_sync.gloo import GlooWeightReceiver, GlooWeightSender
from openrlhf_ext.rollout.weight_sync.plan import BucketPlan, TensorSpec

SENDERS: dict[str, Callable[..., WeightSender]] = {"gloo": GlooWeightSender}
RESERVED_TRANSPORTS = {
    "nccl": "openrlhf_ext/rollout/weight_sync/nccl.py",
    "cuda_ipc": "openrlhf_ext/rollout/weight_sync/cuda_ipc.py",
}


def make_sender(
    transport: str, plan: BucketPlan, engines: Sequence[Any], tensor_parallel_size: int, timeout_s: float
) -> WeightSender:
    """The sender of `transport`, not yet connected.

    Args:
        transport: "gloo"; "nccl" and "cuda_ipc" are reserved.
        plan, engines, tensor_parallel_size, timeout_s: see `GlooWeightSender`.

    Raises:
        ValueError: the transport is reserved or unknown.
    """
    if transport in RESERVED_TRANSPORTS:
        raise ValueError(
            f"weight-sync transport {transport!r} is not there yet: it will live in {RESERVED_TRANSPORTS[transport]}. "
            "Use 'gloo', which works on GPUs too (through host memory)"
        )
    if transport not in SENDERS:
        raise ValueError(f"unknown weight-sync transport {transport!r}; there are {sorted(SENDERS)}")
    return SENDERS[transport](plan, engines, tensor_parallel_size, timeout_s)


__all__ = [
    "BucketPlan", "EngineFailed", "GlooWeightReceiver", "GlooWeightSender", "RESERVED_TRANSPORTS", "SENDERS",
    "TensorSpec", "WeightReceiver", "WeightSender", "WeightStreamAborted", "WeightStreamMismatch", "WeightSyncError",
    "WeightSyncTimeout", "WeightTransferFailed", "make_sender",
]  # fmt: skip
