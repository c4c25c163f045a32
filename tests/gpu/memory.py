"""A trained model's states leave the device and come back, and go to disk and come back, to the
last bit."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from typing import Any

import psutil
import torch
from megatron.core import parallel_state
from megatron.core.optimizer import Adam
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from openrlhf_ext.megatron.checkpoint import load_checkpoint, take_snapshot
from openrlhf_ext.megatron.host_memory import KINDS, ModelStates
from openrlhf_ext.megatron.policy import MegatronPolicy
from openrlhf_ext.megatron.step.batch import SequenceBatch
from openrlhf_ext.megatron.step.host_optimizer import HostOptimizer
from tests.gpu.alone import build, different, facts, states_of, tiny_folder
from tests.gpu.kit import Machine, NotHere, join_alone
from tests.megatron import checkpoint_worker
from tests.megatron.parity import WeightedLogprob
from tests.megatron.reference import make_batch
from tests.models import make_tiny_model

_LEAST_FREED = 0.8  # of what moved: torch gives blocks back to the driver as a whole


def offload(machine: Machine) -> dict[str, Any]:
    """bf16 with the distributed optimizer, as a colocated run trains: freed memory, speed, and the
    same bits."""
    size = {"vocab": 32_000, "heads": 64, "layers": 16} if machine.on_gpu else {}
    with tiny_folder() as folder:
        make_tiny_model(folder, **size)
        policy = build({"model": str(folder), "dtype": "bf16", "distributed_optimizer": True})
    batch, weights_N = make_batch(61)
    _step(policy, batch, weights_N)  # the optimizer has its moments after a step
    before, states = states_of(policy), ModelStates(policy.models, policy.optimizer, policy.device)
    swaps = []
    for _ in range(2):  # the second time host memory is there already
        free = _free_bytes(machine)
        out = states.offload()
        left = sum(states.nbytes(kind) for kind in KINDS if kind in states.resident)
        assert left == 0, f"{left} bytes stayed on the device"
        freed = _free_bytes(machine) - free
        back = states.reload()
        swaps.append((out, back, freed))
    wrong = different(states_of(policy), before)
    assert not wrong, f"states that came back changed: {wrong}"
    metrics = _step(policy, batch, weights_N)
    assert all(math.isfinite(value) for value in metrics.values()), (
        f"the step after the swap gave {metrics}"
    )
    out, back, freed = swaps[-1]
    if machine.on_gpu:
        least = _LEAST_FREED * out.room_bytes
        assert min(out.measured_bytes, freed) > least, (
            f"{out.room_bytes} bytes were emptied, torch gave back {out.measured_bytes}, the "
            f"device has {freed} more"
        )
    return {
        **facts(policy),
        "moved_mib": out.moved_bytes / 2**20,
        "room_mib": out.room_bytes / 2**20,
        "given_back_mib": out.measured_bytes / 2**20,
        "more_free_on_device_mib": freed / 2**20 if machine.on_gpu else None,
        "first_offload_s": swaps[0][0].seconds,
        "offload_gb_per_s": 1e-9 * out.moved_bytes / out.seconds,
        "reload_gb_per_s": 1e-9 * back.moved_bytes / back.seconds,
    }


_LONGEST_UPDATE_S = 3.0  # of 4 billion parameters
_SHARE_OF_THE_BUS = 0.7
_SHARDS = 16


def streaming(machine: Machine) -> dict[str, Any]:
    """Adam's states in host memory: seconds of an update of as many parameters as a rank of 32B on
    eight GPUs has, beside copies both ways at a time; the first shard to the last bit against Adam
    on the device.

    Raises:
        NotHere: too little host memory for 12 bytes a parameter.
    """
    return _in_time(_streamed(machine, _SHARDS), machine)


def streaming_of_four_shards(machine: Machine) -> dict[str, Any]:
    """The same of a quarter: the registering of host memory is what takes long."""
    return _in_time(_streamed(machine, _SHARDS // 4), machine)


def _in_time(measured: dict[str, Any], machine: Machine) -> dict[str, Any]:
    if machine.on_gpu:
        share = measured["gb_per_s_each_way"] / measured["bus_gb_per_s_each_way"]
        in_time = measured["seconds"][-1] <= _LONGEST_UPDATE_S * measured["parameters"] / 4e9
        assert in_time and share >= _SHARE_OF_THE_BUS, f"an update is too slow: {measured}"
    return measured


def _streamed(machine: Machine, count: int) -> dict[str, Any]:
    entries = 250_000_000 if machine.on_gpu else 1000
    needed, there = 12 * count * entries, psutil.virtual_memory().available
    if needed > 0.8 * there:
        raise NotHere(f"{needed >> 30} GiB of host memory, of which {there >> 30} are free")
    kind = Adam if machine.on_gpu else torch.optim.AdamW
    shards = [
        torch.full((entries,), 0.5 + n, dtype=torch.bfloat16, device=machine.device)
        for n in range(count)
    ]
    gradients = [torch.rand(entries, device=machine.device) - 0.5 for _ in shards]
    main = shards[0].float()
    device = kind([main], lr=1e-2, weight_decay=0.1)
    started = time.perf_counter()
    host = HostOptimizer(kind(shards, lr=1e-2, weight_decay=0.1))
    allocated, seconds = time.perf_counter() - started, []
    for _ in range(3):
        for shard, gradient in zip(shards, gradients, strict=True):
            shard.decoupled_grad = gradient
        main.grad = gradients[0].clone()
        host.step()
        device.step()
        seconds.append(host.take_seconds())
    held, resident = host.tensors(shards[0]), {**device.state[main], "master": main}
    for name in ("exp_avg", "exp_avg_sq", "master"):
        assert torch.equal(held[name], resident[name].cpu()), (
            f"{name} differs from Adam on the device"
        )
    assert torch.equal(shards[0], main.bfloat16()), "the weights are not those of their masters"
    return {
        "parameters": count * entries,
        "seconds": seconds,
        "allocating_and_pinning_s": allocated,
        "gb_per_s_each_way": 1e-9 * needed / seconds[-1],
        "bus_gb_per_s_each_way": _bus(machine),
        "copy_queues": os.environ.get("CUDA_DEVICE_MAX_COPY_CONNECTIONS"),
    }


def streaming_by_one_queue(machine: Machine) -> dict[str, Any]:
    """The same with one copy queue, as ``CUDA_DEVICE_MAX_CONNECTIONS=1`` alone would leave: what
    both ways at a time are worth. Its pace is told and not judged."""
    return _streamed(machine, _SHARDS // 4)


def _bus(machine: Machine) -> float:
    """GB/s of a copy to the device and of one from it, at the same time; of pinned memory, where
    there is a GPU."""
    size = 1 << 30 if machine.on_gpu else 1 << 20
    there, back = (
        torch.empty(size, dtype=torch.uint8, pin_memory=machine.on_gpu) for _ in range(2)
    )
    here, other = (torch.zeros(size, dtype=torch.uint8, device=machine.device) for _ in range(2))
    lanes = [torch.cuda.Stream(machine.device) if machine.on_gpu else None for _ in range(2)]
    for repeat in (1, 8):  # the first to warm up
        if machine.on_gpu:
            torch.cuda.synchronize(machine.device)
        started = time.perf_counter()
        for _ in range(repeat):
            for lane, target, source in ((lanes[0], here, there), (lanes[1], back, other)):
                with torch.cuda.stream(lane):
                    target.copy_(source, non_blocking=True)
        if machine.on_gpu:
            torch.cuda.synchronize(machine.device)
    return 1e-9 * repeat * size / (time.perf_counter() - started)


def _free_bytes(machine: Machine) -> int:
    return torch.cuda.mem_get_info(machine.device)[0] if machine.on_gpu else 0


def _step(policy: MegatronPolicy, batch: SequenceBatch, weights_N: Tensor) -> dict[str, float]:
    shaped = WeightedLogprob(weights_N, batch.responses)
    return policy.train_step(batch, shaped, shaped)


def context(machine: Machine) -> dict[str, Any]:
    """Bytes of the device that another process takes by using CUDA at all, and by a product of
    cuBLAS.

    Raises:
        NotHere: there is no GPU.
    """
    machine.need_gpu("CUDA's context")
    torch.ones((), device=machine.device)  # this process has its own before anything is counted
    free = [_free_bytes(machine)]
    process = subprocess.Popen(
        [sys.executable, "-c", _CONTEXT], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        for step in ("context", "product"):
            assert process.stdout.readline() == f"{step}\n", "the process ended early"
            free.append(_free_bytes(machine))
            process.stdin.write("\n")
            process.stdin.flush()
    finally:
        process.kill()
        process.wait()
    return {"context_bytes": free[0] - free[1], "with_a_product_bytes": free[0] - free[2]}


_CONTEXT = """
import torch
one = torch.ones((), device="cuda")
torch.cuda.synchronize()
print("context", flush=True)
input()
matrix = torch.ones(256, 256, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize(), matrix @ matrix, torch.cuda.synchronize()
print("product", flush=True)
input()
"""


def checkpoint(machine: Machine) -> dict[str, Any]:
    """Saved after two steps and loaded into a fresh policy: the same states, and the same next
    step."""
    _always_the_same_sums()
    join_alone()
    batch, weights_N = make_batch(61)
    with tiny_folder() as folder, sdpa_kernel(SDPBackend.MATH):
        make_tiny_model(folder / "model")
        case = {"model": str(folder / "model"), "dtype": "fp32"}
        policy = checkpoint_worker.build(case)
        checkpoint_worker.train(policy, batch, weights_N, 2)
        saved = states_of(policy)
        entries = take_snapshot(policy, {"version": 2}, copy=True).write(folder / "saved", "policy")
        steps, after = checkpoint_worker.train(policy, batch, weights_N, 1), states_of(policy)
        parallel_state.destroy_model_parallel()
        fresh = checkpoint_worker.build(case)
        extra = load_checkpoint(fresh, folder / "saved" / "policy")
        assert extra == {"version": 2}, f"the driver's part came back as {extra}"
        wrong = different(states_of(fresh), saved)
        assert not wrong, f"loaded states differ from saved ones: {wrong}"
        again, after_again = checkpoint_worker.train(fresh, batch, weights_N, 1), states_of(fresh)
    assert again == steps, f"the next step differs: {again} after loading, {steps} without"
    wrong = different(after_again, after)
    assert not wrong, f"states after the next step differ: {wrong}"
    return {**facts(fresh), "files": len(entries), "states": len(saved), "next_step": steps[0]}


def _always_the_same_sums() -> None:
    """Sums of the same numbers in the same order every time: otherwise two equal runs differ on a
    GPU."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when CUDA starts
    torch.use_deterministic_algorithms(True, warn_only=True)
