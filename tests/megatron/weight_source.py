"""Ranks whose exporter is the source of vLLM's own sender, for test_weights.py."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer import nccl_engine
from vllm.distributed.weight_transfer.base import WeightSource
from vllm.distributed.weight_transfer.packed_tensor import pack_tensors, unpack_tensor

from openrlhf_ext.megatron.model.hf_weights import HFExporter, Ownership
from tests.megatron.weights_worker import policy_of

BUFFER_BYTES = 5000


class Source(HFExporter, WeightSource):
    """What vLLM asks of a source beyond our exporter is its own default."""


class Engine:
    """Stands where vLLM's engine answers, and where NCCL would carry the packed buffers to it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.info: dict[str, Any] = {}
        self.received: dict[str, torch.Tensor] = {}

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, info: dict[str, Any]) -> None:
        self.calls.append("update")
        self.info = info

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append("finish")

    def carry(self, iterator, group, src, post_iter_func, buffer_size_bytes, num_buffers) -> None:
        """vLLM's producer and consumer without their CUDA streams: one function of it packs,
        another unpacks."""
        while (chunk := pack_tensors(iterator, post_iter_func, buffer_size_bytes)) is not None:
            parts = (chunk.names, chunk.shapes, chunk.dtypes, chunk.tensor_sizes)
            self.received |= {
                n: t.clone() for n, t in unpack_tensor(chunk.packed_tensor.clone(), *parts)
            }


def send(model: str, layout: dict, ranks: int) -> dict:
    """vLLM's NCCL sender over two rounds, the second after the weights have moved; groups by
    layer."""
    policy = policy_of(model, layout, ranks)
    source = Source(policy.chunks, Ownership(policy.shape, policy.settings.layout))
    client = Engine()
    sender = nccl_engine.NCCLTrainerWeightTransferEngine(
        client=client,
        source=source,
        is_sender=dist.get_rank() == 0,
        packed_buffer_size_bytes=BUFFER_BYTES,
    )
    sender.model_update_group = object()
    rounds = []
    with mock.patch.object(nccl_engine, "packed_nccl_broadcast_producer", client.carry):
        for _ in range(2):
            sender.send_weights()
            rounds.append(dict(client.received))
            for chunk in policy.chunks:
                for parameter in chunk.parameters():
                    parameter.data.add_(1.0)
    groups = (
        [names for names, _ in source.iter_groups()]
        if dist.get_rank() == 0
        else [0 for _ in source]
    )
    return {"rounds": rounds, "calls": client.calls, "info": client.info, "groups": groups}
