"""The shared-memory transport with host memory in the place of a GPU's: the same protocol, between real processes."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import ray
import torch
from torch import Tensor

from openrlhf_ext.rollout.sync import (
    BucketPlan,
    EngineFailed,
    Link,
    Relay,
    WeightStreamMismatch,
    WeightSyncError,
    WeightSyncTimeout,
    make_sender,
)
from openrlhf_ext.rollout.sync.cuda_ipc import IpcWeightReceiver, IpcWeightSender
from openrlhf_ext.rollout.sync.shared_memory import HostMemory
from tests.launch import launch
from tests.patience import PATIENCE_S
from tests.rollout.test_gloo import PATIENCE, plan, ready, same, state


class HostDevice:
    """`DeviceMemory` of a host: what is shared is anonymous memory."""

    def __init__(self, name: str = "host") -> None:
        self.name = name
        self.made: dict[int, HostMemory] = {}

    def key(self) -> str:
        return self.name

    def allocate(self, nbytes: int) -> Tensor:
        memory = HostMemory.create(nbytes)
        self.made[memory.tensor.data_ptr()] = memory
        return memory.tensor

    def share(self, tensor: Tensor) -> list[Any]:
        return [self.made[tensor.data_ptr()].handle]

    def open(self, handle: list[Any]) -> Tensor:
        return HostMemory.open(handle[0]).tensor

    def synchronize(self) -> None:
        pass


@ray.remote(num_cpus=0.1)
class FakeEngine:
    """The weight-sync surface of a rollout engine, without a model."""

    def __init__(self, device: str = "host", behaviour: str = "good") -> None:
        self.device, self.behaviour = device, behaviour

    def connect_weight_sync(self, plan: BucketPlan, link: Link) -> None:
        self.receiver = IpcWeightReceiver(plan, link, 0, HostDevice(self.device))

    def receive_weights(self, version: int) -> float:
        stream = self.receiver.receive(version)
        if self.behaviour == "die":
            next(stream)
            os._exit(3)
        if self.behaviour == "hang":
            time.sleep(3600)
        self.received = dict(stream)
        return 0.0

    def holds(self, version: int) -> bool:
        return same(self.received, version)


def sender_to(engines: list[Any], timeout_s: float = PATIENCE_S) -> IpcWeightSender:
    sender = make_sender("cuda_ipc", plan(), ready(*engines), 1, timeout_s, Relay(plan(), HostDevice()))
    sender.connect()
    return sender


def test_every_engine_gets_every_version_also_after_an_update_that_was_void(ray_session: None) -> None:
    engines = [FakeEngine.remote(), FakeEngine.remote()]
    sender = sender_to(engines)
    for version in (1, 2):
        sender.send(state(version).items(), version)
        assert all(ray.get([engine.holds.remote(version) for engine in engines]))
    with pytest.raises(WeightStreamMismatch, match="missing: \\['norm'\\]"):
        sender.send(((name, tensor) for name, tensor in state(3).items() if name != "norm"), 3)
    sender.send(state(4).items(), 4)
    assert all(ray.get([engine.holds.remote(4) for engine in engines]))
    sender.close()


def test_engines_that_die_hang_or_sit_elsewhere_are_named(ray_session: None) -> None:
    good = FakeEngine.remote()
    sender = sender_to([good, FakeEngine.remote(behaviour="die")])
    with pytest.raises(EngineFailed, match="rollout engine 1 failed(.|\n)*(died|unavailable)") as failed:
        sender.send(state(1).items(), 1)
    assert failed.value.engines == (1,)
    hanging = FakeEngine.remote(behaviour="hang")
    sender = sender_to([good, hanging], timeout_s=10.0)
    with pytest.raises(WeightSyncTimeout, match="engines \\[1\\] did not answer within 10 s"):
        sender.send(state(1).items(), 1)
    with pytest.raises(EngineFailed, match="rollout engine 0(.|\n)*this worker's is elsewhere, the policy's are"):
        sender_to([FakeEngine.remote("elsewhere")])
    sender = sender_to([good])
    sender.send(state(5).items(), 5)
    assert ray.get(good.holds.remote(5))


def relay_cases() -> dict[str, Any]:
    """Runs on two policy ranks: rank 0's frames reach the other's buffers, which a worker beside it opens."""
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=PATIENCE)
    rank = dist.get_rank()
    relay = Relay(plan(), HostDevice(f"device {rank}"))
    if rank == 0:
        for bucket, buffer in zip(plan().buckets, relay.staging, strict=False):
            buffer.fill_(bucket.index + 1)
    for bucket in plan().buckets[:2]:
        relay.spread(bucket)
    opened = [HostDevice().open(handle) for handle in relay.buffers[f"device {rank}"]]
    return {"devices": sorted(relay.buffers), "seen": [int(buffer[0]) for buffer in opened]}


def test_a_frame_reaches_the_buffers_of_every_policy_rank() -> None:
    for result in launch("tests.rollout.test_cuda_ipc", "relay_cases", 2):
        assert result == {"devices": ["device 0", "device 1"], "seen": [1, 2]}


def test_memory_of_another_host_or_of_a_process_that_has_closed_it_cannot_be_opened() -> None:
    memory = HostMemory.create(100)
    memory.tensor[3] = 7
    assert HostMemory.open(memory.handle).tensor[3] == 7
    memory.close()
    with pytest.raises(OSError):
        HostMemory.open(memory.handle)
    with pytest.raises(OSError, match="on another machine"):
        HostMemory.open("elsewhere:1:2")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_nccl_without_a_gpu_says_what_to_use(ray_session: None) -> None:
    sender = make_sender(
        "nccl", plan(), ready(FakeNcclEngine.remote()), 1, PATIENCE_S, (torch.empty(0), torch.empty(0))
    )
    with pytest.raises(WeightSyncError, match="nccl needs a GPU(.|\n)*use gloo"):
        sender.connect()


@ray.remote(num_cpus=0.1)
class FakeNcclEngine:
    def connect_weight_sync(self, plan: BucketPlan, link: Link) -> None:
        from openrlhf_ext.rollout.sync import make_receiver

        make_receiver(plan, link, 0)
