"""What the ranks of the sharded head test run."""

from __future__ import annotations

import torch
import torch.distributed as dist

from openrlhf_ext.head import linear_logprob_entropy


def run(cases: list[dict]) -> list[dict]:
    """Values and gradients of every case, with this rank's shard of the weight."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    results = []
    for case in cases:
        rows = -(-case["weight"].shape[0] // size)
        padded = torch.zeros(rows * size, case["weight"].shape[1], dtype=case["weight"].dtype)
        padded[: len(case["weight"])] = case["weight"]
        padded[len(case["weight"]) :] = 7.0  # padding rows must not matter, whatever they hold
        hidden = case["hidden"].clone().requires_grad_()
        shard = padded.chunk(size)[rank].clone().requires_grad_()
        out = linear_logprob_entropy(
            hidden, shard, case["target"], case["temperature"], len(case["weight"]), dist.group.WORLD,
            case["workspace_bytes"], entropy_grad=case["entropy_grad"],
        )  # fmt: skip
        loss = (out.logprob_T * case["a"]).sum()
        if case["entropy_grad"]:
            loss = loss + (out.entropy_T * case["b"]).sum()
        loss.backward()
        results.append(
            {
                "logprob": out.logprob_T.detach(),
                "entropy": out.entropy_T.detach(),
                "hidden": hidden.grad,
                "weight": shard.grad,
            }
        )
    return results
