"""The shared-memory transport with host memory in the place of a GPU's: the same protocol, between
real processes."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from openrlhf_ext.rollout.sync import cuda_ipc
from openrlhf_ext.rollout.sync.base import (
    EngineFailed,
    Staging,
    WeightSyncError,
    WeightSyncTimeout,
    WeightTransferFailed,
)
from openrlhf_ext.rollout.sync.sender import WeightSender
from tests.launch import launch
from tests.patience import PATIENCE_S
from tests.rollout.host_ipc import TRANSPORT
from tests.rollout.updates import (
    FakeEngine,
    all_hold,
    fill_with,
    plan,
    ready,
    sender_to,
    state,
    without,
)

HOST_IPC = "tests.rollout.host_ipc"


@pytest.fixture(scope="module")
def engines(ray_session: None) -> list[Any]:
    return ready(FakeEngine.remote(), FakeEngine.remote())


def test_every_engine_gets_every_version_also_after_an_update_that_was_void(
    engines: list[Any],
) -> None:
    sender = sender_to(engines, HOST_IPC)
    for version in (1, 2):
        sender.send(fill_with(state(version)), version)
        assert all_hold(engines, version)
    with pytest.raises(KeyError, match="norm"):
        sender.send(without("norm", 3), 3)
    sender.connect()
    sender.send(fill_with(state(4)), 4)
    assert all_hold(engines, 4)
    sender.close()


def test_engines_that_die_hang_or_sit_elsewhere_are_named(engines: list[Any]) -> None:
    good = engines[0]
    dying, hanging, elsewhere = ready(
        FakeEngine.remote("die"), FakeEngine.remote("hang"), FakeEngine.remote(device="elsewhere")
    )
    sender = sender_to([good, dying], HOST_IPC)
    with pytest.raises(
        EngineFailed, match="rollout engine 1 failed(.|\n)*(died|unavailable)"
    ) as failed:
        sender.send(fill_with(state(1)), 1)
    assert failed.value.engines == (1,)
    sender = sender_to([good, hanging], HOST_IPC, timeout_s=4.0)
    with pytest.raises(WeightSyncTimeout, match="engines \\[1\\] did not answer within 4 s"):
        sender.send(fill_with(state(1)), 1)
    with pytest.raises(
        EngineFailed, match="rollout engine 0(.|\n)*this worker's is elsewhere, the policy's are"
    ):
        sender_to([elsewhere], HOST_IPC)
    sender = sender_to([good], HOST_IPC)
    sender.send(fill_with(state(5)), 5)
    assert all_hold([good], 5)


def test_a_policy_lets_engines_open_its_memory_where_yama_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple] = []
    libc = SimpleNamespace(prctl=lambda *arguments: asked.append(arguments) or len(asked) - 1)
    monkeypatch.setattr(cuda_ipc, "_PTRACE_SCOPE", tmp_path / "scope")
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: libc)
    buffer = torch.empty(8, dtype=torch.uint8)
    for scope in ("absent", "0", "1"):
        if scope != "absent":
            (tmp_path / "scope").write_text(scope + "\n")
        assert asked == []
        with suppress(RuntimeError):  # a CPU's storage has no handle of CUDA
            cuda_ipc.TRANSPORT.share(buffer)
    assert [(number, what.value) for number, what, *_ in asked] == [(0x59616D61, 2**64 - 1)]
    with pytest.raises(
        WeightSyncError,
        match=r"cuda_ipc: .*scope is 1 and prctl.*ptrace_scope to 0 .*or use .* gloo",
    ):
        cuda_ipc.TRANSPORT.share(buffer)


def relay_cases() -> dict[str, Any]:
    """Runs on two policy ranks: rank 0's frames reach the other's buffers, which a worker beside it
    opens."""
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_S))
    rank = dist.get_rank()
    TRANSPORT.name = f"device {rank}"
    with pytest.MonkeyPatch.context() as patch:
        # gloo connects when a group is made, which not every network of GPUs allows
        patch.delattr(dist, "new_group")
        relay = TRANSPORT.staging(plan(), [[0, 1]], PATIENCE_S)
    if rank == 0:
        for bucket in plan().buckets[:2]:
            relay.frame(bucket).fill_(bucket.index + 1)
    for bucket in plan().buckets[:2]:
        relay.complete(bucket)
    opened = [TRANSPORT.open(handle).tensor for handle in relay.handles[f"device {rank}"]]
    found = {
        "devices": sorted(relay.handles),
        "seen": [int(buffer[0]) for buffer in opened],
        "late": "",
    }
    found["keys"] = dist.distributed_c10d._get_default_store().list_keys()
    relay = TRANSPORT.staging(plan(), [[0, 1]], 0.5)
    if rank == 1:  # rank 0 exports another bucket for longer than that
        with pytest.raises(WeightTransferFailed) as late:
            relay.complete(plan().buckets[2])
        found["late"] = str(late.value)
    return found


def test_a_frame_reaches_the_buffers_of_every_policy_rank_and_one_that_is_late_is_named() -> None:
    for rank, result in enumerate(launch("tests.rollout.test_cuda_ipc", "relay_cases", 2)):
        assert (result["devices"], result["seen"]) == (["device 0", "device 1"], [1, 2])
        if rank == 0:  # which removes them when all have seen them
            assert not [key for key in result["keys"] if "relay" in key], (
                "each is used once, and there are many"
            )
        late = "rank 0 had not filled bucket 2 after 0.5 s (megatron.collective_timeout_s)"
        assert (late in result["late"]) == (rank == 1), result["late"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_nccl_without_a_gpu_says_what_to_use(engines: list[Any]) -> None:
    staging = Staging((torch.empty(0), torch.empty(0)))
    sender = WeightSender("nccl", plan(), staging, engines[:1], 1, PATIENCE_S)
    with pytest.raises(WeightSyncError, match="nccl needs a GPU(.|\n)*use gloo"):
        sender.connect()
