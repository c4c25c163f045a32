"""What the ranks of the weight-publisher tests run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import load_file

from openrlhf_ext.megatron.distributed import initialize_distributed
from openrlhf_ext.megatron.policy import MegatronPolicy
from openrlhf_ext.megatron.step.batch import sequence_batch
from openrlhf_ext.options.sections import WeightSync
from openrlhf_ext.ranks import publishing
from openrlhf_ext.ranks.publishing import SyncSettings, WeightPublisher
from openrlhf_ext.rollout import probe
from openrlhf_ext.rollout.sync.base import EngineFailed, Staging, WeightSyncError
from openrlhf_ext.rollout.sync.gloo import HostMemory
from openrlhf_ext.rollout.sync.plan import HEADER_BYTES, BucketPlan, WeightSyncMismatch
from openrlhf_ext.rollout.sync.sender import EngineCalls, SendReport
from openrlhf_ext.rollout.sync.stream import Fill, send_stream
from tests.megatron.parity import settings
from tests.patience import PATIENCE_S

SYNC = SyncSettings("gloo", 1, WeightSync(timeout_s=30.0), 1e-4, tuple(range(16)))


def _small_buckets(build: Callable[..., BucketPlan], specs: list, _bucket_bytes: int) -> BucketPlan:
    return build(specs, 60_000)


class LoopbackSender:
    """A sender whose engines are a dictionary of what arrived; fails at a bucket when told to."""

    fail_at: int | None = None
    sends_shared_memory = False

    def __init__(self, transport: str, plan: BucketPlan, staging: Staging, engines: list, *_others: object) -> None:
        self.plan, self.staging, self.engines = plan, staging, engines
        LoopbackSender.sends_shared_memory = staging.shared
        self.connected = False
        self.frames = 0

    def connect(self) -> None:
        self.connected = True

    def close(self) -> None:
        self.connected = False

    def send(self, fill: Fill, version: int) -> SendReport:
        self.frames = 0
        end = SimpleNamespace(send=self.deliver)
        _store().set("engines", "busy")
        try:
            sums = send_stream(end, self.plan, self.staging, fill, version)
            time.sleep(0.2)  # they load
        finally:
            _store().set("engines", "free")
        return SendReport(0.0, self.plan.payload_bytes, 0.0, sums)

    def deliver(self, frame: torch.Tensor) -> Callable[[], None]:
        if self.frames == LoopbackSender.fail_at:
            self.close()
            raise EngineFailed("rollout engine 1 failed: it was killed", [1])
        bucket = self.plan.buckets[self.frames]
        arrived = frame.clone()[HEADER_BYTES:]
        for engine in self.engines:
            for slot in bucket.slots:
                rows = slot.view(arrived)
                engine.setdefault(slot.name, rows.new_zeros(slot.shape))[slot.start : slot.stop] = rows
        self.frames += 1
        return lambda: None


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


@contextmanager
def waits_beside_engines() -> Iterator[list[str]]:
    """Where this rank enters a collective of all ranks while the engines are busy and rank 0 with them: on a GPU it
    would take computing time from an engine beside it."""
    found: list[str] = []

    def all_gather_object(*arguments: Any, **options: Any) -> None:
        if _store().get("engines") == b"busy":
            found.append("waits for rank 0 in a collective")
        kept(*arguments, **options)

    kept = dist.all_gather_object
    _store().set("engines", "free")
    with patch.object(dist, "all_gather_object", all_gather_object):
        yield found


class FirstCalls:
    """Notes the first call of this rank on every group, by the group's ranks: a point-to-point call or all_reduce."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, ...], str] = {}

    def __enter__(self) -> FirstCalls:
        def all_reduce(tensor, *args, group=None, **kwargs):
            self._note(group, "all_reduce")
            return kept[0](tensor, *args, group=group, **kwargs)

        def batch_isend_irecv(operations):
            self._note(operations[0].group, "point to point")
            return kept[1](operations)

        kept = dist.all_reduce, dist.batch_isend_irecv
        self._kept = kept
        dist.all_reduce, dist.batch_isend_irecv = all_reduce, batch_isend_irecv
        return self

    def _note(self, group: dist.ProcessGroup | None, call: str) -> None:
        self.seen.setdefault(tuple(dist.get_process_group_ranks(group or dist.group.WORLD)), call)

    def __exit__(self, *_: object) -> None:
        dist.all_reduce, dist.batch_isend_irecv = self._kept

    def problems(self) -> list[str]:
        """Groups whose first call is a point-to-point one on a rank: under NCCL all their ranks have to take part."""
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self.seen)
        calls = [(rank, group, call) for rank, seen in enumerate(everyone) for group, call in seen.items()]
        alone = [f"rank {rank} meets {group} in a {call} call" for rank, group, call in calls if "point" in call]
        missing = [
            f"rank {rank} never calls {group}" for _, group, _ in calls for rank in group if group not in everyone[rank]
        ]
        return alone + missing


def publish(cases: list[dict], ranks: int) -> list[str]:
    """Publishes every case's model twice, with a failure in between; returns what was wrong."""
    publishing.WeightSender = LoopbackSender
    problems = []
    for case in cases:
        policy_settings = replace(settings(case, ranks), optimizer=None)
        initialize_distributed(policy_settings.layout, PATIENCE_S, 1234)
        openable = HostMemory.open if case["shared"] else staticmethod(_cannot_open)
        with patch.object(HostMemory, "open", openable):
            found = _publish(MegatronPolicy(policy_settings), case["model"], case["shared"])
        problems += [f"{case}: {problem}" for problem in found]
        parallel_state.destroy_model_parallel()
    return problems


def _cannot_open(handle: str) -> HostMemory:
    raise OSError("the ranks are on different hosts, says the test")


def _not_waking_up(_engines: list, method: str, _arguments: list, what: str, _timeout_s: float) -> None:
    assert method == "wake_up"
    raise EngineFailed(f"rollout engine 1 failed while {what}", [1])


def _publish(policy: MegatronPolicy, model: str, shared: bool) -> list[str]:
    engines: list[dict] = [{}, {}]
    with patch.object(BucketPlan, "build", partial(_small_buckets, BucketPlan.build)):
        publisher = WeightPublisher(policy, SYNC, engines)
    problems = []
    if LoopbackSender.sends_shared_memory != (shared and publisher._exporter.takes_part):
        problems.append(f"shared memory: {LoopbackSender.sends_shared_memory}")
    publisher.connect()
    with FirstCalls() as first_calls, waits_beside_engines() as waits:
        publisher.publish(1, trained=True)
    problems += first_calls.problems() + waits
    problems += _differences(engines, model, 1.0)
    for parameter in (p for chunk in policy.chunks for p in chunk.parameters()):
        parameter.data.mul_(2.0)
    LoopbackSender.fail_at = 2
    try:
        publisher.publish(2, trained=True)
        problems.append("the failure of an engine was not raised here")
    except EngineFailed as error:
        if error.engines != (1,):
            problems.append(f"wrong engines: {error.engines}")
    except WeightSyncError as error:
        problems.append(f"another error: {error!r}")
    LoopbackSender.fail_at = None
    publisher.replace_engines(engines)
    publisher.publish(2, trained=True)
    publisher.publish(3, trained=False)
    try:
        publisher.publish(4, trained=True)
        problems.append("weights that did not move were sent")
    except WeightSyncMismatch as error:
        problems += [] if "to the last bit" in str(error) else [f"told otherwise: {error}"]
    except WeightSyncError as error:
        problems.append(f"another error: {error!r}")
    with patch.object(EngineCalls, "start", _not_waking_up):
        try:
            publisher.prove(2, wake=True)
            problems.append("an engine that does not wake up was not told here")
        except EngineFailed as error:
            if error.engines != (1,):
                problems.append(f"wrong engines do not wake up: {error.engines}")
    problems += _probe_problems(publisher, engines)
    return problems + _differences(engines, model, 2.0)


def _probe_problems(publisher: WeightPublisher, engines: list[dict]) -> list[str]:
    """A difference is rounding at the start, and said where there was none; above the tolerance it ends the run.

    So it does in an engine that takes the place of another: that one gets the weights, and is asked, alone.
    """
    tokens = SYNC.probe
    ours_N = publisher._policy.logprobs(sequence_batch([np.array(tokens)], [[(1, len(tokens))]]), 1.0).logprobs_N
    asked: list[list[dict]] = []

    def prove(off: float, proof: Callable[[], object] = lambda: publisher.prove(3)) -> str:
        calls = SimpleNamespace(finish=lambda: [(ours_N + off).tolist()])
        start = patch.object(EngineCalls, "start", lambda engines, *_: asked.append(engines) or calls)
        with start, patch.object(probe.logger, "warning") as said:
            try:
                proof()
            except WeightSyncMismatch:
                return "ends"
            return "said" if said.called else "passes"

    found = [prove(off) for off in (2e-6, 2e-5, 9e-5, 2e-4)]
    publisher._baseline = None
    found.append(prove(9e-5))
    asked.clear()
    engines[1].clear()
    found += [prove(off, lambda: publisher.bring_up_to_date([1], 3)) for off in (2e-6, 2e-4)]
    said = "said" if dist.get_rank() == 0 else "passes"
    problems = [] if found == ["passes", "passes", said, "ends", "passes", "passes", "ends"] else [f"probe: {found}"]
    if dist.get_rank() == 0 and not (len(asked) == 2 and all(one is engines[1] for (one,) in asked)):
        problems.append("others than the fresh engine were asked")
    return problems


def _differences(engines: list[dict], model: str, factor: float) -> list[str]:
    """Names that rank 0's engines do not hold as the checkpoint has them, times ``factor``."""
    if dist.get_rank() != 0:
        return []
    expected = load_file(f"{model}/model.safetensors")
    found = [f"names {sorted(e.keys() ^ expected.keys())}" for e in engines if e.keys() != expected.keys()]
    return found + [n for e in engines for n, t in e.items() if not torch.equal(t, expected[n] * factor)]
