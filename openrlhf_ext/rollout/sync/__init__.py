"""How the policy hands its weights to the rollout engines: one file per transport, behind `WeightSender`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from openrlhf_ext.rollout.sync.base import (
    BucketSource,
    EngineFailed,
    EnginesAtFault,
    Link,
    SendReport,
    WeightReceiver,
    WeightSender,
    WeightStreamAborted,
    WeightStreamMismatch,
    WeightSyncError,
    WeightSyncTimeout,
    WeightTransferFailed,
)
from openrlhf_ext.rollout.sync.cuda_ipc import CudaMemory, IpcWeightReceiver, IpcWeightSender, Relay
from openrlhf_ext.rollout.sync.gloo import GlooWeightReceiver, GlooWeightSender
from openrlhf_ext.rollout.sync.nccl import NcclWeightReceiver, NcclWeightSender
from openrlhf_ext.rollout.sync.plan import Bucket, BucketPlan, TensorSpec
from openrlhf_ext.rollout.sync.sender import Staging, largest_frame

SENDERS: dict[str, Callable[..., WeightSender]] = {
    "gloo": GlooWeightSender,
    "nccl": NcclWeightSender,
    "cuda_ipc": IpcWeightSender,
}
RECEIVERS: dict[str, Callable[[BucketPlan, Link, int], WeightReceiver]] = {
    "gloo": GlooWeightReceiver,
    "nccl": NcclWeightReceiver,
    "cuda_ipc": IpcWeightReceiver,
}


def choose_transport(asked: str, *, on_gpu: bool, colocated: bool) -> str:
    """The transport that `vllm.sync_backend` stands for on this machine.

    Args:
        asked: "auto" or a transport.
        on_gpu: whether policy and engines run on GPUs.
        colocated: whether they share them.

    Raises:
        ValueError: the transport that was asked for cannot work here. Nothing is put in its place silently.
    """
    if asked == "auto":
        return ("cuda_ipc" if colocated else "nccl") if on_gpu else "gloo"
    if asked not in SENDERS:
        raise ValueError(f"unknown vllm.sync_backend {asked!r}; there are {sorted(SENDERS)}, and auto")
    if asked != "gloo" and not on_gpu:
        raise ValueError(f"vllm.sync_backend {asked} needs GPUs, and this run has none: use auto or gloo")
    if asked == "nccl" and colocated:
        raise ValueError(
            "vllm.sync_backend nccl needs engines with GPUs of their own, and train.colocate_all puts them on the "
            "policy's: NCCL takes one rank per GPU; use auto or cuda_ipc"
        )
    if asked == "cuda_ipc" and not colocated:
        raise ValueError(
            "vllm.sync_backend cuda_ipc needs engines on the policy's GPUs (train.colocate_all), and they have their "
            "own: use auto or nccl"
        )
    return asked


def make_sender(
    transport: str,
    plan: BucketPlan,
    engines: Sequence[Any],
    tensor_parallel_size: int,
    timeout_s: float,
    staging: Staging | Relay | None = None,
) -> WeightSender:
    """The sender of `transport`, not yet connected.

    Args:
        transport: "gloo", "nccl" or "cuda_ipc".
        plan, engines, tensor_parallel_size, timeout_s: see `EngineSender`.
        staging: buffers to send from (None: own ones); for cuda_ipc this rank's `Relay`.

    Raises:
        ValueError: the transport is unknown.
    """
    if transport not in SENDERS:
        raise ValueError(f"unknown weight-sync transport {transport!r}; there are {sorted(SENDERS)}")
    return SENDERS[transport](plan, engines, tensor_parallel_size, timeout_s, staging)


def make_receiver(plan: BucketPlan, link: Link, worker: int) -> WeightReceiver:
    """The end of worker number `worker` of an engine; joins the group."""
    return RECEIVERS[link.transport](plan, link, worker)


__all__ = [
    "Bucket", "BucketPlan", "BucketSource", "CudaMemory", "EngineFailed", "EnginesAtFault", "Link", "RECEIVERS",
    "Relay", "SENDERS", "SendReport", "Staging", "TensorSpec", "WeightReceiver", "WeightSender", "WeightStreamAborted",
    "WeightStreamMismatch", "WeightSyncError", "WeightSyncTimeout", "WeightTransferFailed", "choose_transport",
    "largest_frame", "make_receiver", "make_sender",
]  # fmt: skip
