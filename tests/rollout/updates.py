"""What the transport tests send, and engines without a model that take it, or misbehave."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any, TypeVar

import ray
import torch
from torch import Tensor

from openrlhf_ext.rollout.sync import find_transport
from openrlhf_ext.rollout.sync.base import Link
from openrlhf_ext.rollout.sync.plan import Bucket, BucketPlan, Receipt, bit_sum, together, words
from openrlhf_ext.rollout.sync.sender import SendReport, WeightSender
from openrlhf_ext.rollout.sync.stream import Fill, WeightReceiver
from tests.patience import PATIENCE_S, until

T = TypeVar("T")


def state(version: int) -> dict[str, Tensor]:
    """What version `version` of a model looks like, the same in every process."""
    generator = torch.Generator().manual_seed(version)
    layers = {f"layer{i}.weight": torch.randn(300, 100, generator=generator) for i in range(6)}
    return {
        **layers,
        "norm": torch.randn(100, generator=generator).bfloat16(),
        "scale": torch.tensor(float(version)),
    }


def plan_of(tensors: Mapping[str, Tensor], bucket_bytes: int) -> BucketPlan:
    return BucketPlan.build(
        [(name, tuple(t.shape), t.dtype) for name, t in tensors.items()], bucket_bytes
    )


def plan() -> BucketPlan:
    return plan_of(state(0), 200_000)


def no_sum(words_N: Tensor) -> Tensor:
    """In the place of ``bit_sum`` on both sides: an update that nobody proves."""
    return torch.zeros((), dtype=torch.int64, device=words_N.device)


def same(received: dict[str, Tensor], version: int) -> bool:
    sent = state(version)
    return received.keys() == sent.keys() and all(
        torch.equal(received[name].cpu(), sent[name]) for name in sent
    )


def fill_with(tensors: Mapping[str, Tensor]) -> Fill:
    """Fills buckets with these tensors; fails at one that is missing."""

    def fill(bucket: Bucket, content: Tensor | None) -> None:
        if content is not None:
            for slot in bucket.slots:
                tensor = tensors[slot.name].detach()
                slot.view(content).copy_(
                    tensor if slot.is_whole else tensor[slot.start : slot.stop]
                )

    return fill


def without(name: str, version: int) -> Fill:
    """Fails when it comes to this tensor."""
    return fill_with({other: tensor for other, tensor in state(version).items() if other != name})


@ray.remote(num_cpus=0.1, max_concurrency=2)
class FakeEngine:
    """The weight-sync surface of a rollout engine, without a model."""

    def __init__(self, behavior: str = "good", device: str | None = None, workers: int = 1) -> None:
        """`device`: the name of this process's device, for `host_ipc`; `workers`: threads, each
        with all weights."""
        self.behavior, self.workers = behavior, workers
        if device is not None:
            import_module("tests.rollout.host_ipc").TRANSPORT.name = device

    def behave(self, behavior: str) -> None:
        self.behavior = behavior

    def connect_weight_sync(self, plan: BucketPlan, link: Link) -> None:
        if self.behavior == "cannot connect":
            raise OSError("no route to the policy")
        self.plan = plan = BucketPlan.from_wire(plan.to_wire())
        link = Link(**vars(link))
        self.receivers = self.of_workers(lambda worker: WeightReceiver.connect(plan, link, worker))

    def of_workers(self, function: Callable[[int], T]) -> list[T]:
        with ThreadPoolExecutor(self.workers) as pool:
            return list(pool.map(function, range(self.workers)))

    def receive_weights(self, version: int) -> Receipt:
        if self.behavior == "hang":
            time.sleep(3600)
        if self.behavior == "die":
            next(self.receivers[0].receive(version))
            os._exit(3)
        receivers = self.receivers
        try:
            if self.behavior == "fail":
                next(receivers[0].receive(version))
                raise RuntimeError("layer0.weight does not fit into this model")
            self.received = self.of_workers(lambda worker: dict(receivers[worker].receive(version)))
        except Exception:
            for receiver in receivers:
                receiver.close()
            raise
        return self.receipt()

    def receipt(self) -> Receipt:
        """Of workers that hold everything as it arrived."""
        names = [name for name, _, _ in self.plan.tensors]
        tensors = [[own[name] for name in names] for own in self.received]
        held = [
            [(words(each, each.shape, self.workers), each.numel()) for each in own]
            for own in tensors
        ]
        summed = no_sum if self.behavior == "no sums" else bit_sum
        return together(
            [0.25],
            [[(int(summed(words_N)), entries, False) for words_N, entries in own] for own in held],
        )

    def holds(self, version: int) -> bool:
        return all(same(own, version) for own in self.received)


def ready(*engines: Any) -> list[Any]:
    """The actors, started: importing torch does not count against a deadline."""
    ray.get([engine.__ray_ready__.remote() for engine in engines], timeout=PATIENCE_S)
    return [*engines]


def sender_to(
    engines: list[Any], transport: str, timeout_s: float = PATIENCE_S, workers: int = 1
) -> WeightSender:
    """A sender of `plan` from one process, connected to engines of so many workers."""
    staging = find_transport(transport).staging(plan(), [[0]], PATIENCE_S)
    sender = WeightSender(transport, plan(), staging, engines, workers, timeout_s)
    sender.connect()
    return sender


def two_senders(
    tensors: Mapping[str, Tensor], bucket_bytes: int, engines: list[Any], workers: int = 1
) -> list[WeightSender]:
    """Connected, as on two policy ranks: tensors of even and of odd places."""
    specs = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    plan = BucketPlan.build(specs, bucket_bytes, [place % 2 for place in range(len(specs))])
    staging = [find_transport("gloo").staging(plan, [[0]], PATIENCE_S) for _ in range(2)]
    senders = [
        WeightSender("gloo", plan, own, engines, workers, PATIENCE_S, number)
        for number, own in enumerate(staging)
    ]
    link = senders[0].meet()
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda sender: sender.join(link), senders))
    return senders


def send_together(senders: list[WeightSender], fill: Fill, version: int) -> SendReport:
    """An update, as `WeightPublisher` has the ranks send it."""
    senders[0].begin(version)
    with ThreadPoolExecutor() as pool:
        sums = list(pool.map(lambda sender: sender.stream(fill, version), senders))
    return senders[0].finish(version, [sum(each) for each in zip(*sums, strict=True)])


def halted_in_flight(engine: Any, ask: Callable[[], list[Any]]) -> list[Any]:
    """What ``ask`` asked of a `tiny.SabotagedEngine`, which has sampled some tokens for each and
    stands still until it takes weights. Asked again if all end before, so it does not matter how
    fast it is."""
    asked: list[Any] = []

    def halted() -> bool:
        unfinished = asked and ray.wait(asked, num_returns=len(asked), timeout=0)[1]
        if not unfinished:
            ray.get(asked)  # raises what an engine that fails at them would raise for ever
            asked[:] = ask()
        ray.get(engine.halt.remote(), timeout=PATIENCE_S)
        sampled = ray.get(engine.sampled_tokens.remote(), timeout=PATIENCE_S).values()
        if len(sampled) == len(asked) and min(sampled) > 0:
            return True
        ray.get(engine.resume_generation.remote(), timeout=PATIENCE_S)
        return False

    until(halted, "requests in flight")
    return asked


def all_hold(engines: list[Any], version: int) -> bool:
    return all(ray.get([engine.holds.remote(version) for engine in engines]))
