"""What the transport tests send, and engines without a model that take it, or misbehave."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import ray
import torch
from torch import Tensor

from openrlhf_ext.rollout.sync import find_transport
from openrlhf_ext.rollout.sync.base import Link
from openrlhf_ext.rollout.sync.checksum import Receipt, bit_sum, together, words
from openrlhf_ext.rollout.sync.plan import Bucket, BucketPlan
from openrlhf_ext.rollout.sync.sender import WeightSender
from openrlhf_ext.rollout.sync.stream import Fill, WeightReceiver
from tests.patience import PATIENCE_S


def state(version: int) -> dict[str, Tensor]:
    """What version `version` of a model looks like, the same in every process."""
    generator = torch.Generator().manual_seed(version)
    layers = {f"layer{i}.weight": torch.randn(300, 100, generator=generator) for i in range(6)}
    return {**layers, "norm": torch.randn(100, generator=generator).bfloat16(), "scale": torch.tensor(float(version))}


def plan_of(tensors: Mapping[str, Tensor], bucket_bytes: int) -> BucketPlan:
    return BucketPlan.build([(name, tuple(t.shape), t.dtype) for name, t in tensors.items()], bucket_bytes)


def plan() -> BucketPlan:
    return plan_of(state(0), 200_000)


def same(received: dict[str, Tensor], version: int) -> bool:
    sent = state(version)
    return received.keys() == sent.keys() and all(torch.equal(received[name].cpu(), sent[name]) for name in sent)


def fill_with(tensors: Mapping[str, Tensor]) -> Fill:
    """Fills buckets with these tensors; fails at one that is missing."""

    def fill(bucket: Bucket, content: Tensor | None) -> None:
        if content is not None:
            for slot in bucket.slots:
                tensor = tensors[slot.name].detach()
                slot.view(content).copy_(tensor if slot.is_whole else tensor[slot.start : slot.stop])

    return fill


def without(name: str, version: int) -> Fill:
    """Fails when it comes to this tensor."""
    return fill_with({other: tensor for other, tensor in state(version).items() if other != name})


@ray.remote(num_cpus=0.1, max_concurrency=2)
class FakeEngine:
    """The weight-sync surface of a rollout engine, without a model."""

    def __init__(self, behavior: str = "good", device: str | None = None) -> None:
        """`device`: the name of this process's device, for `host_ipc`."""
        self.behavior = behavior
        if device is not None:
            import_module("tests.rollout.host_ipc").TRANSPORT.name = device

    def behave(self, behavior: str) -> None:
        self.behavior = behavior

    def connect_weight_sync(self, plan: BucketPlan, link: Link) -> None:
        if self.behavior == "cannot connect":
            raise OSError("no route to the policy")
        self.receiver = WeightReceiver.connect(BucketPlan.from_wire(plan.to_wire()), Link(**vars(link)), 0)

    def receive_weights(self, version: int) -> Receipt:
        if self.behavior == "hang":
            time.sleep(3600)
        stream = self.receiver.receive(version)
        if self.behavior == "die":
            next(stream)
            os._exit(3)
        if self.behavior == "fail":
            next(stream)
            self.receiver.close()
            raise RuntimeError("layer0.weight does not fit into this model")
        self.received = dict(stream)
        return self.receipt()

    def receipt(self) -> Receipt:
        """Of an engine with one worker that holds everything as it arrived."""
        held = [(words(tensor, tensor.shape, 1), tensor.numel()) for tensor in self.received.values()]
        return together([0.25], [[(int(bit_sum(words_N)), entries, False) for words_N, entries in held]])

    def holds(self, version: int) -> bool:
        return same(self.received, version)


def ready(*engines: Any) -> list[Any]:
    """The actors, started: importing torch does not count against a deadline."""
    ray.get([engine.__ray_ready__.remote() for engine in engines], timeout=PATIENCE_S)
    return [*engines]


def sender_to(engines: list[Any], transport: str, timeout_s: float = PATIENCE_S) -> WeightSender:
    """A sender of `plan` from one process, connected."""
    staging = find_transport(transport).staging(plan(), [0], PATIENCE_S)
    sender = WeightSender(transport, plan(), staging, engines, 1, timeout_s)
    sender.connect()
    return sender


def all_hold(engines: list[Any], version: int) -> bool:
    return all(ray.get([engine.holds.remote(version) for engine in engines]))
