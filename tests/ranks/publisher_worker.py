"""What the ranks of the weight-publisher tests run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
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
from openrlhf_ext.rollout.sync import sender
from openrlhf_ext.rollout.sync.base import EngineFailed, WeightSyncError
from openrlhf_ext.rollout.sync.gloo import HostMemory
from openrlhf_ext.rollout.sync.plan import BucketPlan, WeightSyncMismatch
from openrlhf_ext.rollout.sync.sender import _CONSEQUENCES, EngineCalls, SendReport, WeightSender
from openrlhf_ext.rollout.sync.stream import Fill
from tests.megatron.parity import settings
from tests.patience import PATIENCE_S
from tests.rollout.updates import FakeEngine

SYNC = SyncSettings(
    "gloo", 1, WeightSync(timeout_s=30.0), 1e-4, tuple(range(16)), "adapter", "fp32"
)


Fake = FakeEngine.__ray_metadata__.modified_class


def _small_buckets(
    build: Callable[..., BucketPlan], specs: list, _bucket_bytes: int, streams: list[int]
) -> BucketPlan:
    return build(specs, 60_000, streams)


class LocalEngine(Fake):
    """An engine of threads of rank 0's process, with the calls of a Ray actor."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("connect_weight_sync", "receive_weights"):
            return found
        return SimpleNamespace(remote=partial(ThreadPoolExecutor(1).submit, found))


class LocalCalls(EngineCalls):
    @classmethod
    def start(
        cls, engines: list, method: str, arguments: list[tuple], what: str, timeout_s: float
    ) -> LocalCalls:
        return cls(
            what,
            [getattr(e, method).remote(*a) for e, a in zip(engines, arguments, strict=True)],
            timeout_s,
        )

    def _collect(self, timeout_s: float) -> None:
        for future in wait(list(self._pending), timeout_s, FIRST_COMPLETED).done:
            index = self._pending.pop(future)
            try:
                self._results[index] = future.result()
            except _CONSEQUENCES as error:
                self._consequences[index] = error
            except Exception as error:
                raise EngineFailed(
                    f"rollout engine {index} failed while {self._what}: {error}", [index]
                ) from error


class NotedSender(WeightSender):
    """Says in the store of all ranks while rank 0 is busy with engines."""

    def stream(self, fill: Fill, version: int) -> list[int]:
        return self.noted(lambda: super(NotedSender, self).stream(fill, version))

    def finish(self, version: int, sums: list[int]) -> SendReport:
        return self.noted(lambda: super(NotedSender, self).finish(version, sums))

    def noted(self, function: Callable[[], Any]) -> Any:
        if dist.get_rank() != 0:
            return function()
        _store().set("engines", "busy")
        try:
            time.sleep(0.1)
            return function()
        finally:
            _store().set("engines", "free")


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


@contextmanager
def waits_beside_engines() -> Iterator[list[str]]:
    """Where this rank enters a collective of all ranks while the engines are busy and rank 0 with
    them: on a GPU it would take computing time from an engine beside it."""
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
    """Notes the first call of this rank on every group, by the group's ranks: a point-to-point call
    or all_reduce."""

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
        """Groups whose first call is a point-to-point one on a rank: under NCCL all their ranks
        have to take part."""
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self.seen)
        calls = [
            (rank, group, call)
            for rank, seen in enumerate(everyone)
            for group, call in seen.items()
        ]
        alone = [
            f"rank {rank} meets {group} in a {call} call"
            for rank, group, call in calls
            if "point" in call
        ]
        missing = [
            f"rank {rank} never calls {group}"
            for _, group, _ in calls
            for rank in group
            if group not in everyone[rank]
        ]
        return alone + missing


def publish(cases: list[dict], ranks: int) -> list[str]:
    """Publishes every case's model twice, with a failure in between; returns what was wrong."""
    publishing.WeightSender = NotedSender
    sender.EngineCalls = LocalCalls
    sender._own_address = lambda: "127.0.0.1"
    problems = []
    for case in cases:
        policy_settings = replace(settings(case, ranks), optimizer=None)
        initialize_distributed(policy_settings.layout, PATIENCE_S, 1234)
        openable = HostMemory.open if case["shared"] else staticmethod(_cannot_open)
        with patch.object(HostMemory, "open", openable):
            for workers in case["workers"]:
                found = _publish(MegatronPolicy(policy_settings), case, workers)
                problems += [f"{case}, {workers} workers: {problem}" for problem in found]
        parallel_state.destroy_model_parallel()
    return problems


def _cannot_open(handle: str) -> HostMemory:
    raise OSError("the ranks are on different hosts, says the test")


def _not_waking_up(
    _engines: list, method: str, _arguments: list, what: str, _timeout_s: float
) -> None:
    assert method == "wake_up"
    raise EngineFailed(f"rollout engine 1 failed while {what}", [1])


def _publish(policy: MegatronPolicy, case: dict, workers: int) -> list[str]:
    model = case["model"]
    engines = [LocalEngine(workers=workers), LocalEngine(workers=workers)]
    with patch.object(BucketPlan, "build", partial(_small_buckets, BucketPlan.build)):
        publisher = WeightPublisher(policy, replace(SYNC, workers=workers), engines)
    problems = []
    streams = publisher._exporter.streams
    if len(streams) != case["streams"] or sum(map(len, streams)) != len(
        {rank for ranks in streams for rank in ranks}
    ):
        problems.append(f"ranks of the streams: {streams}")
    own = publisher._exporter.stream
    if publisher._staging.shared != (case["shared"] and own is not None and len(streams[own]) > 1):
        problems.append(f"shared memory: {publisher._staging.shared}")
    publisher.connect()
    with FirstCalls() as first_calls, waits_beside_engines() as waits:
        publisher.publish(1, trained=True)
    problems += first_calls.problems() + waits
    problems += _differences(engines, model, 1.0)
    for parameter in (p for chunk in policy.chunks for p in chunk.parameters()):
        parameter.data.mul_(2.0)
    engines[1].behave("fail")
    try:
        publisher.publish(2, trained=True)
        problems.append("the failure of an engine was not raised here")
    except EngineFailed as error:
        if error.engines != (1,):
            problems.append(f"wrong engines: {error.engines}")
    except WeightSyncError as error:
        problems.append(f"another error: {error!r}")
    engines[1].behave("good")
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


def _probe_problems(publisher: WeightPublisher, engines: list[LocalEngine]) -> list[str]:
    """A difference is rounding at the start, and said where there was none; above the tolerance it
    ends the run.

    So it does in an engine that takes the place of another: that one gets the weights, and is
    asked, alone.
    """
    tokens = SYNC.probe
    ours_N = publisher._policy.logprobs(
        sequence_batch([np.array(tokens)], [[(1, len(tokens))]]), 1.0
    ).logprobs_N
    asked: list[list[LocalEngine]] = []

    def prove(off: float, proof: Callable[[], object] = lambda: publisher.prove(3)) -> str:
        calls = SimpleNamespace(finish=lambda: [(ours_N + off).tolist()])
        start = patch.object(
            EngineCalls, "start", lambda engines, *_: asked.append(engines) or calls
        )
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
    engines[1].received = []
    found += [prove(off, lambda: publisher.bring_up_to_date([1], 3)) for off in (2e-6, 2e-4)]
    said = "said" if dist.get_rank() == 0 else "passes"
    problems = (
        []
        if found == ["passes", "passes", said, "ends", "passes", "passes", "ends"]
        else [f"probe: {found}"]
    )
    if dist.get_rank() == 0 and not (
        len(asked) == 2 and all(one is engines[1] for (one,) in asked)
    ):
        problems.append("others than the fresh engine were asked")
    return problems


def _differences(engines: list[LocalEngine], model: str, factor: float) -> list[str]:
    """Names that workers of rank 0's engines do not hold as the checkpoint has them, times
    ``factor``."""
    if dist.get_rank() != 0:
        return []
    expected = load_file(f"{model}/model.safetensors")
    held = [own for engine in engines for own in engine.received]
    found = [
        f"names {sorted(own.keys() ^ expected.keys())}"
        for own in held
        if own.keys() != expected.keys()
    ]
    return found + [
        n for own in held for n, t in own.items() if not torch.equal(t, expected[n] * factor)
    ]
