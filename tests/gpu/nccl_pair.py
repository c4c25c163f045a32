"""Two ranks whose first call in a group is a batched send and receive, as that of a weight sync may
be.

With NCCL all ranks of a group must take part when a batched P2P call is its first
(torch/distributed/ distributed_c10d.py, batch_isend_irecv); who stays away leaves the other
waiting. Started by torchrun.
"""

from __future__ import annotations

import json
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

_TIMEOUT_S = 120.0


def run(megabytes: int) -> dict:
    """What rank 0 measured; both ranks check what they got.

    Args:
        megabytes: of a message, 2^20 bytes each.

    Raises:
        AssertionError: what came is not what was sent.
    """
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=_TIMEOUT_S))
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    mine = torch.full((megabytes << 18,), float(rank + 1), device=device)
    found: dict[str, float] = {}
    for name, first in (("p2p_first", False), ("p2p_after_a_reduction", True)):
        group = dist.new_group([0, 1], timeout=timedelta(seconds=_TIMEOUT_S))
        if first:
            dist.all_reduce(torch.ones(1, device=device), group=group)
        found[f"{name}_first_seconds"] = _exchange(mine, group)
        seconds = min(_exchange(mine, group) for _ in range(3))
        found[f"{name}_gib_per_second"] = megabytes / 1024 / seconds
    total = torch.tensor([rank + 1.0], device=device)
    dist.all_reduce(total)
    assert total.item() == 3.0, f"a reduction gave {total.item()}, not 3"
    return found


def _exchange(mine: Tensor, group: dist.ProcessGroup) -> float:
    """Seconds in which each rank gives the other its tensor."""
    rank, got = dist.get_rank(), torch.zeros_like(mine)
    calls = [
        dist.P2POp(dist.isend, mine, 1 - rank, group=group),
        dist.P2POp(dist.irecv, got, 1 - rank, group=group),
    ]
    started = time.perf_counter()
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    if mine.is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    assert bool((got == 2.0 - rank).all()), (
        f"rank {rank} got {got.unique().tolist()[:4]}, not {2.0 - rank}"
    )
    return seconds


if __name__ == "__main__":
    measured = run(1024 if torch.cuda.is_available() else 1)
    if dist.get_rank() == 0:
        print(json.dumps(measured))
    dist.destroy_process_group()
