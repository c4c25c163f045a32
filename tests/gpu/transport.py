"""Weights on their way to other processes: CUDA IPC, NCCL, and the checksums that prove them.

Engines are processes without a model (``tests.rollout.updates.FakeEngine``). On a CPU shared host
memory stands in for CUDA IPC, and gloo for NCCL; the protocol is the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from openrlhf_ext.rollout.sync import find_transport
from openrlhf_ext.rollout.sync import plan as plan_module
from openrlhf_ext.rollout.sync.base import (
    GO,
    YES,
    EngineFailed,
    Link,
    Staging,
    WeightSyncError,
    WeightTransferFailed,
)
from openrlhf_ext.rollout.sync.plan import bit_sum, words
from openrlhf_ext.rollout.sync.sender import WeightSender
from openrlhf_ext.rollout.sync.stream import WeightReceiver, send_stream
from tests.gpu import ray_stand_in
from tests.gpu.kit import Machine

ray_stand_in.install()

from tests.launch import launch  # noqa: E402
from tests.rollout.updates import (  # noqa: E402
    FakeEngine,
    all_hold,
    fill_with,
    no_sum,
    plan,
    plan_of,
    ready,
    same,
    sender_to,
    state,
    without,
)

ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 20.0
_SOON_S = 10.0
"""For what should come at once, and not with a deadline."""


def _ipc_name() -> str:
    return "cuda_ipc" if torch.cuda.is_available() else "tests.rollout.host_ipc"


# ---- CUDA IPC


def ipc(machine: Machine) -> dict[str, Any]:
    """Two engines get every version, also after one that was void; one that dies is named;
    speed."""
    engines = ready(FakeEngine.remote(), FakeEngine.remote())
    sender = sender_to(engines, _ipc_name(), _TIMEOUT_S)
    for version in (1, 2):
        sender.send(fill_with(state(version)), version)
        assert all_hold(engines, version), f"an engine does not hold version {version}"
    try:
        sender.send(without("norm", 3), 3)
        raise AssertionError("an update that could not be made was sent")
    except KeyError:
        pass  # the export's own error
    sender.connect()
    sender.send(fill_with(state(4)), 4)
    assert all_hold(engines, 4), "an engine does not hold the version after one that was void"
    measured = {"gb_per_s": _speed(engines, machine), "sent_mib": _SENT_MIB[machine.on_gpu]}
    measured["gb_per_s_without_sums"] = _speed(engines, machine, sums=False)
    sender.close()
    start = time.monotonic()
    try:
        sender = sender_to(ready(engines[0], FakeEngine.remote("die")), _ipc_name(), _TIMEOUT_S)
        sender.send(fill_with(state(5)), 5)
        raise AssertionError("an engine that died took part in an update")
    except EngineFailed as error:
        assert error.engines == (1,), f"engine 1 died, named were {error.engines}: {error}"
    seconds = time.monotonic() - start
    return {"transport": _ipc_name(), **measured, "died_engine_named_s": seconds}


_SENT_MIB = {True: 64 * 64, False: 8 * 4}


def _speed(engines: list[Any], machine: Machine, sums: bool = True) -> float:
    """GB/s of an update of many buckets, filled from the device.

    Args:
        sums: the sender sums up what it sends, every engine what it holds, and the sender compares;
            otherwise nobody does, which no run can ask for.
    """
    rows, count = (4096, 64) if machine.on_gpu else (256, 8)  # 4096 x 8192 bf16 is 64 MiB
    for engine in engines:
        engine.behave.remote("good" if sums else "no sums").result(_TIMEOUT_S)
    tensors = {
        f"w{i}": torch.randn(rows, 8192, device=machine.device).bfloat16() for i in range(count)
    }
    big = plan_of(tensors, 256 << 20)
    staging = find_transport(_ipc_name()).staging(big, [[0]], _TIMEOUT_S)
    sender = WeightSender(_ipc_name(), big, staging, engines, 1, 3 * _TIMEOUT_S)
    sender.connect()
    with nullcontext() if sums else mock.patch.object(plan_module, "bit_sums", _no_sums):
        reports = [sender.send(fill_with(tensors), version) for version in (1, 2)]
    sender.close()
    assert big.payload_bytes == _SENT_MIB[machine.on_gpu] << 20
    return 1e-9 * big.payload_bytes / reports[-1].seconds


def _no_sums(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([no_sum(part) for part in parts])


def killed_sender(machine: Machine) -> dict[str, Any]:
    """A worker learns within seconds that its sender was killed, and takes the update of
    another."""
    with _sending_process("stop in the middle") as (process, link):
        receiver = WeightReceiver.connect(plan(), link, 0)
        stream = receiver.receive(1)
        next(stream)
        process.kill()
        process.wait()
        start = time.monotonic()
        try:
            for _ in stream:
                pass
            raise AssertionError("an update without a sender went through")
        except WeightTransferFailed as error:
            told = str(error)
        seconds = time.monotonic() - start
        receiver.close()
    assert seconds < _SOON_S, f"a worker waited {seconds:.1f} s for a sender that had been killed"
    if machine.on_gpu:
        torch.cuda.synchronize()
    assert _whole_update(), "the update of another sender did not arrive whole"
    return {"transport": _ipc_name(), "noticed_s": seconds, "told": told.splitlines()[0][:200]}


def expandable_segments(machine: Machine) -> dict[str, Any]:
    """What becomes of an update from memory of expandable segments: the right weights, or an error;
    never a hang."""
    machine.need_gpu("expandable segments")
    outcome = {}
    for name, value in (("off", "False"), ("on", "True")):
        try:
            whole = _whole_update({"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{value}"})
        except (WeightSyncError, RuntimeError, AssertionError) as error:
            outcome[name] = f"{type(error).__name__}: {str(error)[:300]}"
            continue
        assert whole, (
            f"expandable segments {name}: an update arrived with other weights and without an error"
        )
        outcome[name] = "works"
    assert outcome["off"] == "works", outcome
    return {"expandable_segments": outcome}


def _whole_update(environment: dict[str, str] | None = None) -> bool:
    with _sending_process("whole", environment) as (process, link):
        receiver = WeightReceiver.connect(plan(), link, 0)
        whole = same(dict(receiver.receive(1)), 1)
        receiver.close()
        process.communicate("done\n", timeout=_TIMEOUT_S)
    assert process.returncode == 0, f"the sender ended with {process.returncode}"
    return whole


@contextmanager
def _sending_process(
    behavior: str, environment: dict[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen, Link]]:
    """A process that sends version 1, and how to reach it."""
    command = [sys.executable, "-m", "tests.gpu.transport", behavior]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | (environment or {}),
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    giving_up = threading.Timer(2 * _TIMEOUT_S, process.kill)  # a pipe has no deadline of its own
    giving_up.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (
            f"the sending process ended before it was ready, with {process.wait(_TIMEOUT_S)}"
        )
        yield process, Link(**json.loads(line))
    finally:
        giving_up.cancel()
        process.kill()
        process.communicate()


def _send(behavior: str) -> None:
    """What that process does: policy rank 0 with one worker."""
    transport = find_transport(_ipc_name())
    staging = transport.staging(plan(), [[0]], _TIMEOUT_S)
    store = dist.TCPStore(
        "127.0.0.1",
        0,
        is_master=True,
        timeout=timedelta(seconds=_TIMEOUT_S),
        wait_for_workers=False,
    )
    store.set(GO, YES)
    link = Link(_ipc_name(), "127.0.0.1", store.port, 1, 2, _TIMEOUT_S, staging.handles)
    end = transport.open_sender(store, link, staging)
    print(json.dumps(vars(link)), flush=True)
    fill = fill_with(state(1))

    def fill_and_stop(bucket: Any, content: Tensor | None) -> None:
        if behavior == "stop in the middle" and bucket.index == 2:
            time.sleep(3600)  # until it is killed
        fill(bucket, content)

    send_stream(end, plan(), staging, fill_and_stop, 1)
    sys.stdin.readline()  # the buffers stay as long as the worker reads them


# ---- process groups


def collective(machine: Machine) -> dict[str, Any]:
    """Open a group, broadcast, leave it, open another; with two GPUs (or none) between two
    processes too."""
    name = "nccl" if machine.on_gpu else "gloo"
    measured: dict[str, Any] = {"transport": name, "alone": _alone(name, machine)}
    if machine.on_gpu and torch.cuda.device_count() < 2:
        measured["two processes"] = "not here: one GPU, and NCCL takes one rank per GPU"
        return measured
    sender, worker = launch("tests.gpu.transport", "pair", 2, name=name)
    assert worker["whole"], "the worker got other weights"
    assert sender["noticed_s"] < 2 * _TIMEOUT_S, sender
    return measured | {"two processes": {**sender, **worker}}


def _alone(name: str, machine: Machine) -> dict[str, Any]:
    transport = find_transport(name)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    times: dict[str, list[float]] = {"open_s": [], "broadcast_s": [], "leave_s": []}
    for number in range(2):  # what was left and aborted is no hindrance to the next
        link = Link(name, "127.0.0.1", store.port, 1, 1, _TIMEOUT_S, {})
        start = time.monotonic()
        end = transport.open_sender(dist.PrefixStore(str(number), store), link, Staging(None))
        times["open_s"].append(time.monotonic() - start)
        frame = torch.arange(1 << 20, device=machine.device).to(torch.uint8)
        before = frame.clone()
        start = time.monotonic()
        end.send(frame)()
        times["broadcast_s"].append(time.monotonic() - start)
        assert torch.equal(frame, before), "a broadcast of one rank changed its frame"
        end.send(frame)  # under way when it leaves
        start = time.monotonic()
        end.close()
        times["leave_s"].append(time.monotonic() - start)
        assert times["leave_s"][-1] < _SOON_S, times
        try:
            end.send(frame)
            raise AssertionError("a rank that has left the group could send")
        except WeightTransferFailed:
            pass
    return times


def pair(name: str) -> dict[str, Any]:
    """Runs on two ranks: sender and worker. The worker leaves in the middle of the second
    update."""
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    link = Link(name, "127.0.0.1", port, 1, 2, _TIMEOUT_S, {})
    if rank == 1:
        receiver = WeightReceiver.connect(plan(), link, 0)
        whole = same(dict(receiver.receive(1)), 1)
        next(receiver.receive(2))
        receiver.close()
        return {"whole": whole}
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=_TIMEOUT_S))
    store.set(GO, YES)
    transport = find_transport(name)
    staging = transport.staging(plan(), [[0]], _TIMEOUT_S)
    end = transport.open_sender(store, link, staging)
    send_stream(end, plan(), staging, fill_with(state(1)), 1)
    start = time.monotonic()
    try:
        # small frames fit into socket buffers: the loss shows after a few
        for version in range(2, 200):
            send_stream(end, plan(), staging, fill_with(state(version)), version)
    except WeightSyncError as error:
        end.close()
        return {"noticed_s": time.monotonic() - start, "told": str(error).splitlines()[0][:200]}
    raise AssertionError("a worker that had left took 198 updates")


# ---- checksums


def checksums(machine: Machine) -> dict[str, Any]:
    """Sums of bits on the device equal those of the same tensors on the CPU."""
    tensors = _tensors()
    for name, tensor in tensors.items():
        here, there = _sum(tensor), _sum(tensor.to(machine.device))
        assert here == there, f"{name}: the sum on {machine.device} is {there}, on the CPU {here}"
        changed = tensor.clone()
        changed.view(-1).view(torch.uint8)[0] ^= 1
        assert _sum(changed.to(machine.device)) != here, (
            f"{name}: a changed bit left the sum as it was"
        )
    nbytes = (4 << 30) if machine.on_gpu else (16 << 20)
    big = torch.empty(nbytes // 1024, 1024, dtype=torch.uint8, device=machine.device).random_()
    words_N = words(big, big.shape, 1)
    assert words_N is not None
    bit_sum(words_N)
    start = time.perf_counter()
    total = bit_sum(words_N).item()
    return {
        "tensors": len(tensors),
        "gb_per_s": 1e-9 * nbytes / (time.perf_counter() - start),
        "sum": str(total),
    }


def _tensors() -> dict[str, Tensor]:
    """All words' sizes, and more words than are summed at a time on the CPU."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1,), (61,), (61, 24), (513, 128), (1025, 1024))
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
    return {
        f"{dtype} {shape}": torch.randn(shape, generator=generator).to(dtype)
        for dtype in dtypes
        for shape in shapes
    }


def _sum(tensor: Tensor) -> int:
    words_N = words(tensor, tensor.shape, 1)
    assert words_N is not None, tensor.shape
    return int(bit_sum(words_N))


if __name__ == "__main__":
    from openrlhf_ext import patches

    patches.apply()
    _send(sys.argv[1])
