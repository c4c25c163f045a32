"""Ranks that prepare mini-batches again with a policy that has moved, for test_preparation.py.

Nothing here imports the stack, so that the ranks start quickly.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.distributed as dist

from openrlhf_ext.algorithms import ShapedBatch
from openrlhf_ext.controller.preparation import Preparation, share_for_update
from openrlhf_ext.megatron.batch import SequenceBatch
from openrlhf_ext.megatron.layout import ParallelLayout

# a rank's part of a mini-batch: rows of the rollout batch, sequences, share, preparation
Part = tuple[list[int], SequenceBatch, ShapedBatch, Preparation | None]


class MovedPolicy:
    """Stands for a policy whose log-probs of ``rows`` are now ``new_BT``; copies differ in the last bit."""

    device = torch.device("cpu")

    def __init__(self, layout: ParallelLayout, new_BT: torch.Tensor) -> None:
        self.settings = SimpleNamespace(layout=layout)
        self.new_BT, self.rows, self.calls = new_BT, [], 0

    def logprobs(self, batch: SequenceBatch) -> SimpleNamespace:
        self.calls += 1
        assert len(batch) == len(self.rows)
        copy = dist.get_rank() % self.settings.layout.model_parallel_size
        return SimpleNamespace(logprobs_BT=self.new_BT[self.rows] * (1.0 + copy * 2.0**-52))


def shares(
    layout: ParallelLayout, by_replica: dict[str, list[list[Part]]], new_BT: torch.Tensor, updates: int
) -> dict[str, list]:
    """For each method: this rank's (rows, share) of every update, and how often its policy ran forward."""
    dist.init_process_group("gloo")
    replica = dist.get_rank() // layout.model_parallel_size
    out = {}
    for name, replicas in by_replica.items():
        policy, parts = MovedPolicy(layout, new_BT), replicas[replica]
        out[name] = []
        for update in range(updates):
            policy.rows, batch, share, preparation = parts[update % len(parts)]
            out[name].append((policy.rows, share_for_update(policy, batch, share, preparation, update)))
        out[f"{name} forward passes"] = policy.calls
    return out
